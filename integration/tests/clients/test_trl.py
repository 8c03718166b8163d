"""`lamella train`'s data beside TRL's SFTTrainer: the same rows, targets and losses from the same records."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from client_models import TEMPLATE, model_folder
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from lamella.testing import load_tokens, prepare, resolve
from lamella_transformers import loss_of_logits

NUM_STEPS, BATCH_SIZE, LENGTH, CLIP_NORM = 50, 2, 96, 1.0
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def conversations(number: int) -> list[dict[str, Any]]:
    """Conversations of one or two turns, some with tools; one has an empty answer, and one is longer than a row."""
    draw = random.Random(0)
    records = []
    for index in range(number):
        messages = []
        for _ in range(draw.randint(1, 2)):
            question, answer = "q" * draw.randint(1, 20), "abc"[index % 3] * draw.randint(1, 12)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        tools = [{"type": "function", "function": {"name": f"f{index % 9}"}}]
        records.append({"messages": messages, "tools": json.dumps(tools) if index % 5 == 0 else None})
    records[1]["messages"][-1]["content"] = ""
    records[2]["messages"][0]["content"] = "long " * 30
    return records


def pairs(number: int) -> list[dict[str, Any]]:
    """Prompts with completions: conversations, whose last message is the completion."""
    return [
        {"prompt": record["messages"][:-1], "completion": record["messages"][-1:], "tools": record["tools"]}
        for record in conversations(number)
    ]


def texts(number: int) -> list[dict[str, Any]]:
    """Prompts with completions as texts, one of them empty."""
    records = pairs(number)
    return [{"prompt": r["prompt"][0]["content"] + "\n", "completion": r["completion"][0]["content"]} for r in records]


def lamella_rows(folder: Path, model: Path, records: list[dict[str, Any]]) -> Any:
    """Return `lamella train`'s rows of the records, with few more held out."""
    lines = [json.dumps(record) for record in [*records, *records[:4]]]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    held_out = sum(len(line) + 1 for line in lines[-4:])
    data = {
        "paths": (str(folder / "data.jsonl"),),
        "sequence_length": LENGTH,
        "validation_fraction": held_out / sum(len(line) + 1 for line in lines),
    }
    run = {"directory": str(folder / "run")}
    config = resolve({"model": {"name": str(model)}, "data": data, "run": run, "parallel": {"device": "cpu"}})
    return load_tokens(prepare(config).directory.tokens).sequences("train", LENGTH)


def trl_trainer(folder: Path, model: Path, records: list[dict[str, Any]]) -> SFTTrainer:
    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=LENGTH,
        packing=True,
        packing_strategy="bfd",
        assistant_only_loss="messages" in records[0],
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP_NORM,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        loss_type="nll",
    )

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rows = [{name: column for name, column in record.items() if column is not None} for record in records]
    return InOrder(str(model), args=arguments, train_dataset=Dataset.from_list(rows))


def key(batch: Any, index: int, length: int) -> tuple[list[int], list[int]]:
    """Tokens and targets of a row without padding."""
    return batch.inputs[index, :length].tolist(), batch.targets[index, :length].tolist()


def trl_key(row: Any) -> tuple[list[int], list[int]]:
    """Tokens and targets of a row of TRL's, whose labels the model shifts: no document's first token is a target."""
    labels = torch.tensor(row["labels"])
    labels[torch.tensor([0, *row["seq_lengths"][:-1]]).cumsum(0)] = -100
    return row["input_ids"], [*labels[1:].tolist(), -100]


def losses_in_order(rows: Any, model: Path) -> list[float]:
    """Train on lamella's rows from the first on, by AdamW, and return the losses."""
    module = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(NUM_STEPS):
        indices = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        batch = rows.batch(indices)
        loss = loss_of_logits(module, batch.inputs, batch.targets, max(1, rows.num_targets(indices)), batch.positions)
        loss.cross_entropy.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.cross_entropy.item())
    return losses


@pytest.mark.parametrize(("records", "template"), [(conversations, UNMARKED), (pairs, TEMPLATE), (texts, TEMPLATE)])
def test_fifty_losses_are_those_of_trls_trainer(tmp_path: Path, records: Any, template: str) -> None:
    """TRL has to have marks for the loss on answers; lamella finds the same answers without."""
    documents = records(520)
    trl_model = model_folder(tmp_path / "model", TEMPLATE)
    trainer = trl_trainer(tmp_path, trl_model, documents)
    rows = lamella_rows(tmp_path, model_folder(tmp_path / "lamella-model", template), documents)
    assert len(rows) == len(trainer.train_dataset) >= NUM_STEPS * BATCH_SIZE
    batch = rows.batch(torch.arange(len(rows)))
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    assert [key(batch, index, length) for index, length in enumerate(lengths)] == list(
        map(trl_key, trainer.train_dataset)
    )
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    actual = losses_in_order(rows, trl_model)
    assert actual == pytest.approx(expected, rel=1e-5)
