"""The parameters present under an overlap schedule: decided at each event from sizes and budgets, and counted.

Every choice follows from the order of events and from sizes known to every rank: ranks with the same schedule choose
alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias

Key: TypeAlias = tuple[int, int | None, str]  # microbatch, layer (None: around the layers), phase


class ResidenceStep(Protocol):
    """A step in the residence of a layer's parameters, as `lamella_schedule.ResidenceEvent`."""

    @property
    def microbatch(self) -> int:
        """Index in the step."""

    @property
    def layer(self) -> int | None:
        """Index among the layers; None for the parameters around the layers."""

    @property
    def phase(self) -> str:
        """The pass that reads the parameters: "forward" or "backward"."""


def key_of(event: ResidenceStep) -> Key:
    """One stay: a pass of a microbatch through a layer."""
    return event.microbatch, event.layer, event.phase


class Presence:
    """The layers whose parameters are present.

    Args:
        nbytes: Unsharded bytes of each layer; under None those of the parameters around the layers.
        staying: Layers whose parameters stay once gathered: copies of ZeRO-1, ZeRO-2 and DDP.
        prefetch_budget: Bytes that layers acquired and not used yet may weigh together. The first of these layers
            counts as fitting. None: as many layers as the schedule acquires.
        keep_budget: Bytes that layers may weigh together which stay from a microbatch's forward to its backward. The
            layers that backward wants first stay; a layer too large for the rest of the budget is left out.
    """

    def __init__(
        self,
        nbytes: Mapping[int | None, int],
        staying: Collection[int | None] = (),
        *,
        prefetch_budget: int | None = None,
        keep_budget: int = 0,
    ) -> None:
        self._nbytes = nbytes
        self._staying = staying
        self._prefetch_budget = prefetch_budget
        self._keep_budget = keep_budget
        # By stays, not by a count: several microbatches may use a layer at once, and a stay may be handed to its
        # backward.
        self._holders: dict[int | None, set[Key]] = {layer: set() for layer in nbytes}
        self._present: set[int | None] = set()
        self._prefetched: set[int | None] = set()  # gathered, and not used yet

    @property
    def total(self) -> int:
        """Bytes present."""
        return sum(self._nbytes[layer] for layer in self._present)

    def acquire(self, key: Key) -> bool:
        """Whether to gather now: not if the layer stayed for the pass, and not ahead of its turn beyond the budget."""
        layer = key[1]
        if key in self._holders[layer] or not self._fits_ahead(layer):
            return False
        if layer is not None and layer not in self._present:
            self._prefetched.add(layer)
        self._take(key)
        return True

    def use(self, key: Key) -> bool:
        """Whether to gather now, since `acquire` had no room."""
        layer = key[1]
        is_late = key not in self._holders[layer]
        self._take(key)
        self._prefetched.discard(layer)
        return is_late

    def finish(self, key: Key) -> bool:
        """Whether to let go: not if the layer stays for the backward of the microbatch."""
        microbatch, layer, phase = key
        holders = self._holders[layer]
        holders.remove(key)
        if phase == "forward" and layer in self._kept_layers:
            holders.add((microbatch, layer, "backward"))
            return False
        if not holders and layer not in self._staying:
            self._present.remove(layer)
        return True

    def _take(self, key: Key) -> None:
        self._holders[key[1]].add(key)
        self._present.add(key[1])

    def _fits_ahead(self, layer: int | None) -> bool:
        if self._prefetch_budget is None or layer is None or layer in self._present:
            return True
        waiting = sum(self._nbytes[other] for other in self._prefetched)
        return not waiting or waiting + self._nbytes[layer] <= self._prefetch_budget

    @cached_property
    def _kept_layers(self) -> frozenset[int | None]:
        """The layers that stay from forward to backward."""
        remaining_nbytes, layers = self._keep_budget, set()
        for layer in sorted((layer for layer in self._nbytes if layer is not None), reverse=True):
            if layer not in self._staying and self._nbytes[layer] <= remaining_nbytes:
                layers.add(layer)
                remaining_nbytes -= self._nbytes[layer]
        return frozenset(layers)


def peak_unsharded_nbytes(
    events: Iterable[object],
    layers: Sequence[int],
    *,
    around: int = 0,
    prefetch_budget: int | None = None,
    keep_budget: int = 0,
) -> int:
    """Compute the bytes of unsharded parameters at the peak of a schedule, before any model is sharded.

        plan = plan_units(model, ...)
        *layers, around = [unit.unsharded_nbytes for unit in plan.units]
        peak_unsharded_nbytes(run_order(4, len(layers)), layers, around=around)

    Args:
        events: `lamella_schedule.order` or `run_order`. Events other than of residence count nothing.
        layers: Unsharded bytes of each layer, in the order of the schedule. Layers are freed after each pass (ZeRO-3).
        around: Unsharded bytes of the parameters around the layers.
        prefetch_budget: The budget of `ShardingOptions`, in bytes; `UnitResidence` tells its meaning under a schedule.
        keep_budget: The budget of `ShardingOptions`, in bytes.
    """
    nbytes: dict[int | None, int] = {None: around, **dict(enumerate(layers))}
    return peak(events, Presence(nbytes, prefetch_budget=prefetch_budget, keep_budget=keep_budget))


def peak(events: Iterable[object], presence: Presence) -> int:
    """The most bytes present after any of some events."""
    steps = {"acquire": presence.acquire, "used": presence.use, "finished": presence.finish}
    highest = 0
    for event in events:
        if (action := getattr(event, "action", None)) in steps:
            steps[action](key_of(event))  # type: ignore[arg-type]  # an event with an action is one of residence
            highest = max(highest, presence.total)
    return highest
