"""The documents of a text file: the file itself, or the text or conversation on each of its JSON lines."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lamella._data.text import TextFile
from lamella._settings.options import ConfigError
from lamella._settings.parsing import has_half_characters, kind_of, parse_json

_CONVERSATIONS: Final = ("messages", "conversations")
_ROLES: Final[Mapping[str, str]] = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""ShareGPT's names of roles -> chat templates' names."""

_PIECE_LENGTH: Final = 1 << 16
_NUM_NAMED: Final = 8


class LinePosition(NamedTuple):
    """A line of a file, in words by `str`.

    Attributes:
        file: The file, or a part of one that begins at a line.
        number: Number of the line in the file or its part, from 1 on.
    """

    file: TextFile
    number: int

    def __str__(self) -> str:
        return f"line {self.file.num_lines_before() + self.number} of {str(self.file.path)!r}"


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
    place: LinePosition


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
        if file.is_json_lines:
            for number, line in enumerate(file.lines(), start=1):
                if line.strip():
                    yield from _parsed(line, LinePosition(file, number))
        else:
            yield from file.pieces()
            yield EndOfText()


def first_chat(files: Iterable[TextFile]) -> Chat | None:
    """Return the first conversation; None when all documents are text.

    Raises:
        ConfigError: A JSON line of a file holds no document. Parsing every line here finds damaged lines before hours
            of tokenization.

    Effects: reads all files of JSON lines.
    """
    lines = [file for file in files if file.is_json_lines]
    first = None
    for part in parts(lines):
        if isinstance(part, Chat) and first is None:
            first = part
    return first


def _parsed(line: str, position: LinePosition) -> Iterator[Part]:
    try:
        record = parse_json(line, is_line=True)
    except ValueError as error:
        raise ConfigError(f"Expected JSON in {position}, got {error}.") from error
    fields = record if isinstance(record, dict) else {}
    # Tables written out as JSON lines have every column on every line: null stands for an absent one.
    name = next((name for name in _CONVERSATIONS if fields.get(name) is not None), None)
    if name is not None:
        _check_characters(line, position, fields[name], fields.get("tools"))
        yield _chat(fields, name, position)
    elif isinstance(text := fields.get("text"), str):
        _check_characters(line, position, text)
        yield from (text[start : start + _PIECE_LENGTH] for start in range(0, len(text), _PIECE_LENGTH))
        yield EndOfText()
    else:
        got = f"no object but {kind_of(record)}" if not isinstance(record, dict) else _described(fields)
        raise ConfigError(f"Expected an object with a text 'text', or with 'messages', in {position}, got {got}.")


def _described(fields: Mapping[str, object]) -> str:
    """Describe an object that is no document: the document's field of another kind, or the keys."""
    for name in ("text", *_CONVERSATIONS):
        if name in fields:
            return f"{kind_of(fields[name])} under {name!r}"
    return _keys(fields)


def _keys(fields: Mapping[str, object]) -> str:
    names = [repr(name) for name in list(fields)[:_NUM_NAMED]]
    more = f" and {len(fields) - _NUM_NAMED} more" if len(fields) > _NUM_NAMED else ""
    return f"the keys {textwrap.shorten(', '.join(names), 200) or 'of nothing'}{more}"


def _check_characters(line: str, position: LinePosition, *values: object) -> None:
    if has_half_characters(line, *values):
        raise ConfigError(
            f"Expected whole characters in {position}, got half of one (an escape from \\ud800 to \\udfff without its "
            "other half). Replace the escape, or leave the line out."
        )


def _chat(record: Mapping[str, object], name: str, position: LinePosition) -> Chat:
    messages = record[name]
    if not isinstance(messages, list) or not messages:
        got = "an empty one" if messages == [] else kind_of(messages)
        raise ConfigError(f"Expected a list of messages under {name!r} in {position}, got {got}.")
    tools = record.get("tools")
    return Chat(
        messages=tuple(_message(message, name, position) for message in messages),
        tools=tools if isinstance(tools, list) and tools else None,
        place=position,
    )


def _message(message: object, name: str, position: LinePosition) -> Mapping[str, object]:
    """Return a message with "role" and "content", converted from ShareGPT's "from" and "value" where necessary."""
    if isinstance(message, dict):
        if isinstance(message.get("role"), str) and ("content" in message or "tool_calls" in message):
            return message
        if isinstance(role := message.get("from"), str) and isinstance(message.get("value"), str):
            return {"role": _ROLES.get(role, role), "content": message["value"]}
    got = _keys(message) if isinstance(message, dict) else kind_of(message)
    raise ConfigError(
        f"Expected messages with 'role' and 'content', or 'from' and 'value', under {name!r} in {position}, got {got}."
    )
