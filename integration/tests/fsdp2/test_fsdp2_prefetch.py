"""Lists of units to prefetch: a pass gathers the listed units in order, and each unit once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fsdp2_models import DIM, Api, Block, Stack, inputs, on_ranks, shard
from torch import nn

from lamella_integration.collectives import CollectiveCounter

# The hooks on a unit's backward make views of the unit's outputs.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

NUM_BLOCKS = 4
Lists = dict[str, str]  # of a unit, the units to gather ahead: "1 2" are two blocks


class _Trace(CollectiveCounter):  # type: ignore[no-untyped-call]
    """Records gathers (`+name`) and computation (`name`) of units. The size identifies a unit."""

    def __init__(self, units: dict[str, Any]) -> None:
        super().__init__()
        self.events: list[str] = []
        self._names: dict[int, str] = {}
        for name, unit in units.items():
            with CollectiveCounter() as counter:
                unit.unshard()
            unit.reshard()
            self._names[sum(call.numel for call in counter.calls)] = name
        assert len(self._names) == len(units)

    def _add(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        super()._add(kind, tensors)
        if kind == "all_gather":
            self.events.append(f"+{self._names[self.calls[-1].numel]}")

    def take(self) -> str:
        """Return the events since the last call."""
        events, self.events[:] = " ".join(self.events), []
        return events

    def note(self, name: str) -> Callable[..., None]:
        """A hook."""
        return lambda *_: self.events.append(name)


def _units(api: Api) -> dict[str, Any]:
    model = Stack(NUM_BLOCKS)
    model.blocks = nn.ModuleList(Block(DIM, 9 + i) for i in range(NUM_BLOCKS))
    shard(api, model)
    return {"root": model} | {str(i): block for i, block in enumerate(model.blocks)}


def _passes(api: Api, *, forward: Lists | None = None, backward: Lists | None = None) -> list[tuple[str, str]]:
    """The events of forward and of backward, in each of several steps."""
    units = _units(api)
    for name, prefetched in (forward or {}).items():
        units[name].set_modules_to_forward_prefetch([units[unit_name] for unit_name in prefetched.split()])
    for name, prefetched in (backward or {}).items():
        units[name].set_modules_to_backward_prefetch([units[unit_name] for unit_name in prefetched.split()])
    model = units["root"]
    trace = _Trace(units)
    for name, unit in units.items():
        first, last = (unit.stem, unit.head) if name == "root" else (unit.up, unit.down)
        first.register_forward_pre_hook(trace.note(name))
        last.register_full_backward_pre_hook(trace.note(name))
    return [_pass(trace, model, step) for step in range(3)]


def _pass(trace: _Trace, model: nn.Module, step: int) -> tuple[str, str]:
    with trace:
        loss = model(inputs(seed=step)).sum()
        forward = trace.take()
        loss.backward()
        return forward, trace.take()


def _gathers(events: str) -> list[str]:
    return [event.removeprefix("+") for event in events.split() if event.startswith("+")]


EACH_ITS_NEXT_TWO = {"root": "0 1", "0": "1 2", "1": "2 3", "2": "3", "3": "root"}
EACH_ITS_LAST_TWO = {"root": "3 2", "3": "2 1", "2": "1 0", "1": "0", "0": "root"}


def test_forward_gathers_two_units_ahead_where_each_names_its_next_two(api: Api) -> None:
    def scenario() -> None:
        for forward, _ in _passes(api, forward=EACH_ITS_NEXT_TWO):
            assert forward == "+root +0 +1 root +2 0 +3 1 2 3"

    on_ranks(scenario)


def test_backward_gathers_two_units_ahead_where_each_names_its_last_two(api: Api) -> None:
    def scenario() -> None:
        for _, backward in _passes(api, backward=EACH_ITS_LAST_TWO):
            assert backward == "+3 +2 root +1 3 +0 2 1 0"

    on_ranks(scenario)


def test_units_are_gathered_in_the_order_of_the_prefetch_list_not_of_execution(api: Api) -> None:
    def scenario() -> None:
        everything = {"root": "2 0 3 1"} | {str(i): "root" for i in range(NUM_BLOCKS)}
        for forward, backward in _passes(api, forward=everything, backward=everything):
            assert forward == "+root +2 +0 +3 +1 root 0 1 2 3"
            assert backward == "+2 +0 +3 +1 root 3 2 1 0"

    on_ranks(scenario)


def test_units_without_a_list_change_neither_the_order_nor_how_often(api: Api) -> None:
    """The moment of the gathers is each implementation's own choice."""

    def scenario() -> None:
        for forward, backward in _passes(api, forward={"root": "1", "2": "3"}, backward={"root": "2", "3": "1"}):
            assert _gathers(forward) == ["root", "1", "0", "2", "3"]
            assert _gathers(backward) == ["2", "3", "1", "0"]

    on_ranks(scenario)
