"""The columns of JSON records: TRL's, ShareGPT's and Alpaca's.

TRL has `messages`, `prompt` with `completion` (both texts or both lists of messages) and `text`, and `tools` and
`chat_template_kwargs` beside messages.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from lamella._data.documents import Chat, EndOfText, Instruction, Part, PromptCompletion, RecordPosition
from lamella._data.json_files import COLUMN_SETS, COLUMNS_BESIDE
from lamella._settings.options import ConfigError, shown
from lamella._settings.parsing import has_half_characters, kind_of, parse_json

_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    "observation": "tool",
}
"""Names of roles in lower case, ShareGPT's among them -> chat templates' names."""

_CALL: Final = "function_call"
"""The name of the assistant's calls of tools in ShareGPT's form, as LLaMA-Factory has them."""

_LOSS_MARKS: Final[Mapping[str, tuple[object, ...]]] = {"weight": (None, 0, 1), "train": (None, False, True)}
"""Keys of a message, OpenAI's and axolotl's -> values: 0 and False take an answer out of the loss."""

_PIECE_LENGTH: Final = 1 << 16
_NUM_NAMED: Final = 8

Fields = Mapping[str, object]


def document(text: str, position: RecordPosition) -> Iterator[Part]:
    """Yield the parts of a record's document.

    Of several kinds of columns, conversations come first and `text` last: data sets often hold a rendered `text` beside
    the messages.

    Args:
        text: The record's JSON text.
        position: The record, for error messages.

    Raises:
        ConfigError: The text is not JSON, or its object holds no document; names position and keys.
    """
    try:
        record = parse_json(text, is_line=True)
    except ValueError as error:
        raise ConfigError(f"Expected JSON in {position}, got {error}. Repair the record, or leave it out.") from error
    # Tables written out as JSON have every column in every record: null stands for an absent one.
    fields = {name: value for name, value in record.items() if value is not None} if isinstance(record, dict) else {}
    for names, parse in _PARSERS:
        if all(name in fields for name in names):
            _check_characters(text, position, [fields.get(name) for name in (*names, *COLUMNS_BESIDE)])
            yield from parse(fields, position)
            return
    got = _described(record) if isinstance(record, dict) else f"no object but {kind_of(record)}"
    way_out = "Rename the keys, or leave the record out."
    if record == {} and position.file.form == "table":  # Null columns of a table's row are left out.
        got, way_out = "nothing under the columns of a document", "Leave the row out."
    if isinstance(record, list):
        way_out = "An array of records is read from a file whose name ends in .json."
    raise ConfigError(
        "Expected an object with 'messages', with 'prompt' and 'completion', with 'instruction' and 'output', or with "
        f"a text 'text', in {position}, got {got}. {way_out}"
    )


def _described(record: Fields) -> str:
    """Describe an object without a document: the document's field of another kind, or the keys."""
    for name in ("text", "messages", "conversations"):
        if name in record:
            return f"{kind_of(record[name])} under {name!r}"
    return _keys(record)


def _keys(fields: Fields) -> str:
    names = [repr(name) for name in list(fields)[:_NUM_NAMED]]
    more = f" and {len(fields) - _NUM_NAMED} more" if len(fields) > _NUM_NAMED else ""
    return f"the keys {textwrap.shorten(', '.join(names), 200) or 'of nothing'}{more}"


def _check_characters(text: str, position: RecordPosition, columns: list[object]) -> None:
    if has_half_characters(text, columns):
        raise ConfigError(
            f"Expected whole characters in {position}, got half of one (an escape from \\ud800 to \\udfff without its "
            "other half). Replace the escape, or leave the record out."
        )


def _chat(name: str) -> Callable[[Fields, RecordPosition], Iterator[Part]]:
    def parse(fields: Fields, position: RecordPosition) -> Iterator[Part]:
        yield _conversation(fields, _with_system(_messages(fields[name], name, position), fields, position), position)

    return parse


def _with_system(messages: list[Fields], fields: Fields, position: RecordPosition) -> list[Fields]:
    """Return messages behind that of the column `system`, unless they have one of their own."""
    system = _text_under("system", fields, position)
    if not system or any(_role(str(message["role"])) == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _text_under(name: str, fields: Fields, position: RecordPosition) -> str:
    """Return the text in a column, empty for an absent one."""
    text = fields.get(name, "")
    if not isinstance(text, str):
        raise ConfigError(f"Expected a text under {name!r} in {position}, got {kind_of(text)}.")
    return text


def _conversation(
    fields: Fields, messages: list[Fields], position: RecordPosition, num_prompt_messages: int | None = None
) -> Chat:
    options = fields.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise ConfigError(f"Expected an object under 'chat_template_kwargs' in {position}, got {kind_of(options)}.")
    if not any(message["role"] == "assistant" for message in messages):  # Else the template knows the other names.
        messages = [{**message, "role": _role(str(message["role"]))} for message in messages]
    for message in messages:
        _check_loss_marks(message, position)
    return Chat(
        messages=messages,
        tools=_tools(fields.get("tools"), position),
        template_options=options,
        num_prompt_messages=num_prompt_messages,
        position=position,
    )


def _tools(tools: object, position: RecordPosition) -> list[object] | None:
    if isinstance(tools, str):  # TRL's form: a table's column has one type, and tools have many
        try:
            tools = parse_json(tools, is_line=True) if tools else None
        except ValueError as error:
            raise ConfigError(f"Expected JSON in the text under 'tools' in {position}, got {error}.") from error
    if tools is None or isinstance(tools, list):
        return tools or None
    raise ConfigError(f"Expected a list under 'tools' in {position}, got {kind_of(tools)}.")


def _messages(messages: object, name: str, position: RecordPosition) -> list[Fields]:
    if not isinstance(messages, list) or not messages:
        got = "an empty one" if messages == [] else kind_of(messages)
        raise ConfigError(f"Expected a list of messages under {name!r} in {position}, got {got}.")
    return [_message(message, name, position) for message in messages]


def _message(message: object, name: str, position: RecordPosition) -> Fields:
    """Return a message with "role" and "content", converted from ShareGPT's "from" and "value" where necessary."""
    if isinstance(message, dict):
        if isinstance(message.get("role"), str) and ("content" in message or "tool_calls" in message):
            return message
        if isinstance(role := message.get("from"), str) and isinstance(text := message.get("value"), str):
            marks = {name: message[name] for name in _LOSS_MARKS if name in message}
            if role == _CALL:  # Under a role of that name no answer would be found: it would never be in the loss.
                return {"role": "assistant", "content": "", "tool_calls": _calls(text, position), **marks}
            return {"role": _role(role), "content": text, **marks}
    got = _keys(message) if isinstance(message, dict) else kind_of(message)
    raise ConfigError(
        f"Expected messages with 'role' and 'content', or 'from' and 'value', under {name!r} in {position}, got {got}."
    )


def _calls(text: str, position: RecordPosition) -> list[Fields]:
    """Return the calls of tools in the JSON of a call, or of a list of calls, as chat templates expect them."""
    try:
        calls = parse_json(text, is_line=True)
    except ValueError as error:
        raise ConfigError(f"Expected JSON in the text of {_CALL!r} in {position}, got {error}.") from error
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            got = _keys(call) if isinstance(call, dict) else kind_of(call)
            raise ConfigError(f"Expected a call's 'name' and 'arguments' under {_CALL!r} in {position}, got {got}.")
    return [{"type": "function", "function": call} for call in calls]


def _role(name: str) -> str:
    return _ROLES.get(name.lower(), name)


def _check_loss_marks(message: Fields, position: RecordPosition) -> None:
    for name, values in _LOSS_MARKS.items():
        if message["role"] == "assistant" and message.get(name) not in values:
            expected = " or ".join(map(json.dumps, values[1:]))
            raise ConfigError(
                f"Expected {expected} under {name!r} of an assistant's message in {position}, got "
                f"{shown(message[name])}. Leave it out."
            )


def _prompt_and_completion(fields: Fields, position: RecordPosition) -> Iterator[Part]:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        yield PromptCompletion(prompt, completion)
    elif isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt", position)
        messages = [*before, *_messages(completion, "completion", position)]
        yield _conversation(fields, messages, position, num_prompt_messages=len(before))
    else:
        raise ConfigError(
            f"Expected two texts or two lists of messages under 'prompt' and 'completion' in {position}, got "
            f"{kind_of(prompt)} and {kind_of(completion)}."
        )


def _instruction(fields: Fields, position: RecordPosition) -> Iterator[Part]:
    names = ("instruction", "input", "output", "system")
    instruction, context, output, system = (_text_under(name, fields, position) for name in names)
    if fields.get("history"):
        raise ConfigError(
            f"Expected no earlier turns under 'history' in {position}, got {kind_of(fields['history'])}. Write the "
            "turns as 'messages'."
        )
    yield Instruction(instruction, context, output, system, position)


def _text(fields: Fields, position: RecordPosition) -> Iterator[Part]:
    text = fields["text"]
    if not isinstance(text, str):
        raise ConfigError(f"Expected a text under 'text' in {position}, got {kind_of(text)}.")
    yield from (text[start : start + _PIECE_LENGTH] for start in range(0, len(text), _PIECE_LENGTH))
    yield EndOfText()


_PARSERS: Final = tuple(
    zip(
        COLUMN_SETS,
        (_chat("messages"), _chat("conversations"), _prompt_and_completion, _instruction, _text),
        strict=True,
    )
)
"""Columns that a record must have -> its document's parts."""
