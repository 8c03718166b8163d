"""A run goes on from whole checkpoints; a damaged one is named, with the option that avoids it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._processes.placement import Rank, place
from lamella._record.metrics import StepRecord, read
from lamella._record.run_directory import RunDirectory
from lamella._training.checks import run_directory
from lamella._training.preparation import prepare
from lamella._training.steps import Steps, seed_of
from lamella._training.trainer import Trainer
from lamella_testing import run_ranks


@pytest.fixture(scope="module")
def run(shared_config: Config, train: TrainOn) -> Config:
    """The configuration of a run with checkpoints of the steps 3 and 6."""
    config = replace(shared_config, run=replace(shared_config.run, checkpoint_interval=3))
    train(config, 2)
    return config


@pytest.fixture
def config(run: Config, tmp_path: Path) -> Config:
    """The same in a folder of the test's own."""
    return replace(run, run=replace(run.run, directory=str(tmp_path / "run")))


def longer(config: Config, **run: Any) -> Config:
    return replace(config, optim=replace(config.optim, steps=9), run=replace(config.run, **run))


def losses_of(directory: RunDirectory) -> dict[int, float]:
    return {record.step: record.loss for record in read(directory.metrics) if isinstance(record, StepRecord)}


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(place(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def finished(run: Config, config: Config) -> RunDirectory:
    """A copy of the run, which the test may damage."""
    return RunDirectory(Path(shutil.copytree(str(run.run.directory), str(config.run.directory))))


def test_a_damaged_checkpoint_is_refused_with_the_option_that_goes_on_from_the_one_before(
    config: Config, finished: RunDirectory, train: TrainOn
) -> None:
    losses = losses_of(finished)
    newest = finished.checkpoints / "step_00000006"
    file = min(newest.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    message = refusal(longer(config))
    assert str(file) in message and f"the checkpoint {str(newest)!r} is damaged" in message
    assert "Run the same command with --from-step 3 to go on from the checkpoint before it" in message

    going_back = longer(config, from_step=3)
    prepared = prepare(place(going_back))
    assert prepared.first_step == 3
    [aside] = finished.checkpoints.glob("step_00000006.aside-*")
    assert f"set aside: {aside}" in prepared.lines
    assert max(record.step for record in read(finished.metrics)) == 3
    assert json.loads(finished.config.read_text())["run"]["from_step"] is None  # Going back is done once.
    on = train(longer(config), 2)
    assert sorted(on.losses) == list(range(1, 10))
    assert on.losses[3] == losses[3]


def test_a_checkpoint_that_lost_its_metadata_is_not_passed_over(config: Config, finished: RunDirectory) -> None:
    (finished.checkpoints / "step_00000006" / ".metadata").unlink()
    message = refusal(longer(config))
    assert "without .metadata" in message and "--from-step 3" in message
    assert prepare(place(longer(config, from_step=3))).first_step == 3


def test_the_only_checkpoint_that_is_damaged_leaves_another_folder(config: Config, finished: RunDirectory) -> None:
    (finished.checkpoints / "step_00000003").rename(finished.root / "elsewhere")
    (finished.checkpoints / "step_00000006" / ".metadata").unlink()
    assert "There is none before it: pass another --run-dir to start anew" in refusal(longer(config))


def test_damage_found_while_resuming_is_reported_on_every_rank_in_one_line(
    config: Config, finished: RunDirectory
) -> None:
    file = finished.checkpoints / "step_00000006" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    directory = prepare(place(longer(config))).directory

    def on_rank() -> str:
        rank = Rank(rank=dist.get_rank(), num_ranks=2, device=torch.device("cpu"))
        with pytest.raises(ConfigError) as caught:
            Trainer(longer(config), directory, rank).train()
        return str(caught.value)

    for message in run_ranks(on_rank, 2):
        assert "\n" not in message
        assert str(file) in message and "--from-step 3" in message


def test_from_step_without_a_checkpoint_is_refused_with_the_saved_steps(config: Config, finished: RunDirectory) -> None:
    assert "for --from-step, got 3, 6." in refusal(longer(config, from_step=4))
    assert (finished.checkpoints / "step_00000006").is_dir()


def test_resuming_with_another_data_order_is_refused(
    config: Config, finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._training.resume.ORDER", "feistel-2")
    message = refusal(longer(config))
    assert "in the data order 'feistel-2', got 'feistel-1'." in message and "pass another --run-dir" in message


def test_resuming_with_another_packing_is_refused(config: Config, finished: RunDirectory) -> None:
    changed = longer(config)
    changed = replace(changed, data=replace(changed.data, packing="documents"))
    expected = "Expected data.packing to stay 'stream' as in the run to be resumed, got 'documents'. Pass the former "
    assert expected + "value of --packing, or another --run-dir." in refusal(changed)


def test_resuming_with_another_held_out_share_is_refused_by_its_option(config: Config, finished: RunDirectory) -> None:
    changed = longer(config)
    changed = replace(changed, data=replace(changed.data, validation_fraction=0.1))
    assert "Pass the same --data, --validation-data and --validation-fraction, and the same" in refusal(changed)


def test_a_resumed_run_reports_dropped_lines_of_its_metrics(
    config: Config, finished: RunDirectory, train: TrainOn
) -> None:
    with finished.metrics.open("a") as file:
        file.write('{"step": 7, "loss": 5.')
    prepared = prepare(place(longer(config)))
    assert "dropped from metrics.jsonl: 1 damaged lines, as a run leaves that is killed" in prepared.lines
    assert sorted(train(longer(config), 1).losses) == list(range(1, 10))


def test_optimizer_options_of_a_resumed_run_come_from_settings_not_the_checkpoint(
    config: Config, finished: RunDirectory
) -> None:
    changed = longer(config)
    changed = replace(changed, optim=replace(changed.optim, weight_decay=0.7, beta1=0.5, beta2=0.6, eps=1e-3))
    directory = prepare(place(changed)).directory

    def on_rank() -> list[tuple[object, ...]]:
        trainer = Trainer(changed, directory, Rank(rank=0, num_ranks=1, device=torch.device("cpu")))
        trainer.train()
        return [(group["weight_decay"], group["betas"], group["eps"]) for group in trainer._optimizer.param_groups]

    [groups] = run_ranks(on_rank, 1)
    assert groups == [(0.7, (0.5, 0.6), 1e-3), (0.0, (0.5, 0.6), 1e-3)]


def test_resuming_with_another_activation_function_is_refused(
    config: Config, finished: RunDirectory, tmp_path: Path
) -> None:
    values = json.loads(Path(config.model.name).read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values | {"hidden_act": "relu"}))
    message = refusal(replace(longer(config), model=replace(config.model, name=str(other))))
    assert "Expected the model's hidden_act to stay 'silu' as in the run to be resumed, got 'relu'." in message


def _dropout_masks(config: Config) -> list[list[list[bool]]]:
    """The first dropout mask of each training forward, of 64 elements: by rank, and by step."""
    directory = prepare(place(config)).directory

    def on_rank() -> list[list[bool]]:
        masks: list[list[bool]] = []

        backward = Steps._backward

        def backward_after_a_mask(steps: Steps, *args: Any, **options: Any) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                masks.append(F.dropout(torch.ones(64), 0.5).bool().tolist())
            return backward(steps, *args, **options)

        rank = Rank(rank=dist.get_rank(), num_ranks=2, device=torch.device("cpu"))
        with patch.object(Steps, "_backward", backward_after_a_mask):
            Trainer(config, directory, rank).train()
        return masks

    return run_ranks(on_rank, 2)


def test_dropout_differs_by_step_and_rank_and_is_a_resumed_runs_too(config: Config, tmp_path: Path) -> None:
    model = tmp_path / "dropout.json"
    model.write_text(json.dumps(json.loads(Path(config.model.name).read_text()) | {"attention_dropout": 0.5}))
    config = replace(config, model=replace(config.model, name=str(model)))
    by_rank, uninterrupted = _dropout_masks(config), losses_of(run_directory(config))
    masks = [tuple(mask) for masks in by_rank for mask in masks]
    assert [len(masks) for masks in by_rank] == [config.optim.steps] * 2
    assert len(set(masks)) == len(masks)
    resumed = _dropout_masks(replace(config, run=replace(config.run, from_step=3)))
    assert resumed == [masks[3:] for masks in by_rank]
    assert losses_of(run_directory(config)) == uninterrupted
    assert seed_of(0, 3, 1) != seed_of(1, 3, 1)


def test_checkpoints_in_another_folder_than_at_the_last_start_are_refused_and_nothing_is_lost(
    config: Config, finished: RunDirectory, tmp_path: Path
) -> None:
    metrics = finished.metrics.read_bytes()
    message = refusal(longer(config, checkpoints=str(tmp_path / "other")))
    assert f"of step 6 in {str(finished.checkpoints)!r}, got {str(tmp_path / 'other')!r}, with none" in message
    older = Path(shutil.copytree(finished.checkpoints, tmp_path / "older"))
    shutil.rmtree(older / "step_00000006")
    assert "with 3. Pass the former as --checkpoints" in refusal(longer(config, checkpoints=str(older)))
    assert finished.metrics.read_bytes() == metrics


def test_moved_checkpoints_and_a_run_without_them_go_on(config: Config, finished: RunDirectory, tmp_path: Path) -> None:
    moved = finished.checkpoints.rename(tmp_path / "moved")
    assert prepare(place(longer(config, checkpoints=str(moved)))).first_step == 6
    shutil.rmtree(moved)
    finished.config.write_text("{}", encoding="utf-8")
    assert prepare(place(longer(config))).first_step == 0


def test_another_number_of_validated_sequences_is_said_at_the_start(config: Config, finished: RunDirectory) -> None:
    before, now = config.run.validation_sequences, config.run.validation_sequences + 1
    expected = f"validation: on {now} sequences from now on, {before} before: losses before and after are of other "
    lines = prepare(place(longer(config, validation_sequences=now))).lines
    assert [line for line in lines if line.startswith("validation")] == [f"{expected}texts"]
    assert not any(
        line.startswith("validation") for line in prepare(place(longer(config, validation_sequences=now))).lines
    )
