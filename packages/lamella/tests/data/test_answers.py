"""Answers in rendered conversations: the mask of marked templates, found without marks in any template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella import ConfigError
from lamella._data.documents import Chat, RecordPosition
from lamella._data.encoding import Encoder
from lamella._data.text_files import TextFile
from lamella._data.tokenizer import RunTokenizer

CHATML = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ (message.content or '') + '<|im_end|>' }}"
    "{%- for call in message.tool_calls or [] %}{{ '<call>' + (call | tojson) }}{%- endfor %}{% endgeneration %}"
    "{{ '\n' }}"
    "{%- else %}{{ message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THOUGHTS_AHEAD = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>' }}{% endif %}"
)
REFUSING = (
    "{% if messages | length < 2 or messages[1].role != 'assistant' %}{{ raise_exception('Two, please') }}{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<|im_end|>' }}{% endfor %}"
)
LASTING = (
    "{% for message in messages %}{{ '<' + message.role + ('>' if loop.last else '*>') + message.content }}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ENDED = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% else %}{{ '<s>' }}{% endif %}"
)
WITHOUT_ENDS = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def run_tokenizer() -> RunTokenizer:
    """A byte-level tokenizer with a token for the end of a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<s>", special=True)])
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    return RunTokenizer(tokenizer=tokenizer, end=256, num_tokens=258, unit="byte")


def chat(*messages: Mapping[str, object], **options: Any) -> Chat:
    position = RecordPosition(TextFile(name="a", path=options.pop("path", None), stop=0, digest="", form="array"), 3)
    return Chat(messages=messages, position=position, **options)


def message(role: str, content: str) -> Mapping[str, object]:
    return {"role": role, "content": content}


def encoded(tokenizer: RunTokenizer, template: str, conversation: Chat, *, marked: bool = False) -> list[list[int]]:
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    tokenizer.tokenizer.chat_template = template if marked else plain
    return Encoder(tokenizer=tokenizer, keeps_documents_apart=True)._encode_chat(conversation)


def answers(tokenizer: RunTokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.tokenizer.decode([token for token in ids if token >= 0]))


CONTENTS = st.text("ab \n<>é", max_size=12)


@settings(max_examples=40)
@given(st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3), st.booleans(), st.sampled_from([CHATML, LLAMA]))
def test_the_mask_without_marks_is_the_mask_of_the_marks(
    run_tokenizer: RunTokenizer, turns: list[tuple[str, str]], has_system: bool, template: str
) -> None:
    messages = [message("system", "You add.")] if has_system else []
    for question, answer in turns:
        messages += [message("user", question), message("assistant", answer)]
    marked = encoded(run_tokenizer, template, chat(*messages), marked=True)
    assert encoded(run_tokenizer, template, chat(*messages)) == marked


def test_calls_of_tools_are_answers_and_their_outputs_are_not(run_tokenizer: RunTokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    messages = [message("user", "1+2"), call, message("tool", "3"), message("assistant", "Three.")]
    conversation = chat(*messages, tools=[{"type": "function", "function": {"name": "add"}}])
    [ids] = encoded(run_tokenizer, CHATML, conversation)
    assert [ids] == encoded(run_tokenizer, CHATML, conversation, marked=True)
    assert answers(run_tokenizer, ids) == ('<|im_end|><call>{"name": "add", "arguments": {"a": 1}}Three.<|im_end|>')


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("num_prompt_messages", [None, 1])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"train": 0}])
def test_an_answer_without_weight_is_read_and_not_predicted(
    run_tokenizer: RunTokenizer, mark: Mapping[str, object], num_prompt_messages: int | None, is_marked: bool
) -> None:
    bad, good = {**message("assistant", "one"), **mark}, {**message("assistant", "two"), "weight": 1}
    conversation = chat(message("user", "1"), bad, message("user", "2"), good, num_prompt_messages=num_prompt_messages)
    [ids] = encoded(run_tokenizer, CHATML, conversation, marked=is_marked)
    assert answers(run_tokenizer, ids) == "two<|im_end|>"
    assert "one" in str(run_tokenizer.tokenizer.decode([max(token, ~token) for token in ids]))


def test_a_turn_rewritten_by_the_chat_template_is_a_document_in_its_original_form(run_tokenizer: RunTokenizer) -> None:
    messages = [message("user", "1"), message("assistant", "one"), message("user", "2"), message("assistant", "two")]
    first, second = encoded(run_tokenizer, THINKING, chat(*messages))
    for ids, answer in ((first, "one"), (second, "two")):
        assert answers(run_tokenizer, ids) == f"<think>\n\n</think>\n\n{answer}<|im_end|>"
    text = run_tokenizer.tokenizer.decode([token if token >= 0 else ~token for token in second])
    assert "one" in str(text) and str(text).count("<think>") == 1


def test_an_answer_begins_before_a_thought_that_only_the_prompt_begins(run_tokenizer: RunTokenizer) -> None:
    for answer in ("one", "<html>", "<thin"):
        [ids] = encoded(run_tokenizer, THOUGHTS_AHEAD, chat(message("user", "1"), message("assistant", answer)))
        assert answers(run_tokenizer, ids) == f"{answer}<|im_end|>"


def test_answers_are_found_in_templates_that_refuse_the_messages_before(run_tokenizer: RunTokenizer) -> None:
    [ids] = encoded(run_tokenizer, REFUSING, chat(message("user", "1"), message("assistant", "one")))
    assert answers(run_tokenizer, ids) == "one<|im_end|>"


def test_an_answer_may_come_first_or_be_empty(run_tokenizer: RunTokenizer) -> None:
    [ids] = encoded(run_tokenizer, CHATML, chat(message("assistant", "Hello"), message("user", "1")))
    assert answers(run_tokenizer, ids) == "Hello<|im_end|>"
    [ids] = encoded(run_tokenizer, CHATML, chat(message("user", "1"), message("assistant", "")))
    assert answers(run_tokenizer, ids) == "<|im_end|>"


@pytest.mark.parametrize("mark", [{}, {"weight": 0}])
def test_of_a_prompt_with_completion_the_loss_is_on_all_of_the_completion(
    run_tokenizer: RunTokenizer, mark: Mapping[str, object]
) -> None:
    prompt = [message("user", "1"), {**message("assistant", "one"), **mark}, message("user", "2")]
    messages = [*prompt, message("assistant", "two")]
    [ids] = encoded(run_tokenizer, CHATML, chat(*messages, num_prompt_messages=3))
    assert answers(run_tokenizer, ids) == "two<|im_end|>\n"


def test_a_prompt_that_ends_otherwise_without_the_generation_prompt_is_a_prompt(run_tokenizer: RunTokenizer) -> None:
    messages = [message("user", "1"), message("assistant", "one"), message("user", "2")]
    [ids] = encoded(run_tokenizer, ENDED, chat(*messages, num_prompt_messages=1))
    assert answers(run_tokenizer, ids) == "one<|im_end|><user>2<|im_end|><s>"


def test_a_prompt_that_later_turns_rewrite_stays_outside_the_loss(run_tokenizer: RunTokenizer) -> None:
    messages = [message("user", "1"), message("assistant", "one"), message("user", "2"), message("assistant", "two")]
    lasting = [
        ids for stop in (1, 3) for ids in encoded(run_tokenizer, LASTING, chat(*messages, num_prompt_messages=stop))
    ]
    assert [answers(run_tokenizer, ids) for ids in lasting] == ["one<|im_end|>", "two<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize("answer", ["\u597d\u3002", "ok \U0001f600", "\u00e9\U0001f389", "a "])
def test_all_bytes_of_an_answers_last_character_are_in_the_loss(run_tokenizer: RunTokenizer, answer: str) -> None:
    messages = [message("user", "1"), message("assistant", answer), message("user", "2"), message("assistant", "b")]
    [ids] = encoded(run_tokenizer, WITHOUT_ENDS, chat(*messages))
    assert answers(run_tokenizer, ids) == f"{answer}b"


def test_a_question_behind_an_answer_whose_end_has_no_token_stays_outside_the_loss() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"user": 0, "assistant": 1, ":": 2, "a": 3, "q": 4, "<end>": 5}, "<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    words = make(tokenizer_object=backend, eos_token="<end>")
    tokenizer = RunTokenizer(tokenizer=words, end=5, num_tokens=6, unit="token")
    messages = [message("user", "q"), message("assistant", "a "), message("user", "q")]
    [ids] = encoded(tokenizer, WITHOUT_ENDS, chat(*messages))
    assert [token for token in ids if token >= 0] == [3]


def test_answers_in_a_chat_with_tools_are_found_in_the_tool_use_template(run_tokenizer: RunTokenizer) -> None:
    conversation = chat(message("user", "1"), message("assistant", "one"), tools=[{"name": "f"}])
    run_tokenizer.tokenizer.chat_template = {"default": CHATML, "tool_use": THOUGHTS_AHEAD}
    [ids] = Encoder(tokenizer=run_tokenizer, keeps_documents_apart=True)._encode_chat(conversation)
    assert answers(run_tokenizer, ids) == "one<|im_end|>"


def test_a_conversation_that_the_chat_template_rejects_is_refused_by_row(run_tokenizer: RunTokenizer) -> None:
    with pytest.raises(ConfigError, match="can render in row 3 of 'None', got: Two, please."):
        encoded(run_tokenizer, REFUSING, chat(message("user", "1")))
