"""specds choose-skip: which layers the model can leave out when it drafts for itself."""

from __future__ import annotations

from typing import Annotated

import typer

from specds.cli import options


def choose_skip(
    prompts: options.PromptOptions,
    target: options.TargetOptions,
    limit: Annotated[int, typer.Option(min=1, help="Prompts taken.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded after each prompt.")] = 24,
) -> None:
    """Search the layers that a model can leave out when it drafts for itself, and print them on stdout.

    One layer after the other is left out, each time the one without which the next token changes least often; of the
    sets found the one is printed that should decode fastest on this machine. A table of all goes to stderr.

    [dim]specds decode -p F.jsonl --draft-model "$(specds choose-skip -p some.jsonl)"[/dim]
    """
    from specds.calibration.skipping import choose_skip
    from specds.cli.render import bar, comparison, note
    from specds.decode.pricing import measurement
    from specds.decode.targets import choose_runtime, make_target
    from specds.errors import UnsupportedModel
    from specds.reading.conversation import Conversation
    from specds.reading.prompts import Prompt

    rows = [row for row in prompts.read() if isinstance(row, Prompt)]
    if not rows:
        raise prompts.nothing()
    language_model = target.target()
    layers = int(language_model.config.num_hidden_layers)
    if layers < 3:
        raise UnsupportedModel(f"{language_model.name} has {layers} layers, and the first and the last are needed")
    runtime = choose_runtime(language_model, target.runtime)
    with options.reading(language_model):
        decoder = make_target(language_model, runtime)
    texts = [Conversation(row).tokens(language_model.tokenizer) for row in rows[:limit]]
    curve = measurement.known(decoder, language_model, runtime)
    with bar("searching", None) as update:
        choices = choose_skip(
            decoder, texts, max_new_tokens, layers, curve, lambda done, total: update(done, total, -1.0)
        )
    comparison(
        f"layers left out of {layers}, over {len(texts)} prompts of {max_new_tokens} tokens",
        ("layers", "agreement", "cost", "γ", "expected speed"),
        [
            (choice.name, f"{choice.agreement:.1%}", f"{choice.cost:.2f}", f"{choice.gamma}", f"{choice.speed:.2f} ×")
            for choice in choices
        ],
    )
    if choices[0].speed < 1:
        note(
            "note: none of them is expected to be faster than plain decoding here; a retrieving drafter costs nothing "
            "to draft"
        )
    print(choices[0].name)
