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
