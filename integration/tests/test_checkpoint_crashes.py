"""A few crashes; `soak` has many."""

from pathlib import Path

import pytest

from lamella_integration.crashes import (
    FORMATS,
    Crash,
    check_never_silently_wrong,
    check_whole,
    save_filled,
    save_without_room,
)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_save_loses_no_checkpoint(tmp_path: Path, seed: int) -> None:
    Crash.draw(seed, in_background=False).happen(tmp_path)
    check_whole(tmp_path)


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_save_in_the_background_loses_no_checkpoint(tmp_path: Path, seed: int) -> None:
    Crash.draw(seed, in_background=True).happen(tmp_path)
    check_whole(tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_checkpoint_is_never_loaded_silently_wrong(tmp_path: Path, kind: str) -> None:
    suffix = ".pt" if kind in ("torch", "torch.save") else ""
    save_filled(tmp_path / f"a{suffix}", kind)
    refused = [check_never_silently_wrong(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}", seed) for seed in range(40)]
    assert sum(refused) > (15 if kind == "hf" else 30)


def test_a_full_disk_loses_no_checkpoint(tmp_path: Path) -> None:
    save_filled(tmp_path / "a")
    assert all(save_without_room(tmp_path / "a", seed, in_background=False) for seed in range(10))
