"""The host's work for each unit: the named ranges of lamella and FSDP2 in a profile."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lamella_trace._trace import Kernel, Trace, args_of, events_of

OUTERMOST = "(outermost)"
OPTIMIZER = "(optimizer)"
NO_UNIT = "(no unit)"

GATHER, REDUCE = "all_gather", "post_backward_reduce"
STEP = "step"

_NODE = re.compile(r"schedule::(?P<node>(?:dispatch|combine) \w+) \((?P<layer>.*)\)")
_NAME = re.compile(r"FSDP::(?P<phase>\w+)(?: for (?P<target>.*)| \((?P<unit>.*)\))?")
# Without a unit's name, ranges of these phases belong to the outermost unit; ranges of other phases to no unit.
_OF_A_UNIT = {
    *("pre_forward", "post_forward", "all_gather", "all_gather_copy_out", "pre_backward"),
    *("post_backward_accumulate", "post_backward_reshard", "post_backward_reduce"),
}

# Ranges at the beginning or end of a pass -> True if backward follows. Forwards recomputed in backward leave none.
_TURNS = {"root_pre_forward": False, "pre_backward": True, "root_post_backward_callback": False}


@dataclass(frozen=True, kw_only=True)
class HostRange:
    """A host thread's time on a unit. `depth` counts the enclosing ranges."""

    phase: str
    unit: str
    thread: int
    start_us: float
    end_us: float
    depth: int = 0


class Host:
    """The ranges of a trace, by thread and time."""

    def __init__(self, trace: Trace) -> None:
        self.ranges: list[HostRange] = []
        self._threads: dict[int, _Nest] = defaultdict(_Nest)
        self._streams: dict[int, _Nest] = defaultdict(_Nest)
        self._turns: list[tuple[float, bool]] = []
        self._nodes = _Nest()
        by_number: dict[object, HostRange] = {}
        for event in _in_order(events_of(trace, "user_annotation")):
            if (node := _NODE.fullmatch(event["name"])) is not None:
                start, end = _times(event)
                node_range = HostRange(
                    phase=node["node"], unit=node["layer"], thread=event["tid"], start_us=start, end_us=end
                )
                self._nodes.add(start, end, node_range)
                continue
            phase, unit = _parse(event["name"])
            if phase in _TURNS:
                self._turns.append((float(event["ts"]), _TURNS[phase]))
            if unit is not None:
                by_number[args_of(event).get("External id")] = self._add(phase, unit, event)
        # Ranges on the device's timeline: the only link from copies by driver calls, without a launch event, to units.
        for event in _in_order(events_of(trace, "gpu_user_annotation")):
            host_range = by_number.get(args_of(event).get("External id"))
            if host_range is not None and _parse(event["name"]) == (host_range.phase, host_range.unit):
                self._streams[event["tid"]].add(*_times(event), host_range)

    def _add(self, phase: str, unit: str, event: dict[str, Any]) -> HostRange:
        start, end = _times(event)
        thread = self._threads[event["tid"]]
        host_range = HostRange(
            phase=phase, unit=unit, thread=event["tid"], start_us=start, end_us=end, depth=thread.depth_at(start)
        )
        thread.add(start, end, host_range)
        self.ranges.append(host_range)
        return host_range

    def launching(self, kernel: Kernel) -> HostRange | None:
        """Return the innermost range around a kernel's launch."""
        if kernel.thread is None or kernel.launched_us is None:
            return self._streams[kernel.stream].at(kernel.start_us)
        return self._threads[kernel.thread].at(kernel.launched_us)

    @property
    def has_nodes(self) -> bool:
        """Whether a schedule's dispatches and combines were recorded."""
        return self._nodes.after(-math.inf) is not None

    def node_about(self, kernel: Kernel, unit_range: HostRange | None) -> HostRange | None:
        """Return the dispatch or combine of a schedule in which a kernel was launched, outside of ranges of units.

        By time alone: autograd launches the kernels of a backward on a thread of its own, while the schedule's thread
        waits inside the range.

        Args:
            kernel: The kernel.
            unit_range: The unit's range around the launch.
        """
        node = self._nodes.at(kernel.start_us if kernel.launched_us is None else kernel.launched_us)
        return None if node is None or (unit_range is not None and unit_range.start_us >= node.start_us) else node

    def unit_about(self, kernel: Kernel) -> str:
        """Return the unit of the range around a kernel's launch, or of the next range on the launching thread.

        Compute inside a unit's forward or backward precedes the range that ends the pass of the unit.
        """
        if kernel.thread is None or kernel.launched_us is None:
            return NO_UNIT
        thread = self._threads[kernel.thread]
        host_range = thread.at(kernel.launched_us) or thread.after(kernel.launched_us)
        return NO_UNIT if host_range is None else host_range.unit

    def in_backward(self, time_us: float) -> bool:
        """True between the beginning and the end of a backward."""
        index = bisect_right(self._turns, time_us, key=lambda turn: turn[0])
        return index > 0 and self._turns[index - 1][1]


class _Nest:
    """Nested ranges, added in the order of their starts."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._parents: list[int] = []
        self._ranges: list[HostRange] = []

    def add(self, start_us: float, end_us: float, host_range: HostRange) -> None:
        self._parents.append(self._around(start_us))
        self._starts.append(start_us)
        self._ends.append(end_us)
        self._ranges.append(host_range)

    def at(self, time_us: float) -> HostRange | None:
        index = self._around(time_us)
        return self._ranges[index] if index >= 0 else None

    def after(self, time_us: float) -> HostRange | None:
        index = bisect_left(self._starts, time_us)
        return self._ranges[index] if index < len(self._ranges) else None

    def depth_at(self, time_us: float) -> int:
        parent = self.at(time_us)
        return 0 if parent is None else parent.depth + 1

    def _around(self, time_us: float) -> int:
        """Return the index of the innermost range around a time; -1 for none."""
        index = bisect_right(self._starts, time_us) - 1
        while index >= 0 and self._ends[index] <= time_us:
            index = self._parents[index]
        return index


def _in_order(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def _times(event: dict[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _parse(name: str) -> tuple[str, str | None]:
    """Split a range's name into phase and unit; None for ranges of no unit."""
    if name.startswith("Optimizer.step#"):
        return STEP, OPTIMIZER
    match = _NAME.fullmatch(name)
    if match is None:
        return "", None
    phase = match["phase"]
    unit = match["unit"] if match["target"] is None else match["target"]
    if unit is None:
        return phase, OUTERMOST if phase in _OF_A_UNIT else None
    return phase, unit or OUTERMOST
