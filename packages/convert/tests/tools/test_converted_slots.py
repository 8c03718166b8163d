"""Slots that an optimizer keeps as plain tensors of a rank stay so through a conversion."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint import load, save
from lamella_convert import convert
from lamella_testing import run_ranks
from lamella_testing.local_slots import OnShards, make, over_all


def trained(make_sharded: Callable[[torch.Tensor], torch.Tensor], num_steps: int) -> tuple[nn.ParameterDict, OnShards]:
    model, optimizer = make(make_sharded)
    for _ in range(num_steps):
        optimizer.step()
    return model, optimizer


def assert_holds_what_one_rank_has(path: Path, num_steps: int) -> None:
    """Read by one process, which steps whole tensors."""
    model, optimizer = make(lambda values: values)
    load(path, model=model, optimizer=optimizer)
    expected, its_optimizer = trained(lambda values: values, num_steps)
    for name, param in model.items():
        assert torch.equal(param, expected[name])
        state, its_state = optimizer.state[param], its_optimizer.state[expected[name]]
        assert sorted(state) == sorted(its_state)
        for slot, value in its_state.items():
            assert torch.equal(state[slot], value), (name, slot)


def test_a_converted_checkpoint_still_says_which_slots_are_plain(tmp_path: Path) -> None:
    def train_and_save() -> None:
        model, optimizer = trained(over_all, 2)
        save(tmp_path / "two", model=model, optimizer=optimizer)

    def resume() -> None:
        model, optimizer = make(over_all)
        load(tmp_path / "converted", model=model, optimizer=optimizer)
        optimizer.step()
        save(tmp_path / "three", model=model, optimizer=optimizer)

    run_ranks(train_and_save, 2)
    convert(tmp_path / "two", tmp_path / "converted", to="dcp")
    run_ranks(resume, 3)
    assert_holds_what_one_rank_has(tmp_path / "three", 3)
