"""How good a lossy method's texts are: beside plain decoding's, and beside a reference where the prompt has one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_MARK = "####"
_BOX = "\\boxed{"


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L: the F-measure of the longest common subsequence of lower-case words (Lin, 2004)."""
    words, other = re.findall(r"\w+", text.lower()), re.findall(r"\w+", reference.lower())
    if not words or not other:
        return float(words == other)
    return 2 * common(words, other) / (len(words) + len(other))


def common(words: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    numbers: dict[str, int] = {}
    columns = np.array([numbers.setdefault(word, len(numbers)) for word in other])
    best = np.zeros(len(columns) + 1, np.int64)
    for word in words:
        hit = np.append(0, best[:-1] + (columns == numbers.get(word, -1)))
        best = np.maximum.accumulate(np.maximum(best, hit))
    return int(best[-1])


def correct(text: str, reference: str) -> bool | None:
    """Whether a text ends in the reference's answer; None if the reference does not mark one.

    An answer is what stands after the last `####` (GSM8K) or in the last `\\boxed{…}` (MATH). Of a text without such a
    mark it is the last number.
    """
    expected = _marked(reference)
    if expected is None:
        return None
    answer = _marked(text)
    if answer is None:
        numbers = _NUMBER.findall(text)
        answer = _plain(numbers[-1]) if numbers else ""
    return answer == expected


def _marked(text: str) -> str | None:
    if _MARK in text:
        numbers = _NUMBER.findall(text.rpartition(_MARK)[2])
        return _plain(numbers[0]) if numbers else None
    _, box, inside = text.rpartition(_BOX)
    if not box:
        return None
    depth = 1
    for place, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return _plain(inside[:place])
    return None


def _plain(answer: str) -> str:
    """An answer without what does not change it: spaces, dollar signs, thousands' commas, a final stop, `.0`."""
    plain = re.sub(r"[\s$]|,(?=\d{3})", "", answer).rstrip(".")
    return re.sub(r"^(-?\d+)\.0+$", r"\1", plain)
