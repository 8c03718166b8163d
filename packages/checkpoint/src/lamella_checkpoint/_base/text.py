"""Text of a checkpoint, as it may be shown: names and values are chosen by whoever wrote it."""

from typing import Final

_MAX_SHOWN: Final = 80


def printable(text: str) -> str:
    """Text with escapes in place of what moves a terminal's cursor, ends a line or cannot be encoded."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def short(value: object) -> str:
    """A value as a few words, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  Python refuses to write out large integers, and others' objects what they like.
        text = f"<{type(value).__name__}>"
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}...")
