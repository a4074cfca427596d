"""Measuring what passes of a target cost, and keeping what was measured on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specds.caches import SUGGESTION, cache_directories, cache_directory
from specds.decode.contracts import Item, Target
from specds.decode.draft import chain
from specds.decode.pricing.curve import FORMAT, MOST_ROWS, CostCurve
from specds.decode.prompt import hold
from specds.errors import OutputError
from specds.files import write_atomically
from specds.model import LanguageModel
from specds.version import __version__

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
CONTEXTS = (64, 512, 2048)
# Close together where drafts are: a runtime's pass has steps there, where another row of registers begins.
_QUICK_ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 24, 32, 64)
_QUICK_CONTEXT, _QUICK_LONGER = 256, 1024
_QUICK_SECONDS = 2.5
_ALWAYS = 16


_KIND = "profiles"


def measure(
    target: Target,
    *,
    vocabulary: int,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    seconds: float = float("inf"),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostCurve:
    """Measure a target: medians over repeats that are interleaved over the row counts.

    Args:
        vocabulary: token ids below it are fed; which ones does not matter to a dense model.
        seconds: when this much time is spent, leave out counts above 16 that are not measured yet, and repeat no more.
        progress: called with (passes done, passes in all).
    """
    began = 0.0
    random = np.random.default_rng(0)
    found = np.zeros((len(contexts), len(rows)))
    measured = len(rows)
    passes, total = 0, len(contexts) * repeats * len(rows)
    for number, context in enumerate(contexts):
        prompt = random.integers(0, vocabulary, context).tolist()
        slot = hold(target, prompt, context + rows[-1])
        samples: list[list[float]] = [[] for _ in rows]
        for repeat in range(repeats):
            for place, count in enumerate(rows[:measured]):
                draft = chain(random.integers(0, vocabulary, count - 1), [0.5] * (count - 1))
                if repeat == 0:  # what is allocated, captured or compiled at first use
                    float(target.forward([Item.draft(slot, 0, draft)]).logits[-1, 0])
                    began = began or time.perf_counter()
                start = time.perf_counter()
                float(target.forward([Item.draft(slot, 0, draft)]).logits[-1, 0])
                samples[place].append(time.perf_counter() - start)
                passes += 1
                progress(passes, total)
                if repeat == 0 and count >= _ALWAYS and time.perf_counter() - began > seconds:
                    measured = place + 1
                    break
            if time.perf_counter() - began > seconds:
                break
        found[number, :measured] = [float(np.median(one)) for one in samples[:measured]]
        target.close(slot)
    # More rows and a longer context never cost less; where they seem to, the machine was busy.
    smooth = np.maximum.accumulate(np.maximum.accumulate(found[:, :measured], axis=1), axis=0)
    return CostCurve(tuple(rows[:measured]), tuple(contexts), smooth)


def quick(target: Target, vocabulary: int, context_length: int) -> CostCurve:
    """A curve good enough to choose drafts by, in two or three seconds."""
    context = max(1, min(_QUICK_CONTEXT, context_length - _QUICK_ROWS[-1]))
    rows = [count for count in _QUICK_ROWS if context + count <= context_length] or [1]
    curve = measure(target, vocabulary=vocabulary, rows=rows, contexts=[context], repeats=3, seconds=_QUICK_SECONDS)
    longer = min(_QUICK_LONGER, context_length - 1)
    if longer < 2 * context:
        return curve
    # What attention adds behind a longer context is the same for every row count, nearly.
    far = measure(target, vocabulary=vocabulary, rows=[1], contexts=[longer], repeats=3)
    more = max(0.0, float(far.seconds[0, 0] - curve.seconds[0, 0]))
    return CostCurve(curve.rows, (context, longer), np.concatenate([curve.seconds, curve.seconds + more]))


def known(target: Target, model: LanguageModel, runtime: str) -> CostCurve:
    """The kept curve of this model on this machine; where there is none a quick one, which is kept then."""
    import torch

    path = None
    with contextlib.suppress(OutputError):  # without a cache it costs two seconds a run, no more
        path = profile_path(model, runtime, torch.get_num_threads())
    curve = None if path is None else load(path)
    if curve is None:
        curve = quick(target, model.config.vocab_size, model.context_length)
        with contextlib.suppress(OutputError):
            if path is not None:
                save(curve, path)
    return curve


def profile_path(model: LanguageModel, runtime: str, threads: int) -> Path:
    """Where the curve of a model on this machine is kept: by model, dtype, device, runtime, threads and version.

    Raises:
        OutputError: there is none, and no place to keep one.
    """
    device = str(model.device)
    if model.device.type == "cuda":
        import torch

        device = torch.cuda.get_device_name(model.device)
    machine = [device, platform.node(), platform.processor()]
    parts = [model.fingerprint, model.dtype, *machine, runtime, str(threads), __version__]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24] + ".json"
    kept = (folder / name for folder in cache_directories(_KIND) if (folder / name).is_file())
    return next(kept, None) or cache_directory(_KIND) / name


def save(curve: CostCurve, path: Path) -> None:
    """Write a curve, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(curve.record(), indent=1) + "\n").encode())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", SUGGESTION) from error


def load(path: Path) -> CostCurve | None:
    """A kept curve; None if there is none, or what is there is none."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        record = json.loads(path.read_bytes())
        rows, contexts = tuple(map(int, record["rows"])), tuple(map(int, record["contexts"]))
        seconds = np.array(record["seconds"], np.float64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    ascending = all(list(one) == sorted(set(one)) for one in (rows, contexts))
    fits = seconds.shape == (len(contexts), len(rows)) and bool(np.isfinite(seconds).all() and (seconds > 0).all())
    if record.get("format") != FORMAT or not rows or rows[0] != 1 or rows[-1] > MOST_ROWS or not ascending or not fits:
        return None
    return CostCurve(rows, contexts, seconds)
