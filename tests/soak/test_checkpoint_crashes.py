"""Saves that are killed, starved and damaged hundreds of times: no checkpoint is lost, and none is silently wrong."""

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

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("in_background", [False, True])
def test_two_hundred_saves_killed_at_random_moments_lose_no_checkpoint(tmp_path: Path, in_background: bool) -> None:
    num_saves, seed = 0, 0
    while num_saves < 200:
        root = tmp_path / str(seed)
        root.mkdir()
        num_saves += Crash.draw(seed, in_background=in_background).happen(root)
        check_whole(root)
        seed += 1
    assert seed > 5


@pytest.mark.parametrize("kind", FORMATS)
def test_a_thousand_damages_are_never_loaded_silently_wrong(tmp_path: Path, kind: str) -> None:
    suffix = ".pt" if kind in ("torch", "torch.save") else ""
    save_filled(tmp_path / f"a{suffix}", kind)
    refused = [
        check_never_silently_wrong(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}", seed) for seed in range(1000)
    ]
    assert sum(refused) > (400 if kind == "hf" else 800)


@pytest.mark.parametrize(("in_background", "num_times"), [(False, 100), (True, 10)])
def test_full_disks_lose_no_checkpoint(tmp_path: Path, in_background: bool, num_times: int) -> None:
    save_filled(tmp_path / "a")
    assert all(save_without_room(tmp_path / "a", seed, in_background=in_background) for seed in range(num_times))
