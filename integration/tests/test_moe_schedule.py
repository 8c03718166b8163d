"""A mixture of experts under a schedule, its units gathered and reduced by `UnitResidence`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo  # once here instead of once a rank
from moe_training import (
    LAYERS,
    MICROBATCHES,
    STEPS,
    layers_of,
    microbatches,
    plain_step,
    scheduled_step,
    sharded,
    train,
)

from lamella_engine import FSDPModule, UnitResidence
from lamella_engine.testing import Residency, named_units, require_unit
from lamella_integration.moe import MoE
from lamella_schedule import Event, Kind, Slot, run, run_order
from lamella_testing import run_ranks


@contextmanager
def _counted(model: MoE) -> Iterator[Counter[str]]:
    """Count the gathers and reductions of each unit."""
    counts: Counter[str] = Counter()
    for module in (*layers_of(model), model):
        unit = require_unit(module)
        name = unit.parameters.name or "root"
        for group in unit.parameters.groups:
            inner = group.transports.shard

            class CountingTransport:
                def __init__(self, inner: Any, name: str) -> None:
                    self.inner, self.name = inner, name

                def __getattr__(self, attribute: str) -> Any:
                    if attribute in ("all_gather", "reduce_scatter"):
                        counts[f"{attribute} {self.name}"] += 1
                    return getattr(self.inner, attribute)

            group.transports.shard = CountingTransport(inner, name)
    yield counts


ALL = list(itertools.product(("ZERO1", "ZERO2", "ZERO3"), (2, 4), (False, True), (False, True)))
# With each change, every value in at least one case; all cases take minutes.
SOME = [("ZERO1", 2, False, True), ("ZERO2", 4, True, False), ("ZERO3", 2, True, True)]


@pytest.mark.parametrize(
    ("stage", "world", "is_delayed", "has_shared"),
    [pytest.param(*case, marks=[] if case in SOME else pytest.mark.slow) for case in ALL],
)
def test_losses_and_weights_equal_training_by_hooks(stage: str, world: int, is_delayed: bool, has_shared: bool) -> None:
    def on_each_rank() -> list[int]:
        plain = train(sharded(2, stage, has_shared=has_shared, is_delayed=is_delayed), plain_step)
        learned = sum(plain[:MICROBATCHES]) - sum(plain[(STEPS - 1) * MICROBATCHES : STEPS * MICROBATCHES])
        assert float(learned) > 0.05, "equal bits would prove nothing"
        differing = []
        for early_release in (False, True):
            trace = train(
                sharded(2, stage, has_shared=has_shared, is_delayed=is_delayed),
                scheduled_step,
                early_release=early_release,
            )
            differing.append(sum(not torch.equal(a, b) for a, b in zip(plain, trace, strict=True)))
        return differing

    assert run_ranks(on_each_rank, world) == [[0, 0]] * world


def test_the_results_are_near_a_single_ranks() -> None:
    def alone() -> list[list[torch.Tensor]]:
        model = MoE(LAYERS, has_shared=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        losses = []
        for step in range(STEPS):
            for rank in range(2):
                for batch in microbatches(step, rank):
                    loss = model(batch, 1 / MICROBATCHES)
                    (loss / 2).backward()
                    losses.append((rank, loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        return [[loss for owner, loss in losses if owner == rank] for rank in range(2)]

    def on_two_ranks() -> list[torch.Tensor]:
        model = sharded(2, "ZERO3", has_shared=True, is_delayed=False)
        return train(model, scheduled_step)[: STEPS * MICROBATCHES]

    expected = run_ranks(alone, 1)[0]
    for expected_trace, two_rank_trace in zip(expected, run_ranks(on_two_ranks, 2), strict=True):
        torch.testing.assert_close(two_rank_trace, expected_trace, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("stage", "reductions"), [("ZERO3", MICROBATCHES), ("ZERO1", 1)])
def test_scheduled_units_are_gathered_and_reduced_as_often_as_their_stage_says(stage: str, reductions: int) -> None:
    def on_each_rank() -> tuple[dict[str, int], int, set[int]]:
        model = sharded(2, stage, has_shared=False, is_delayed=False)
        units = [require_unit(layer) for layer in layers_of(model)]
        present: set[int] = set()

        @contextmanager
        def around(_: Event) -> Iterator[None]:
            present.add(sum(unit.weights.num_holds > 0 for unit in units))
            yield

        with _counted(model) as counts:
            scheduled_step(model, microbatches(0), around=around)
        return dict(counts), len(layers_of(model)), present

    for counts, num_layers, present in run_ranks(on_each_rank, 2):
        for name in ("root", *(f"layers.{i}" for i in range(num_layers))):
            groups = 1 if name == "root" else 2  # the experts lie on a mesh of their own
            assert counts[f"reduce_scatter {name}"] == reductions * groups, counts
            passes = counts[f"all_gather {name}"] / groups
            assert passes == 1 if stage == "ZERO1" else MICROBATCHES < passes <= 2 * MICROBATCHES, counts
        assert max(present) <= 4


@dataclass(frozen=True)
class _Budgets:
    """Budgets in layers, and the most layers present."""

    prefetch: int | None
    keep: int
    layers_ahead: int
    num_present: int


@pytest.mark.parametrize(
    ("stage", "cases"),
    [
        (
            "ZERO3",
            [
                _Budgets(prefetch=None, keep=0, layers_ahead=1, num_present=4),
                _Budgets(prefetch=0, keep=0, layers_ahead=1, num_present=3),  # prefetch of one layer, in either pass
                _Budgets(prefetch=2, keep=0, layers_ahead=1, num_present=4),
                _Budgets(prefetch=None, keep=0, layers_ahead=0, num_present=2),
                _Budgets(prefetch=1, keep=3, layers_ahead=1, num_present=4),
            ],
        ),
        ("ZERO1", [_Budgets(prefetch=0, keep=3, layers_ahead=1, num_present=6)]),
    ],
)
def test_the_counted_peak_in_bytes_is_the_computed_one(stage: str, cases: list[_Budgets]) -> None:
    def on_each_rank() -> list[Counter[str]]:
        model = sharded(1, stage, has_shared=False, is_delayed=False, num_layers=6)
        assert isinstance(model, FSDPModule)
        losses, gathers = [], []
        with _counted(model) as counts:
            for budgets in cases:
                before = Counter(counts)
                losses.append(_step_within(model, budgets))
                gathers.append(counts - before)
                model.zero_grad()
        assert all(loss == losses[0] for loss in losses)
        return gathers

    one, other = run_ranks(on_each_rank, 2)
    assert one == other
    if stage == "ZERO3":  # the last layer in forward, first in backward, is kept
        freed, num_kept = (counts["all_gather layers.5"] for counts in (one[0], one[-1]))
        assert freed == 2 * num_kept == 2 * 2 * MICROBATCHES  # experts lie on a mesh of their own


def _step_within(model: MoE, budgets: _Budgets) -> list[torch.Tensor]:
    """Take a step within budgets, and compare the peak with the computed peak."""
    assert isinstance(model, FSDPModule)
    layers = [require_unit(layer) for layer in layers_of(model)]
    root = require_unit(model)
    [nbytes] = {unit.parameters.unsharded_nbytes for unit in layers}
    prefetch = None if budgets.prefetch is None else budgets.prefetch * nbytes
    model.set_options(prefetch_budget=prefetch, keep_budget=budgets.keep * nbytes)
    counted: list[int] = []

    @contextmanager
    def around(_: Event) -> Iterator[None]:
        groups = [group for unit in (*layers, root) for group in unit.parameters.groups]
        counted.append(sum(group.unsharded_weight.flat.untyped_storage().nbytes() for group in groups))
        yield

    losses = scheduled_step(model, microbatches(0), layers_ahead=budgets.layers_ahead, around=around)
    residence = UnitResidence(model, layers_of(model))
    computed = residence.peak_nbytes(run_order(MICROBATCHES, len(layers), num_layers_ahead=budgets.layers_ahead))
    assert max(counted) == computed == root.parameters.unsharded_nbytes + budgets.num_present * nbytes
    assert all(unit.weights.num_holds == 0 for unit in layers)
    return losses


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("ZERO3", Kind.BACKWARD),
        pytest.param("ZERO1", Kind.FORWARD, marks=pytest.mark.slow),
        pytest.param("ZERO1", Kind.BACKWARD, marks=pytest.mark.slow),
        pytest.param("ZERO3", Kind.FORWARD, marks=pytest.mark.slow),
    ],
)
def test_an_exception_in_any_slot_leaves_all_units_at_rest_and_the_next_step_works(stage: str, kind: Kind) -> None:
    def on_each_rank() -> list[str]:
        expected = train(sharded(2, stage, has_shared=True, is_delayed=False), scheduled_step)
        unequal: list[str] = []
        for slot in Slot:
            if slot is Slot.POST:
                continue
            model = sharded(2, stage, has_shared=True, is_delayed=False)

            @contextmanager
            def around(event: Event, slot: Slot = slot) -> Iterator[None]:
                if (event.microbatch, event.slot, event.kind) == (1, slot, kind) and event.layer in (None, 1):
                    raise InterruptedError
                yield

            with pytest.raises(InterruptedError):
                scheduled_step(model, microbatches(0), around=around)
            for _, unit in named_units(model):
                assert unit.weights.num_holds == 0
                assert not unit.parameters.has_gradients
                assert unit.weights.residency in (Residency.SHARDED, Residency.KEPT)
            model.zero_grad()
            trace = train(model, scheduled_step)
            if not all(torch.equal(a, b) for a, b in zip(expected, trace, strict=True)):
                unequal.append(slot)
        return unequal

    assert run_ranks(on_each_rank, 2) == [[], []]


@pytest.mark.parametrize("stage", ["ZERO1", "ZERO3"])
def test_one_residence_takes_steps_of_any_number_of_microbatches(stage: str) -> None:
    def on_each_rank() -> None:
        reference, model = (sharded(2, stage, has_shared=False, is_delayed=False) for _ in range(2))
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.2) for network in (reference, model)]
        residence = UnitResidence(model, layers_of(model))
        for num in (4, 3, 4):
            batches = microbatches(num)[:num]
            losses = run([model.chunk(batch, 1 / num) for batch in batches], residence=residence, device="cpu")
            assert losses == plain_step(reference, batches)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(on_each_rank, 2)


def test_a_wrong_loss_returns_kept_units_to_rest() -> None:
    def on_each_rank() -> None:
        model: Any = sharded(2, "ZERO3", has_shared=False, is_delayed=False)
        [*_, (_, layer)] = named_units(model)
        model.set_options(keep_budget=LAYERS * layer.parameters.unsharded_nbytes)
        residence = UnitResidence(model, layers_of(model))
        chunks = [model.chunk(batch, 1 / MICROBATCHES) for batch in microbatches(0)]
        wrong = [*chunks[:1], replace(chunks[1], postprocess=lambda x: x), *chunks[2:]]
        with pytest.raises(ValueError, match="one 0-D loss .*in microbatch 1"):
            run(wrong, residence=residence, device="cpu")
        assert all(unit.weights.residency is Residency.SHARDED for _, unit in named_units(model))
        model.zero_grad()
        run(chunks, residence=residence, device="cpu")

    run_ranks(on_each_rank, 2)


def test_wrong_residences_are_refused() -> None:
    def on_each_rank() -> None:
        model = sharded(2, "ZERO3", has_shared=False, is_delayed=False)
        layers = layers_of(model)
        with pytest.raises(ValueError, match=r"Expected layer 1 to be a unit, got a Linear that is none"):
            UnitResidence(model, [layers[0], torch.nn.Linear(2, 2)])
        chunks = [model.chunk(microbatches(0)[0], 1.0)]
        with pytest.raises(
            ValueError, match=r"Expected a unit for each layer of the schedule, got 2 units and layer 2"
        ):
            run(chunks, residence=UnitResidence(model, layers[:2]))

    run_ranks(on_each_rank, 2)
