"""The lines of a text file with their places, and the whole of one; each decoded and held to a most size."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import IO

from specds.errors import InputError, PromptError
from specds.limits import MAX_ROW
from specds.reading.input_file import opened, reason, shown, unreadable

_SKIP_BYTES = 1 << 16
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
RESAVE = "save it as UTF-8 text"


def lines(path: str, *, max_line: int | None = None) -> Iterator[tuple[str, str | PromptError]]:
    """Each line of a text file that is not blank, with its place and without its end; packed files are unpacked.

    A line that is longer than max_line bytes, is not UTF-8 or holds a NUL is a PromptError.

    Raises:
        InputError: the file cannot be read, is packed and damaged, or is UTF-16.
    """
    max_line = max_line or MAX_ROW.bytes
    for where, raw, whole in raw_lines(path, max_line):
        if not whole:
            yield where, too_long(where, max_line)
            continue
        line = decoded(where, raw.rstrip(b"\r\n"))
        if isinstance(line, PromptError) or line.strip():
            yield where, line


def raw_lines(path: str, max_line: int) -> Iterator[tuple[str, bytes, bool]]:
    """Each line's place, its bytes with their end, and whether they are the whole of it."""
    with opened(path) as stream:
        for number in itertools.count(1):
            where = f"{shown(path)}:row {number}"
            try:
                raw, whole = _read_line(stream, max_line)
            except (OSError, EOFError, zlib.error) as error:
                raise InputError(
                    f"{where} cannot be read: {reason(error)}",
                    "the file is damaged or cut short: write or copy it again",
                ) from error
            if not raw:
                return
            if number == 1:
                if raw.startswith(_UTF16_BOMS):
                    raise InputError(f"{shown(path)} is UTF-16 text", RESAVE)
                raw = raw.removeprefix(_UTF8_BOM)
            yield where, raw, whole


def document(path: str, *, max_bytes: int | None = None) -> str | PromptError:
    """The whole of a text file; a PromptError where `lines` would give one.

    Raises:
        InputError: the file cannot be read, or is UTF-16.
    """
    max_bytes = max_bytes or MAX_ROW.bytes
    with opened(path) as stream:
        try:
            raw = stream.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(path, error) from error
    if len(raw) > max_bytes:
        return too_long(shown(path), max_bytes)
    if raw.startswith(_UTF16_BOMS):
        raise InputError(f"{shown(path)} is UTF-16 text", RESAVE)
    return decoded(shown(path), raw.removeprefix(_UTF8_BOM))


def decoded(where: str, raw: bytes) -> str | PromptError:
    """Text from bytes that should be UTF-8 without NULs; else what is wrong with them."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return PromptError(f"{where} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}", RESAVE)
    if "\0" in text:
        return PromptError(f"{where} holds a NUL byte: binary data or UTF-16", RESAVE)
    return text


def too_long(where: str, most: int) -> PromptError:
    return PromptError(f"{where} is longer than {most:,} bytes", f"split it into shorter ones, or {MAX_ROW.hint}")


def _read_line(stream: IO[bytes], max_line: int) -> tuple[bytes, bool]:
    """The next line and whether that is the whole of it; of a line that is too long the rest is skipped."""
    line = stream.readline(max_line + 1)
    if len(line) <= max_line or line.endswith(b"\n"):
        return line, True
    while (rest := stream.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
        pass
    return line[:4], False
