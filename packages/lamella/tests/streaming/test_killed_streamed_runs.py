"""A run that streams its text, killed at any moment and started again, reads the batches of an unbroken one."""

from dataclasses import replace
from pathlib import Path

import pytest
from killed_runs import Unbroken, check_drawn_kill, check_drawn_kills, train_unbroken
from streamed_texts import texts, write_folder, write_lines

from lamella import Config

NUM_KILLS = 10


@pytest.fixture(scope="module")
def unbroken(shared_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """A run over several windows of a mixture, with rows of whole documents; the smaller source begins anew."""
    folder = tmp_path_factory.mktemp("texts")
    file = write_lines(folder / "low.jsonl", texts(5, 16))
    data = replace(
        shared_config.data,
        paths=(f"web={write_folder(folder)}", f"low={file}"),
        mixture=("web=0.6", "low=0.4"),
        validation_paths=(str(write_lines(folder / "validation.jsonl", texts(9, 40))),),
        packing="documents",
        streaming=True,
        shuffle_buffer=12,
    )
    run = replace(shared_config.run, checkpoint_interval=2, validation_interval=3)
    optim = replace(shared_config.optim, steps=5)
    unbroken = train_unbroken(replace(shared_config, data=data, optim=optim, run=run))
    web, low = unbroken.contents.extra["step_00000004"]["stream"]
    assert web["num_windows"] > 1
    assert low["position"]["epoch"] == 1
    return unbroken


@pytest.mark.parametrize(
    ("phase", "occurrences"),
    [("step", slice(3, 4)), ("measurement", slice(0, 1))],
    ids=["after the first checkpoint", "in the first window"],
)
def test_a_streamed_run_that_is_killed_ends_as_an_unbroken_one(
    unbroken: Unbroken, tmp_path: Path, phase: str, occurrences: slice
) -> None:
    check_drawn_kill(unbroken, tmp_path / "run", phase, occurrences)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(100, 150, 10))
def test_ten_kills_at_drawn_moments_leave_streamed_runs_that_end_as_an_unbroken_one(
    unbroken: Unbroken, tmp_path: Path, first_seed: int
) -> None:
    check_drawn_kills(unbroken, tmp_path, first_seed, NUM_KILLS)
