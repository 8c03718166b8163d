"""SIGKILL at calls of functions, drawn from the calls of an unbroken run."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch


class Calls:
    """Counts the calls of functions in this thread, and may kill the process at one of them."""

    def __init__(self, fatal: int | None = None) -> None:
        self.count, self._fatal = 0, fatal

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the calls in the block. A block with fewer calls than the fatal one is killed at its end."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            if self._fatal is not None:
                kill_this_process()

    def _note(self, _: FrameType, event: str, __: object) -> None:
        self.count += event in ("call", "c_call")
        if self.count == self._fatal:
            kill_this_process()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def calls_in_process(work: Callable[[], object], fatal: int | None = None) -> int | None:
    """Run a function in a forked process, or kill the process at a call.

    Returns:
        The number of calls; None for a killed process.
    """
    receiving, sending = (context := get_context("fork")).Pipe(duplex=False)

    def run() -> None:
        calls = Calls(fatal)
        with calls.counted():
            work()
        sending.send(calls.count)

    process = context.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == (0 if fatal is None else -signal.SIGKILL)
    return receiving.recv() if fatal is None else None


class Phase(NamedTuple):
    """A method whose runs are a phase of a program."""

    owner: type
    method: str


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill of one rank.

    Attributes:
        rank: The rank.
        phase: The name of the phase.
        occurrence: The number of the phase's runs before.
        call: The number of calls since the beginning of the phase.
    """

    rank: int
    phase: str
    occurrence: int
    call: int


CallCounts = Mapping[str, list[int]]
"""The number of calls in each occurrence of a phase, by the phase's name."""


def draw_kill(draw: random.Random, phase: str, counts: list[CallCounts], occurrences: slice = slice(None)) -> Kill:
    """Draw a kill in a phase.

    Args:
        draw: The source of chance.
        phase: The name of the phase.
        counts: The counts of an unbroken run, by rank.
        occurrences: The occurrences to draw from.
    """
    rank = draw.randrange(len(counts))
    numbers = range(len(counts[rank][phase]))[occurrences]
    occurrence = draw.choice(numbers)
    call = draw.randint(1, counts[rank][phase][occurrence])
    return Kill(rank=rank, phase=phase, occurrence=occurrence, call=call)


class CountedPhases:
    """Counts the calls in the phases of this process, or kills the process at one of them.

    Args:
        phases: The phases, by name. None contains another.
        kill: The kill, if this process is the rank of the kill.
        counts_calls: Count the calls, which takes several times as long; 0 each otherwise.
    """

    def __init__(self, phases: Mapping[str, Phase], kill: Kill | None = None, *, counts_calls: bool = True) -> None:
        self.counts: dict[str, list[int]] = {name: [] for name in phases}
        self._phases, self._kill, self._counts_calls = phases, kill, counts_calls

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Count in the block."""
        with ExitStack() as patches:
            for name, (owner, method) in self._phases.items():
                patches.enter_context(patch.object(owner, method, self._counted(name, getattr(owner, method))))
            yield

    def _counted(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            kill = self._kill
            is_fatal = kill is not None and (kill.phase, kill.occurrence) == (phase, len(self.counts[phase]))
            calls = Calls(kill.call if kill is not None and is_fatal else None)
            with calls.counted() if is_fatal or self._counts_calls else nullcontext():
                result = method(*args, **options)
            self.counts[phase].append(calls.count)
            return result

        return counted
