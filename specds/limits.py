"""How much is taken in at once. Each limit is a size in an environment variable; errors that it causes name it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from specds.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of bytes that a user may change.

    Attributes:
        variable: the environment variable that changes it.
        default: bytes, where the variable is not set.
    """

    variable: str
    default: int

    @property
    def bytes(self) -> int:
        """The limit as it is now.

        Raises:
            UsageError: the variable holds no size.
        """
        text = os.environ.get(self.variable)
        if not text:
            return self.default
        size = parse_size(text)
        if not size:
            raise UsageError(f"{self.variable} is {text[:40]!r}", "a size such as 500MB, 2GB or 1.5GiB")
        return size

    @property
    def hint(self) -> str:
        """How to raise it."""
        return f"raise the limit with {self.variable}=SIZE"


MAX_ROW = Limit("SPECDS_MAX_ROW", 4 << 20)
"""The longest row of an input file, and document of a corpus: tokenising takes 150 times as much memory."""
MAX_MANIFEST = Limit("SPECDS_MAX_MANIFEST", 16 << 20)
"""The largest manifest of a store: some tens of thousands of corpus files."""


def parse_size(text: str) -> int | None:
    """Bytes of a size such as 500MB, 2GB or 1.5GiB; None if it is not a size."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([kKMGT]?)(i?)B?", text.strip())
    if not match:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
