"""Ingestion: text that exists already, as an out-of-distribution corpus (DReSD §4.2)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from specds.datastore.corpus import Document, add_documents, document_ids
from specds.datastore.store import Store, require_tokenizer
from specds.errors import PromptError
from specds.reading.examples import Example
from specds.reading.prompts import BadRow
from specds.tokenizer import Tokenizer

_SHARD_DOCUMENTS = 4_096


@dataclass(frozen=True, slots=True)
class IngestionReport:
    """What a run did.

    Attributes:
        documents, tokens: written now.
        present: examples that the store held already.
        truncated: documents whose prompt or response was cut.
        failed: rows that could not be used.
    """

    documents: int
    tokens: int
    present: int
    truncated: int
    failed: tuple[BadRow, ...]


def ingest(
    store: Store,
    tokenizer: Tokenizer,
    examples: Iterable[Example | BadRow],
    max_tokens: int = 1_024,
    strict: bool = False,
    licence: str = "",
    progress: Callable[[int], None] = lambda done: None,
) -> IngestionReport:
    """Tokenise examples into a store's corpus.

    A document's id is made from its tokens and source, so what is there already is skipped, and a killed run
    started again doubles nothing.

    Args:
        max_tokens: prompts and responses are cut to so many tokens each (DReSD §4.2: 1,024).
        licence: under which the examples stand, for the store's provenance.
        strict: raise at the first bad row; what was read before it is kept.

    Raises:
        PromptError: a bad row, if strict.
        InputError, ForeignTokenizer, StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    require_tokenizer(store, tokenizer)
    documents = tokens = present = truncated = seen = 0
    failed: list[BadRow] = []
    waiting: list[Document] = []
    with store.writer() as writer:
        done = document_ids(writer.store)
        twins: Counter[str] = Counter()

        def flush() -> None:
            nonlocal documents, tokens
            if waiting:
                add_documents(writer, waiting, origin="ingested", licence=licence)
                documents += len(waiting)
                tokens += sum(len(document.prompt) + len(document.response) for document in waiting)
                waiting.clear()

        for example in examples:
            seen += 1
            progress(seen)
            try:
                if isinstance(example, BadRow):
                    raise example.error
                document, cut = _document(example, tokenizer, max_tokens, twins)
            except PromptError as error:
                if strict:
                    flush()
                    raise
                failed.append(BadRow(example.id if isinstance(example, BadRow) else str(seen - 1), error))
                continue
            if document.doc_id in done:
                present += 1
                continue
            truncated += cut
            waiting.append(document)
            if len(waiting) >= _SHARD_DOCUMENTS:
                flush()
        flush()
    return IngestionReport(documents, tokens, present, truncated, tuple(failed))


def _document(example: Example, tokenizer: Tokenizer, max_tokens: int, twins: Counter[str]) -> tuple[Document, bool]:
    prompt, response = example.tokens(tokenizer)
    if not response:
        raise PromptError("a document without tokens", "give it some text")
    cut = len(prompt) > max_tokens or len(response) > max_tokens
    # A prompt's end says what is wanted, so prompts keep their end; responses keep their beginning.
    kept = np.array(prompt[-max_tokens:], np.int32), np.array(response[:max_tokens], np.int32)
    digest = hashlib.sha256(example.source.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(len(kept[0]).to_bytes(8, "little") + kept[0].tobytes() + kept[1].tobytes())
    content = digest.hexdigest()[:24]
    # Equal examples stay as many as they are in the input: how often a text occurs is what drafts are counted from.
    doc_id = f"{content}.{twins[content]}"
    twins[content] += 1
    return Document(doc_id, example.source, kept[0], kept[1]), cut
