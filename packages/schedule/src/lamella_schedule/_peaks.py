"""Peaks of memory of an order, in the order of the host: tensors kept for backward, and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias, overload

from lamella_schedule._events import Action, Event, Phase, ResidenceEvent, Slot
from lamella_schedule._passes import PipelineEvent, StagePass, WorkEvent


@overload
def peak(events: Iterable[PipelineEvent], kept_nbytes: Callable[[Event], float]) -> float: ...


@overload
def peak(events: Iterable[PipelineEvent], kept_nbytes: Callable[[StagePass], float]) -> float: ...


def peak(events: Iterable[PipelineEvent], kept_nbytes: Callable[..., float]) -> float:
    """Compute the peak of the tensors kept by forwards for backwards, in the order of the host.

    Args:
        events: An order, or the events of a pipeline's rank.
        kept_nbytes: Bytes (or another unit) kept by the forward of a slot, or of a pass in one piece, until the end
            of the backward. Called with the event of the forward.

    Returns:
        The peak of the sum, in the same unit. A slot or pass with delayed weight gradients keeps the share until the
            weight gradients are computed.
    """
    works = [event for event in events if isinstance(event, WorkEvent)]
    last = {_owner(event): place for place, event in enumerate(works)}
    present = highest = 0.0
    shares: dict[_Owner, float] = {}
    for place, event in enumerate(works):
        if event.phase is Phase.FORWARD:
            shares[_owner(event)] = kept_nbytes(event)
            present += shares[_owner(event)]
            highest = max(highest, present)
        elif last[_owner(event)] == place:
            present -= shares.pop(_owner(event), 0.0)
    return highest


def peak_parameters(events: Iterable[PipelineEvent], nbytes: Callable[[ResidenceEvent], float]) -> float:
    """Compute the peak of the parameters present, in the order of the host.

    Args:
        events: An order with residence, or the events of a pipeline's rank.
        nbytes: Bytes (or another unit) of a layer's parameters, or of the parameters around a stage's layers. Called
            with each `Action.ACQUIRE` of absent parameters.

    Returns:
        The peak of the sum, in the same unit. Overlapping passes share a copy, freed by the last to finish.
    """
    present = highest = 0.0
    holders: dict[tuple[int, int | None], list[float]] = {}
    for event in events:
        if not isinstance(event, ResidenceEvent):
            continue
        shares = holders.setdefault((event.stage, event.layer), [])
        if event.action is Action.ACQUIRE:
            shares.append(0.0 if shares else nbytes(event))
            present += shares[-1]
            highest = max(highest, present)
        elif event.action is Action.FINISHED:
            present -= shares.pop()  # the first share, the copy's bytes, is the last in the list
    return highest


_Owner: TypeAlias = tuple[int, int, int | None, Slot | None]  # stage, microbatch, layer and slot


def _owner(event: WorkEvent) -> _Owner:
    return event.stage, event.microbatch, event.layer, event.slot if isinstance(event, Event) else None
