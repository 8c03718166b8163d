"""Text of a checkpoint made safe to display: a checkpoint's author controls names and values."""

from typing import Final

_MAX_SHOWN: Final = 80


def printable(text: str) -> str:
    """Text with escapes for characters that move a terminal's cursor, end a line or cannot be encoded."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def short(value: object) -> str:
    """Any value as a few words."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  Python refuses to print large integers, and an object's `repr` may raise anything.
        text = f"<{type(value).__name__}>"
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}...")
