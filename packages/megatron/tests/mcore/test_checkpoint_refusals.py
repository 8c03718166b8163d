"""Models, groups and checkpoints that do not fit are refused, and nothing is touched."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import (
    World,
    make,
    on_rank_zero,
    save_random,
    sharded,
)
from torch.distributed.tensor import DTensor

from lamella_convert import convert
from lamella_files import rename
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks


def _refused(world: World, kind: str, path: Path, options: dict[str, Any]) -> tuple[str, str]:
    """The error of a load, after which nothing has changed."""
    model, optimizer = sharded(world, kind, seed=7)
    before = {name: p.to_local().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    with pytest.raises(Exception) as error:  # noqa: PT011
        load_checkpoint(path, model=model, optimizer=optimizer, **options)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), before[name]), name
    assert not optimizer.state
    return type(error.value).__name__, str(error.value)


@pytest.fixture(scope="module")
def gated(on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two tensor-parallel ranks."""
    path = tmp_path_factory.mktemp("gated") / "saved"
    on_rank_zero(World(2, tp=2), save_random, "gated", path)
    return path


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("wider", "model.decoder.layers.0.mlp.linear_fc2.weight: (32, 48) in the checkpoint, (64, 48) here"),
        ("deeper", "model.decoder.layers.2.mlp.linear_fc2.weight: absent from the checkpoint, (32, 48) here"),
        ("dense", "model.decoder.layers.0.mlp.linear_fc1.weight: (96, 32) in the checkpoint, (128, 32) here"),
    ],
)
def test_another_models_checkpoint_is_refused_with_all_differences(gated: Path, kind: str, difference: str) -> None:
    error, message = on_rank_zero(World(2), _refused, kind, gated, {})
    assert error == "CheckpointMismatch"
    assert difference in message
    assert "pass strict=False" in message


@pytest.mark.parametrize("strict", [True, False])
def test_moments_without_steps_are_refused_as_another_optimizers(gated: Path, tmp_path: Path, strict: bool) -> None:
    """As of optimizers of other libraries, which count elsewhere: AdamW could not step."""
    path = tmp_path / "a"
    without_steps = partial(rename, names=lambda name: None if name.endswith(".step") else name)
    convert(gated, path, to="fsdp_dtensor", translate=without_steps)
    error, message = on_rank_zero(World(1), _refused, "gated", path, {"strict": strict})
    assert error == "ValueError"
    assert "got exp_avg, exp_avg_sq, another optimizer's. Load the weights alone" in message


def test_a_tensor_parallel_size_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    on_rank_zero(World(2, tp=2), save_random, "hybrid", tmp_path)
    error, message = on_rank_zero(World(2), _refused, "hybrid", tmp_path, {"tensor_parallel_size": 4})
    assert error == "ValueError"
    assert f"number of ranks that wrote {str(tmp_path)!r} (2, as its files tell), got 4. Leave it out." in message


def test_the_number_of_writing_ranks_is_saved_beside_the_users_own_args(tmp_path: Path) -> None:
    def save() -> None:
        save_checkpoint(
            tmp_path, model=fully_shard_model(make(World(2, tp=2), "hybrid")), args=Namespace(hidden_size=32)
        )

    run_ranks(save, 2)
    error, message = on_rank_zero(World(1), _refused, "hybrid", tmp_path, {"tensor_parallel_size": 1})
    assert error == "ValueError"
    assert "(2, as its files tell), got 1" in message


def test_models_and_groups_without_a_place_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        model = make(World(2), "gated")
        with pytest.raises(ValueError, match=r"got 'embedding.*' as a plain tensor.*Call lamella_megatron.fully_shard"):
            save_checkpoint(tmp_path / "no", model=model)
        fully_shard_model(model)
        with pytest.raises(ValueError, match="process group `tp`, got none"):
            save_checkpoint(tmp_path / "no", model=model, groups=ProcessGroupCollection())
        with pytest.raises(ValueError, match=r"`format` to be one of \('fsdp_dtensor', 'torch_dist'\), got 'zarr'"):
            save_checkpoint(tmp_path / "no", model=model, format="zarr")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=r"number of tensor-parallel ranks \(1\), got 2"):
            save_checkpoint(tmp_path / "no", model=model, args=Namespace(tensor_model_parallel_size=2))

    run_ranks(on_each_rank, 2)
    assert not any(tmp_path.iterdir())
