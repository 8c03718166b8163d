"""From the passes of a pipeline to all events of its ranks: slots, residence of parameters, messages between stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lamella_schedule._events import Event, Kind, Phase
from lamella_schedule._order import Layers, order, with_residence, work
from lamella_schedule._passes import (
    PassKind,
    PassOrPair,
    PipelineEvent,
    StagePass,
    TransferAction,
    TransferEvent,
    WorkEvent,
    passes_in,
)
from lamella_schedule._pipeline import Pipeline


def pipeline_events(
    pipeline: Pipeline,
    layers: Layers | Mapping[int, Layers] | None = None,
    *,
    num_layers_ahead: int = 1,
    early_release: bool = False,
) -> tuple[tuple[PipelineEvent, ...], ...]:
    """List all events of each rank, in the order of its host.

    A message is sent right after the pass that another rank waits for. At the same moment of the global order it is
    among the receiver's events, so that two ranks have their messages to each other in one order.

    Args:
        pipeline: The order of passes.
        layers: The layers of a stage, as `order` takes them, or by stage where stages differ: a pass becomes the events
            of its layers' slots, with dispatch and combine as all-to-alls, and a pair those of `order`. None keeps
            passes in one piece; the passes of a pair then follow each other.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.
        early_release: Run the backward of `PRE` before the forward of the experts, in pairs.

    Returns:
        The events of each rank. Parameters stay from the first event of a forward to the last, and from the first of a
        backward to the last weight gradient, however late.

    Raises:
        ValueError: A stage without layers in a mapping, or a negative `num_layers_ahead`.
    """
    expand = _Expansion(layers, range(pipeline.num_stages), early_release)
    return tuple(_events_by_rank(pipeline, range(pipeline.num_ranks), expand, num_layers_ahead).values())


def rank_events(
    pipeline: Pipeline,
    rank: int,
    layers: Layers | Mapping[int, Layers] | None = None,
    *,
    num_layers_ahead: int = 1,
    early_release: bool = False,
) -> tuple[PipelineEvent, ...]:
    """List all events of one rank, as `pipeline_events` does, from the layers of the rank's own stages.

    Args:
        pipeline: The order of passes.
        rank: Index of the rank along the pipeline.
        layers: The layers of a stage, or by stage of this rank.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.
        early_release: Run the backward of `PRE` before the forward of the experts, in pairs.

    Raises:
        ValueError: No such rank, a stage of the rank without layers in a mapping, or a negative `num_layers_ahead`.
    """
    if not 0 <= rank < pipeline.num_ranks:
        raise ValueError(
            f"Expected rank to be from 0 to {pipeline.num_ranks - 1}, got {rank}. Give the index along the pipeline."
        )
    expand = _Expansion(layers, pipeline.stages_of(rank), early_release)
    return _events_by_rank(pipeline, [rank], expand, num_layers_ahead)[rank]


def _events_by_rank(
    pipeline: Pipeline, ranks: Iterable[int], expand: _Expansion, num_layers_ahead: int
) -> dict[int, tuple[PipelineEvent, ...]]:
    if num_layers_ahead < 0:
        raise ValueError(
            f"Expected num_layers_ahead to be a number of layers, got {num_layers_ahead}. Give 0 for no layer ahead."
        )
    events: dict[int, list[WorkEvent | TransferEvent]] = {rank: [] for rank in ranks}
    for owner, pass_or_pair in pipeline.global_order():
        if owner in events:
            events[owner] += expand(pass_or_pair)
        for stage_pass in passes_in(pass_or_pair):
            for rank, transfer in _transfers(pipeline, stage_pass):
                if rank in events:
                    events[rank].append(transfer)
    return {rank: tuple(with_residence(listed, num_layers_ahead=num_layers_ahead)) for rank, listed in events.items()}


class _Expansion:
    """The events of a pass or a pair, by the layers of each stage."""

    def __init__(
        self, layers: Layers | Mapping[int, Layers] | None, stages: Sequence[int], early_release: bool
    ) -> None:
        self._early_release = early_release
        self._layers: Mapping[int, Layers] = {}
        if isinstance(layers, Mapping):
            if missing := set(stages) - set(layers):
                raise ValueError(
                    f"Expected the layers of stages {sorted(stages)}, got none for {sorted(missing)}. Give each stage "
                    "its layers, 0 for none."
                )
            self._layers = layers
        elif layers is not None:
            self._layers = dict.fromkeys(stages, layers)

    def __call__(self, pass_or_pair: PassOrPair) -> Sequence[WorkEvent]:
        if not self._layers:
            return passes_in(pass_or_pair)
        passes = {stage_pass.phase: stage_pass for stage_pass in passes_in(pass_or_pair)}
        backward = passes.get(Phase.BACKWARD)
        events = self._chunks(passes.get(Phase.FORWARD), backward)
        if backward is None or backward.kind is PassKind.BACKWARD:
            return events
        is_for_weights = backward.kind is PassKind.WEIGHT_GRADIENT
        return [event for event in events if (event.kind is Kind.WEIGHT_GRADIENT) == is_for_weights]

    def _chunks(self, forward: StagePass | None, backward: StagePass | None) -> list[Event]:
        events = order(
            None if forward is None else self._layers[forward.stage],
            None if backward is None else self._layers[backward.stage],
            forward_microbatch=-1 if forward is None else forward.microbatch,
            backward_microbatch=-1 if backward is None else backward.microbatch,
            early_release=self._early_release,
        )
        stages = {phase: chunk.stage for phase, chunk in zip(Phase, (forward, backward), strict=True) if chunk}
        return [replace(event, stage=stages[event.phase]) for event in work(events)]


def _transfers(pipeline: Pipeline, stage_pass: StagePass) -> Iterator[tuple[int, TransferEvent]]:
    """Both ends of a pass's message with their ranks, if another rank waits for the pass."""
    stage = pipeline.next_stage(stage_pass)
    if stage is None:
        return
    sender, receiver = pipeline.stage_ranks[stage_pass.stage], pipeline.stage_ranks[stage]
    if sender != receiver:
        yield (
            sender,
            TransferEvent(stage_pass.stage, stage_pass.microbatch, stage_pass.phase, TransferAction.SEND, receiver),
        )
        yield receiver, TransferEvent(stage, stage_pass.microbatch, stage_pass.phase, TransferAction.RECEIVE, sender)
