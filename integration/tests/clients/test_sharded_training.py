"""The Trainer's callback: settings of lamella inside `transformers.Trainer`, with unchanged losses and weights."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from client_models import let_accelerate_shard_on_cpus, tiny_llama, tokens
from transformers import Trainer, TrainingArguments

import lamella_engine
from lamella_integration.in_place import Device, assert_same, units, unsharded_copy
from lamella_testing import run_ranks
from lamella_transformers.trainer import ShardedTraining, add_to_trainers

ROWS = [{"input_ids": row, "labels": row} for row in tokens(64)]
FSDP = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}
ACCUMULATED = {"gradient_accumulation_steps": 2}
UNCLIPPED = {"max_grad_norm": 0.0}


def trainer_in(folder: Path, callback: ShardedTraining | None, **options: Any) -> Any:
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Read by libraries; the process group exists.
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        fsdp=True,
        fsdp_config=FSDP,
        max_steps=6,
        save_steps=2,
        **{"max_grad_norm": 0.1, **options},
    )
    let_accelerate_shard_on_cpus()  # after the arguments: `TrainingArguments` detects ranks again
    callbacks = [] if callback is None else [callback]
    return Trainer(model=tiny_llama(), args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:8], callbacks=callbacks)


def figures(trainer: Any) -> object:
    """Logged figures, evaluated losses and weights."""
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    logged = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
    return [logged, unsharded_copy(trainer.model.state_dict())]


def trained(folder: Path, callback: ShardedTraining | None, **options: Any) -> object:
    trainer = trainer_in(folder, callback, **options)
    trainer.train()
    if callback is not None:
        assert isinstance(trainer.model, lamella_engine.FSDPModule)
    assert units(trainer.model)
    return figures(trainer)


def trained_without_and_with(folder: Path, settings: dict[str, Any], options: dict[str, Any]) -> None:
    expected = trained(folder / "fsdp2", None, **options)
    actual = trained(folder / "lamella", ShardedTraining(**settings), **options)
    assert_same(expected, actual, "with the callback")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"overlap": False}, {}),
        ({"keep_budget": 1 << 30}, ACCUMULATED),
        ({"late_gradients": True}, UNCLIPPED),
        ({"late_gradients": True, "keep_budget": 6000}, {**UNCLIPPED, **ACCUMULATED}),
        ({}, {"eval_strategy": "steps", "eval_steps": 2}),
    ],
    ids=["overlapped", "installed only", "kept, accumulated", "late", "late, kept, accumulated", "evaluated"],
)
def test_the_trainer_callback_keeps_fsdp2s_losses_norms_and_weights(
    settings: dict[str, Any], options: dict[str, Any], device: Device, tmp_path: Path
) -> None:
    run_ranks(trained_without_and_with, 2, tmp_path, settings, options, device=device)


def clipped_on_local_shards(folder: Path) -> tuple[Any, Any]:
    return trained(folder / "torch", ShardedTraining()), trained(
        folder / "local", ShardedTraining(clips_local_shards=True)
    )


def test_norms_of_local_shards_are_torchs_but_for_rounding(tmp_path: Path) -> None:
    for (expected, _), (actual, _) in run_ranks(clipped_on_local_shards, 2, tmp_path):
        for expected_step, actual_step in zip(expected, actual, strict=True):
            assert actual_step == pytest.approx(expected_step, rel=1e-4)


def resumed(folder: Path, saved_with: bool) -> None:
    callbacks = [ShardedTraining(), None]
    first = trained(folder / "first", callbacks[not saved_with])
    trainer = trainer_in(folder / "second", callbacks[saved_with])
    trainer.train(resume_from_checkpoint=str(folder / "first" / "checkpoint-4"))
    assert_same(first, figures(trainer), "resumed")


@pytest.mark.parametrize("saved_with", [True, False], ids=["with", "without"])
def test_a_run_resumes_from_a_checkpoint_saved_with_the_callback_or_without(saved_with: bool, tmp_path: Path) -> None:
    with lamella_engine.install():
        run_ranks(resumed, 2, tmp_path, saved_with)


def trained_twice(folder: Path) -> None:
    callback = ShardedTraining()
    first = trained(folder / "first", callback)
    assert_same(first, trained(folder / "second", callback), "second Trainer")


def test_one_callback_serves_trainers_one_after_another(tmp_path: Path) -> None:
    run_ranks(trained_twice, 2, tmp_path)


def clipping_is_restored(folder: Path) -> bool:
    before = Accelerator.clip_grad_norm_
    trained(folder, ShardedTraining(clips_local_shards=True))
    return Accelerator.clip_grad_norm_ is before


def test_accelerate_has_its_function_back_after_training(tmp_path: Path) -> None:
    assert run_ranks(clipping_is_restored, 2, tmp_path) == [True, True]


def trained_by_default(folder: Path) -> object:
    add_to_trainers(ShardedTraining())
    trainer = trainer_in(folder, None)
    trainer.train()
    assert isinstance(trainer.model, lamella_engine.FSDPModule)
    return figures(trainer)


def test_every_trainer_of_a_program_has_a_callback_added_before(tmp_path: Path) -> None:
    expected = run_ranks(trained, 2, tmp_path / "named", ShardedTraining())
    assert_same(expected, run_ranks(trained_by_default, 2, tmp_path / "default"), "rank")


@pytest.mark.parametrize(("late", "max_norm"), [(False, 0.1), (True, 0.0)], ids=["clipped", "late"])
def test_rank_0_writes_a_profile(late: bool, max_norm: float, tmp_path: Path) -> None:
    callback = ShardedTraining(late_gradients=late, num_profiled_steps=2)
    run_ranks(partial(trained, tmp_path, callback, max_grad_norm=max_norm), 2)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["overlap.html", "overlap.json", "overlap.txt", "trace.json.gz"]


def refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Expected `max_grad_norm` of 0 with late_gradients, got 0.1: clipping needs"):
        trainer_in(folder, ShardedTraining(late_gradients=True)).train()


def test_late_gradients_of_a_trainer_that_clips_are_refused(tmp_path: Path) -> None:
    run_ranks(refused, 2, tmp_path)
