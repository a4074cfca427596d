"""specds decode: answers to prompts, generated speculatively."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specds.cli import options

if TYPE_CHECKING:
    from specds.datastore.prompts import BadRow, Prompt
    from specds.decode.engine import Answer, Engine


def decode(
    prompt_file: Annotated[
        list[str],
        typer.Option("--prompt-file", "-p", help="Prompt file (JSONL, Parquet, text), or - for stdin. Repeatable."),
    ],
    store: Annotated[
        list[Path] | None, typer.Option("--store", "-s", help="A datastore to draft from. Repeatable.")
    ] = None,
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="none, pld, rest or dresd; see `specds drafters`.")
    ] = "pld",
    set_option: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="An option of the drafter; see `specds drafters`. Repeatable."
        ),
    ] = None,
    verifier: Annotated[
        str, typer.Option(help="greedy, sampling, or auto: greedy at temperature 0, else sampling.")
    ] = "auto",
    budget: Annotated[
        int | None, typer.Option(min=0, help="Most draft tokens verified in one step; default: 8 on a CPU, else 32.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    model: options.Model = "smollm2-135m",
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    format: Annotated[str | None, typer.Option(help="jsonl, parquet or text; default: by the file's name.")] = None,
    prompt_field: Annotated[str, typer.Option(help="The field that holds a single prompt.")] = "prompt",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write answers to this file; those it holds already are not done again."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write one row for each forward pass to this Parquet file.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first prompt that fails.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")] = False,
) -> None:
    """Answer prompts, verifying drafted tokens several at a time.

    Answers go to stdout as JSON lines, in the order of the prompts, each as soon as it is there: id, text,
    token ids, finish reason and counters. A prompt that cannot be answered gets a record with an `error`; the
    others go on, and the exit code is 1. With a lossless verifier the texts are the model's own, whatever the
    drafter.

    [dim]specds decode -p todo.jsonl --store code.ds --drafter dresd > answers.jsonl[/dim]
    [dim]echo 'Name three primes.' | specds decode -p - | jq -r .text[/dim]
    """
    import contextlib
    import itertools

    from specds.calibration.trace import TraceWriter
    from specds.cli.render import bar, decode_summary, emit
    from specds.datastore.prompts import BadRow, read_prompts
    from specds.datastore.store import open_store
    from specds.decode.counters import Counters
    from specds.decode.drafters import DRAFTERS
    from specds.decode.registry import load as find
    from specds.decode.registry import parse_options
    from specds.errors import InputError, PromptError
    from specds.model import find_tokenizer
    from specds.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    chosen = options.settings(set_option or [])
    parse_options(find(DRAFTERS, drafter, "drafter").Options, chosen, f"drafter {drafter}")
    rows = itertools.islice(read_prompts(prompt_file, format=format, prompt_field=prompt_field), limit)
    if store:
        # Before the weights are loaded: a store of another tokenizer is refused at once.
        tokenizer = find_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
        for path in store:
            open_store(path, tokenizer)
    first = next(rows, None)
    if first is None:
        raise InputError(f"no prompts in {', '.join(prompt_file)}", "one prompt a line, as JSON or as plain text")
    language_model = options.load(model, revision, dtype, device, threads, trust_remote_code)

    from specds.decode.engine import Engine

    stores = [open_store(path, language_model.tokenizer) for path in store or []]
    engine = Engine(language_model, drafter, chosen, stores, verifier, sampling, budget)
    total, prompts, failed = Counters(), 0, 0
    with contextlib.ExitStack() as stack:
        tracer = stack.enter_context(TraceWriter(trace)) if trace is not None else None
        held: list[tuple[str, bool]]
        write, held = stack.enter_context(_answer_file(output)) if output is not None else (emit, [])
        update = stack.enter_context(bar("decoding", limit))
        for number, row in enumerate(itertools.chain([first], rows)):
            if number < len(held):
                done, _ = held[number]
                if done != row.id:
                    raise InputError(
                        f"{output} line {number + 1} answers prompt {done!r}, where the prompt is {row.id!r}",
                        "choose another --output, or give the prompts that it was begun with",
                    )
                continue
            prompts += 1
            record: dict[str, Any]
            try:
                if isinstance(row, BadRow):
                    raise row.error
                answer = engine.answer(row, max_new_tokens)
                record = _record(engine, answer)
                total = total + answer.counters
                if tracer is not None:
                    for turn, one in enumerate(answer.turns):
                        tracer.add(answer.id, turn, drafter, one.steps)
            except PromptError as error:
                failed += 1
                record = _failure(row, error)
                if strict:
                    write(record)
                    raise
            write(record)
            update(prompts, limit, total.tokens_per_second)
    if not quiet:
        named = ("greedy" if sampling.greedy else "sampling") if verifier == "auto" else verifier
        decode_summary(drafter, named, engine.lossless, prompts, failed, total)
        if held:
            from specds.cli.render import note

            broken = sum(bad for _, bad in held)
            note(
                f"{output}: {len(held):,} answers were there already"
                + (f", {broken:,} of them errors" if broken else "")
            )
    if failed or any(bad for _, bad in held):
        raise typer.Exit(1)


def _record(engine: Engine, answer: Answer) -> dict[str, Any]:
    from specds.cli.render import counters_row

    last = answer.turns[-1]
    record: dict[str, Any] = {
        "id": answer.id,
        "text": last.text,
        "tokens": list(last.tokens),
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "drafter": engine.drafter,
        "lossless": engine.lossless,
        "counters": counters_row(answer.counters),
    }
    if len(answer.turns) > 1:
        record["turns"] = [
            {
                "text": turn.text,
                "tokens": list(turn.tokens),
                "finish_reason": turn.finish_reason,
                "prompt_tokens": turn.prompt_tokens,
            }
            for turn in answer.turns
        ]
    return record


def _failure(row: Prompt | BadRow, error: Exception) -> dict[str, Any]:
    from specds.errors import SpecdsError

    hint = error.hint if isinstance(error, SpecdsError) else ""
    return {"id": row.id, "error": {"type": type(error).__name__, "message": str(error), "hint": hint}}


def _answer_file(path: Path) -> Any:
    """The file that answers are appended to, and the ids of those it holds; a last line that a crash cut is dropped."""
    import contextlib
    import json
    import os
    import stat

    from specds.errors import InputError, OutputError

    @contextlib.contextmanager
    def opened() -> Any:
        held: list[tuple[str, bool]] = []
        end = 0
        try:
            with path.open("ab+") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OutputError(f"cannot write {path}: it is not a file", "choose another --output")
                file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    try:
                        record = json.loads(line)
                        held.append((str(record["id"]), "error" in record))
                    except (ValueError, TypeError, KeyError, RecursionError) as error:
                        raise InputError(
                            f"{path} line {len(held) + 1} is no answer", "choose another --output"
                        ) from error
                    end += len(line)
                file.truncate(end)

                def write(record: dict[str, Any]) -> None:
                    file.write((json.dumps(record, ensure_ascii=True) + "\n").encode())
                    file.flush()
                    os.fsync(file.fileno())

                yield write, held
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another --output") from error

    return opened()
