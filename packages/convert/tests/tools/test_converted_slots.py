"""Slots kept as plain tensors of a rank stay plain through a conversion."""

from functools import partial
from pathlib import Path

from lamella_checkpoint import load, save
from lamella_convert import convert
from lamella_testing import run_ranks
from lamella_testing.local_slots import assert_holds_what_one_rank_has, make, over_all, trained


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
    assert_holds_what_one_rank_has(partial(load, tmp_path / "three"), 3)
