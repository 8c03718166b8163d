"""JSON files with many documents: on lines, or as the elements of an array."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

from lamella._settings.options import ConfigError

Form = Literal["text", "lines", "array", "table"]
"""How documents lie in a file: the file is one document, or its lines, the elements of its array or its rows are."""

DOCUMENT_COLUMNS: Final = ("messages", "conversations", "prompt", "instruction", "text")
"""Keys of which a document's object has at least one."""

COLUMN_SETS: Final = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("text",),
)
"""Columns that make a document, each set of them; of several in a record the first counts."""

COLUMN_SETS_IN_WORDS: Final = (
    "'messages', 'prompt' and 'completion', 'instruction' and 'output', 'conversations', or 'text'"
)

COLUMNS_BESIDE: Final = ("tools", "chat_template_kwargs", "input", "system", "history")
"""Columns that count where the document's own columns do."""

COLUMNS: Final = (*(name for names in COLUMN_SETS for name in names), *COLUMNS_BESIDE)

_LINE_SUFFIXES: Final = (".jsonl", ".ndjson")
_ARRAY_SUFFIX: Final = ".json"
_SEPARATORS: Final = re.compile(r"[\s,\ufeff]*")
_COLON: Final = re.compile(r"\s*:\s*")
_DECODER: Final = json.JSONDecoder()


class Element(NamedTuple):
    """An element of an array.

    Attributes:
        text: The element's JSON text; for a damaged element, or one without a comma before, all text up to the file's
            end.
        stop: Bytes from the beginning of the array's text to the end of the element.
    """

    text: str
    stop: int


def form_of(path: Path, suffix: str, texts: Iterable[str], *, is_named: bool) -> Form:
    """Return the form of a file.

    A `.json` file is one document of text, for example a program's settings in a folder of sources, unless the first
    object has a document's columns.

    Args:
        path: The file, for error messages.
        suffix: The suffix of the file's name, in lower case.
        texts: The file's text in pieces; only the first piece, record or element is read.
        is_named: The user named the file itself, not its folder: any array is then an array of documents.

    Raises:
        ConfigError: The file is named, and has documents in another form.
    """
    if suffix in _LINE_SUFFIXES:
        return "lines"
    if suffix != _ARRAY_SUFFIX:
        return "text"
    pieces = iter(texts)
    first = next(pieces, "")
    begin = first.lstrip("\ufeff \t\r\n")
    if begin.startswith("["):
        element = next(elements(_chain(first, pieces)), None)
        is_array = element is not None and (_is_document(element.text) or (is_named and _is_json(element.text)))
        return "array" if is_array else "text"
    begin = "".join(_with_first_line(begin, pieces)) if begin.startswith("{") else begin
    if _is_document(begin.partition("\n")[0]):
        return "lines"
    if is_named and (got := _other_form(begin)) is not None:
        raise ConfigError(
            f"Expected a record a line, or an array of records, in {str(path)!r}, got {got}. Write the "
            "records to a file of their own, in one of these forms."
        )
    return "text"


def _chain(first: str, pieces: Iterator[str]) -> Iterator[str]:
    yield first
    yield from pieces


def _with_first_line(first: str, pieces: Iterator[str]) -> Iterator[str]:
    """Yield pieces up to the first line's end: a record may be longer than a piece."""
    yield first
    while "\n" not in first and (first := next(pieces, "")):
        yield first


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_document(text: str) -> bool:
    fields = json.loads(text) if _is_json(text) else None
    return isinstance(fields, dict) and any(name in fields for name in DOCUMENT_COLUMNS)


def _other_form(text: str) -> str | None:
    """Describe the documents that an object at the beginning of a text is or has in a list; None without any."""
    position = _skip(text, 1) if text.startswith("{") else len(text)
    while text[position : position + 1] == '"':
        try:
            key, position = _DECODER.raw_decode(text, position)
            position += len(colon[0]) if (colon := _COLON.match(text, position)) else 0
            if key in DOCUMENT_COLUMNS and text[position : position + 1] in ('"', "["):
                return "a record over several lines"
            if text[position : position + 1] == "[" and any(
                _is_document(element.text) for element in islice(elements([text[position:]]), 1)
            ):
                return f"an object with records in the list under {key!r}"
            _, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):  # cut at the end of the text, or damaged
            return None
        position = _skip(text, position)
    return None


def elements(texts: Iterable[str], file: Path | None = None) -> Iterator[Element]:
    """Yield the elements of an array, or of a part of an array that begins or ends between elements.

    Args:
        texts: The array's text in pieces.
        file: The file, for error messages, where the text goes up to its end; None for a part that ends before.

    Raises:
        ConfigError: The file ends within the array.
    """
    remainder, nbytes, needed = "", 0, 0
    is_begun = is_behind_element = False
    for text, is_last in _with_end(texts):
        remainder += text
        if len(remainder) < needed and not is_last:  # An element of many pieces would be parsed anew for each.
            continue
        if not is_begun:
            start = _after_bracket(remainder)
            nbytes, remainder, is_begun = len(remainder[:start].encode()), remainder[start:], True
            is_behind_element = start == 0
        position = 0
        for begin, end in _spans(remainder, is_behind_element=is_behind_element):
            nbytes += len(remainder[position:end].encode())
            yield Element(remainder[begin:end], nbytes)
            position, is_behind_element = end, True
        remainder = remainder[position:]
        needed = 2 * len(remainder)
    damaged = remainder.strip(" \t\r\n,")
    if damaged not in ("", "]"):
        yield Element(damaged, nbytes + len(remainder.encode()))
    elif not damaged and file is not None:
        raise ConfigError(
            f"Expected ']' behind the last record of the array in {str(file)!r}, got the end of the file. Copy the "
            "file again, or close the array."
        )


def _with_end(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield every text, and an empty last text with a mark."""
    for text in texts:
        yield text, False
    yield "", True


def _after_bracket(text: str) -> int:
    start = _skip(text, 0)
    return start + 1 if text[start : start + 1] == "[" else 0


def _skip(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    return match.end() if match else position


def _spans(text: str, *, is_behind_element: bool) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each whole element in a text that begins between elements, behind one or not."""
    position = 0
    while (begin := _skip(text, position)) < len(text) and text[begin] != "]":
        if is_behind_element and "," not in text[position:begin]:
            return
        is_behind_element = True
        try:
            _, position = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):  # cut at the end of the text, or damaged
            return
        yield begin, position
