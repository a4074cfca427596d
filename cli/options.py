"""Options that several commands share, in groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli.values import settings, size
from specds.errors import InputError, UsageError

if TYPE_CHECKING:
    from specds.decode.engine import Engine
    from specds.model import LanguageModel
    from specds.reading.prompts import BadRow, Prompt
    from specds.sampling import Sampling
    from specds.tokenizer import Tokenizer


EMBEDDED = "smollm2-135m"
_MOST_REQUESTS = 1024
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
        from specds.loading import unwatched
        from specds.model import load_model

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

    @property
    def streamed(self) -> bool:
        """Whether rows may come slowly: from stdin, or a pipe."""
        return not all(Path(path).is_file() for path in self.paths)

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
class ParallelOptions:
    """How many requests are answered at once."""

    parallel: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            envvar="SPECDS_PARALLEL",
            help="Requests answered at once, sharing forward passes. 1: each as soon as can be; auto: as many as make "
            "most tokens/s, by what passes cost on this machine.",
        ),
    ] = "auto"
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            envvar="SPECDS_KV_MEMORY",
            help="Memory of the key-value cache, such as 2GB. Requests wait for room in it; one that never fits fails.",
            show_default="half of what is free",
        ),
    ] = None

    def memory(self) -> int | None:
        """Bytes of the key-value cache, at most; None: half of what is free."""
        return size("kv-memory", self.kv_memory)

    def check(self) -> None:
        """Refuse what is not valid, before any model is looked for.

        Raises:
            UsageError: one of the options is neither a number nor what may stand in its place.
        """
        self.memory()
        self._requests()

    def choose(self, engine: Engine, first: Prompt | BadRow, max_new_tokens: int, total: int | None) -> int:
        """How many requests at once.

        Args:
            first: a prompt, by whose length those of the others are guessed.
            total: how many prompts there are, if that is known.
        """
        requests = self._requests()
        if requests is None:
            requests = 1 if total == 1 else engine.parallel(_context(engine.model, first, max_new_tokens))
        return requests if total is None else max(1, min(requests, total))

    def _requests(self) -> int | None:
        if self.parallel == "auto":
            return None
        if not (self.parallel.isascii() and self.parallel.isdigit() and 0 < int(self.parallel) <= _MOST_REQUESTS):
            raise UsageError(f"--parallel is {self.parallel!r}", f"a number from 1 to {_MOST_REQUESTS:,}, or auto")
        return int(self.parallel)


def _context(model: LanguageModel, prompt: Prompt | BadRow, max_new_tokens: int) -> int:
    """Tokens behind which answers to such prompts are written, on average."""
    from specds.errors import PromptError
    from specds.reading.conversation import Conversation
    from specds.reading.prompts import Prompt

    length = 0
    if isinstance(prompt, Prompt):
        with contextlib.suppress(PromptError):
            length = len(Conversation(prompt).tokens(model.tokenizer))
    return min(length + max_new_tokens // 2, model.context_length)


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


Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        help="See `specds drafters` for the names; auto takes all that the stores have.",
        autocompletion=_drafters,
        show_default="auto",
    ),
]


@dataclass(frozen=True, slots=True)
class DecodingOptions(DraftingOptions):
    """A drafter, what it drafts from, and how much."""

    drafter: Drafter = None
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Most draft tokens verified in one step; auto: as many as pay for themselves on this machine.",
            show_default="auto",
        ),
    ] = None
    max_new_tokens: MaxNewTokens = 256


@contextlib.contextmanager
def reading(model: LanguageModel, quiet: bool = False) -> Iterator[None]:
    """Show how far a model's weights are, while something is made that reads them."""
    from specds.cli.render import loading
    from specds.loading import Loading, unwatched

    with loading(f"preparing {model.name}", quiet) as watch:
        # What comes after the last byte is measuring, compiling and packing.
        model.watch = lambda now: watch(now if now.done < now.total else Loading(f"preparing {model.name}", 0, 0))
        try:
            yield
        finally:
            model.watch = unwatched


def tokenizer_of(name: str, revision: str | None, trust_remote_code: bool, *, quiet: bool = False) -> Tokenizer:
    """A model's tokenizer; for a GGUF file the whole model is converted, which is shown."""
    from specds.checkpoint import find_tokenizer
    from specds.cli.render import loading

    with loading(f"loading the tokenizer of {name}", quiet) as watch:
        return find_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code, watch=watch)
