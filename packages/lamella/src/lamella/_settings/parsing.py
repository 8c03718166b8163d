"""JSON and TOML of users: small regular files, and errors that fit on one line."""

import json
import re
import stat
import tomllib
from pathlib import Path
from typing import Final

_LARGEST_NBYTES: Final = 64 << 20

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of half a character. The halves of one character together are valid."""


def read_settings(path: Path) -> str:
    """Return the text of a small UTF-8 file, without its byte order mark.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is a pipe or a device, whose reading may never end, or has another encoding, or is large.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ValueError("a folder")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("a pipe or a device, which is no regular file")
    if status.st_size > _LARGEST_NBYTES:
        raise ValueError(f"a file of {status.st_size:,} bytes")
    return path.read_text(encoding="utf-8-sig")


def parse_json(text: str, *, is_line: bool = False) -> object:
    """Parse a JSON document.

    Args:
        text: The document.
        is_line: The document is a line of a file: errors name the column alone.

    Raises:
        ValueError: The text is not JSON, is nested too deeply or, unless a line, has a key twice. The message is one
            line.
    """
    try:
        return json.loads(text, object_pairs_hook=None if is_line else _without_duplicates)
    except json.JSONDecodeError as error:
        row = "" if is_line else f"line {error.lineno}, "
        reason = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        raise ValueError(f"{reason} at {row}column {error.colno}") from error
    except _DuplicateKeyError:
        raise
    except RecursionError as error:
        raise ValueError("values that are nested too deeply") from error
    except ValueError as error:  # int() refuses thousands of digits.
        raise ValueError("an integer of too many digits") from error


def parse_toml(text: str) -> dict[str, object]:
    """Parse a TOML document.

    Raises:
        ValueError: The text is not TOML, or is nested too deeply. The message is one line.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("values that are nested too deeply") from error
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        raise ValueError("an integer of too many digits") from error


class _DuplicateKeyError(ValueError):
    """A key appears twice in an object: one of its values would be dropped."""


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(f"the key {max(names, key=names.count)!r:.80} twice")
    return fields


def has_half_characters(line: str, *values: object) -> bool:
    """True where strings in `values`, parsed from a JSON line, hold surrogates, which no UTF-8 text can hold."""
    if _SURROGATE.search(line) is None:
        return False
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def kind_of(value: object) -> str:
    """Return JSON's name for the kind of a parsed value."""
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
