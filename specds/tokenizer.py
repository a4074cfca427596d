"""A model's tokenizer: text to token ids and back, chat templates, and the fingerprint that stores carry."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specds.errors import ModelError, PromptError, first_line
from specds.printing import is_unicode


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A Hugging Face tokenizer with what a datastore needs to know of it.

    Attributes:
        name: what the user called the model it belongs to.
        fingerprint: sha256 over every (token, id) pair; equal vocabularies have equal fingerprints.
        vocab_size: one more than the largest token id.
        hf: the transformers tokenizer itself.
    """

    name: str
    fingerprint: str
    vocab_size: int
    hf: Any

    @property
    def end(self) -> int | None:
        """The token that ends a text; None if there is none."""
        end = getattr(self.hf, "eos_token_id", None)
        return None if end is None else int(end)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens.

        Raises:
            PromptError: the text is not Unicode.
        """
        return list(self.hf.encode(_unicode(text), add_special_tokens=False))

    def prompt(self, text: str) -> list[int]:
        """Token ids of plain text to be continued, with the special tokens that the model expects in front.

        Raises:
            PromptError: the text is not Unicode.
        """
        return list(self.hf.encode(_unicode(text), add_special_tokens=True))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return str(self.hf.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer, by the model's own chat template.

        A tokenizer without a chat template gets the messages' contents, joined by blank lines, as plain text.

        Raises:
            PromptError: the template refuses the conversation (roles that do not alternate, no system role…), or its
                text is not Unicode.
        """
        if not getattr(self.hf, "chat_template", None):
            return self.prompt("\n\n".join(message["content"] for message in messages))
        try:
            text = self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise whatever their jinja code raises
            raise PromptError(
                f"the model's chat template refuses this conversation: {' '.join(str(error).split())}",
                "check the roles and their order",
            ) from error
        return self.encode(text)


def _unicode(text: str) -> str:
    if not is_unicode(text):
        raise PromptError("the text holds half of a surrogate pair (\\ud800 to \\udfff)", "repair the text")
    return text


def load_tokenizer(directory: Path, name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer in a model's directory.

    Raises:
        ModelError: the directory holds no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(
            f"no usable tokenizer in {directory}: {first_line(error)}",
            "the directory needs tokenizer.json or the files it is made from",
        ) from error
    return wrap_tokenizer(hf, name)


def wrap_tokenizer(hf: Any, name: str) -> Tokenizer:
    """A transformers tokenizer that is already in memory, as specds uses it."""
    vocabulary: dict[str, int] = hf.get_vocab()
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\t{token}\n".encode("utf-8", "surrogatepass"))
    return Tokenizer(name, digest.hexdigest(), max(vocabulary.values(), default=0) + 1, hf)
