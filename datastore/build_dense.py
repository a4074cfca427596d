"""Building the dense index: embed what is new, fit the normalizer, index the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore import ann
from specds.datastore.corpus import TokenStream, token_stream
from specds.datastore.dense_segment import Keys, Progress, load_normalizer, read_keys, write_segment
from specds.datastore.embedding import Embed, embed
from specds.datastore.manifest import Identity, Segment, Shard
from specds.datastore.mapped import working_array
from specds.datastore.normalizer import Normalizer
from specds.datastore.segments import portions, require_memory, to_join, usable_memory
from specds.datastore.store import Store, require_tokenizer, require_tokens
from specds.datastore.trial import remember, require_sound
from specds.datastore.writer import Writer, writing
from specds.errors import UsageError
from specds.files import remove_tree
from specds.model import LanguageModel

_DIMS = 64
# Bytes a token: itself, and where its key leads.
_BYTES = 12


@dataclass(frozen=True, slots=True)
class DenseOptions:
    """How a dense index is built.

    Attributes:
        index: `scann`, `faiss`, or None: as the store's other segments, else scann where it can be imported.
        dims: dimensions kept; None: as the store's other segments, else 64 (DReSD §5.2).
        sample: most hidden states used to fit mean, deviation and PCA (§3.2: about a million).
        max_length: positions embedded of each document; None: as many as the model's context holds.
        leaves, search: cells of the ANN partition, and cells searched a query; None: 5 √n.
        batch_tokens: tokens embedded in one forward pass.
        kept: how precisely keys are kept, see `ann.KEYS`; None: as the store's other segments, else float32.
        memory: bytes that building the ANN index may take, about; None: half of the machine's.
    """

    index: str | None = None
    dims: int | None = None
    sample: int = 1_000_000
    max_length: int | None = None
    leaves: int | None = None
    search: int = 250
    batch_tokens: int = 2_048
    kept: str | None = None
    memory: int | None = None

    def like(self, segments: Sequence[Segment], *, anew: bool) -> DenseOptions:
        """The options with what is left open as the last of some segments has it, or as a first one would.

        Args:
            anew: the segments will go, so that the dimensions may be others.

        Raises:
            UsageError: the dimensions are others than the segments have.
        """
        last = segments[-1].parameters if segments else {}
        dims = last.get("dims", _DIMS) if self.dims is None else self.dims
        if last and not anew and dims != last.get("dims"):
            raise UsageError(
                f"--dims is {dims}, and the store's dense index has {last.get('dims')}", "build it anew with --replace"
            )
        index = self.index or last.get("ann") or ann.default_kind()
        return dataclasses.replace(self, index=index, dims=dims, kept=self.kept or last.get("kept") or "float32")


def build_dense(
    store: Store,
    model: LanguageModel,
    options: DenseOptions | None = None,
    progress: Progress = lambda stage, done, total: None,
    *,
    replace: bool = False,
    embedding: Embed | None = None,
) -> list[Segment]:
    """Index the corpus files that the dense index does not cover yet; the new segments, none if there is nothing new.

    Documents are embedded, the first time the normalizer is fitted and later taken as it was then, so that keys of all
    segments can be compared; then the ANN index is built and measured. A new segment takes in the last ones that are
    no larger than it, by their keys, without embedding them again. An index of another model is built anew.

    Each document passes through the model once. The states of the documents drawn for the sample wait in a file until
    the normalizer is fitted; all others become keys at once, also in a file, so that memory holds the tokens, one batch
    and what the ANN library makes of one segment.

    Args:
        progress: called with (stage, done, total) now and then.
        replace: build the whole index anew.
        embedding: gives the hidden states; by default the model's own network does.

    Raises:
        UsageError: the corpus is empty or too small, or an option is out of range.
        ForeignTokenizer, StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    require_tokenizer(store, model.tokenizer)
    with store.writer() as writer:
        manifest = writer.manifest
        require_tokens(writer.store)
        old = manifest.dense
        if any(segment.model is None or segment.model.fingerprint != model.fingerprint for segment in old):
            old = []
        options = (options or DenseOptions()).like(old, anew=replace)
        tokens = options.batch_tokens
        embedding = embedding or (lambda documents: embed(model, documents, tokens))
        if replace:
            old = []
        covered = {name for segment in old for name in segment.shards}
        new = [shard for shard in manifest.corpus if shard.file not in covered]
        if not new:
            return []
        work = writer.work_path("dense")
        with writing(work):
            normalizer = load_normalizer(store.path, old[-1]) if old else None
            corpus = _Corpus.of(model, embedding, writer.store, new, options, normalizer, work, progress)
            joined, built = _write(writer, model, old, corpus, options, progress)
            del corpus
            remove_tree(work, store.path)
        writer.change(dense=[*(segment for segment in old if segment not in joined), *built])
        for segment in built:
            remember(writer.store, segment)
    return built


def most_keys(options: DenseOptions, memory: int | None) -> int:
    """Keys of the largest segment whose ANN index can be built in so much memory."""
    # The library copies the keys, and keeps codes, cells and, until it is written, the index itself.
    return max(1, usable_memory(memory) // (8 * (options.dims or _DIMS) + 128))


def _write(
    writer: Writer,
    model: LanguageModel,
    old: Sequence[Segment],
    corpus: _Corpus,
    options: DenseOptions,
    progress: Progress,
) -> tuple[list[Segment], list[Segment]]:
    """Segments that were taken in, and the new ones."""
    most = most_keys(options, options.memory)
    order = {shard.file: place for place, shard in enumerate(writer.manifest.corpus)}
    joined: list[Segment] = []
    taken: list[Keys] = []
    first = order[corpus.shards[0].file]
    for segment in reversed(to_join(old, sum(shard.tokens for shard in corpus.shards), most)):
        writer.store.check_whole(segment)
        require_sound(writer.store, segment)
        keys = read_keys(writer.path, segment)
        comparable = load_normalizer(writer.path, segment).same(corpus.normalizer)
        if keys is None or not comparable or order[segment.shards[-1]] > first:
            break
        first = order[segment.shards[0]]
        joined.insert(0, segment)
        taken.insert(0, keys)
    built = []
    for group in portions(corpus.shards, most):
        parts = [*taken, corpus.keys_of(group)]
        taken = []
        if any(len(part.keys) for part in parts):
            identity = Identity(model.name, model.fingerprint)
            built.append(write_segment(writer, parts, corpus.normalizer, identity, corpus.about, progress))
    return joined, built


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
        # Of n tokens the last has no continuation; the entry after each document is its separator.
        lengths = np.clip(np.diff(stream.starts) - 2, 0, max_length)
        return cls(starts, lengths, np.concatenate([[0], np.cumsum(lengths)]), max_length)

    @property
    def keys(self) -> int:
        return int(self.rows[-1])

    def positions(self, first: int, last: int) -> NDArray[np.int64]:
        """Where the continuation of each key of the documents [first, last) starts in the stream."""
        rows = np.arange(self.rows[first], self.rows[last])
        return rows - np.repeat(self.rows[first:last] - self.starts[first:last], self.lengths[first:last]) + 1


@dataclass(frozen=True, slots=True)
class _Corpus:
    """Embedded documents: keys[n, dims] float32, a memory map of a working file, in the order of the documents."""

    shards: Sequence[Shard]
    stream: TokenStream
    plan: _Plan
    keys: NDArray[np.float32]
    normalizer: Normalizer
    about: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        embedding: Embed,
        store: Store,
        shards: Sequence[Shard],
        options: DenseOptions,
        normalizer: Normalizer | None,
        work: Path,
        progress: Progress,
    ) -> _Corpus:
        room = sum(shard.tokens + shard.documents for shard in shards)
        require_memory("the tokens of what is new", room * _BYTES, options.memory)
        stream = token_stream(store, shards)
        plan = _Plan.of(stream, min(options.max_length or model.context_length, model.context_length))
        width, dims = model.config.hidden_size, options.dims or _DIMS
        most = min(width, plan.keys) if normalizer is None else width
        if not 1 <= dims <= most:
            raise UsageError(f"--dims is {dims}", f"between 1 and {most} (hidden size, number of keys)")
        if options.sample < dims:
            raise UsageError(f"--sample is {options.sample}", f"at least --dims, which is {dims}")
        about = {
            "index": options.index,
            "kept": options.kept,
            "leaves": options.leaves,
            "search": options.search,
            "max_length": plan.max_length,
            "dtype": model.dtype,
        }
        keys = working_array(work / "keys.work", (max(plan.keys, 1), dims), work)[: plan.keys]
        normalizer = _embed(embedding, width, stream, plan, options, normalizer, work, keys, progress)
        return cls(shards, stream, plan, keys, normalizer, about)

    def keys_of(self, group: Sequence[Shard]) -> Keys:
        """The keys of neighbouring corpus files."""
        before = [shard.file for shard in self.shards].index(group[0].file)
        first = sum(shard.documents for shard in self.shards[:before])
        last = first + sum(shard.documents for shard in group)
        start, end = self.stream.starts[first], self.stream.starts[last]
        rows = slice(self.plan.rows[first], self.plan.rows[last])
        return Keys(
            shards=[shard.file for shard in group],
            corpus_tokens=sum(shard.tokens for shard in group),
            keys=self.keys[rows],
            positions=self.plan.positions(first, last) - start,
            tokens=self.stream.tokens[start:end],
        )


def _embed(
    embedding: Embed,
    width: int,
    stream: TokenStream,
    plan: _Plan,
    options: DenseOptions,
    normalizer: Normalizer | None,
    work: Path,
    keys: NDArray[np.float32],
    progress: Progress,
) -> Normalizer:
    """Fill `keys` in place, from states of `width` numbers; returns the normalizer, if need be fitted on the way."""
    order = np.random.default_rng(0).permutation(len(plan.lengths))
    drawn = 0
    if normalizer is None:
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
        for document, states in embedding(parts):
            yield document, states
            done += len(states)
            progress("embed", done, plan.keys)

    if normalizer is None:
        held = np.concatenate([[0], np.cumsum(plan.lengths[sample])])
        place = dict(zip(sample.tolist(), held[:-1].tolist(), strict=True))
        states = working_array(work / "states.work", (int(held[-1]), width), work)
        for document, hidden in batches(sample):
            states[place[document] : place[document] + len(hidden)] = hidden
        progress("fit", 0, len(states))
        normalizer = Normalizer.fit(states, keys.shape[1])
        for document in sample.tolist():
            row, length = plan.rows[document], plan.lengths[document]
            keys[row : row + length] = normalizer.keys(states[place[document] : place[document] + length])
        del states
        remove_tree(work / "states.work", work)
    for document, hidden in batches(rest):
        keys[plan.rows[document] : plan.rows[document] + len(hidden)] = normalizer.keys(hidden)
    return normalizer
