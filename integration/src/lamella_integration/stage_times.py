"""Prices for the simulation of a pipeline: the time of a stage's slots without a pipeline, and of a message."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn

from lamella_schedule import Event, Flight, Kind, Lanes, ModelChunk, Slot, Span, Stopwatch, order, work

EventKey: TypeAlias = tuple[int, bool, int | None, Slot, Kind]
_NUM_MESSAGES = 20


def key_of(event: Event) -> EventKey:
    """The price's key: stage, whether the microbatch is the first, layer, slot and kind.

    Gradients of the first microbatch are kept, those of later ones added.
    """
    return event.stage, event.microbatch == 0, event.layer, event.slot, event.kind


def slot_ms(
    module: nn.Module,
    make_chunk: Callable[[], ModelChunk],
    inputs: Sequence[torch.Tensor],
    *,
    stage: int,
    num_repetitions: int,
) -> tuple[dict[EventKey, float], float]:
    """Run a stage forward and backward without a pipeline, and time each slot.

    A slot's time begins where the slot before ends, so that the times add up to a pass.

    Args:
        module: The stage.
        make_chunk: Returns the stage applied to a microbatch.
        inputs: Values of the stage before; none for the first stage.
        stage: Index of the stage, for the keys.
        num_repetitions: Number of times; medians are returned.

    Returns:
        Milliseconds by event, and the host's milliseconds to issue an event, 0 where slots run on the host.

    Effects: gradients of `module`; waits for the device.
    """
    device = next(module.parameters()).device
    lanes = Lanes(device)
    durations: dict[EventKey, list[float]] = {}
    hosts = []
    for repetition in range(num_repetitions + 1):
        module.zero_grad()
        for microbatch in (0, 1):
            watch, begin = Stopwatch(device), time.perf_counter()
            flight = Flight(make_chunk(), lanes, microbatch, _entered(inputs), stage)
            num_events = _run(flight, stage, watch)
            hosts.append((time.perf_counter() - begin) * 1e3 / num_events)
            if repetition:  # The first compiles kernels and allocates.
                for key, duration in _durations(watch.timeline.spans):
                    durations.setdefault(key, []).append(duration)
    host = 0.0 if device.type == "cpu" else statistics.median(hosts)
    return {key: statistics.median(event_durations) for key, event_durations in durations.items()}, host


def message_ms(border: torch.Tensor) -> float:
    """Time a message from the first rank to the second, in milliseconds, among others of its size.

    Effects: point-to-point between the first two ranks, and an all-reduce; waits for the device.
    """
    rank, elapsed = dist.get_rank(), 0.0
    if dist.get_world_size() > 1:
        for _ in range(2):  # The first connects.
            _wait(border.device)
            dist.barrier()
            begin = time.perf_counter()
            if rank < 2:
                pass_on = dist.isend if rank == 0 else dist.irecv
                messages = [pass_on(border.clone(), 1 - rank) for _ in range(_NUM_MESSAGES)]
                for message in messages:
                    cast(dist.Work, message).wait()
            _wait(border.device)
            elapsed = (time.perf_counter() - begin) * 1e3 / _NUM_MESSAGES if rank < 2 else 0.0
    largest = torch.tensor(elapsed, dtype=torch.float64, device=border.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def _entered(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().requires_grad_() for tensor in inputs)


def _run(flight: Flight, stage: int, watch: Stopwatch) -> int:
    """Run a flight forward and backward; return the number of events."""
    forward = _events(order(flight.plans, None, forward_microbatch=flight.microbatch), stage)
    for event in forward:
        flight.run(event, watch)
    [output] = cast(tuple[torch.Tensor, ...], flight.take_outputs())
    flight.begin_backward((torch.ones_like(output),))
    backward = _events(order(None, flight.plans, backward_microbatch=flight.microbatch), stage)
    for event in backward:
        flight.run(event, watch)
    return len(forward) + len(backward)


def _events(events: Iterable[object], stage: int) -> list[Event]:
    return [replace(event, stage=stage) for event in work(events)]  # type: ignore[arg-type]


def _durations(spans: Sequence[Span]) -> Iterator[tuple[EventKey, float]]:
    """Each slot's time, from the end of the slot before."""
    stop = spans[0].start
    for span in spans:
        yield key_of(cast(Event, span.event)), span.stop - stop
        stop = span.stop


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
