"""specds build-dense: the dense index (DReSD)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values
from specds.errors import UsageError

if TYPE_CHECKING:
    from specds.datastore.manifest import Segment


def build_dense(
    store: options.StorePath,
    model: options.ModelOptions,
    index: Annotated[
        str | None,
        typer.Option("--index", help="scann or faiss; default: as the index is, or scann where it can be imported."),
    ] = None,
    dims: Annotated[
        int | None,
        typer.Option(min=1, help="Principal components kept; default: as the index has, or 64 (DReSD §5.2)."),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Most hidden states that z-norm and PCA are fitted on (DReSD §3.2).")
    ] = 1_000_000,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Positions embedded of each document; default: the model's context.")
    ] = None,
    leaves: Annotated[int | None, typer.Option(min=1, help="Cells of the index; default: 5 √keys.")] = None,
    search: Annotated[int, typer.Option(min=1, help="Cells searched for one query.")] = 250,
    keys: Annotated[
        str | None,
        typer.Option(help="How keys are kept: float32, half or int8; default: as the index has, or float32."),
    ] = None,
    drop_keys: Annotated[
        bool, typer.Option("--drop-keys", help="Keep only the codes of the keys: a seventh of the size, less recall.")
    ] = False,
    memory: options.Memory = None,
    replace: Annotated[bool, typer.Option("--replace", help="Build the whole index anew.")] = False,
) -> None:
    """Build a store's dense index, or take in what was added since, for the drafter `dresd`.

    Every position of the corpus is embedded by the model; the hidden states are z-scored, reduced by PCA,
    scaled to unit length and indexed for nearest-neighbour search. What is in the index is not embedded again.
    Prints the variance that the components explain, recall@10 against exact search, and how often a key finds
    itself (self-retrieval MRR).

    [dim]specds build-dense code.ds --index faiss[/dim]
    """
    import time

    from specds.cli.render import bar, note
    from specds.datastore.store import open_store

    limit = values.size("memory", memory)
    # Before the weights are loaded: what is not a valid store, or one of another tokenizer, is refused at once.
    values.require_stores([store])
    open_store(store, model.tokenizer())
    language_model = model.load(weights=True)

    from specds.datastore.build_dense import DenseOptions
    from specds.datastore.build_dense import build_dense as run
    from specds.decode.embedding import Embedder

    opened = open_store(store, language_model.tokenizer)
    if keys and drop_keys:
        raise UsageError("--keys and --drop-keys contradict each other", "give one of them")
    wanted = DenseOptions(
        index, dims, sample, max_length, leaves, search, kept="none" if drop_keys else keys, memory=limit
    )
    with options.reading(language_model):
        embedder = Embedder(language_model)
    began = time.perf_counter()
    with bar("embedding", None) as update:
        segments = run(
            opened,
            language_model,
            wanted,
            lambda stage, done, total: update(
                done, total, done / max(time.perf_counter() - began, 1e-9) if stage == "embed" else -1.0
            ),
            replace=replace,
            embedding=embedder,
        )
    if not segments:
        note(f"{store}: the dense index covers all documents already; --replace builds it anew")
    for segment in segments:
        _report(note, store, segment, time.perf_counter() - began)


def _report(note: Callable[[str], None], store: Path, segment: Segment, seconds: float) -> None:
    quality, parameters = segment.quality, segment.parameters
    note(
        f"{store}: dense index ({parameters['ann']}, {parameters['dims']} dimensions) over {parameters['keys']:,} keys "
        f"in {seconds:.1f} s"
    )
    note(
        f"explained variance {quality['explained_variance']:.1%}, recall@10 {quality['recall_at_10']:.3f}, "
        f"self-retrieval MRR {quality['self_retrieval_mrr']:.3f}"
    )
