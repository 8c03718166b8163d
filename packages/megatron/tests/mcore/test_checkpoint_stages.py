"""Checkpoints of pipeline stages: equal to those of one stage, and read on any number of stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from background import FORMATS
from resuming import World, adamw, assert_equal, on_rank_zero, read, save_random, sharded, sharded_chunks
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_checkpoint import CheckpointMismatch
from lamella_megatron import load_checkpoint, save_checkpoint
from lamella_testing import run_ranks


def _local(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def _load_and_save(world: World, kind: str, path: Path, again: Path) -> None:
    """Read each format into a stage with zeros, and write what was read."""
    chunks, _ = sharded_chunks(world, kind)
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    for form in FORMATS:
        with torch.no_grad():
            for _, parameter in named:
                _local(parameter).zero_()
        optimizer = adamw(*chunks)
        load_checkpoint(path / form, model=chunks, optimizer=optimizer)
        save_checkpoint(again / form, model=chunks, optimizer=optimizer)
        # The last stage's copy of the embedding, which nothing saves, has been read too.
        copies = [parameter for name, parameter in named if name == "output_layer.weight"]
        assert all(
            copy.detach().abs().sum() > 0 and optimizer.state[copy]["exp_avg"].abs().sum() > 0 for copy in copies
        )


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        pytest.param("gated", [World(4, tp=2, pp=2), World(4, pp=2), World(2)], marks=pytest.mark.slow),
        ("tied", [World(2, pp=2), World(1), World(4, pp=4)]),
        pytest.param("tied", [World(4, pp=2, vp=2), World(1), World(2, pp=2)], marks=pytest.mark.slow),
        ("hybrid", [World(2, pp=2, vp=2), World(2, pp=2)]),
        pytest.param("hybrid", [World(4, tp=2, pp=2), World(1)], marks=pytest.mark.slow),
        pytest.param("mtp", [World(2, pp=2), World(1)], marks=pytest.mark.slow),
        pytest.param("experts", [World(4, ep=2, pp=2), World(2, pp=2), World(2, ep=2)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pipeline_stages_save_the_checkpoint_of_one_stage_and_load_on_other_stages(
    tmp_path: Path, kind: str, worlds: list[World]
) -> None:
    first = worlds[0]
    one = replace(first, num_ranks=first.num_ranks // first.pp, pp=1, vp=None)
    on_rank_zero(one, save_random, kind, tmp_path / "one", FORMATS)
    on_rank_zero(first, save_random, kind, tmp_path / "0", FORMATS)
    for form in FORMATS:
        assert_equal(read(tmp_path / "0" / form), read(tmp_path / "one" / form))
    expected = read(tmp_path / "one" / "fsdp_dtensor")
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for i, world in enumerate(worlds):
        on_rank_zero(world, _load_and_save, kind, tmp_path / "0", tmp_path / f"again {i}")
        for form in FORMATS:
            assert_equal(read(tmp_path / f"again {i}" / form), expected)


def _refused(world: World, kind: str, path: Path) -> str:
    model, optimizer = sharded(world, kind)
    before = [_local(parameter).clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointMismatch) as error:
        load_checkpoint(path, model=model, optimizer=optimizer)
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, _local(other))
    return str(error.value)


def test_a_layer_that_no_stage_has_is_refused_on_every_stage(tmp_path: Path) -> None:
    on_rank_zero(World(1), save_random, "deeper", tmp_path / "three")
    for message in run_ranks(_refused, 2, World(2, pp=2), "gated", tmp_path / "three"):
        assert "decoder.layers.2" in message
        assert "decoder.layers.1." not in message


def test_a_chunk_of_several_is_refused(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        [first, _], _ = sharded_chunks(World(2, pp=2, vp=2), "tied")
        with pytest.raises(ValueError, match=r"all 2 chunks of the rank .*, got 1\. Pass the list"):
            save_checkpoint(tmp_path / "no", model=first)

    run_ranks(on_each_rank, 2)
    assert not any(tmp_path.iterdir())
