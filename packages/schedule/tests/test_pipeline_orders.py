"""Orders of pipelines: torch's, pass by pass; each pass once and behind what it needs; few microbatches in flight."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from pipelines import SCHEDULES, pipelines
from torch_schedules import SINGLE, V_SHAPED, passes_of_torch

from lamella_schedule import PassKind, PassPair, Pipeline, StagePass, passes_in, pipeline

_F, _B, _I, _W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT


def _sizes(schedule: str) -> list[tuple[int, int, int]]:
    """Ranks, microbatches and stages of a rank: all up to small numbers, and a few large ones."""
    if schedule in SINGLE:
        nums_of_stages: tuple[int, ...] = (1,)
    else:
        nums_of_stages = (2,) if schedule in V_SHAPED else (1, 2, 3)
    small = product(range(1, 6), range(1, 13), nums_of_stages)
    return [*small, *((8, num, nums_of_stages[-1]) for num in (16, 24, 64))]


def _pipeline(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Pipeline | None:
    """None for numbers that the schedule refuses."""
    try:
        return pipeline(schedule, num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
    except ValueError:
        return None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_rank_runs_the_passes_that_torch_runs(schedule: str) -> None:
    num_equal = 0
    for num_ranks, num_microbatches, stages_per_rank in _sizes(schedule):
        ours = _pipeline(schedule, num_ranks, num_microbatches, stages_per_rank)
        if schedule == "1F1B" and num_microbatches < num_ranks:
            assert ours is not None  # torch refuses fewer microbatches than stages
            continue
        for rank in range(num_ranks):
            try:
                expected = passes_of_torch(schedule, num_ranks, num_microbatches, stages_per_rank, rank)
            except ValueError:
                assert ours is None, "a number that torch refuses was taken"
                break
            assert ours is not None, "a number that torch takes was refused"
            assert [str(one) for item in ours.orders[rank] for one in passes_in(item)] == expected
            num_equal += 1
    assert num_equal >= 100


@given(pipelines())
def test_every_pipeline_pass_runs_once_after_its_dependencies(ours: Pipeline) -> None:
    place: dict[StagePass, int] = {}
    for i, (_, item) in enumerate(ours.global_order()):
        for one in passes_in(item):
            assert one not in place
            place[one] = i
    for rank, order in enumerate(ours.orders):  # the global order has each rank's passes in the rank's order
        places = [place[passes_in(item)[0]] for item in order]
        assert places == sorted(places)
        assert {one.stage for item in order for one in passes_in(item)} == set(ours.stages_of(rank))
    for stage, microbatch in product(range(ours.num_stages), range(ours.num_microbatches)):
        forward = place[StagePass(stage, _F, microbatch)]
        backward = [place[one] for kind in (_B, _I) if (one := StagePass(stage, kind, microbatch)) in place]
        assert len(backward) == 1 and forward < backward[0]
        if stage:
            assert place[StagePass(stage - 1, _F, microbatch)] < forward
            before = [place[one] for kind in (_B, _I) if (one := StagePass(stage - 1, kind, microbatch)) in place]
            assert backward < before
        assert (StagePass(stage, _W, microbatch) in place) == (StagePass(stage, _I, microbatch) in place)
        if StagePass(stage, _W, microbatch) in place:
            assert place[StagePass(stage, _W, microbatch)] > backward[0]


@given(pipelines())
def test_gradients_of_a_stage_accumulate_in_the_order_of_the_microbatches(ours: Pipeline) -> None:
    for kinds in ((_F,), (_B, _I), (_B, _W)):
        for stage in range(ours.num_stages):
            order = [
                one.microbatch
                for item in ours.orders[ours.stage_ranks[stage]]
                for one in passes_in(item)
                if one.stage == stage and one.kind in kinds
            ]
            assert order == list(range(ours.num_microbatches))


def _most_in_flight(ours: Pipeline, rank: int, until: tuple[PassKind, ...]) -> int:
    """The most forwards on a rank whose backward is not over."""
    present = highest = 0
    for one in (one for item in ours.orders[rank] for one in passes_in(item)):
        present += (one.kind is _F) - (one.kind in until)
        highest = max(highest, present)
    return highest


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 4), (2, 4), (4, 8), (4, 16), (8, 32)])
def test_as_many_activations_are_alive_as_the_papers_say(num_ranks: int, num_microbatches: int) -> None:
    def on_ranks(schedule: str, until: tuple[PassKind, ...] = (_B, _W)) -> list[int]:
        ours = pipeline(schedule, num_ranks, num_microbatches)
        return [_most_in_flight(ours, rank, until) for rank in range(num_ranks)]

    assert on_ranks("GPipe") == [num_microbatches] * num_ranks
    assert on_ranks("1F1B") == [num_ranks - rank for rank in range(num_ranks)]
    # Two stages of a rank hold half a rank's layers each. A V keeps every rank at 1F1B's peak of the first rank.
    assert on_ranks("ZBVZeroBubble") == [2 * num_ranks] * num_ranks
    assert max(on_ranks("DualPipeV")) == 2 * num_ranks + 1
    # Delayed weight gradients of zero bubbles cost the last ranks what 1F1B saves there.
    zero_bubble = pipeline("InterleavedZeroBubble", num_ranks, num_microbatches, stages_per_rank=1)
    assert [_most_in_flight(zero_bubble, rank, (_W,)) for rank in range(num_ranks)] == [num_ranks] * num_ranks


def test_pairs_are_forwards_beside_backwards_of_the_other_stage() -> None:
    ours = pipeline("DualPipeV", 4, 10)
    pairs = [item for order in ours.orders for item in order if isinstance(item, PassPair)]
    assert len(pairs) == 2 * sum(10 - 8 + rank + 1 for rank in range(4)) - 1 + 3 + 2 + 1
    for pair in pairs:
        assert (pair.forward.kind, pair.backward.kind) == (_F, _B)
        assert pair.forward.stage + pair.backward.stage == ours.num_stages - 1
        assert pair.forward.microbatch > pair.backward.microbatch


def test_a_pipeline_is_text_in_torchs_form() -> None:
    assert str(pipeline("1F1B", 2, 3)).splitlines() == [
        "rank 0  0F0 0F1 0B0 0F2 0B1 0B2",
        "rank 1  1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert str(PassPair(StagePass(0, _F, 3), StagePass(3, _I, 1))) == "(0F3;3I1)"


def _order(text: str) -> tuple[StagePass, ...]:
    kinds = {"F": _F, "B": _B, "I": _I, "W": _W}
    return tuple(StagePass(int(one[0]), kinds[one[1]], int(one[2:])) for one in text.split())


def test_a_hand_written_order_of_passes_is_a_pipeline() -> None:
    ours = Pipeline((_order("0F0 0F1 0I0 0I1 0W1 0W0"), _order("1F0 1F1 1B0 1B1")))
    assert (ours.num_ranks, ours.num_stages, ours.num_microbatches) == (2, 2, 2)
    items = [item for _, item in ours.global_order()]
    assert all(items.index(one) < items.index(other) for one, other in pairwise(_order("0F0 1F0 1B0 0I0 0W0")))


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ((), "got no rank"),
        (("0F0 0B0", ""), "got none on rank 1"),
        (("0F0 0B0", "2F0 2B0"), r"stages 0 to 1, got \[0, 2\]"),
        (("0F0 0B0", "0F1 0B1"), r"stage 0 on ranks \[0, 1\]"),
        (("0F0 0F0 0B0",), "0F0 2 times"),
        (("0F0 0F1 0B0",), "stage 0 and microbatch 1, got forward"),
        (("0F0 0I0",), "microbatch 0, got forward, input gradient"),
        (("0F0 0B0 0W0",), "got backward, forward, weight gradient"),
        (("0F0 0B0 0F-1 0B-1",), "microbatches from 0 on, got 0F-1"),
        (("0B0 0F0",), "rank 0 at 0B0"),
        (("0F0 0W0 0I0",), "rank 0 at 0W0"),
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "ranks that wait: rank 0 at 0B0, rank 1 at 1F1"),
    ],
)
def test_orders_that_cannot_run_are_refused(orders: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pipeline(tuple(map(_order, orders)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pipeline("2F2B", 2, 2), "Expected one of the schedules GPipe, 1F1B.* got '2F2B'"),
        (lambda: pipeline("1F1B", 0, 2), "num_ranks to be 1 or more, got 0"),
        (lambda: pipeline("1F1B", 2, 0), "num_microbatches to be 1 or more, got 0"),
        (lambda: pipeline("1F1B", 2, 2, stages_per_rank=2), "Expected 1 for stages_per_rank of 1F1B, got 2"),
        (lambda: pipeline("DualPipeV", 2, 4, stages_per_rank=3), "Expected 2 for stages_per_rank of DualPipeV, got 3"),
        (lambda: pipeline("Interleaved1F1B", 2, 4, stages_per_rank=0), "1 or more for stages_per_rank"),
        (lambda: pipeline("Interleaved1F1B", 2, 5), "each of the 2 rounds, got num_microbatches=5"),
        (lambda: pipeline("DualPipeV", 2, 3), "each of the 4 stages of DualPipeV, got num_microbatches=3"),
    ],
)
def test_numbers_that_a_schedule_does_not_take_are_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(("first", "second"), [(_B, _B), (_F, _F), (_F, _W), (_I, _F)])
def test_pairs_other_than_a_forward_and_a_backward_are_refused(first: PassKind, second: PassKind) -> None:
    with pytest.raises(ValueError, match=r"a forward and a backward or input gradient, got \(0.1;0.0\)"):
        PassPair(StagePass(0, first, 1), StagePass(0, second, 0))


def test_pairs_count_in_the_check_of_passes() -> None:
    pair = PassPair(StagePass(0, _F, 1), StagePass(0, _B, 0))
    ours = Pipeline(((StagePass(0, _F, 0), pair, StagePass(0, _B, 1)),))
    assert Counter(one.kind for order in ours.orders for item in order for one in passes_in(item)) == {_F: 2, _B: 2}
    with pytest.raises(ValueError, match="0F0 2 times"):
        Pipeline(((StagePass(0, _F, 0), PassPair(StagePass(0, _F, 0), StagePass(0, _B, 0))),))
