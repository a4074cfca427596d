"""Options that several commands share, in groups, and what is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.errors import InputError, UsageError
from specds.limits import parse_size

if TYPE_CHECKING:
    from specds.calibration.answers import Answers as RecordedAnswers
    from specds.datastore.store import Store
    from specds.decode.pricing.curve import CostCurve
    from specds.model import LanguageModel
    from specds.reading.prompts import BadRow, Prompt
    from specds.sampling import Sampling
    from specds.tokenizer import Tokenizer

EMBEDDED = "smollm2-135m"
_REPLAY_BUDGET = 16
_MODEL, _PROMPTS, _SAMPLING = "Model", "Prompts", "Sampling"

Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.", rich_help_panel=_MODEL)
]
Dtype = Annotated[
    str,
    typer.Option(
        envvar="SPECDS_DTYPE",
        help="float32, bfloat16, float16, or auto: float32 on a CPU, bfloat16 on a GPU.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        envvar="SPECDS_DEVICE", help="cpu, cuda, cuda:1…, or auto: a GPU where there is one.", rich_help_panel=_MODEL
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, envvar="SPECDS_THREADS", help="CPU threads; default: all cores.", rich_help_panel=_MODEL),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run modelling code that comes with the checkpoint. Only for code you have read.",
        rich_help_panel=_MODEL,
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Most draft tokens verified in one step; auto: as many as pay for themselves on this machine.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.", rich_help_panel=_PROMPTS)]
Stores = Annotated[list[Path] | None, typer.Option("--store", "-s", help="A datastore to draft from. Repeatable.")]
StorePath = Annotated[Path, typer.Argument(help="The datastore.")]
NewStore = Annotated[Path, typer.Option("--store", "-s", help="The datastore to write to; made if need be.")]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to build in, such as 2GB; default: half of the machine's."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, instead of text.")]
Answers = Annotated[
    str,
    typer.Option("--answers", help="What `specds decode` wrote: stdout, --output or --trace."),
]
Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        metavar="M,M,…",
        help="Drafters by name; after a name may stand :STORE, @BUDGET and ?OPTION=VALUE&…",
    ),
]
ReplayBudget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="N|auto",
        help="Most draft tokens a step of methods without @N; default: auto with --cost, else 16.",
    ),
]
Cost = Annotated[
    Path | None,
    typer.Option(
        help="T(n) of the machine to predict for: what `specds profile --json` printed, a bench's result, or a trace "
        "of drafts of several sizes."
    ),
]
RecordedLength = Annotated[
    int | None,
    typer.Option(min=1, help="--max-new-tokens of the recorded run; default: that of its longest answer cut short."),
]


@dataclass(frozen=True, slots=True)
class TokenizerOptions:
    """Whose tokenizer is wanted."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            envvar="SPECDS_MODEL",
            help=f"{EMBEDDED} (embedded), a local directory, a GGUF file, or a Hugging Face id. SPECDS_MODEL names "
            "another default.",
            rich_help_panel=_MODEL,
        ),
    ] = EMBEDDED
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False

    def tokenizer(self, *, quiet: bool = False) -> Tokenizer:
        """The model's tokenizer; of a GGUF file the whole model is converted, which is shown."""
        return tokenizer_of(self.model, self.revision, self.trust_remote_code, quiet=quiet)


@dataclass(frozen=True, slots=True)
class ModelOptions(TokenizerOptions):
    """Which model is wanted, and where it is to be."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None

    def load(self, *, weights: bool = False, runtime: str | None = None, quiet: bool = False) -> LanguageModel:
        """The model, while it is shown how far it is; its weights at once, or when they are first needed.

        Args:
            runtime: what it is to run on; what cannot be is refused before the weights are read.
        """
        from specds.cli.render import loading
        from specds.model import load_model, unwatched

        with loading(f"loading {self.model}", quiet) as watch:
            model = load_model(
                self.model,
                dtype=self.dtype,
                device=self.device,
                threads=self.threads,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                watch=watch,
            )
            if runtime is not None:
                from specds.decode.targets import require_runtime

                require_runtime(model, runtime)
            if weights:
                model.watch = watch
                _ = model.network  # what does not load is to fail before anything is written
                model.watch = unwatched
            return model


@dataclass(frozen=True, slots=True)
class TargetOptions(ModelOptions):
    """Which model decodes, where, and by which runtime."""

    runtime: Annotated[
        str,
        typer.Option(
            envvar="SPECDS_RUNTIME",
            help="cpu (Llama-like, float32), cuda (Llama-like), generic (transformers), or auto: the fastest proven "
            "one.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"

    def target(self, *, quiet: bool = False) -> LanguageModel:
        """The model, if the runtime can run it."""
        return self.load(runtime=self.runtime, quiet=quiet)


_PROMPT_HELP = "Prompt file (JSONL, CSV, TSV, Parquet, text; also .gz, .zst), or - for stdin. Repeatable."


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Files of prompts, and how they are read."""

    prompts: Annotated[
        list[str], typer.Option("--prompts", "-p", "--prompt-file", help=_PROMPT_HELP, rich_help_panel=_PROMPTS)
    ]
    prompt_field: Annotated[
        str, typer.Option(help="The field that holds a single prompt.", rich_help_panel=_PROMPTS)
    ] = "prompt"
    format: Annotated[
        str | None,
        typer.Option(help="jsonl, csv, tsv, parquet or text; default: by the file's name.", rich_help_panel=_PROMPTS),
    ] = None

    @property
    def paths(self) -> list[str]:
        """Where the prompts are."""
        return self.prompts

    def read(self, *, limit: int | None = None, group: str | None = None) -> Iterator[Prompt | BadRow]:
        """The prompts, and rows that are none, in order."""
        import itertools

        from specds.reading.prompts import read_prompts

        rows = read_prompts(self.paths, format=self.format, prompt_field=self.prompt_field, group_field=group)
        return itertools.islice(rows, limit)

    def total(self, limit: int | None = None) -> int | None:
        """How many rows there are, as far as that can be counted; None if it cannot, and there is no limit."""
        from specds.reading.rows import count_rows

        counted = count_rows(self.paths, self.format)
        if counted is None or limit is None:
            return limit if counted is None else counted
        return min(counted, limit)

    def nothing(self) -> InputError:
        """What is said where the files hold no prompt."""
        return InputError(f"no prompts in {', '.join(self.paths)}", "one prompt a line, as JSON or as plain text")


@dataclass(frozen=True, slots=True)
class OptionalPromptOptions(PromptOptions):
    """The same where prompts can be left out."""

    prompts: Annotated[
        list[str], typer.Option("--prompts", "-p", "--prompt-file", help=_PROMPT_HELP, rich_help_panel=_PROMPTS)
    ] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JobOptions(OptionalPromptOptions):
    """Prompts of a job: files can be named without an option, too, as `-p *.jsonl` does when a shell has spread it."""

    files: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPTS", help="Prompt files; the same as --prompts.")
    ] = None
    limit: Limit = None

    @property
    def paths(self) -> list[str]:
        """Where the prompts are.

        Raises:
            UsageError: nowhere.
        """
        if not (paths := [*self.prompts, *(self.files or [])]):
            raise UsageError("no prompts are given", "name files of them with --prompts, or - for stdin")
        return paths


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the target's tokens are picked."""

    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.", rich_help_panel=_SAMPLING)] = 0.0
    top_p: Annotated[
        float,
        typer.Option(help="Keep the likeliest tokens that together reach this probability.", rich_help_panel=_SAMPLING),
    ] = 1.0
    top_k: Annotated[
        int, typer.Option(min=0, help="Keep the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)
    ] = 0
    seed: Annotated[
        int,
        typer.Option(min=0, help="Same seed and prompt, same text, whatever the drafter.", rich_help_panel=_SAMPLING),
    ] = 0

    def sampling(self) -> Sampling:
        """The same as the library takes it."""
        from specds.sampling import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """What drafts are made from."""

    store: Stores = None
    set_option: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="An option of the drafter; see `specds drafters`. Repeatable."
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="What drafter model drafts with: a model of the same tokenizer, skip:half, or skip:3,5-8 (the target "
            "without these layers; see `specds choose-skip`)."
        ),
    ] = None

    def settings(self) -> dict[str, str]:
        """The drafter's options."""
        return settings(self.set_option or [])

    def drafting(self, target: ModelOptions) -> LanguageModel | str | None:
        """The draft model, where the target is; what begins with `skip:` names the target's own layers."""
        from specds.decode.draft_model import SKIP

        name = self.draft_model
        if name is None or name.startswith(SKIP):
            return name
        placed = ModelOptions(
            model=name, dtype=target.dtype, device=target.device, trust_remote_code=target.trust_remote_code
        )
        return placed.load()


def _drafters(incomplete: str) -> list[str]:
    """Names of drafters, for a shell that completes one."""
    from specds.decode.drafters import DRAFTERS

    return [name for name in DRAFTERS if name.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class DecodingOptions(DraftingOptions):
    """A drafter, what it drafts from, and how much."""

    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "-d",
            help="See `specds drafters` for the names; auto takes all that the stores have.",
            autocompletion=_drafters,
            show_default="auto",
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Most draft tokens verified in one step; auto: as many as pay for themselves on this machine.",
            show_default="auto",
        ),
    ] = None
    max_new_tokens: MaxNewTokens = 256


def size(name: str, text: str | None) -> int | None:
    """Bytes of a size such as 500MB, 2GB or 1.5GiB.

    Raises:
        UsageError: it is not a valid size.
    """
    if text is None:
        return None
    found = parse_size(text)
    if found is None:
        raise UsageError(f"--{name} is {text!r}", "a size such as 500MB, 2GB or 1.5GiB")
    return found


def open_stores(paths: Sequence[Path] | None, tokenizer: Tokenizer, *, thorough: bool = False) -> list[Store]:
    """Datastores that hold a tokenizer's tokens; every byte of them is read if `thorough`."""
    from specds.datastore.store import open_store

    return [open_store(path, tokenizer, thorough=thorough) for path in paths or []]


@contextlib.contextmanager
def reading(model: LanguageModel, quiet: bool = False) -> Iterator[None]:
    """Show how far a model's weights are, while something is made that reads them."""
    from specds.cli.render import loading
    from specds.model import Loading, unwatched

    with loading(f"preparing {model.name}", quiet) as watch:
        # What comes after the last byte is measuring, compiling and packing.
        model.watch = lambda now: watch(now if now.done < now.total else Loading(f"preparing {model.name}", 0, 0))
        try:
            yield
        finally:
            model.watch = unwatched


def tokenizer_of(name: str, revision: str | None, trust_remote_code: bool, *, quiet: bool = False) -> Tokenizer:
    """A model's tokenizer; for a GGUF file the whole model is converted, which is shown."""
    from specds.cli.render import loading
    from specds.model import find_tokenizer

    with loading(f"loading the tokenizer of {name}", quiet) as watch:
        return find_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code, watch=watch)


def require_stores(paths: Sequence[Path] | None) -> None:
    """Refuse what is not a valid store, before any model is looked for."""
    from specds.datastore.store import open_store

    for path in paths or []:
        open_store(path)


def budget(text: str) -> int | None:
    """A number of draft tokens; None for `auto`.

    Raises:
        UsageError: neither.
    """
    from specds.decode.method import parse_budget

    try:
        return parse_budget(text)
    except ValueError:
        raise UsageError(f"--budget is {text!r}", "a number, 0 or more, or auto") from None


def cost_curve(path: Path | None) -> CostCurve | None:
    """A cost curve in a file, or that of the forward passes of a trace or a bench.

    Raises:
        InputError: there is none in it.
    """
    from specds.calibration.trace import read_passes
    from specds.decode.pricing import measurement

    if path is None:
        return None
    trace = path / "steps.parquet" if path.is_dir() else path
    if trace != path or _is_parquet(path):
        found = read_passes(str(trace)).curve()
        if found is None:
            raise InputError(
                f"{trace} has too few forward passes of one query token, or of several",
                "a bench of `none` and a drafter has both; passes that requests shared (--parallel) do not count",
            )
        return found
    found = measurement.load(path)
    if found is None:
        raise InputError(f"{path} is not a valid cost curve", "`specds profile --json > C.json` writes one")
    return found


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def replay_budget(text: str | None, curve: CostCurve | None) -> int | None:
    """The budget of a replay: by the curve where there is one, else 16."""
    if text is None:
        return _REPLAY_BUDGET if curve is None else None
    return budget(text)


def recorded(
    answers: str,
    prompts: PromptOptions,
    model: LanguageModel,
    *,
    most: int | None = None,
    group: str | None = None,
) -> RecordedAnswers:
    """Recorded answers with their prompts; says what they leave to be desired."""
    from specds.calibration.answers import read_answers
    from specds.cli.render import note

    found = read_answers(answers, prompts.read(group=group), model.tokenizer, most=most, stop_tokens=model.stop_tokens)
    if found.failed:
        note(f"note: {found.failed:,} prompts have an error instead of an answer; they are left out")
    if not found.lossless:
        note("note: some answers are of a lossy run; what a lossless one would write, and accept, differs")
    return found


def numbers(name: str, text: str) -> list[int]:
    """Ascending positive numbers from `1,2,4`.

    Raises:
        UsageError: something else.
    """
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{name} is {text!r}", "positive numbers with commas between them")
    return sorted({int(word) for word in words})


def settings(pairs: Sequence[str], flag: str = "--set") -> dict[str, str]:
    """`name=value` words as a dictionary.

    Raises:
        UsageError: a word without `=`, or a name given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"{flag} {pair!r}", f"write {flag} name=value; `specds drafters` lists the names")
        if name in found:
            raise UsageError(f"{flag} {name} is given twice", "give it once")
        found[name] = value.strip()
    return found
