"""The orders of torch's pipeline schedules, as data: GPipe, 1F1B, interleaved, zero bubbles and DualPipe's V.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2023 (zero bubbles, V),
DeepSeek-AI 2024 (DualPipe); `torch.distributed.pipelining.schedules` for the orders, pass by pass.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Final

from lamella_schedule._passes import PassKind, PassOrPair, PassPair, StagePass
from lamella_schedule._pipeline import Pipeline

_F, _B, _I, _W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT


def pipeline(schedule: str, num_ranks: int, num_microbatches: int, *, stages_per_rank: int | None = None) -> Pipeline:
    """Order the passes of a pipeline as torch's schedule of the same name does.

    Args:
        schedule: A name of `torch.distributed.pipelining.schedules.get_schedule_class`: "GPipe", "1F1B",
            "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        num_ranks: Number of ranks along the pipeline.
        num_microbatches: Number of microbatches in the step. "DualPipeV" needs one for each stage. The interleaved
            schedules run in rounds of `num_ranks` microbatches or a few more, as many in each round.
        stages_per_rank: Number of stages of each rank, for the two interleaved schedules; 2 by default there. Stage i
            is on rank i modulo `num_ranks`. In the V of "ZBVZeroBubble" and "DualPipeV" two stages go down the ranks
            and back up; "GPipe" and "1F1B" have one.

    Returns:
        The order of each rank. Backwards of a stage run in the order of the microbatches: gradients accumulate as
        without a pipeline.

    Raises:
        ValueError: Another name; a number below 1; or numbers that the schedule does not take.
    """
    if schedule not in _SCHEDULES:
        raise ValueError(f"Expected one of the schedules {', '.join(_SCHEDULES)}, got {schedule!r}. Give one of these.")
    for name, number in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if number < 1:
            raise ValueError(f"Expected {name} to be 1 or more, got {number}. Give a number of 1 or more.")
    order, num_stages = _SCHEDULES[schedule]
    if stages_per_rank is None:
        stages_per_rank = num_stages or 2
    if stages_per_rank < 1 or num_stages not in (None, stages_per_rank):
        raise ValueError(
            f"Expected {num_stages or '1 or more'} for stages_per_rank of {schedule}, got {stages_per_rank}. Leave "
            "stages_per_rank out, or give another schedule."
        )
    return Pipeline(
        tuple(tuple(order(rank, num_ranks, num_microbatches, stages_per_rank)) for rank in range(num_ranks))
    )


def _gpipe(rank: int, num_ranks: int, num_microbatches: int, _: int) -> Iterable[PassOrPair]:
    return [StagePass(rank, kind, i) for kind in (_F, _B) for i in range(num_microbatches)]


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int, _: int) -> Iterable[PassOrPair]:
    forwards = [StagePass(rank, _F, i) for i in range(num_microbatches)]
    backwards = [StagePass(rank, _B, i) for i in range(num_microbatches)]
    return _alternating(forwards, backwards, num_ranks - 1 - rank)


def _interleaved(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Iterable[PassOrPair]:
    forwards, backwards, round_size = _rounds(rank, num_ranks, num_microbatches, stages_per_rank, _B)
    return _alternating(forwards, backwards, (stages_per_rank - 1) * round_size + 2 * (num_ranks - 1 - rank))


def _zero_bubble(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Iterable[PassOrPair]:
    forwards, backwards, round_size = _rounds(rank, num_ranks, num_microbatches, stages_per_rank, _I)
    order = _alternating(forwards, backwards, (stages_per_rank - 1) * round_size + num_ranks - 1 - rank)
    # Weight gradients follow `rank` input gradients later, in the time in which 1F1B waits.
    weights = [StagePass(stage_pass.stage, _W, stage_pass.microbatch) for stage_pass in backwards]
    passes: list[PassOrPair] = []
    num_backwards = 0
    for stage_pass in order:
        passes.append(stage_pass)
        if stage_pass.kind is _I:
            num_backwards += 1
            if num_backwards > rank:
                passes.append(weights[num_backwards - 1 - rank])
    return passes + weights[max(num_backwards - rank, 0) :]


def _v(rank: int, num_ranks: int, num_microbatches: int, _: int) -> Iterable[PassOrPair]:
    """Zero bubbles in a V. A step too short for the V is the order of a longer step, with the excess left out."""
    down, up = rank, 2 * num_ranks - 1 - rank
    writer = _PassWriter()
    writer.write((down, _F), times=2 * (num_ranks - rank) - 1)
    writer.write((up, _F), (down, _F), times=rank)
    writer.write((up, _F), (up, _I), (up, _W), times=num_ranks - rank)
    num_in_steady_order = max(2 * num_ranks - 1, num_microbatches)
    while writer.count(up, _F) < num_in_steady_order:
        if writer.count(down, _F) < num_in_steady_order:
            writer.write((down, _F))
        writer.write((down, _I), (down, _W), (up, _F), (up, _I), (up, _W))
    writer.write((down, _I), (up, _I), times=rank)
    writer.write((down, _I), (down, _W), times=num_ranks - rank)
    for stage in (up, down):
        writer.write((stage, _W), times=writer.count(stage, _I) - writer.count(stage, _W))
    return [
        stage_pass
        for stage_pass in writer.passes
        if isinstance(stage_pass, StagePass) and stage_pass.microbatch < num_microbatches
    ]


def _dual_pipe_v(rank: int, num_ranks: int, num_microbatches: int, _: int) -> Iterable[PassOrPair]:
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"Expected a microbatch for each of the {2 * num_ranks} stages of DualPipeV, got num_microbatches="
            f"{num_microbatches}. Give more microbatches, or fewer ranks."
        )
    down, up = rank, 2 * num_ranks - 1 - rank
    num_after = num_ranks - 1 - rank  # ranks further down
    writer = _PassWriter()
    writer.write((down, _F), times=2 * num_after)
    writer.write((down, _F), (up, _F), times=rank + 1)
    for _ in range(num_after):
        writer.write((up, _I))
        writer.weight_gradient()
        writer.write((up, _F))
    for i in range(num_microbatches - 2 * num_ranks + rank + 1):
        if i == 0 and rank == num_ranks - 1:
            writer.write((down, _F), (up, _B))  # the ranks above wait for the backward
        else:
            writer.pair(down, up)
        writer.pair(up, down)
    for _ in range(num_after):
        writer.write((up, _B))
        writer.pair(up, down)
    # From the middle of the last backwards on, weight gradients wait for the end.
    backwards = [stage for _ in range(rank + 1) for stage in (up, down)]
    num_whole = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    writer.write(*((stage, _B if i < num_whole else _I) for i, stage in enumerate(backwards)))
    for _ in range(num_after):
        writer.weight_gradient()
        writer.write((down, _I))
    for _ in range(rank + 1):
        writer.weight_gradient()
    return writer.passes


def _rounds(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int, backward: PassKind
) -> tuple[list[StagePass], list[StagePass], int]:
    """A rank's forwards and backwards, a round of microbatches after another, and the size of a round."""
    num_rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_rounds:
        raise ValueError(
            f"Expected as many microbatches in each of the {num_rounds} rounds, got num_microbatches="
            f"{num_microbatches}. Give a multiple of {num_rounds}."
        )
    round_size = num_microbatches // num_rounds
    stages = [local * num_ranks + rank for local in range(stages_per_rank)]

    def passes(stages: list[int], kind: PassKind) -> list[StagePass]:
        return [
            StagePass(stage, kind, i * round_size + j)
            for i in range(num_rounds)
            for stage in stages
            for j in range(round_size)
        ]

    return passes(stages, _F), passes(stages[::-1], backward), round_size


def _alternating(forwards: list[StagePass], backwards: list[StagePass], num_warmup: int) -> list[StagePass]:
    """Some forwards, then a forward and a backward in turn, then the rest of the backwards."""
    pairs = zip_longest(forwards[num_warmup:], backwards)
    return forwards[:num_warmup] + [stage_pass for pair in pairs for stage_pass in pair if stage_pass is not None]


class _PassWriter:
    """Writes passes, each of the next microbatch of its stage and kind."""

    def __init__(self) -> None:
        self.passes: list[PassOrPair] = []
        self._counts: Counter[tuple[int, PassKind]] = Counter()
        self._delayed: deque[int] = deque()  # stages of weight gradients to come

    def count(self, stage: int, kind: PassKind) -> int:
        return self._counts[stage, kind]

    def write(self, *works: tuple[int, PassKind], times: int = 1) -> None:
        self.passes += [self._next(*work) for _ in range(times) for work in works]

    def pair(self, forward: int, backward: int) -> None:
        self.passes.append(PassPair(self._next(forward, _F), self._next(backward, _B)))

    def weight_gradient(self) -> None:
        """Write the oldest delayed weight gradient, if there is one."""
        if self._delayed:
            self.write((self._delayed.popleft(), _W))

    def _next(self, stage: int, kind: PassKind) -> StagePass:
        # A whole backward is both parts of one microbatch.
        microbatch = self._counts[stage, _I if kind is _B else kind]
        self._counts.update([(stage, _I), (stage, _W)] if kind is _B else [(stage, kind)])
        if kind is _I:
            self._delayed.append(stage)
        return StagePass(stage, kind, microbatch)


_SCHEDULES: Final[dict[str, tuple[Callable[[int, int, int, int], Iterable[PassOrPair]], int | None]]] = {
    "GPipe": (_gpipe, 1),
    "1F1B": (_one_f_one_b, 1),
    "Interleaved1F1B": (_interleaved, None),
    "InterleavedZeroBubble": (_zero_bubble, None),
    "ZBVZeroBubble": (_v, 2),
    "DualPipeV": (_dual_pipe_v, 2),
}
