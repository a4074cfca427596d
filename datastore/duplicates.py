"""What stands in a store more than once: equal documents, and passages that documents share."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore.corpus import Document, read_documents, token_dtype
from specds.datastore.manifest import SourceCount
from specds.datastore.store import Store
from specds.datastore.suffix_array import build_suffix_array
from specds.errors import UsageError
from specds.jit import compiled, prefetch

# Entries between asking for a cache line and using it, as in suffix_array.py.
_AHEAD = 32


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Documents that an earlier one equals.

    Attributes:
        doc_ids: in the order of the corpus.
        saved: by source, the documents and tokens that go with them.
    """

    doc_ids: tuple[str, ...]
    saved: dict[str, SourceCount]


@dataclass(frozen=True, slots=True)
class Cut:
    """What of one response stands in enough earlier documents. Places are token positions in the response.

    Attributes:
        doc_id, source: the document.
        spans: the passages to cut, as (start, end); they do not touch.
        pieces: what is left between them, as (start, end), without the pieces that are too short. Empty: the
            document goes.
    """

    doc_id: str
    source: str
    spans: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[int, int], ...]

    def apply(self, document: Document) -> list[Document]:
        """The pieces as documents of their own, so that no match runs over a cut.

        The first keeps the document's id, the others add where they start. The prompt stays with a piece that
        follows it, and goes where the response's beginning goes.
        """
        pieces_cut = []
        for number, (start, end) in enumerate(self.pieces):
            prompt = document.prompt if start == 0 else document.prompt[:0]
            doc_id = document.doc_id if number == 0 else f"{document.doc_id}@{start}"
            pieces_cut.append(Document(doc_id, document.source, prompt, document.response[start:end]))
        return pieces_cut


@dataclass(frozen=True, slots=True)
class Boilerplate:
    """Passages that documents share.

    Attributes:
        cuts: for each document of which something is to be cut, in the order of the corpus.
        saved: by source, the documents that go and the tokens that are saved: cut passages, pieces that are too short
            and the prompts of beginnings that go.
    """

    cuts: tuple[Cut, ...]
    saved: dict[str, SourceCount]


def savings(saved_by: Mapping[str, Mapping[str, SourceCount]]) -> dict[str, Any]:
    """Documents and tokens saved, in all and by source, as JSON.

    Args:
        found: what was found → source → what goes with it.
    """
    return {
        name: {
            "documents": sum(count.documents for count in saved.values()),
            "tokens": sum(count.tokens for count in saved.values()),
            "sources": {source: dataclasses.asdict(count) for source, count in sorted(saved.items())},
        }
        for name, saved in saved_by.items()
    }


def find_duplicates(store: Store, *, prompts: bool = False) -> Duplicates:
    """Documents whose response is, token for token, an earlier one's.

    Documents without a response are compared by their prompts. In memory are digests (sha256), no texts.

    Args:
        prompts: prompts must be equal too.

    Raises:
        CorruptStore: the corpus cannot be read.
    """
    seen: set[bytes] = set()
    duplicates: list[str] = []
    saved: dict[str, SourceCount] = {}
    for document in read_documents(store):
        told_by_prompt = prompts or not len(document.response)
        prompt = document.prompt.tobytes() if told_by_prompt else b""
        digest = hashlib.sha256(len(prompt).to_bytes(8, "little") + prompt + document.response.tobytes()).digest()
        if digest in seen:
            duplicates.append(document.doc_id)
            _save(saved, document.source, 1, len(document.prompt) + len(document.response))
        seen.add(digest)
    return Duplicates(tuple(duplicates), saved)


def find_boilerplate(
    store: Store, *, length: int = 32, keep: int = 1, shortest: int = 16, without: Container[str] = frozenset()
) -> Boilerplate:
    """Passages of responses that stand in at least `keep` responses before, in the order of the corpus.

    A passage is cut when each `length` tokens in a row of it do; passages are as long as that allows. Repetition
    within one response does not count, and prompts neither count nor are cut: what a prompt repeats is its template.
    Exact, in linear time, with at most 20 bytes a token of responses in memory (from 2^31 tokens on twice that).

    Args:
        length: tokens that must be equal in a row.
        keep: how many documents keep a passage, the first ones.
        shortest: pieces of fewer tokens between cuts go too.
        without: ids of documents to be left out, as if they were not in the store: duplicates that go.

    Raises:
        UsageError: a number is below 1. CorruptStore: the corpus cannot be read.

    Source: Lee et al., "Deduplicating Training Data Makes Language Models Better", ACL 2022, §4.1 (passages found
        in a suffix array).
    """
    for name, value in (("length", length), ("keep", keep), ("shortest", shortest)):
        if value < 1:
            raise UsageError(f"{name} is {value}", "a number from 1")
    tokens, starts = _responses(store, without)
    repeated = _repeated(tokens, starts, length, keep)
    del tokens
    cuts = []
    saved: dict[str, SourceCount] = {}
    for place, document in enumerate(_kept(store, without)):
        start = int(starts[place])
        marks = repeated[start : start + len(document.response)]
        if not marks.any():
            continue
        spans = _runs(marks)
        pieces = tuple(run for run in _runs(~marks) if run[1] - run[0] >= shortest)
        cuts.append(Cut(document.doc_id, document.source, spans, pieces))
        left = sum(end - begin for begin, end in pieces)
        left += len(document.prompt) if pieces and pieces[0][0] == 0 else 0
        _save(saved, document.source, int(not pieces), len(document.prompt) + len(document.response) - left)
    return Boilerplate(tuple(cuts), saved)


def _kept(store: Store, without: Container[str]) -> Iterator[Document]:
    return (document for document in read_documents(store) if document.doc_id not in without)


def _responses(store: Store, without: Container[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All responses with a separator after each, and where each starts; the last entry is the length of all."""
    dtype = token_dtype(store.manifest.vocab_size)
    parts: list[NDArray[Any]] = []
    starts = [0]
    separator = np.full(1, np.iinfo(dtype).max, dtype)
    for document in _kept(store, without):
        parts += [document.response.astype(dtype), separator]
        starts.append(starts[-1] + len(document.response) + 1)
    return np.concatenate([*parts, separator[:0]]), np.array(starts, np.int64)


def _repeated(tokens: NDArray[Any], starts: NDArray[np.int64], length: int, keep: int) -> NDArray[np.bool_]:
    """bool[n]: whether a token is in a passage that stands in `keep` documents before its own."""
    order = build_suffix_array(tokens)
    classes = np.empty_like(order)
    _predecessors(order, classes)
    _mark_equal(tokens, starts, classes, length)
    count = _number_classes(order, classes)
    del order
    marks = np.zeros(len(tokens), np.bool_)
    _mark(classes, starts, length, keep, np.zeros(count, np.int32), np.full(count, -1, classes.dtype), marks)
    return marks


@compiled
def _predecessors(order: NDArray[Any], before: NDArray[Any]) -> None:
    """before[p]: the suffix that stands before suffix p in the order; -1 for the first."""
    previous = -1
    for rank in range(order.size):
        if rank + _AHEAD < order.size:
            prefetch(before, order[rank + _AHEAD])
        before[order[rank]] = previous
        previous = order[rank]


@compiled
def _mark_equal(tokens: NDArray[Any], starts: NDArray[np.int64], before: NDArray[Any], length: int) -> None:
    """Turn before[p] into: 1 where suffix p begins with the same `length` tokens as the one before it, 0 where it
    does not, -1 where a document ends earlier.

    Linear, because what two suffixes share shrinks by at most one from p to p + 1 (J. Kärkkäinen, G. Manzini,
    S. J. Puglisi, "Permuted Longest-Common-Prefix Array", CPM 2009), also when it is cut off at `length`.
    """
    shared = 0
    for document in range(starts.size - 1):
        last = starts[document + 1] - 1 - length
        for place in range(starts[document], starts[document + 1]):
            if place + _AHEAD < before.size and before[place + _AHEAD] >= 0:
                prefetch(tokens, before[place + _AHEAD])
            other = before[place]
            if other < 0:
                shared = 0
            else:
                limit = min(length, tokens.size - max(place, other))
                while shared < limit and tokens[place + shared] == tokens[other + shared]:
                    shared += 1
            # A suffix that has `length` tokens of its document has no separator in them, and then nor has the other.
            before[place] = -1 if place > last else int(shared >= length)
            shared = max(0, shared - 1)


@compiled
def _number_classes(order: NDArray[Any], classes: NDArray[Any]) -> int:
    """Turn the marks of `_mark_equal` into numbers: equal for equal passages; -1 stays. Returns how many there are.

    order is the suffix array and classes the marks, both int32[n] or int64[n].
    """
    count = 0
    for rank in range(order.size):
        if rank + _AHEAD < order.size:
            prefetch(classes, order[rank + _AHEAD])
        place = order[rank]
        if classes[place] >= 0:
            count += 1 - classes[place]
            classes[place] = count - 1
    return count


@compiled
def _mark(
    classes: NDArray[Any],
    starts: NDArray[np.int64],
    length: int,
    keep: int,
    documents: NDArray[np.int32],
    latest: NDArray[Any],
    marks: NDArray[np.bool_],
) -> None:
    """Walk through the corpus, counting for each class the documents that hold it.

    Args:
        classes: int32[n] or int64[n], the class of the passage at each place; -1: none.
        starts: int64[D + 1], where each document begins.
        length: tokens of a passage.
        keep: documents that may hold a passage before it is marked.
        documents, latest: [classes], how many hold each so far, and the last of them.
        marks: bool[n], set at the tokens of passages that go.
    """
    for document in range(starts.size - 1):
        marked = starts[document]
        for place in range(starts[document], starts[document + 1]):
            if place + _AHEAD < classes.size and classes[place + _AHEAD] >= 0:
                prefetch(documents, classes[place + _AHEAD])
                prefetch(latest, classes[place + _AHEAD])
            kind = classes[place]
            if kind < 0:
                continue
            earlier = documents[kind]
            if latest[kind] == document:
                earlier -= 1
            else:
                latest[kind] = document
                documents[kind] += 1
            if earlier >= keep:
                for covered in range(max(marked, place), place + length):
                    marks[covered] = True
                marked = place + length


def _runs(marks: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Where a mark stands, as (start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]])))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _save(saved: dict[str, SourceCount], source: str, documents: int, tokens: int) -> None:
    count = saved.get(source, SourceCount(0, 0))
    saved[source] = SourceCount(count.documents + documents, count.tokens + tokens)
