"""specds build-dense: the dense index (DReSD)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specds.cli import options


def build_dense(
    store: Annotated[Path, typer.Argument(help="The datastore.")],
    model: options.Model = "smollm2-135m",
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    index: Annotated[
        str | None, typer.Option("--index", help="scann or faiss; default: scann where it can be imported.")
    ] = None,
    dims: Annotated[int, typer.Option(min=1, help="Principal components kept (DReSD §5.2: 64).")] = 64,
    sample: Annotated[
        int, typer.Option(min=1, help="Most hidden states that z-norm and PCA are fitted on (DReSD §3.2).")
    ] = 1_000_000,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Positions embedded of each document; default: the model's context.")
    ] = None,
    leaves: Annotated[int | None, typer.Option(min=1, help="Cells of the index; default: 5 √keys.")] = None,
    search: Annotated[int, typer.Option(min=1, help="Cells searched for one query.")] = 250,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens embedded in one forward pass.")] = 2048,
) -> None:
    """Build a store's dense index, for the drafter `dresd`.

    Every position of the corpus is embedded by the model; the hidden states are z-scored, reduced by PCA,
    scaled to unit length and indexed for nearest-neighbour search. Prints the variance that the components
    explain, recall@10 against exact search, and how often a key finds itself (self-retrieval MRR).

    [dim]specds build-dense code.ds --index faiss[/dim]
    """
    import time

    from specds.cli.render import bar, note
    from specds.datastore.store import open_store
    from specds.model import find_tokenizer

    # Before the weights are loaded: a store of another tokenizer is refused at once.
    open_store(store, find_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code))
    language_model = options.load(model, revision, dtype, device, threads, trust_remote_code, weights=True)

    from specds.datastore.build_dense import DenseOptions
    from specds.datastore.build_dense import build_dense as run

    opened = open_store(store, language_model.tokenizer)
    wanted = DenseOptions(index, dims, sample, max_length, leaves, search, batch_tokens)
    began = time.perf_counter()
    with bar("embedding", None) as update:
        segment = run(
            opened,
            language_model,
            wanted,
            lambda stage, done, total: update(
                done, total, done / max(time.perf_counter() - began, 1e-9) if stage == "embed" else -1.0
            ),
        )
    quality, parameters = segment.quality, segment.parameters
    note(
        f"{store}: dense index ({parameters['ann']}, {parameters['dims']} dimensions) over {parameters['keys']:,} keys "
        f"in {time.perf_counter() - began:.1f} s"
    )
    note(
        f"explained variance {quality['explained_variance']:.1%}, recall@10 {quality['recall_at_10']:.3f}, "
        f"self-retrieval MRR {quality['self_retrieval_mrr']:.3f}"
    )
