"""The documents of a text file: the file itself, or the text or conversation on each of its JSON lines."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lamella._options import ConfigError
from lamella._text import TextFile

_SUFFIXES: Final = (".jsonl", ".ndjson")
_CONVERSATIONS: Final = ("messages", "conversations")
_ROLES: Final[Mapping[str, str]] = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""ShareGPT's names of roles -> chat templates' names."""

_PIECE_LENGTH: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation in the form of chat templates.

    Attributes:
        messages: Each with "role" and "content".
        tools: The conversation's tools; None for none.
        place: File and line, for error messages.
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None
    place: str


class EndOfText(NamedTuple):
    """Marks the end of a document's text."""


Part = str | EndOfText | Chat
"""A piece of a document's text, the end of a document's text, or a whole conversation."""


def length_of(part: Part) -> int:
    """Return the approximate number of characters of a part."""
    if isinstance(part, Chat):
        return sum(len(str(message.get("content"))) for message in part.messages)
    return len(part)


def parts(files: Iterable[TextFile]) -> Iterator[Part]:
    """Yield the documents of all files, in order, in parts: text in bounded pieces, conversations whole.

    Raises:
        ConfigError: A JSON line holds no document. Names the file, the line and the line's keys.
    """
    for file in files:
        if file.path.suffix.lower() in _SUFFIXES:
            for number, line in enumerate(file.lines(), start=1):
                if line.strip():
                    yield from _parsed(line, _place(file, number))
        else:
            yield from file.pieces()
            yield EndOfText()


def first_chat(files: Iterable[TextFile]) -> Chat | None:
    """Return the first conversation; None when all documents are text.

    Raises:
        ConfigError: As `parts`, for any line of any file. Parsing every line here finds damaged lines before hours of
            tokenization.

    Effects: reads all files of JSON lines.
    """
    lines = [file for file in files if file.path.suffix.lower() in _SUFFIXES]
    first = None
    for part in parts(lines):
        if isinstance(part, Chat) and first is None:
            first = part
    return first


def _place(file: TextFile, number: int) -> str:
    # The second part of a split file cannot number its lines: the number of earlier lines is unknown.
    return f"line {number} of {str(file.path)!r}" if file.start == 0 else f"{str(file.path)!r}"


def _parsed(line: str, place: str) -> Iterator[Part]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"Expected JSON in {place}, got {str(error).rstrip('.')}.") from error
    if isinstance(record, dict):
        for name in _CONVERSATIONS:
            if name in record:
                yield _chat(record, name, place)
                return
        if isinstance(text := record.get("text"), str):
            yield from (text[start : start + _PIECE_LENGTH] for start in range(0, len(text), _PIECE_LENGTH))
            yield EndOfText()
            return
    got = (
        f"the keys {', '.join(map(repr, record)) or 'of nothing'}"
        if isinstance(record, dict)
        else type(record).__name__
    )
    raise ConfigError(f"Expected an object with a text 'text', or with 'messages', in {place}, got {got}.")


def _chat(record: Mapping[str, object], name: str, place: str) -> Chat:
    given = record[name]
    if not isinstance(given, list) or not given:
        raise ConfigError(f"Expected a list of messages under {name!r} in {place}, got {given!r:.60}.")
    tools = record.get("tools")
    return Chat(
        messages=tuple(_message(each, name, place) for each in given),
        tools=tools if isinstance(tools, list) and tools else None,
        place=place,
    )


def _message(given: object, name: str, place: str) -> Mapping[str, object]:
    """Return a message with "role" and "content", converted from ShareGPT's "from" and "value" where necessary."""
    if isinstance(given, dict):
        if isinstance(given.get("role"), str) and ("content" in given or "tool_calls" in given):
            return given
        if isinstance(role := given.get("from"), str) and isinstance(given.get("value"), str):
            return {"role": _ROLES.get(role, role), "content": given["value"]}
    got = f"the keys {', '.join(map(repr, given))}" if isinstance(given, dict) else type(given).__name__
    raise ConfigError(
        f"Expected messages with 'role' and 'content', or 'from' and 'value', under {name!r} in {place}, got {got}."
    )
