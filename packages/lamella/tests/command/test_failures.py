"""Full disks and losses beyond finite numbers: one line on every rank, and earlier checkpoints stay whole."""

import errno
import json
import math
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import lamella_optim
from lamella import Config, LossNotFiniteError, StorageError
from lamella._command.train import printed_result
from lamella._processes.endings import EXIT_CODES
from lamella._processes.launch import run_workers
from lamella._processes.placement import Rank, place
from lamella._record.metrics import ValidationRecord, append
from lamella._record.run_directory import RunDirectory
from lamella._training.preparation import prepare
from lamella._training.saves import Saves, reason_of
from lamella._training.steps import FinishedStep
from lamella._training.trainer import Trainer
from lamella.cli import main, parse
from lamella_checkpoint import AsyncSaver, CheckpointDirectory, CheckpointFailed
from lamella_convert import verify
from lamella_testing import run_ranks
from lamella_testing.forked_programs import fork_lamella

FAR_TOO_SMALL = 20_000  # bytes of a file: enough for the metrics, not for a rank's part of the state


def limit_files(num_bytes: int) -> None:
    """A full disk, for this process and its children."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def config(config: Config) -> Config:
    """A run that also saves on the way: step 3, in the background."""
    return replace(config, run=replace(config.run, checkpoint_interval=3))


@pytest.fixture
def errors_of(config: Config) -> Callable[..., list[str]]:
    """Train on two ranks until all raise an error of a kind; return the rank's lines, one line each."""

    def errors_of(
        kind: type[Exception], before_step: Callable[[Trainer, int], None], config: Config = config
    ) -> list[str]:
        directory = prepare(place(config)).directory

        def on_rank() -> str:
            rank = Rank(rank=dist.get_rank(), num_ranks=2, device=torch.device("cpu"))
            trainer = Trainer(config, directory, rank)
            step_of_trainer = trainer._step

            def step(index: int) -> FinishedStep:
                before_step(trainer, index)
                return step_of_trainer(index)

            trainer._step = step  # type: ignore[assignment, method-assign]
            with pytest.raises(kind) as caught:
                trainer.train()
            return str(caught.value)

        texts = run_ranks(on_rank, 2)
        assert not any("\n" in text for text in texts)
        return texts

    return errors_of


def checkpoints_of(config: Config) -> CheckpointDirectory:
    return CheckpointDirectory(RunDirectory(Path(str(config.run.directory))).checkpoints)


def test_a_file_past_its_limit_ends_the_run_and_leaves_the_last_checkpoint(
    config: Config, errors_of: Callable[..., list[str]]
) -> None:
    def fill(trainer: Trainer, step: int) -> None:
        if trainer._rank.rank == 1 and step == 4:
            limit_files(FAR_TOO_SMALL)

    for text in errors_of(StorageError, fill):
        assert "Expected to write the checkpoint of step 6 in " in text and "File too large" in text
        assert "Raise the limit on the sizes of files (`ulimit -f`), then run the same command again. The last" in text
        assert text.endswith("checkpoint is of step 3.")
    assert checkpoints_of(config).steps() == [3]
    assert verify(checkpoints_of(config).path(3))


def test_a_save_in_the_background_that_failed_is_told_and_the_next_one_is_waited_for(
    config: Config, errors_of: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    def fill_for_the_process_that_writes(trainer: Trainer, step: int) -> None:
        if trainer._rank.rank == 1 and step == 0:
            limit_files(FAR_TOO_SMALL)
            trainer._saves._checkpoints._saver = AsyncSaver()
            limit_files(resource.RLIM_INFINITY)
        if step == 6:
            raise NotImplementedError  # Enough of the interface.

    config = replace(config, optim=replace(config.optim, steps=20), run=replace(config.run, log_interval=1))
    errors_of(NotImplementedError, fill_for_the_process_that_writes, config)
    lines = [line for line in capfd.readouterr().out.splitlines() if "not saved" in line]
    assert len(lines) == 1 and "File too large" in lines[0] and lines[0].endswith("Saving step 6 in its place.")
    assert checkpoints_of(config).steps() == [6]


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_folder_that_is_moved_or_removed_during_the_run_ends_the_run_in_one_line(
    config: Config, errors_of: Callable[..., list[str]], is_moved: bool
) -> None:
    root = Path(str(config.run.directory))

    def take_away(trainer: Trainer, step: int) -> None:
        if step == 5 and trainer._rank.is_first:
            trainer._saves.settle()
            root.rename(root.with_name("elsewhere"))
            if not is_moved:
                shutil.rmtree(root.with_name("elsewhere"))

    for text in errors_of(StorageError, take_away):
        assert f"in {str(root)!r}, got " in text and "The folder was moved or removed during the run." in text


def test_a_folder_that_is_moved_while_a_save_makes_its_path_anew_ends_the_run_at_the_next_save(
    config: Config, errors_of: Callable[..., list[str]]
) -> None:
    root = Path(str(config.run.directory))
    moved = root.with_name("elsewhere")

    def take_away(trainer: Trainer, step: int) -> None:
        if step == 4 and trainer._rank.is_first:
            trainer._saves.settle()
            root.rename(moved)
            (root / "checkpoints").mkdir(parents=True)

    for text in errors_of(StorageError, take_away):
        assert f"the checkpoint of step 6 in {str(root)!r}, got no " in text
        assert text.endswith(
            "The folder was moved or removed during the run. Pass its new place as --run-dir to go on."
        )
    assert CheckpointDirectory(moved / "checkpoints").steps() == [3]


def test_a_folder_of_checkpoints_elsewhere_is_named_with_its_own_option(
    config: Config, errors_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints_elsewhere"

    def replace_by_a_file(trainer: Trainer, step: int) -> None:
        if step == 5 and trainer._rank.is_first:
            trainer._saves.settle()
            shutil.rmtree(checkpoints)
            checkpoints.write_text("")

    config = replace(config, run=replace(config.run, checkpoints=str(checkpoints)))
    for text in errors_of(StorageError, replace_by_a_file, config):
        assert f"of step 6 in {str(checkpoints)!r}, got " in text
        assert text.endswith("Pass its new place as --checkpoints to go on.")
        assert "--run-dir" not in text


def test_a_writer_that_could_not_write_its_reason_is_told_by_its_peers_or_as_such() -> None:
    assert reason_of(CheckpointFailed("save", {0: "", 1: "OSError: [Errno 28] No space"})) == (
        "OSError: [Errno 28] No space (rank 1)"
    )
    assert reason_of(CheckpointFailed("save", {1: " "})) == ("no reason, which a full disk leaves no room for (rank 1)")


def test_a_disk_with_room_for_the_tensors_and_no_more_is_told_as_too_small(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(512, 512)  # 1 MiB
    prepare(place(config))
    saves = Saves(RunDirectory(Path(str(config.run.directory))), 1, model, torch.optim.SGD(model.parameters()))
    full = os.strerror(errno.ENOSPC)
    for free_mib, expected in ((1.5, "Free more than 1.50 MiB"), (0.5, "Free 1.00 MiB")):
        usage = SimpleNamespace(free=int(free_mib * 2**20))
        monkeypatch.setattr("lamella._training.saves.shutil.disk_usage", lambda _, usage=usage: usage)
        assert f"{expected} for a checkpoint (the disk has {free_mib:.2f} MiB), then" in saves.cannot_write("it", full)
    way_out = "Free 1.00 MiB of the disk quota for a checkpoint, then run the same command again."
    assert way_out in saves.cannot_write("it", os.strerror(errno.EDQUOT))


def test_metrics_that_cannot_be_written_end_the_run_on_every_rank(
    config: Config, errors_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_the_checkpoint(trainer: Trainer, step: int) -> None:
        if step == 5:
            trainer._saves.settle()

    def full(path: Path, _: object) -> None:
        if path.name == "metrics.jsonl" and checkpoints_of(config).steps():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("lamella._record.stream.append", full)
    run = replace(config.run, log_interval=6)
    texts = errors_of(StorageError, wait_for_the_checkpoint, replace(config, run=run))
    assert texts[0] == texts[1]
    assert "Expected to write metrics.jsonl in " in texts[0] and "got No space left on device" in texts[0]
    assert texts[0].endswith("The last checkpoint is of step 3.")


def test_a_loss_that_is_not_finite_keeps_the_checkpoints_and_names_its_first_step(
    config: Config, errors_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = lamella_optim.clip_grad_norm_

    def burst(_: Trainer, step: int) -> None:
        if step == 4:
            monkeypatch.setattr("lamella_optim.clip_grad_norm_", lambda *_: torch.tensor(math.nan))
        else:
            monkeypatch.setattr("lamella_optim.clip_grad_norm_", clip)

    texts = errors_of(LossNotFiniteError, burst, replace(config, run=replace(config.run, log_interval=3)))
    assert texts[0] == texts[1]
    assert texts[0].startswith("Expected a finite gradient norm, got nan at step 5. The last checkpoint is of step 3. ")
    assert "docs/how-to/find-a-nan.md" in texts[0]
    assert checkpoints_of(config).steps() == [3]
    lines = Path(str(config.run.directory), "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 3, 4]


def test_weights_that_are_not_finite_are_not_saved(config: Config, errors_of: Callable[..., list[str]]) -> None:
    wild = replace(
        config, optim=replace(config.optim, lr=1e39, warmup_steps=0), run=replace(config.run, checkpoint_interval=1)
    )
    for text in errors_of(LossNotFiniteError, lambda *_: None, wild):
        assert text.startswith("Expected finite weights to save, got ") and "after step 1. There is no" in text
    assert checkpoints_of(config).steps() == []


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_an_error_of_all_workers_is_raised_with_its_type_and_one_line(kind: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        f"from {kind.__module__} import {kind.__name__}\n"
        "from lamella._processes.launch import run_as_worker\n"
        "def work(requests):\n"
        f"    raise {kind.__name__}('Expected this.')\n"
        "run_as_worker(work)\n"
    )
    with pytest.raises(kind) as caught:
        run_workers([sys.executable, str(tmp_path / "worker.py")], 2, 1)
    assert str(caught.value) == "Expected this."


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_errors_of_lamella_train_end_with_their_exit_codes(
    kind: type[Exception],
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise kind("Expected this.")

    monkeypatch.setattr("lamella._command.train.prepare", fail)
    assert main(options) == EXIT_CODES[kind]
    assert capsys.readouterr().err == "lamella: error: Expected this.\n"


def test_the_help_of_lamella_train_explains_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["train", "--help"])
    lines = capsys.readouterr().out.split("exit codes:\n")[1].splitlines()
    for code in (0, 1, *EXIT_CODES.values(), 128 + signal.SIGINT):
        assert any(line.startswith(f"  {code} ") for line in lines)
    assert f"{128 + signal.SIGTERM} by SIGTERM, {128 + signal.SIGHUP} by the end of the terminal" in lines[5]


def test_a_run_with_closed_standard_output_goes_on(options: list[str], tmp_path: Path) -> None:
    run = fork_lamella(*options, "--log-interval", "1", "--ranks", "1")
    assert run.stdout is not None and run.stderr is not None
    with run.stdout:
        assert any(line.startswith("step: 1  loss") for line in run.stdout)
    with run.stderr:
        errors = run.stderr.read()
    assert run.wait() == 0, errors
    assert errors == ""
    assert (tmp_path / "run" / "checkpoints" / "step_00000006").is_dir()


def test_a_finished_run_whose_checkpoints_were_moved_away_has_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    append(directory.metrics, [ValidationRecord.of(0, 3.0, "byte"), ValidationRecord.of(6, 1.5, "byte")])
    printed = printed_result(directory)
    assert printed.checkpoint == directory.checkpoints / "step_00000006"
    lines = capsys.readouterr().out
    assert "validation: 3.0000 -> 1.5000 nats/byte" in lines
    assert f"checkpoint: {printed.checkpoint}, moved or removed since it was saved" in lines
    assert "next:" not in lines, "there is nothing to export"
