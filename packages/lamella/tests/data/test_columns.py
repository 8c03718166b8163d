"""The columns of records, in lines and in arrays: TRL's, ShareGPT's and Alpaca's."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella import ConfigError
from lamella._data.documents import Chat, EndOfText, Instruction, Part, PromptCompletion
from lamella._data.json_files import elements
from lamella._data.records import parts, survey
from lamella._data.text import collect

USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}


def read(folder: Path, record: object, name: str = "a.jsonl") -> list[Part]:
    text = json.dumps(record) + "\n" if name.endswith("l") else json.dumps([record, record], indent=1)
    (folder / name).write_text(text, encoding="utf-8")
    corpus = collect([str(folder / name)], 1e-9)
    return list(parts((*corpus.train, *corpus.validation)))


def only_chat(documents: list[Part]) -> Chat:
    [chat] = documents
    assert isinstance(chat, Chat)
    return chat


def test_conversations_have_messages_or_a_prompt_and_a_completion(tmp_path: Path) -> None:
    chat = only_chat(read(tmp_path, {"messages": [USER, ASSISTANT], "text": "the same, rendered", "tools": None}))
    assert chat.messages == [USER, ASSISTANT] and chat.num_prompt_messages is None and chat.tools is None
    chat = only_chat(read(tmp_path, {"prompt": [USER], "completion": [ASSISTANT], "messages": None}))
    assert chat.messages == [USER, ASSISTANT] and chat.num_prompt_messages == 1
    chat = only_chat(read(tmp_path, {"conversations": [{"from": "human", "value": "1+1"}, ASSISTANT]}))
    assert chat.messages == [USER, ASSISTANT]
    answers = [{"from": name, "value": "2"} for name in ("gpt", "chatgpt", "bot", "model", "assistant")]
    assert only_chat(read(tmp_path, {"conversations": answers})).messages == [ASSISTANT] * 5


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_system_column_begins_a_conversation_without_a_system_message(tmp_path: Path, name: str) -> None:
    system = {"role": "system", "content": "You add."}
    for messages, column in (([USER, ASSISTANT], "You add."), ([system, USER, ASSISTANT], "You sum.")):
        assert only_chat(read(tmp_path, {name: messages, "system": column})).messages == [system, USER, ASSISTANT]
    absent: list[object] = ["", None]
    for nothing in absent:
        assert only_chat(read(tmp_path, {name: [USER, ASSISTANT], "system": nothing})).messages == [USER, ASSISTANT]


def test_calls_and_observations_of_sharegpt_are_calls_and_outputs_of_tools(tmp_path: Path) -> None:
    add, mul = ({"name": name, "arguments": {"a": 1, "b": 1}} for name in ("add", "mul"))
    for value, calls in ((add, [add]), ([add, mul], [add, mul])):
        turns = [{"from": "function_call", "value": json.dumps(value)}, {"from": "observation", "value": "2"}]
        call, output = only_chat(read(tmp_path, {"conversations": turns})).messages
        tool_calls = [{"type": "function", "function": call} for call in calls]
        assert call == {"role": "assistant", "content": "", "tool_calls": tool_calls}
        assert output == {"role": "tool", "content": "2"}


def test_names_of_roles_are_converted_where_no_message_is_the_assistants(tmp_path: Path) -> None:
    for user, answer in (("user", "model"), ("human", "gpt"), ("User", "Assistant")):
        messages = [{"role": user, "content": "1+1"}, {"role": answer, "content": "2"}]
        assert only_chat(read(tmp_path, {"messages": messages})).messages == [USER, ASSISTANT]
        chat = only_chat(read(tmp_path, {"prompt": messages[:1], "completion": messages[1:]}))
        assert chat.messages == [USER, ASSISTANT]
    others = [{"role": "human", "content": "1+1"}, ASSISTANT, {"role": "model", "content": "3"}]
    assert only_chat(read(tmp_path, {"messages": others})).messages == others


def test_marks_of_messages_without_loss_are_kept(tmp_path: Path) -> None:
    answers = [{"from": "gpt", "value": "2", "weight": 0}, {**ASSISTANT, "train": False}]
    assert only_chat(read(tmp_path, {"conversations": answers})).messages == [{**ASSISTANT, "weight": 0}, answers[1]]


def test_tools_may_be_a_text_and_the_template_may_have_options(tmp_path: Path) -> None:
    record = {"messages": [USER], "tools": '[{"name": "f"}]', "chat_template_kwargs": {"enable_thinking": False}}
    chat = only_chat(read(tmp_path, record))
    assert chat.tools == [{"name": "f"}] and chat.template_options == {"enable_thinking": False}
    absent: list[object] = [None, [], "", "[]", "null"]
    for tools in absent:
        assert only_chat(read(tmp_path, {"messages": [USER], "tools": tools})).tools is None


def test_a_prompt_and_a_completion_may_be_texts(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompt": "a", "completion": "b", "text": "ab"}) == [PromptCompletion("a", "b")]
    assert read(tmp_path, {"prompt": "a", "text": "b"}) == ["b", EndOfText()]


def test_alpacas_records_are_conversations_or_alpacas_prompt(tmp_path: Path) -> None:
    [record] = read(tmp_path, {"instruction": "Add.", "input": "1 1", "output": "2", "text": "all of it"})
    assert isinstance(record, Instruction)
    assert record.as_chat().messages == [{"role": "user", "content": "Add.\n1 1"}, ASSISTANT]
    assert record.as_text().prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:\n")
    [record] = read(tmp_path, {"instruction": "Add.", "input": "", "output": "2"})
    assert isinstance(record, Instruction) and "### Input" not in record.as_text().prompt


def test_a_json_array_is_split_into_training_and_validation_between_elements(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": f"{index} é"} for index in range(100)], indent=1))
    corpus = collect([str(tmp_path / "a.json")], 0.1)
    texts = [[part for part in parts(files) if isinstance(part, str)] for files in (corpus.train, corpus.validation)]
    assert [*texts[0], *texts[1]] == [f"{index} é" for index in range(100)] and 9 <= len(texts[1]) <= 11


def test_errors_name_the_row_of_an_array(tmp_path: Path) -> None:
    records = [{"text": str(index)} for index in range(99)] + [{"question": 1}]
    (tmp_path / "a.json").write_text(json.dumps(records))
    with pytest.raises(ConfigError, match="in row 100 of .*a.json', got the keys 'question'. Rename"):
        survey(collect([str(tmp_path / "a.json")], 0.1).validation)
    (tmp_path / "a.json").write_text(json.dumps(records)[:-20])
    with pytest.raises(ConfigError, match="Expected JSON in row 99 of"):
        survey(collect([str(tmp_path / "a.json")], 0.01).validation)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"text": "a"}, {"text": "b"}', r"Expected '\]' behind the last record of .*a.json', got the end"),
        ('[{"text": "a"}, {"text": "b"},\n', r"Expected '\]' behind the last record of the array in .*"),
        ('[{"text": "a"}, {"text": "b"} {"text": "c"}]', "Expected JSON in row 3 of .*a.json', got extra data at"),
    ],
)
def test_an_array_that_is_cut_or_lacks_a_comma_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.txt").write_text("b")
    for fraction in (1e-9, 0.5):
        corpus = collect([str(tmp_path / "a.json")], fraction)
        with pytest.raises(ConfigError, match=expected):
            survey([*corpus.train, *corpus.validation])
    validation = (str(tmp_path / "b.txt"),)
    [file] = collect([str(tmp_path / "a.json")], 0.1, validation_paths=validation, streaming=True).streamed
    first = next(file.documents())
    for place in (None, first.after):
        with pytest.raises(ConfigError, match=expected):
            list(file.documents(place))


def test_json_that_holds_no_documents_is_text_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('[{"indent": 2}]\n' * 20)
    (tmp_path / "b.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    corpus = collect([str(tmp_path)], 1e-9)
    assert {file.name: file.form for file in (*corpus.train, *corpus.validation)} == {
        "settings.json": "text",
        "b.json": "lines",
    }
    (tmp_path / "settings.json").write_text('[{"indent": 2}, {"indent": 3}]')
    with pytest.raises(ConfigError, match="in row 1 of .*got the keys 'indent'"):
        survey(collect([str(tmp_path / "settings.json")], 0.5).train)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (json.dumps({"version": [1], "data": [{"text": "a"}]}), "an object with records in the list under 'data'"),
        (json.dumps({"data": [{"messages": [USER, ASSISTANT]}]}, indent=1), "an object with records in the list"),
        (json.dumps({"id": 1, "text": "a"}, indent=1) + json.dumps({"text": "b"}, indent=1), "a record over several"),
    ],
)
def test_records_in_another_form_are_text_in_a_folder_and_refused_by_name(tmp_path: Path, text: str, got: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert [file.form for file in collect([str(tmp_path)], 1e-9).train] == ["text"]
    (tmp_path / "b.txt").write_text("b")
    for streaming in (False, True):
        with pytest.raises(ConfigError, match=f"a record a line, or an array of records, in .*a.json', got {got}"):
            collect([str(tmp_path / "a.json")], 0.1, validation_paths=(str(tmp_path / "b.txt"),), streaming=streaming)


@pytest.mark.parametrize("record", [{"text": "a" * (1 << 20)}, {"id": "b" * (3 << 20), "text": "a"}])
def test_a_first_record_may_be_longer_than_a_block(tmp_path: Path, record: dict[str, str]) -> None:
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in (record, {"text": "c"})))
    (tmp_path / "b.txt").write_text("b")
    validation = (str(tmp_path / "b.txt"),)
    for location in (path, tmp_path):
        prepared = collect([str(location)], 0.1, validation_paths=validation)
        streamed = collect([str(location)], 0.1, validation_paths=validation, streaming=True)
        assert [file.form for file in (*prepared.train, *streamed.streamed)] == ["lines", "lines"]
    assert "".join(part for part in parts(prepared.train) if isinstance(part, str)) == f"{record['text']}c"


def test_settings_without_records_are_text_by_name_too(tmp_path: Path) -> None:
    settings = {"name": "a", "text_config": {"text": "b"}, "sizes": [1, 2], "files": [{"path": "c"}], "rest": []}
    settings["messages"] = {"greeting": "Hello"}
    (tmp_path / "a.json").write_text(json.dumps(settings, indent=1))
    assert [file.form for file in collect([str(tmp_path / "a.json")], 1e-9).train] == ["text"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"prompt": "a", "completion": []},
            "two texts or two lists of messages .* line 1 of .*, got a text and a list.",
        ),
        ({"instruction": "a", "output": 1}, "a text under 'output' in line 1 of .*, got a number."),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "no earlier turns .* Write the turns as 'messages'",
        ),
        ({"messages": [USER], "tools": "[{"}, "JSON in the text under 'tools' in line 1 of"),
        ({"messages": [USER], "tools": {"name": "f"}}, "Expected a list under 'tools' in line 1 of .*, got an object."),
        ({"messages": [USER], "tools": "{}"}, "Expected a list under 'tools' in line 1 of .*, got an object."),
        ({"messages": [USER], "chat_template_kwargs": 1}, "an object under 'chat_template_kwargs' in line 1 of"),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
            "Expected 0 or 1 under 'weight' of an assistant's message in line 1 of .*, got 0.5. Leave it out.",
        ),
        ({"messages": [{**ASSISTANT, "train": "no"}]}, "Expected false or true under 'train' of .*, got 'no'."),
        ({"messages": [USER], "system": ["a"]}, "Expected a text under 'system' in line 1 of .*, got a list."),
        (
            {"conversations": [{"from": "function_call", "value": "add(1, 1)"}]},
            "Expected JSON in the text of 'function_call' in line 1 of .*, got expecting value at column 1.",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"function": "add"}'}]},
            "Expected a call's 'name' and 'arguments' under 'function_call' in line 1 of .*, got the keys 'function'.",
        ),
        ({"text": "\ud83d"}, "whole characters in line 1 of"),
    ],
)
def test_columns_of_other_kinds_are_refused(tmp_path: Path, record: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, record)


RECORDS = st.lists(st.dictionaries(st.text(max_size=3), st.text(']},\\"é[{ \n', max_size=9)), max_size=9)


@given(RECORDS, st.integers(1, 7), st.sampled_from([None, 1]), st.booleans())
def test_elements_of_a_json_array_are_found_in_pieces_of_any_length(
    records: list[dict[str, str]], length: int, indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(records, indent=indent, ensure_ascii=is_ascii)
    pieces = [text[start : start + length] for start in range(0, len(text), length)]
    found = list(elements(pieces))
    assert [json.loads(element.text) for element in found] == records
    for element, following in itertools.pairwise(found):
        later = elements([text.encode()[element.stop :].decode()])
        assert next(later).text == following.text
