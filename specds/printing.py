"""Text that may hold anything, on its way to a terminal or a page."""

from __future__ import annotations


def printable(text: str, *, lines: bool = False) -> str:
    """Text with everything that is not printable spelled out: escape sequences, lone surrogates, controls.

    Args:
        lines: the ends of lines stay what they are.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or (lines and character == "\n") else ascii(character)[1:-1]
        for character in text
    )


def is_unicode(text: str) -> bool:
    """Whether the text has a UTF-8 form: JSON escapes can spell half a surrogate pair, which has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
