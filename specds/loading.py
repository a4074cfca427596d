"""Loading a model: how far it is, told in place of the bars of the libraries that do it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a model is.

    Attributes:
        what: what is being done, as in "converting tiny.gguf".
        done: bytes.
        total: bytes in all.
        kept: where the result lies from now on; None while it is made, or if nothing is kept.
    """

    what: str
    done: int
    total: int
    kept: Path | None = None


Watch = Callable[[Loading], None]


def unwatched(loading: Loading) -> None:
    """Nobody looks on."""


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading bars and advice of transformers do not belong on a pipeline's stderr."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
