"""Conversations: a prompt while it is being answered, and as which tokens a model reads it."""

from __future__ import annotations

from specds.reading.prompts import Message, Prompt
from specds.tokenizer import Tokenizer


class Conversation:
    """One prompt, answered turn by turn; each turn sees the answers before it.

    Attributes:
        prompt: what is being answered.
        turn: the turn that comes next, from 0.
        messages: all that was said before its answer: earlier turns with their answers, and its own messages.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.turn = 0
        self.messages: list[Message] = [*prompt.turns[0]] if prompt.turns else []

    @property
    def done(self) -> bool:
        """Whether every turn has its answer."""
        return self.turn == len(self.prompt.turns)

    @property
    def raw_text(self) -> str | None:
        """The text that the model continues as it is; None where the chat template makes one of the messages."""
        return self.messages[0]["content"] if self.prompt.raw else None

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the next turn's prompt, ready for its answer.

        Raises:
            PromptError: the chat template refuses the messages, or their text is not Unicode.
        """
        text = self.raw_text
        return tokenizer.chat(self.messages) if text is None else tokenizer.prompt(text)

    def answered(self, text: str) -> None:
        """The next turn has its answer, and the one after it is asked."""
        self.messages.append({"role": "assistant", "content": text})
        self.turn += 1
        if not self.done:
            self.messages += self.prompt.turns[self.turn]
