"""specds rebuild: every index anew, from the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specds.cli import options, values


def rebuild(
    store: Annotated[Path, typer.Argument(help="The datastore; its indexes may be damaged.")],
    suffix_only: Annotated[bool, typer.Option("--suffix-only", help="Leave the dense index as it is.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Whose hidden states; default: as the dense index says.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    memory: options.Memory = None,
) -> None:
    """Build every index of a store again from its corpus, also where index files are damaged or gone.

    The corpus is the source of truth and must be whole. The suffix index comes out byte for byte as it was. The
    dense one needs the model; its normalizer is fitted anew.

    [dim]specds verify code.ds || specds rebuild code.ds[/dim]
    """
    from specds.cli.render import note, working
    from specds.datastore.compaction import rebuild_suffix
    from specds.datastore.store import open_store

    limit = values.size("memory", memory)
    opened = open_store(store, corpus_only=True)
    dense = [] if suffix_only else opened.manifest.dense
    if opened.manifest.suffix:
        with working("sorting suffixes"):
            segments = rebuild_suffix(opened, limit)
        note(
            f"{store}: suffix index over {sum(segment.tokens for segment in segments):,} tokens, "
            f"{len(segments)} segments"
        )
    if dense:
        from specds.datastore.build_dense import DenseOptions, build_dense

        named = model or next(segment.model.name for segment in dense if segment.model)
        language_model = options.ModelOptions(
            model=named, dtype=dtype, device=device, threads=threads, trust_remote_code=trust_remote_code
        ).load(weights=True)
        said = dense[-1].parameters
        wanted = DenseOptions(max_length=said.get("max_length"), search=said.get("search") or 250, memory=limit)
        with working("embedding"):
            built = build_dense(opened, language_model, wanted, replace=True)
        note(f"{store}: dense index over {sum(segment.tokens for segment in built):,} tokens, {len(built)} segments")
    if not opened.manifest.suffix and not dense:
        note(f"{store} has no index to rebuild")
