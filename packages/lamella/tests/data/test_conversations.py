"""JSON lines: texts and conversations, rendered by the model's chat template, with the loss on what is told."""

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from trained_runs import TrainOn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lamella import Config, ConfigError
from lamella._data.batches import IGNORED
from lamella._data.order import validation_indices
from lamella._data.text import collect
from lamella._data.tokenizer import read_tokenizer, train_tokenizer
from lamella._data.tokens import load_tokens
from lamella._settings.sections import Packing
from lamella._training.preparation import prepare

PLAIN = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for message in messages %}[{{ message.role }}]{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|endoftext|>{% endgeneration %}{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
)


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def conversation(index: int, num_repeats: int = 1) -> Mapping[str, object]:
    question = {"role": "user", "content": f"What is {index} plus one? " + "Say it in one number." * num_repeats}
    return {"messages": [question, {"role": "assistant", "content": f"It is {index + 1}, of course."}]}


def as_sharegpt(record: Mapping[str, Sequence[Mapping[str, str]]]) -> Mapping[str, object]:
    names = {"user": "human", "assistant": "gpt"}
    return {
        "conversations": [
            {"from": names[message["role"]], "value": message["content"]} for message in record["messages"]
        ]
    }


@pytest.fixture
def chat_model(tmp_path: Path, text_folder: Path, model_file: Path) -> Callable[[str | None], Path]:
    """A published model's folder, whose tokenizer has a chat template, or none."""

    def chat_model(template: str | None) -> Path:
        folder = tmp_path / "chat-model"
        values = json.loads(model_file.read_text())
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(folder)  # type: ignore[no-untyped-call]
        tokenizer = train_tokenizer(collect([str(text_folder)], 0.05).train, 290).tokenizer
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return chat_model


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    (tmp_path / "chats.jsonl").write_text(lines(*map(conversation, range(300))))
    return tmp_path / "chats.jsonl"


def on(config: Config, data: Path, model: Path | None = None) -> Config:
    name = config.model.name if model is None else str(model)
    return replace(
        config,
        model=replace(config.model, name=name),
        data=replace(config.data, paths=(str(data),), sequence_length=64),
        optim=replace(config.optim, lr=1e-2),
    )


def test_a_text_field_is_trained_on_and_nothing_else_of_its_line(config: Config, tmp_path: Path) -> None:
    texts = [f"Document {index} says {index * index}.\nTwice.\n" for index in range(300)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines(*({"text": text, "source": "noise"} for text in texts)) + "\n")
    prepared = prepare(on(config, tmp_path / "a.jsonl"))
    data = load_tokens(prepared.directory.tokens)
    tokenizer: Any = AutoTokenizer.from_pretrained(prepared.directory.model)
    decoded = tokenizer.decode(torch.cat([data.train, data.validation])).split("<|endoftext|>")
    assert decoded == [*texts, ""] and data.packing == "stream" and int(data.train.min()) >= 0


def test_a_conversation_is_rendered_by_the_models_template(
    config: Config, chat_model: Callable[[str | None], Path], chats: Path
) -> None:
    config = on(config, chats, chat_model(PLAIN))
    prepared = prepare(replace(config, data=replace(config.data, packing="stream", loss_on="all")))
    data = load_tokens(prepared.directory.tokens)
    tokenizer: Any = AutoTokenizer.from_pretrained(prepared.directory.model)
    text = tokenizer.decode(data.train)
    assert text.startswith(
        "[user]What is 0 plus one? Say it in one number.\n[assistant]It is 1, of course.\n<|endoftext|>["
    )
    assert int(data.train.min()) >= 0
    assert "answers: the loss is on all tokens, those of prompts too" in prepared.lines


def test_the_loss_is_on_answers_alone_under_marked_and_unmarked_templates(
    config: Config, chat_model: Callable[[str | None], Path], chats: Path
) -> None:
    for template, answers in ((MARKED, "It is 1, of course.<|endoftext|>"), (PLAIN, "It is 1, of course.")):
        folder = chat_model(template)
        prepared = prepare(on(config, chats, folder))
        tokenizer = read_tokenizer(folder, 300).tokenizer
        tokens = load_tokens(prepared.directory.tokens).train
        assert str(tokenizer.decode(tokens[tokens >= 0])).startswith(answers + "It is 2, of course.")
        # Jinja leaves out a line's end that follows a tag.
        text = str(tokenizer.decode(torch.where(tokens < 0, ~tokens, tokens)))
        assert "[user]What is 1 plus one? Say it in one number." in text
        [line] = [line for line in prepared.lines if line.startswith("answers:")]
        assert ("as the chat template marks them" in line) == (template == MARKED)


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_no_answer_is_without_its_prompt(
    config: Config, chat_model: Callable[[str | None], Path], tmp_path: Path, packing: Packing
) -> None:
    draw = random.Random(0)
    records = [conversation(index, draw.randint(1, 12)) for index in range(300)]
    (tmp_path / "drawn.jsonl").write_text(lines(*records))
    config = on(config, tmp_path / "drawn.jsonl", folder := chat_model(MARKED))
    data = replace(config.data, packing=packing, sequence_length=400, validation_fraction=0.05)
    prepared = prepare(replace(config, data=data))
    sequences = load_tokens(prepared.directory.tokens).sequences("train", 400)
    tokenizer = read_tokenizer(folder, 300).tokenizer
    num_answers = 0
    for index in torch.arange(len(sequences)):
        batch = sequences.batch(index[None])
        positions = torch.arange(400) if batch.positions is None else batch.positions[0]
        for part in parts_of(positions):
            if bool((batch.targets[0][part] != IGNORED).any()):
                document = str(tokenizer.decode(batch.inputs[0][part]))
                assert document.startswith("[user]What") and document.count("[user]") == 1
                num_answers += document.count("[assistant]It is")
    assert 280 < num_answers < 290  # the others are held out


def parts_of(positions: torch.Tensor) -> list[slice]:
    """Return the parts of a row from one position 0 to the next."""
    begins = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
    return [slice(begin, end) for begin, end in itertools.pairwise(begins)]


def test_sharegpt_records_give_the_tokens_of_chat_messages(
    config: Config, chat_model: Callable[[str | None], Path], chats: Path, tmp_path: Path
) -> None:
    folder = chat_model(MARKED)
    first = load_tokens(prepare(on(config, chats, folder)).directory.tokens)
    records = [json.loads(line) for line in chats.read_text().splitlines()]
    (tmp_path / "other").mkdir()
    for name, changed in (("from-value", [as_sharegpt(record) for record in records]),):
        (tmp_path / "other" / f"{name}.jsonl").write_text(lines(*changed))
        again = on(config, tmp_path / "other" / f"{name}.jsonl", folder)
        again = replace(again, run=replace(again.run, directory=str(tmp_path / name)))
        data = load_tokens(prepare(again).directory.tokens)
        assert torch.equal(torch.cat([data.train, data.validation]), torch.cat([first.train, first.validation]))


@pytest.mark.parametrize(
    ("packing", "num_ranks"),
    [
        ("documents", 4),
        ("none", 2),
        ("stream", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("documents", 2), ("none", 4), ("stream", 4))),
    ],
)
def test_losses_on_conversations_are_means_over_answers_on_any_number_of_ranks(
    config: Config,
    train: TrainOn,
    chat_model: Callable[[str | None], Path],
    chats: Path,
    tmp_path: Path,
    packing: Packing,
    num_ranks: int,
) -> None:
    config = on(config, chats, chat_model(MARKED))
    config = replace(config, data=replace(config.data, packing=packing))
    one = train(config, 1)
    data = load_tokens(one.directory.tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "chat-model", dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    held_out = data.sequences("validation", 64)
    batch = held_out.batch(validation_indices(held_out, 7))
    with torch.no_grad():
        logits = model(input_ids=batch.inputs, position_ids=batch.positions).logits
    nats = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="sum")
    answers = batch.targets[batch.targets != IGNORED]
    assert data.packing == packing and 0 < len(answers) < batch.targets.numel()
    assert one.validations[0] == pytest.approx(float(nats / data.units[answers].sum()), rel=1e-5)
    elsewhere = replace(config, run=replace(config.run, directory=str(tmp_path / "elsewhere")))
    run = train(replace(elsewhere, optim=replace(elsewhere.optim, accumulation=2)), num_ranks)
    assert run.losses == pytest.approx(one.losses, rel=1e-5)
    assert run.validations == pytest.approx(one.validations, rel=1e-5)
    assert one.losses[6] < one.losses[1]


def test_a_model_whose_state_crosses_documents_has_one_a_sequence(
    config: Config, chat_model: Callable[[str | None], Path], chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._training.sources.separates_documents", lambda _: False)
    config = on(config, chats, chat_model(MARKED))
    prepared = prepare(config)
    assert "packing: none, since documents of one sequence would see each other in this model" in prepared.lines
    assert load_tokens(prepared.directory.tokens).packing == "none"
    with pytest.raises(ConfigError, match="for --packing documents, got one whose state crosses them. Pass"):
        prepare(replace(config, data=replace(config.data, packing="documents")))


def test_truncated_and_rewritten_conversations_are_told(
    config: Config, chat_model: Callable[[str | None], Path], tmp_path: Path
) -> None:
    turns = [*conversation(1)["messages"], *conversation(2)["messages"]]  # type: ignore[misc]
    (tmp_path / "a.jsonl").write_text(lines(*[{"messages": turns}] * 40))
    rewriting = PLAIN.replace("{{ message.content }}", "{% if loop.last %}!{% endif %}{{ message.content }}")
    config = on(config, tmp_path / "a.jsonl", chat_model(rewriting))
    prepared = prepare(replace(config, data=replace(config.data, sequence_length=96)))
    assert any("40 conversations become several documents" in line for line in prepared.lines)
    [line] = [line for line in prepared.lines if "are truncated to" in line]
    assert "documents are truncated to 96 tokens, " in line and "--sequence-length" in line


def test_conversations_without_an_answer_are_told(
    config: Config, chat_model: Callable[[str | None], Path], tmp_path: Path
) -> None:
    question = {"messages": [{"role": "user", "content": "What is one plus one?"}]}
    (tmp_path / "a.jsonl").write_text(lines(*[conversation(1)] * 40, *[question] * 3))
    prepared = prepare(on(config, tmp_path / "a.jsonl", chat_model(PLAIN)))
    assert (
        "answers: 3 conversations have none in the loss: no message of the role 'assistant', or none with a weight"
        in prepared.lines
    )


def test_conversations_without_a_template_are_refused(
    config: Config, chat_model: Callable[[str | None], Path], chats: Path
) -> None:
    with pytest.raises(ConfigError, match="the conversation in line 1 of .*chats.jsonl', got one without a tokenizer"):
        prepare(on(config, chats))
    with pytest.raises(
        ConfigError, match="Expected a tokenizer with a chat template for the conversation in line 1 of"
    ):
        prepare(on(config, chats, chat_model(None)))


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            '{"question": "a", "answer": "b"}',
            "or with a text 'text', in line 2 of .*got the keys 'question', 'answer'. Rename the keys",
        ),
        ('{"text": 3}', "a text under 'text' in line 2 of .*got a number."),
        ("[1]", "in line 2 of .*got no object but a list."),
        ("{", "Expected JSON in line 2 of .*a.jsonl', got expecting property name .* at column 2. Repair"),
        ('{"messages": []}', "a list of messages under 'messages' in line 2 of .*got an empty one."),
        ('{"messages": [{"who": "me"}]}', "or 'from' and 'value', under 'messages' in line 2 of .*got the keys 'who'."),
    ],
)
def test_lines_that_hold_no_document_are_refused_by_their_keys(
    config: Config, tmp_path: Path, second: str, expected: str
) -> None:
    (tmp_path / "a.jsonl").write_text(lines({"text": "one"}) + second + "\n" + lines({"text": "more\n" * 99}) * 9)
    with pytest.raises(ConfigError, match=expected):
        prepare(on(config, tmp_path / "a.jsonl"))


def test_a_conversation_that_the_chat_template_rejects_is_refused_by_line(
    config: Config, chat_model: Callable[[str | None], Path], tmp_path: Path
) -> None:
    strict = "{% for message in messages %}{{ raise_exception('Only users here') }}{% endfor %}"
    (tmp_path / "a.jsonl").write_text(lines(conversation(1), conversation(2)))
    with pytest.raises(ConfigError, match="can render in line 1 of .*a.jsonl', got: Only users here."):
        prepare(on(config, tmp_path / "a.jsonl", chat_model(strict)))
