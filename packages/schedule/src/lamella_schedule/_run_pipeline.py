"""Runs a rank of a pipeline: flights of the rank's stages, in the order of the rank's events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from lamella_schedule._chunk import ModelChunk
from lamella_schedule._events import Event, Kind, LayerPlan, Phase, ResidenceEvent, Slot
from lamella_schedule._flight import Around, Flight
from lamella_schedule._lanes import Lanes
from lamella_schedule._measure import device_of
from lamella_schedule._messages import Address, Mail, Tensors
from lamella_schedule._passes import PipelineEvent, TransferAction, TransferEvent
from lamella_schedule._pipeline import Pipeline
from lamella_schedule._pipeline_events import rank_events
from lamella_schedule._run import Residence, loss_of, nothing_around, step_residence

ChunkMaker: TypeAlias = Callable[[int, int], ModelChunk]


def run_pipeline(
    pipeline: Pipeline,
    chunks: ChunkMaker,
    borders: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    residences: Mapping[int, Residence] | None = None,
    early_release: bool = False,
    num_layers_ahead: int = 1,
    device: torch.device | str | None = None,
    around: Around | None = None,
) -> list[torch.Tensor]:
    """Run this rank's part of a step: forward and backward of the rank's stages, as `pipeline_events` says.

    Gradients are added to `.grad` of parameters, in the order of the microbatches. A stage's weight gradients come
    apart from the input gradients if the layers have `delayed` functions and the schedule asks for the parts.

    Args:
        pipeline: The order of passes; the same on each rank.
        chunks: Returns a stage of the rank applied to a microbatch, and is called once for each, with both indices.
            `preprocess` takes nothing in stage 0, and the outputs of the stage before elsewhere; `postprocess` of the
            last stage returns the loss, 0-D and scaled like the gradient. A stage has the same layers for each
            microbatch.
        borders: Tensors with the shape and dtype of the values between two stages, on any device ("meta" needs no
            memory). Tensors with a floating dtype get a gradient.
        group: The ranks of the pipeline; None for all ranks.
        residences: The holders of the layers' parameters, by stage, for each stage of the rank; None for parameters
            always present.
        early_release: Run the backward of `PRE` before the forward of the experts, in pairs.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.
        device: The device of the tensors; None for the current accelerator, or the CPU without an accelerator.
        around: Called with each slot's event; the event runs inside the returned context, on the event's stream.

    Returns:
        The losses, 0-D, detached, in the order of the microbatches; none on a rank without the last stage.

    Raises:
        ValueError: The group has another number of ranks than the pipeline; residences of other stages than the rank's;
            outputs unlike the borders; a loss other than a single 0-D tensor with a gradient; or layers that
            change between microbatches.

    Effects: point-to-point messages on `group`; compute on the current stream, all-to-alls on a second stream. With
        gloo the host waits for each needed message. After an exception no tensor is held and the residences are
        dropped; other ranks wait for missing messages, until their timeout.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks != pipeline.num_ranks:
        raise ValueError(
            f"Expected a group of {pipeline.num_ranks} ranks for the pipeline, got a group of {num_ranks}. Give the "
            "group of the pipeline's axis."
        )
    rank = dist.get_rank(group)
    stages = pipeline.stages_of(rank)
    if residences is not None and set(residences) != set(stages):
        raise ValueError(
            f"Expected a residence for each of the rank's stages {list(stages)}, got residences for "
            f"{sorted(residences)}. Give one for each stage, or None."
        )
    lanes = Lanes(device_of(device))
    mail = Mail(borders, group, lanes.device)
    step = _PipelineStep(pipeline, chunks, stages, lanes, mail, around or nothing_around)
    events = _events(pipeline, rank, step.plans, num_layers_ahead, early_release)
    holders = dict(residences or {})
    for residence in holders.values():
        residence.begin_step(pipeline.num_microbatches)
    try:
        lanes.begin()
        with lanes.on_compute():
            for event in events:
                if isinstance(event, Event):
                    step.run(event)
                elif isinstance(event, TransferEvent):
                    step.transfer(event)
                elif isinstance(event, ResidenceEvent) and holders:
                    with lanes.on(event.lane):
                        step_residence(holders[event.stage], event)
            step.mail.finish()
        lanes.end()
    except BaseException:
        lanes.join()  # tensors go back to their allocator next, whichever stream reads the tensors
        lanes.end()
        step.drop()
        for residence in holders.values():
            residence.drop()
        raise
    return [step.losses[microbatch] for microbatch in sorted(step.losses)]


Plans: TypeAlias = tuple[tuple[int, tuple[LayerPlan, ...]], ...]


@functools.lru_cache(maxsize=8)  # each step repeats the step before
def _events(
    pipeline: Pipeline, rank: int, plans: Plans, num_layers_ahead: int, early_release: bool
) -> tuple[PipelineEvent, ...]:
    return rank_events(pipeline, rank, dict(plans), num_layers_ahead=num_layers_ahead, early_release=early_release)


class _PipelineStep:
    """The flights of a rank's stages, and the values between the stages."""

    def __init__(
        self,
        pipeline: Pipeline,
        chunks: ChunkMaker,
        stages: Sequence[int],
        lanes: Lanes,
        mail: Mail,
        around: Around,
    ) -> None:
        self.mail = mail
        self.losses: dict[int, torch.Tensor] = {}
        self._last_stage = pipeline.num_stages - 1
        self._chunks, self._lanes, self._around = chunks, lanes, around
        self._flights: dict[tuple[int, int], Flight] = {}
        # The first microbatch's chunks tell the layers; the order of the events depends on the layers.
        self._first = {stage: chunks(stage, 0) for stage in stages}
        self.plans: Plans = tuple((stage, tuple(chunk.plans)) for stage, chunk in self._first.items())

    def run(self, event: Event) -> None:
        """Run an event; at the ends of a pass, take and hand on the values."""
        key = event.stage, event.microbatch
        if event.slot is Slot.PREPROCESS and event.kind is Kind.FORWARD:
            self._flights[key] = self._begin_forward(*key)
        elif event.slot is Slot.POSTPROCESS and event.kind is Kind.BACKWARD:
            self._begin_backward(self._flights[key], *key)
        flight = self._flights[key]
        flight.run(event, self._around)
        if event.slot is Slot.POSTPROCESS and event.kind is Kind.FORWARD:
            self._end_forward(flight, *key)
        elif event.slot is Slot.PREPROCESS and event.kind is Kind.BACKWARD:
            self._end_backward(flight, *key)
        if flight.is_over:
            del self._flights[key]

    def transfer(self, event: TransferEvent) -> None:
        """Send or receive the values of a pass."""
        if event.action is TransferAction.SEND:
            self.mail.send(event)
        else:
            self.mail.receive(event)

    def drop(self) -> None:
        """Let go of all tensors."""
        for flight in self._flights.values():
            flight.drop()
        self._flights.clear()

    def _begin_forward(self, stage: int, microbatch: int) -> Flight:
        chunk = self._first.pop(stage) if microbatch == 0 else self._chunks(stage, microbatch)
        if (plans := tuple(chunk.plans)) != dict(self.plans)[stage]:
            raise ValueError(
                f"Expected stage {stage} to have the layers of microbatch 0, {len(dict(self.plans)[stage])} in number, "
                f"got {len(plans)} layers or other slots in microbatch {microbatch}. Give each microbatch the same."
            )
        inputs: Tensors = ()
        if stage > 0:
            inputs = self.mail.take((stage, microbatch, Phase.FORWARD))
            inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
        return Flight(chunk, self._lanes, microbatch, inputs, stage)

    def _end_forward(self, flight: Flight, stage: int, microbatch: int) -> None:
        if stage == self._last_stage:
            self.losses[microbatch] = loss_of(flight.outputs, microbatch).detach()
            return
        values = flight.outputs
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise ValueError(
                f"Expected tensors from stage {stage}, got {', '.join(type(value).__name__ for value in values)}. Keep "
                "other objects out of the values between stages."
            )
        self.mail.put((stage + 1, microbatch, Phase.FORWARD), cast(Tensors, flight.take_outputs()))

    def _begin_backward(self, flight: Flight, stage: int, microbatch: int) -> None:
        if stage == self._last_stage:
            loss = cast(torch.Tensor, flight.outputs[0])
            flight.begin_backward((torch.ones_like(loss),))
            return
        arrived = iter(self.mail.take((stage, microbatch, Phase.BACKWARD)))
        gradients: list[torch.Tensor | None] = []
        for output in cast(Tensors, flight.outputs):
            gradient = next(arrived) if output.is_floating_point() else None
            gradients.append(gradient if output.requires_grad else None)  # frozen stages below use no gradient
        flight.begin_backward(tuple(gradients))

    def _end_backward(self, flight: Flight, stage: int, microbatch: int) -> None:
        if stage == 0:
            return
        gradients = tuple(
            torch.zeros(border.shape, dtype=border.dtype, device=self._lanes.device) if gradient is None else gradient
            for gradient, border in zip(flight.input_gradients, self.mail.borders, strict=True)
            if border.is_floating_point()
        )
        address: Address = stage - 1, microbatch, Phase.BACKWARD
        self.mail.put(address, gradients)
