"""A save in the background holds the state of the call, appears whole or not at all, and fails on every rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from background import assert_same_files, save_thrice
from resuming import World, assert_equal, on_rank_zero, read, sharded, train

from lamella_checkpoint import AsyncSaver, CheckpointDamaged, CheckpointFailed
from lamella_megatron import load_checkpoint, save_checkpoint
from lamella_testing import run_ranks
from lamella_testing.harmed_files import no_file_larger_than


def _begin(world: World, kind: str, path: Path, written: Any) -> list[float]:
    """Save, and train on before the save has written anything."""
    model, optimizer = sharded(world, kind)
    train(model, optimizer)
    losses: list[float] = []

    def go_on() -> None:
        losses.extend(train(model, optimizer))
        with pytest.raises(FileNotFoundError, match="Expected a checkpoint, got .*/saved'"):
            load_checkpoint(path / "saved", model=model)

    save_thrice(path, go_on, model=model, optimizer=optimizer, format=written, iteration=2)
    save_checkpoint(path / "went on", model=model, optimizer=optimizer, iteration=4)
    return losses


def _resume(world: World, kind: str, path: Path) -> list[float]:
    model, optimizer = sharded(world, kind, seed=7)
    assert load_checkpoint(path / "saved", model=model, optimizer=optimizer)["iteration"] == 2
    losses = train(model, optimizer)
    save_checkpoint(path / "resumed", model=model, optimizer=optimizer, iteration=4)
    return losses


@pytest.mark.parametrize(
    ("kind", "world", "written"),
    [
        ("gated", World(2), "fsdp_dtensor"),
        pytest.param("gated", World(4, tp=2), "fsdp_dtensor", marks=pytest.mark.slow),
        ("experts", World(2, ep=2), "torch_dist"),
        pytest.param("experts", World(4, tp=2, ep=2, etp=1), "torch_dist", marks=pytest.mark.slow),
        pytest.param("gated", World(4, tp=2), "torch_dist", marks=pytest.mark.slow),
        pytest.param("experts", World(4, tp=2, ep=2, etp=1), "fsdp_dtensor", marks=pytest.mark.slow),
        pytest.param("tied", World(4, pp=2), "fsdp_dtensor", marks=pytest.mark.slow),
        pytest.param("tied", World(4, pp=2), "torch_dist", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_during_a_save_leave_the_files_of_a_blocking_save(
    tmp_path: Path, kind: str, world: World, written: str
) -> None:
    losses = on_rank_zero(world, _begin, kind, tmp_path, written)
    assert_same_files(tmp_path)
    if written == "torch_dist":  # It has no options of parameter groups.
        return
    assert on_rank_zero(world, _resume, kind, tmp_path) == losses
    assert_equal(read(tmp_path / "resumed"), read(tmp_path / "went on"))


def _fail(world: World, path: Path, written: Any, cause: str) -> list[int]:
    """Lose a save in place of an earlier one, on rank 1, and learn so from the next."""
    model, optimizer = sharded(world, "gated")
    arguments: Any = {"model": model, "optimizer": optimizer, "format": written}
    save_checkpoint(path, iteration=1, **arguments)
    with no_file_larger_than(1 << 12 if dist.get_rank() == 1 and cause == "File too large" else None):
        saver = AsyncSaver()
    if cause == "died" and dist.get_rank() == 1:
        assert saver._process is not None
        os.kill(saver._process._popen.pid, signal.SIGKILL)
    train(model, optimizer, num_steps=1)
    save_checkpoint(path, saver=saver, iteration=2, **arguments)
    with pytest.raises(CheckpointFailed, match=f"save the checkpoint '{path}' in the background.*\n.*{cause}") as error:
        save_checkpoint(path.with_name("next"), saver=saver, iteration=3, **arguments)
    saver.close()  # The failure is raised once.
    assert load_checkpoint(path, model=model)["iteration"] == 1
    _assert_unfinished(path, model)
    return sorted(error.value.failures)


def _assert_unfinished(path: Path, model: Any) -> None:
    """The directory of a save that ended early is refused by name."""
    [unfinished] = path.parent.glob(f"{path.name}.saving-*")
    with pytest.raises(CheckpointDamaged, match=f"{unfinished.name}'.* unfinished: .* Open '{path.name}'"):
        load_checkpoint(unfinished, model=model)


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        ("fsdp_dtensor", "File too large"),
        ("torch_dist", "died"),
        pytest.param("fsdp_dtensor", "died", marks=pytest.mark.slow),
        pytest.param("torch_dist", "File too large", marks=pytest.mark.slow),
    ],
)
def test_a_failed_writer_is_reported_on_every_rank_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, written: str, cause: str
) -> None:
    world = World(2, tp=2)
    assert run_ranks(_fail, 2, world, tmp_path / "kept", written, cause) == [[1], [1]]
    names = {file.name for file in tmp_path.iterdir() if ".saving-" not in file.name}
    assert names == {"kept"}
    assert torch.isfinite(read(tmp_path / "kept")["model.embedding.word_embeddings.weight"]).all()


def _leave_unfinished(world: World, path: Path, written: Any) -> None:
    """End as a killed job does: rank 1's process writes nothing more."""
    model, optimizer = sharded(world, "gated")
    saver = AsyncSaver()
    arguments: Any = {"model": model, "optimizer": optimizer, "format": written, "saver": saver}
    save_checkpoint(path / "earlier", iteration=1, **arguments).wait()
    dist.barrier()
    if dist.get_rank() == 1:
        assert saver._process is not None
        os.kill(saver._process._popen.pid, signal.SIGKILL)
    handle = save_checkpoint(path / "later", iteration=2, **arguments)
    with pytest.raises(CheckpointFailed):
        handle.wait()
    saver.close()
    dist.barrier()
    [unfinished] = path.glob("later.saving-*")
    assert load_checkpoint(path / "earlier", model=model)["iteration"] == 1
    with pytest.raises(FileNotFoundError, match=f"got an unfinished save of it \\('{unfinished.name}'\\).*/later'"):
        load_checkpoint(path / "later", model=model)
    _assert_unfinished(path / "later", model)


@pytest.mark.parametrize("written", ["fsdp_dtensor", pytest.param("torch_dist", marks=pytest.mark.slow)])
def test_an_unfinished_checkpoint_is_refused_by_name(tmp_path: Path, written: str) -> None:
    run_ranks(_leave_unfinished, 2, World(2, tp=2), tmp_path, written)
