"""Building the dense index: embed the corpus, fit the normalizer, index the keys, measure the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore import ann
from specds.datastore.corpus import TokenStream, token_stream
from specds.datastore.embedding import embed
from specds.datastore.manifest import Identity, Segment
from specds.datastore.normalizer import Normalizer
from specds.datastore.store import Store, provenance, require_tokenizer, require_tokens, writing
from specds.errors import UsageError
from specds.model import LanguageModel

_CHUNK = 65_536
_PROBES = 1_000


@dataclass(frozen=True, slots=True)
class DenseOptions:
    """How a dense index is built.

    Attributes:
        index: `scann`, `faiss`, or None: scann where it can be imported.
        dims: dimensions kept (DReSD §5.2: 64).
        sample: most hidden states used to fit mean, deviation and PCA (§3.2: about a million).
        max_length: positions embedded of each document; None: as many as the model's context holds.
        leaves, search: cells of the ANN partition, and cells searched a query; None: 5 √n.
        batch_tokens: tokens embedded in one forward pass.
    """

    index: str | None = None
    dims: int = 64
    sample: int = 1_000_000
    max_length: int | None = None
    leaves: int | None = None
    search: int = 250
    batch_tokens: int = 2_048


def build_dense(
    store: Store,
    model: LanguageModel,
    options: DenseOptions | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Segment:
    """Embed the corpus, fit the normalizer, build the ANN index, measure it, and make it the store's only one.

    Each document passes through the model once. The states of the documents drawn for the sample wait in a
    file until the normalizer is fitted; all others become keys at once, so that memory holds one batch and
    the sample.

    Args:
        progress: called with (stage, done, total) now and then.

    Raises:
        UsageError: the corpus is empty or too small, or an option is out of range.
        ForeignTokenizer, StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    options = options or DenseOptions()
    kind = options.index or ann.default_kind()
    if kind not in ann.KINDS:
        raise UsageError(f"no index kind {kind!r}", f"--index is one of {', '.join(ann.KINDS)}")
    require_tokenizer(store, model.tokenizer)
    with store.writer() as writer:
        store = Store(store.path, writer.manifest)
        require_tokens(store)
        stream = token_stream(store)
        width = model.config.hidden_size
        plan = _Plan.of(stream, min(options.max_length or model.context_length, model.context_length))
        if not 1 <= options.dims <= min(width, plan.keys):
            most = min(width, plan.keys)
            raise UsageError(f"--dims is {options.dims}", f"between 1 and {most} (hidden size, number of keys)")
        if options.sample < options.dims:
            raise UsageError(f"--sample is {options.sample}", f"at least --dims, which is {options.dims}")
        directory = writer.segment_path("dense")
        with writing(directory):
            keys_file = directory / "keys.work"
            keys = np.memmap(keys_file, np.float32, "w+", shape=(plan.keys, options.dims))
            normalizer = _embed_corpus(model, stream, plan, options, directory, keys, progress)
            normalizer.save(directory / "normalizer.safetensors")
            (directory / "keys").mkdir()
            progress("index", 0, plan.keys)
            built = ann.build(kind, keys, directory / "keys", leaves=options.leaves, search=options.search)
            positions = plan.continuation_positions()
            positions.tofile(directory / "positions.bin")
            stream.tokens.tofile(directory / "tokens.bin")
            parameters = built | {
                "dims": options.dims,
                "hidden_size": width,
                "sampled": normalizer.sampled,
                "max_length": plan.max_length,
                "keys": plan.keys,
                "positions": len(stream.tokens),
                "position_dtype": str(positions.dtype),
                "token_dtype": str(stream.tokens.dtype),
                "separator": stream.separator,
                "dtype": model.dtype,
            }
            quality = {"explained_variance": normalizer.explained_variance}
            quality |= _measure(ann.load(directory / "keys", parameters, options.dims), keys, progress)
            del keys
            keys_file.unlink()
        segment = Segment(
            directory=directory.relative_to(store.path).as_posix(),
            shards=[shard.file for shard in store.manifest.corpus],
            tokens=store.manifest.tokens,
            model=Identity(model.name, model.fingerprint),
            parameters=parameters,
            quality=quality,
            provenance=provenance(),
        )
        writer.replace_index("dense", segment)
    return segment


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which positions become keys: all but each document's last, up to max_length of a document.

    Attributes:
        starts: int64[d], where each document starts in the stream.
        lengths: int64[d], how many of its tokens are embedded.
        rows: int64[d + 1], the first key of each document; the last entry is the number of keys.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    max_length: int

    @classmethod
    def of(cls, stream: TokenStream, max_length: int) -> _Plan:
        starts = stream.starts[:-1]
        # Of n tokens the last has no continuation; the entry behind each document is its separator.
        lengths = np.clip(np.diff(stream.starts) - 2, 0, max_length)
        return cls(starts, lengths, np.concatenate([[0], np.cumsum(lengths)]), max_length)

    @property
    def keys(self) -> int:
        return int(self.rows[-1])

    def continuation_positions(self) -> NDArray[Any]:
        dtype = np.uint32 if len(self.starts) == 0 or self.starts[-1] < 1 << 31 else np.uint64
        positions = np.arange(self.keys) - np.repeat(self.rows[:-1] - self.starts, self.lengths) + 1
        return positions.astype(dtype)


def _embed_corpus(
    model: LanguageModel,
    stream: TokenStream,
    plan: _Plan,
    options: DenseOptions,
    directory: Path,
    keys: NDArray[np.float32],
    progress: Callable[[str, int, int], None],
) -> Normalizer:
    """Fill `keys` in place; returns the normalizer fitted on the way."""
    width = model.config.hidden_size
    order = np.random.default_rng(0).permutation(len(plan.lengths))
    drawn = int(np.searchsorted(np.cumsum(plan.lengths[order]), min(options.sample, plan.keys))) + 1
    sample, rest = order[:drawn], order[drawn:]
    done = 0

    def batches(documents: NDArray[np.int64]) -> Any:
        nonlocal done
        longest_first = documents[np.argsort(-plan.lengths[documents], kind="stable")]
        parts = [
            (int(document), stream.tokens[plan.starts[document] :][: plan.lengths[document]])
            for document in longest_first
            if plan.lengths[document]
        ]
        for document, states in embed(model, parts, options.batch_tokens):
            yield document, states
            done += len(states)
            progress("embed", done, plan.keys)

    held = np.concatenate([[0], np.cumsum(plan.lengths[sample])])
    place = dict(zip(sample.tolist(), held[:-1].tolist(), strict=True))
    states_file = directory / "states.work"
    states = np.memmap(states_file, np.float32, "w+", shape=(int(held[-1]), width))
    for document, hidden in batches(sample):
        states[place[document] : place[document] + len(hidden)] = hidden
    progress("fit", 0, len(states))
    normalizer = Normalizer.fit(states, options.dims)
    for document in sample.tolist():
        row, length = plan.rows[document], plan.lengths[document]
        keys[row : row + length] = normalizer.keys(states[place[document] : place[document] + length])
    del states
    states_file.unlink()
    for document, hidden in batches(rest):
        keys[plan.rows[document] : plan.rows[document] + len(hidden)] = normalizer.keys(hidden)
    return normalizer


def _measure(
    searcher: ann.Searcher, keys: NDArray[np.float32], progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """recall@10 against exact search, and self-retrieval MRR (DReSD Eq. 4), over keys drawn evenly at random."""
    probes = np.sort(np.random.default_rng(1).choice(len(keys), min(_PROBES, len(keys)), replace=False))
    queries = np.ascontiguousarray(keys[probes])
    k = min(10, len(keys))
    best = np.empty((len(probes), 0), np.float32)
    for start in range(0, len(keys), _CHUNK):
        joined = np.concatenate([best, queries @ keys[start : start + _CHUNK].T], axis=1)
        best = np.sort(np.partition(joined, -min(k, joined.shape[1]), axis=1)[:, -k:], axis=1)[:, ::-1]
        progress("measure", min(start + _CHUNK, len(keys)), len(keys))
    hits, ranks = 0, []
    for query, row, exact in zip(queries, probes, best, strict=True):
        similarity, rows = searcher.search(query, 100)
        # A neighbour counts as right when it is as near as the k-th exact one: equal keys are interchangeable.
        hits += int((similarity[:k] >= exact[-1] - 1e-5).sum())
        where = np.flatnonzero(rows == row)
        ranks.append(1.0 / (1 + int(where[0])) if len(where) else 0.0)
    return {
        "recall_at_10": round(hits / (k * len(probes)), 4),
        "self_retrieval_mrr": round(float(np.mean(ranks)), 4),
        "probes": len(probes),
    }
