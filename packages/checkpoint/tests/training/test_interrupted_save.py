"""A keyboard interrupt at any line of a save leaves no checkpoint with the values of another step."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch
from test_async_save import filled, value_at

from lamella_checkpoint import AsyncSaver, CheckpointDirectory, CheckpointFailed
from lamella_checkpoint._training import async_save, copies, handle, outcomes, staging, writer
from lamella_checkpoint._training.copies import await_copies

_FILES = {module.__file__ for module in (async_save, copies, handle, outcomes, staging, writer)}
_NUM_FEATURES = 150  # Copied by the thread, since the weight is too large to be copied at once.
_SAMPLE = 9


class Interruption:
    """Raises KeyboardInterrupt in the main thread before the nth line of the modules of a save."""

    def __init__(self, index: int) -> None:
        self._remaining_lines = index

    @property
    def has_come(self) -> bool:
        return self._remaining_lines < 0

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in _FILES or self.has_come:
            return None
        if event == "line":
            self._remaining_lines -= 1
            if self.has_come:
                raise KeyboardInterrupt
        return self._trace


@pytest.fixture(scope="module")
def saver() -> Iterator[AsyncSaver]:
    """One saver for all tests: its process takes seconds to start."""
    with AsyncSaver() as saver:
        yield saver


def checkpoints_with(saver: AsyncSaver, root: Path) -> CheckpointDirectory:
    checkpoints = CheckpointDirectory(root, keep=None)
    checkpoints._saver = saver
    return checkpoints


def save_with_interrupt_at(index: int, saver: AsyncSaver, root: Path) -> bool:
    """Save six steps, the third under an interruption; return False if the save has fewer lines."""
    checkpoints = checkpoints_with(saver, root)
    model = filled(0.0, _NUM_FEATURES)
    interruption = Interruption(index)
    failures = []
    for step in range(6):
        await_copies()
        with torch.no_grad():
            model.weight.fill_(step)
        try:
            if step == 2:
                with interruption:
                    checkpoints.save_async(step, model=model)
                    checkpoints.wait()
            else:
                checkpoints.save_async(step, model=model)
        except KeyboardInterrupt:
            pass
        except CheckpointFailed as error:
            failures.append(str(error))
    checkpoints.wait()
    assert len(failures) <= 1 and all("KeyboardInterrupt" in text for text in failures)
    assert set(checkpoints.steps()) >= {0, 1, 4, 5}
    for step in checkpoints.steps():
        assert value_at(checkpoints.path(step), _NUM_FEATURES) == step, f"interrupted at line {index}"
    return interruption.has_come


def test_an_interrupt_at_a_line_of_a_save_leaves_later_checkpoints_right(tmp_path: Path, saver: AsyncSaver) -> None:
    index = 0
    while save_with_interrupt_at(index, saver, tmp_path / str(index)):
        index += _SAMPLE
    assert index > 10 * _SAMPLE


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_save_leaves_later_checkpoints_right(tmp_path: Path, saver: AsyncSaver) -> None:
    index = 0
    while save_with_interrupt_at(index, saver, tmp_path / str(index)):
        index += 1
    assert index > 100


@pytest.mark.slow
def test_an_interrupt_at_a_line_of_closing_leaves_a_saver_that_saves(tmp_path: Path) -> None:
    saver = AsyncSaver()
    model = filled(1.0, _NUM_FEATURES)
    index = 0
    while True:
        saver.save(tmp_path / "a", model=model)
        interruption = Interruption(index)
        try:
            with interruption:
                saver.close()
        except KeyboardInterrupt:
            saver.close()
        if not interruption.has_come:
            break
        index += 8
    saver.close()
    assert index > 8
    assert value_at(tmp_path / "a", _NUM_FEATURES) == 1.0
