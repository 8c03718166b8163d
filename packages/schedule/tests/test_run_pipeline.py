"""Pipelines on four ranks: losses and weights of one rank, bit by bit, under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alive import Alive
from pipeline_toy import BORDERS, StagedModel, microbatches
from pipelines import SCHEDULES

from lamella_schedule import (
    Action,
    Event,
    Lane,
    LayerSlots,
    ModelChunk,
    PassKind,
    PassPair,
    Pipeline,
    PipelineTimeline,
    ResidenceEvent,
    Slot,
    StagePass,
    Stopwatch,
    bars,
    peak,
    peak_parameters,
    pipeline,
    rank_events,
    run_pipeline,
    work,
)
from lamella_testing import run_ranks

STEPS, MICROBATCHES = 3, 8


def _alone(num_stages: int, is_delayed: bool) -> tuple[list[torch.Tensor], StagedModel]:
    """The losses and the model of one rank without a pipeline."""
    model = StagedModel(num_stages, is_delayed=is_delayed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        for tokens in microbatches(step, MICROBATCHES):
            loss = model(tokens, 1 / MICROBATCHES)
            loss.backward()
            model.finish_delayed()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def _piped(ours: Pipeline, is_delayed: bool, **how: Any) -> tuple[list[torch.Tensor], StagedModel]:
    """The same on this rank of a pipeline, which trains the rank's stages alone."""
    model = StagedModel(ours.num_stages, is_delayed=is_delayed)
    optimizer = torch.optim.SGD(model.of_stages(ours.stages_of(dist.get_rank())), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = microbatches(step, MICROBATCHES)

        def chunk(stage: int, microbatch: int, batches: list[torch.Tensor] = batches) -> ModelChunk:
            return model.stage(stage, batches[microbatch], 1 / MICROBATCHES)

        losses += run_pipeline(ours, chunk, BORDERS, **how)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize("is_delayed", [False, True])
def test_four_ranks_train_as_one_under_every_schedule(is_delayed: bool) -> None:
    def on_each_rank() -> list[str]:
        unequal = []
        for schedule in SCHEDULES:
            ours = pipeline(schedule, 4, MICROBATCHES)
            expected, reference = _alone(ours.num_stages, is_delayed)
            assert sum(expected[:MICROBATCHES]) - sum(expected[-MICROBATCHES:]) > 0.1, "equal bits would prove nothing"
            losses, model = _piped(ours, is_delayed)
            stages = ours.stages_of(dist.get_rank())
            if ours.num_stages - 1 not in stages:
                expected = []
            pairs = zip([*expected, *reference.of_stages(stages)], [*losses, *model.of_stages(stages)], strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                unequal.append(schedule)
            untouched = StagedModel(ours.num_stages, is_delayed=is_delayed)
            trained = {id(parameter) for parameter in model.of_stages(stages)}
            for parameter, start in zip(model.parameters(), untouched.parameters(), strict=True):
                assert id(parameter) in trained or torch.equal(parameter, start)
        return unequal

    assert run_ranks(on_each_rank, 4) == [[]] * 4


def _chunk(model: StagedModel, batches: list[torch.Tensor], stage: int, microbatch: int) -> ModelChunk:
    return model.stage(stage, batches[microbatch], 1 / len(batches))


def test_an_order_of_ones_own_trains_alike_and_returns_losses_by_microbatch() -> None:
    forwards, (late, early) = [StagePass(0, PassKind.FORWARD, i) for i in (1, 0)], (1, 0)
    inputs, weights = (StagePass(0, kind, late) for kind in (PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT))
    last = StagePass(0, PassKind.BACKWARD, early)
    orders = (
        (forwards[0], inputs, forwards[1], weights, last),
        (forwards[0], PassPair(forwards[1], inputs), weights, last),
    )

    def on_each_rank() -> bool:
        batches = microbatches(0, 2)
        expected = [StagedModel(1, is_delayed=False)(tokens, 0.5).detach() for tokens in batches]
        assert not torch.equal(*expected)
        found = []
        for passes in orders:
            model = StagedModel(1, is_delayed=True)
            losses = run_pipeline(Pipeline((passes,)), partial(_chunk, model, batches), BORDERS)
            assert all(map(torch.equal, losses, expected))
            found.append([parameter.grad for parameter in model.parameters()])
        return all(map(torch.equal, *found))

    assert run_ranks(on_each_rank, 1) == [True]


def test_events_run_in_the_order_of_the_data() -> None:
    ours = pipeline("DualPipeV", 2, MICROBATCHES)

    def on_each_rank() -> bool:
        seen: list[Event] = []

        @contextmanager
        def around(event: Event) -> Iterator[None]:
            seen.append(event)
            yield

        _, model = _piped(ours, True, around=around)
        plans = {stage: model.stage(stage, microbatches(0, 1)[0], 1.0).plans for stage in range(4)}
        return tuple(seen) == work(rank_events(ours, dist.get_rank(), plans)) * STEPS

    assert run_ranks(on_each_rank, 2) == [True, True]


class CountingResidence:
    """A residence of a stage whose parameters have no bytes but from their acquisition to the end of their use."""

    def __init__(self, owners: dict[int | None, list[torch.Tensor]]) -> None:
        self._owners = owners
        self._at_rest = {id(p): p.detach().clone() for parameters in owners.values() for p in parameters}
        self._num_users = dict.fromkeys(owners, 0)
        self.present = self.highest = 0
        for owner in owners:
            self._free(owner)

    def begin_step(self, num_microbatches: int) -> None:
        assert num_microbatches == MICROBATCHES

    def acquire(self, event: ResidenceEvent) -> None:
        if not self._num_users[event.layer]:
            for parameter in self._owners[event.layer]:
                saved = self._at_rest[id(parameter)]
                parameter.untyped_storage().resize_(saved.nbytes)
                parameter.data.copy_(saved)
            self.present += self.nbytes(event.layer)
            self.highest = max(self.highest, self.present)
        self._num_users[event.layer] += 1

    def used(self, event: ResidenceEvent) -> None:
        assert self._num_users[event.layer]

    def finished(self, event: ResidenceEvent) -> None:
        self._num_users[event.layer] -= 1
        if not self._num_users[event.layer]:
            self._free(event.layer)
            self.present -= self.nbytes(event.layer)

    def drop(self) -> None:
        raise AssertionError("nothing has failed")

    def nbytes(self, owner: int | None) -> int:
        return sum(self._at_rest[id(parameter)].nbytes for parameter in self._owners[owner])

    def _free(self, owner: int | None) -> None:
        for parameter in self._owners[owner]:
            parameter.untyped_storage().resize_(0)


def _residences(model: StagedModel, stages: tuple[int, ...]) -> dict[int, CountingResidence]:
    residences = {}
    for stage in stages:
        layer = list(model.layers[stage].parameters())
        inner = {id(parameter) for parameter in layer}
        around = [parameter for parameter in model.of_stages((stage,)) if id(parameter) not in inner]
        residences[stage] = CountingResidence({None: list(around), 0: list(layer)})
    return residences


def _nbytes(residence: CountingResidence, event: ResidenceEvent) -> float:
    return residence.nbytes(event.layer)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_parameters_are_needed_only_where_residences_keep_them(schedule: str) -> None:
    ours = pipeline(schedule, 2, MICROBATCHES)

    def on_each_rank() -> tuple[bool, dict[int, int], dict[int, int]]:
        stages = ours.stages_of(dist.get_rank())
        gradients, highest, computed = [], {}, {}
        for is_kept in (True, False):
            model = StagedModel(ours.num_stages, is_delayed=True)
            batches = microbatches(0, MICROBATCHES)

            def chunk(
                stage: int, microbatch: int, model: StagedModel = model, batches: list[torch.Tensor] = batches
            ) -> ModelChunk:
                return model.stage(stage, batches[microbatch], 0.5)

            residences = None if is_kept else _residences(model, stages)
            run_pipeline(ours, chunk, BORDERS, residences=residences)
            gradients.append([parameter.grad for parameter in model.of_stages(stages)])
            for stage, residence in (residences or {}).items():
                assert not residence.present
                highest[stage] = residence.highest
                plans = {one: chunk(one, 0).plans for one in stages}
                events = [
                    event
                    for event in rank_events(ours, dist.get_rank(), plans)
                    if isinstance(event, ResidenceEvent) and event.stage == stage
                ]
                computed[stage] = round(peak_parameters(events, partial(_nbytes, residence)))
        is_equal = all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        return is_equal, highest, computed

    for is_equal, highest, computed in run_ranks(on_each_rank, 2):
        assert is_equal
        assert highest == computed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_tensors_are_alive_as_computed(schedule: str) -> None:
    ours = pipeline(schedule, 2, MICROBATCHES)

    def on_each_rank() -> tuple[int, float]:
        alive = Alive()
        highest = 0

        def slot(x: torch.Tensor) -> torch.Tensor:
            out = torch.tanh(x)  # saves its output
            alive.note(out)
            return out

        def chunk(stage: int, microbatch: int) -> ModelChunk:
            is_last = stage == ours.num_stages - 1
            return ModelChunk(
                (lambda x: x) if stage else (lambda: torch.ones(4, requires_grad=True)),
                [LayerSlots(pre=slot, experts=slot)] * (1 + stage),
                (lambda x: x.sum()) if is_last else (lambda x: x * 1.0),  # a message of another storage
            )

        @contextmanager
        def around(event: Event) -> Iterator[None]:
            nonlocal highest
            yield
            highest = max(highest, alive.num)

        rank = dist.get_rank()
        run_pipeline(ours, chunk, [torch.empty(4, device="meta")], around=around)
        assert alive.num == 0
        plans = {stage: chunk(stage, 0).plans for stage in ours.stages_of(rank)}
        noted = (Slot.PRE, Slot.EXPERTS)
        return highest, peak(rank_events(ours, rank, plans), lambda event: float(event.slot in noted))

    for highest, computed in run_ranks(on_each_rank, 2):
        assert highest == computed > 0


def test_a_failure_drops_residences_and_tensors_and_the_next_step_works() -> None:
    ours = pipeline("Interleaved1F1B", 1, MICROBATCHES)

    def on_each_rank() -> None:
        model = StagedModel(ours.num_stages, is_delayed=True)
        batches = microbatches(0, MICROBATCHES)

        def chunk(stage: int, microbatch: int) -> ModelChunk:
            return model.stage(stage, batches[microbatch], 0.5)

        @contextmanager
        def around(event: Event) -> Iterator[None]:
            if (event.stage, event.microbatch, event.phase) == (1, 3, "backward"):
                raise InterruptedError
            yield

        class Dropping:
            num_dropped = 0

            def begin_step(self, num_microbatches: int) -> None: ...

            def acquire(self, event: ResidenceEvent) -> None:
                assert event.action is Action.ACQUIRE

            def used(self, event: ResidenceEvent) -> None: ...

            def finished(self, event: ResidenceEvent) -> None: ...

            def drop(self) -> None:
                self.num_dropped += 1

        residences = {stage: Dropping() for stage in (0, 1)}
        with pytest.raises(InterruptedError):
            run_pipeline(ours, chunk, BORDERS, residences=residences, around=around)
        assert [residence.num_dropped for residence in residences.values()] == [1, 1]
        for module in model.modules():
            getattr(module, "store", []).clear()
        model.zero_grad()
        assert len(run_pipeline(ours, chunk, BORDERS, residences=residences)) == MICROBATCHES

    run_ranks(on_each_rank, 1)


def test_a_stopwatch_measures_every_slot_on_every_rank() -> None:
    ours = pipeline("1F1B", 2, MICROBATCHES)

    def on_each_rank() -> Any:
        watch = Stopwatch("cpu")
        _piped(ours, False, around=watch)
        return watch.timeline

    timeline = PipelineTimeline(tuple(run_ranks(on_each_rank, 2)))
    assert [len(of_rank.spans) for of_rank in timeline.ranks] == [STEPS * MICROBATCHES * 8] * 2
    assert all(of_rank.busy(Lane.COMPUTE) > 0 for of_rank in timeline.ranks)
    assert bars(timeline).count("rank") == 2


def _refused(call: Callable[[Callable[[int, int], ModelChunk]], object], words: str) -> None:
    model = StagedModel(2, is_delayed=False)
    [tokens] = microbatches(0, 1)

    def chunk(stage: int, microbatch: int) -> ModelChunk:
        return model.stage(stage, tokens, 1.0)

    with pytest.raises(ValueError, match=words):
        call(chunk)


def test_pipelines_with_unfit_ranks_residences_losses_or_layers_are_refused() -> None:
    forward, backward = PassKind.FORWARD, PassKind.BACKWARD
    passes = ((0, forward), (1, forward), (1, backward), (0, backward))
    two_stages = Pipeline((tuple(StagePass(stage, kind, 0) for stage, kind in passes),))

    def on_each_rank() -> None:
        def with_loss(loss: Callable[..., Any]) -> Callable[[Any], object]:
            return lambda chunk: run_pipeline(
                two_stages, lambda *key: replace(chunk(*key), postprocess=loss) if key[0] else chunk(*key), BORDERS
            )

        _refused(lambda chunk: run_pipeline(pipeline("1F1B", 2, 2), chunk, BORDERS), "a group of 2 ranks .* of 1")
        _refused(
            lambda chunk: run_pipeline(two_stages, chunk, BORDERS, residences={}),
            r"stages \[0, 1\], got residences for \[\]",
        )
        _refused(lambda chunk: run_pipeline(two_stages, chunk, BORDERS[:1]), "for stage 1 and microbatch 0 in forward")
        _refused(with_loss(lambda x: x), "one 0-D loss .* in microbatch 0")
        _refused(
            lambda chunk: run_pipeline(
                two_stages,
                lambda *key: chunk(*key) if key[0] else replace(chunk(*key), postprocess=lambda x: (x, 3)),
                BORDERS,
            ),
            "tensors from stage 0, got Tensor, int",
        )
        _refused(
            lambda chunk: run_pipeline(
                pipeline("GPipe", 1, 2),
                lambda stage, microbatch: replace(
                    chunk(1, microbatch),
                    preprocess=lambda: torch.ones(6, 8, requires_grad=True),
                    postprocess=lambda x: x.sum(),
                    layers=[*chunk(0, 0).layers] * (1 + microbatch),
                ),
                BORDERS,
            ),
            "layers of microbatch 0, 1 in number, got 2",
        )

    run_ranks(on_each_rank, 1)
