"""A prompt becomes the same tokens wherever it is answered, and whoever reads the answers later."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from specds.calibration.answers import read_answers
from specds.calibration.bench.contenders import Peer, Worker
from specds.datastore.corpus import read_documents
from specds.datastore.store import Store, open_store
from specds.decode.engine import Engine
from specds.decode.generation import GenerationOptions, generate
from specds.model import LanguageModel
from specds.reading.conversation import Conversation
from specds.reading.prompts import Message, Prompt
from specds.tokenizer import wrap_tokenizer

from ..conftest import STOP, make_tokenizer

HISTORY: tuple[Message, ...] = (
    {"role": "system", "content": "w1"},
    {"role": "user", "content": "w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4"},
)
CHAT = Prompt("chat", (HISTORY, ({"role": "user", "content": "w5"},), ({"role": "user", "content": "w6"},)))
RAW = Prompt("raw", (({"role": "user", "content": "w1 w2 w3"},),), raw=True)

RECORDER = """
import json, sys
with open(sys.argv[1], "a") as requests:
    for line in sys.stdin:
        print(line, end="", file=requests, flush=True)
        request = json.loads(line)
        print(json.dumps({"id": request["id"], "tokens": [9, 8]}), flush=True)
"""


def texts_of(prompt: Prompt, *answers: str) -> list[str]:
    """What the tiny models' template makes of each turn, written by hand; the last answer is seen by no turn."""
    if prompt.raw:
        return ["w1 w2 w3"]
    first, second, _ = answers
    opening = "system w1 user w2 assistant w3 user w4 assistant"
    return [
        opening,
        f"{opening} {first} user w5 assistant",
        f"{opening} {first} user w5 assistant {second} user w6 assistant",
    ]


def test_turns_go_through_the_template_and_raw_text_does_not() -> None:
    hf = make_tokenizer()
    hf.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", STOP)])
    tokenizer = wrap_tokenizer(hf, "begins")
    conversation = Conversation(CHAT)
    answers = ("w7 w8", "w9", "w10")
    for text, answer in zip(texts_of(CHAT, *answers), answers, strict=True):
        assert conversation.tokens(tokenizer) == tokenizer.encode(text)
        conversation.answered(answer)
    assert conversation.done
    assert Conversation(RAW).tokens(tokenizer) == [STOP, *tokenizer.encode("w1 w2 w3")]


@pytest.mark.parametrize("prompt", [CHAT, RAW], ids=["chat", "raw"])
def test_whoever_answers_reads_the_same(
    prompt: Prompt, new_store: Callable[..., Store], tiny: LanguageModel, tmp_path: Path
) -> None:
    answer = Engine(tiny).answer(prompt, 5)
    expected = [tiny.tokenizer.encode(text) for text in texts_of(prompt, *(turn.text for turn in answer.turns))]
    assert [list(turn.prompt) for turn in answer.turns] == expected

    store = new_store()
    generate(store, Engine(tiny), [prompt], GenerationOptions(max_new_tokens=5))
    assert [document.prompt.tolist() for document in read_documents(open_store(store.path))] == expected

    records = [
        {
            "text": turn.text,
            "tokens": turn.tokens,
            "finish_reason": turn.finish_reason,
            "prompt_tokens": len(turn.prompt),
        }
        for turn in answer.turns
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"id": prompt.id, "turns": records, "lossless": True}) + "\n")
    assert [list(turn.prompt) for turn in read_answers(str(path), [prompt], tiny.tokenizer).turns] == expected


@pytest.mark.parametrize("prompt", [CHAT, RAW], ids=["chat", "raw"])
def test_a_peer_is_asked_the_same(prompt: Prompt, tiny: LanguageModel, tmp_path: Path) -> None:
    asked = tmp_path / "requests.jsonl"
    peer = Peer("other", Worker([sys.executable, "-c", RECORDER, str(asked)], tmp_path / "log", 30), tiny)
    try:
        measured = peer.answer(prompt, 5)
    finally:
        peer.close()
    expected = texts_of(prompt, *(turn.text for turn in measured.turns))
    requests = [json.loads(line) for line in asked.read_text().splitlines()]
    assert [request["tokens"] for request in requests] == [tiny.tokenizer.encode(text) for text in expected]
    assert [request["text"] for request in requests] == expected
    assert [request["turn"] for request in requests] == list(range(len(prompt.turns)))
    lengths = [len(request.get("messages", ())) for request in requests]
    assert lengths == ([0] if prompt.raw else [4, 6, 8])
