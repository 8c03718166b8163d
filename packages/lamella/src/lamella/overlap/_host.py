"""What the host did for which unit: the ranges that lamella, and FSDP2, name in a profile."""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

from lamella.overlap._trace import Kernel, Trace, events_of

OUTERMOST = "(outermost)"
OPTIMIZER = "(optimizer)"
NO_UNIT = "(no unit)"

GATHER, REDUCE = "all_gather", "post_backward_reduce"

_NAME = re.compile(r"FSDP::(?P<phase>\w+)(?: for (?P<target>.*)| \((?P<unit>.*)\))?")
# Without a unit's name they are the outermost unit's. Other phases without one are nobody's.
_OF_A_UNIT = {
    *("pre_forward", "post_forward", "all_gather", "all_gather_copy_out", "pre_backward"),
    *("post_backward_accumulate", "post_backward_reshard", "post_backward_reduce"),
}

# Where a pass begins or ends, and whether what follows is a backward. Forwards recomputed in a backward have none.
_TURNS = {"root_pre_forward": False, "pre_backward": True, "root_post_backward_callback": False}


@dataclass(frozen=True, kw_only=True)
class HostRange:
    """Time that a thread of the host spent on a unit. `depth` counts the ranges around it."""

    phase: str
    unit: str
    thread: int
    start_us: float
    end_us: float
    depth: int = 0


class Host:
    """The ranges of a trace, by thread and time."""

    def __init__(self, trace: Trace) -> None:
        events = sorted(events_of(trace, "user_annotation"), key=lambda event: (event["ts"], -event["dur"]))
        self._threads: dict[int, _Thread] = defaultdict(_Thread)
        self._turns: list[tuple[float, bool]] = []
        for event in events:
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            phase, unit = _parse(event["name"])
            if phase in _TURNS:
                self._turns.append((start, _TURNS[phase]))
            if unit is not None:
                self._threads[event["tid"]].add(phase, unit, event["tid"], start, end)

    @property
    def ranges(self) -> list[HostRange]:
        """All of them."""
        return [found for thread in self._threads.values() for found in thread.ranges]

    def launching(self, kernel: Kernel) -> HostRange | None:
        """The innermost range that a kernel was launched in."""
        if kernel.thread is None or kernel.launched_us is None:
            return None
        return self._threads[kernel.thread].at(kernel.launched_us)

    def unit_about(self, kernel: Kernel) -> str:
        """The unit that a kernel was launched for: whose range it was launched in, or whose came next on that thread.

        What runs inside a unit's forward or backward comes before the range that ends it.
        """
        if kernel.thread is None or kernel.launched_us is None:
            return NO_UNIT
        thread = self._threads[kernel.thread]
        found = thread.at(kernel.launched_us) or thread.after(kernel.launched_us)
        return NO_UNIT if found is None else found.unit

    def in_backward(self, time_us: float) -> bool:
        """Whether a backward had begun, and was not over."""
        index = bisect_right(self._turns, time_us, key=lambda turn: turn[0])
        return index > 0 and self._turns[index - 1][1]


class _Thread:
    """Nested ranges, in the order of their beginnings."""

    def __init__(self) -> None:
        self.ranges: list[HostRange] = []
        self._parents: list[int] = []

    def add(self, phase: str, unit: str, thread: int, start_us: float, end_us: float) -> None:
        parent = self._enclosing(len(self.ranges) - 1, start_us)
        depth = self.ranges[parent].depth + 1 if parent >= 0 else 0
        self._parents.append(parent)
        self.ranges.append(
            HostRange(phase=phase, unit=unit, thread=thread, start_us=start_us, end_us=end_us, depth=depth)
        )

    def at(self, time_us: float) -> HostRange | None:
        index = self._enclosing(bisect_right(self.ranges, time_us, key=_start) - 1, time_us)
        return self.ranges[index] if index >= 0 else None

    def after(self, time_us: float) -> HostRange | None:
        index = bisect_left(self.ranges, time_us, key=_start)
        return self.ranges[index] if index < len(self.ranges) else None

    def _enclosing(self, index: int, time_us: float) -> int:
        """The innermost range around an instant, beginning at one that begins before it; -1 if there is none."""
        while index >= 0 and self.ranges[index].end_us <= time_us:
            index = self._parents[index]
        return index


def _start(found: HostRange) -> float:
    return found.start_us


def _parse(name: str) -> tuple[str, str | None]:
    """The phase that a range names, and its unit if it is some unit's."""
    if name.startswith("Optimizer.step#"):
        return "step", OPTIMIZER
    match = _NAME.fullmatch(name)
    if match is None:
        return "", None
    phase = match["phase"]
    unit = match["unit"] if match["target"] is None else match["target"]
    if unit is None:
        return phase, OUTERMOST if phase in _OF_A_UNIT else None
    return phase, unit or OUTERMOST
