"""`transformers.Trainer` with FSDP in version 2: trained, evaluated, saved, and resumed from the middle."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from client_models import let_accelerate_shard_on_cpus, tiny_llama, tokens
from transformers import Trainer, TrainingArguments

from lamella_integration.in_place import Device, run_in_both, units, unsharded_copy

ROWS = [{"input_ids": row, "labels": row} for row in tokens(32)]


def trainer_in(folder: Path, *, num_steps: int, state_dict_type: str) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": state_dict_type,
        },
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=num_steps,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=1,
        max_grad_norm=0.1,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    let_accelerate_shard_on_cpus()  # after the arguments, which ask for the ranks anew
    return Trainer(model=tiny_llama(), args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:8])


def logged(trainer: Any) -> list[dict[str, object]]:
    """Losses and norms by step, also of steps before a run was resumed."""
    figures = ("step", "loss", "grad_norm", "learning_rate")
    return [{name: entry[name] for name in figures} for entry in trainer.state.log_history if "loss" in entry]


def trained_and_resumed(folder: Path, *, state_dict_type: str) -> object:
    first = trainer_in(folder / "first", num_steps=4, state_dict_type=state_dict_type)
    first.train()
    names = units(first.model)
    evaluated = first.evaluate()["eval_loss"]
    first.save_model(str(folder / "saved"))

    second = trainer_in(folder / "second", num_steps=4, state_dict_type=state_dict_type)
    second.train(resume_from_checkpoint=str(folder / "first" / "checkpoint-2"))
    assert logged(second) == logged(first)
    assert len(logged(second)) == 4
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [names, logged(first), logged(second), evaluated, unsharded_copy(first.model.state_dict()), files]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_the_trainer_trains_and_resumes(state_dict_type: str, device: Device) -> None:
    run_in_both(partial(trained_and_resumed, state_dict_type=state_dict_type), device=device, timeout_s=200.0)
