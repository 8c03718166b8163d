"""A pipeline as data: the passes of each rank in the host's order, and the checks of all ranks' orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lamella_schedule._passes import PassKind, PassOrPair, StagePass, passes_in

_BACKWARDS = ((PassKind.BACKWARD,), (PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT))


@dataclass(frozen=True)
class Pipeline:
    """The order of passes on each rank, of `pipeline` or of a caller: both are checked.

    Attributes:
        orders: The passes of each rank, in the host's order.

    Raises:
        ValueError: A stage on two ranks; a pass missing or twice; a negative microbatch; or a circle of waiting ranks.
    """

    orders: tuple[tuple[PassOrPair, ...], ...]

    def __post_init__(self) -> None:
        _check_stages(self)
        _check_passes(self)
        for _ in self.global_order():
            pass

    @property
    def num_ranks(self) -> int:
        """Number of ranks along the pipeline."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches in the step."""
        return 1 + max(stage_pass.microbatch for _, stage_pass in self._passes())

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        ranks = {stage_pass.stage: rank for rank, stage_pass in self._passes()}
        return tuple(ranks[stage] for stage in sorted(ranks))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def next_stage(self, stage_pass: StagePass) -> int | None:
        """Return the stage that waits for a pass; None after the last forward, the first backward, and weights."""
        if not stage_pass.sends:
            return None
        stage = stage_pass.stage + (1 if stage_pass.kind is PassKind.FORWARD else -1)
        return stage if 0 <= stage < self.num_stages else None

    def global_order(self) -> Iterator[tuple[int, PassOrPair]]:
        """List all ranks' passes in one order, each pass after the passes needed: rank by rank, a pass at a time.

        Raises:
            ValueError: Ranks wait in a circle.
        """
        over: set[StagePass] = set()
        remaining = [iter(order) for order in self.orders]
        heads = {rank: next(order) for rank, order in enumerate(remaining)}
        while heads:
            waiting = tuple(heads.values())
            for rank in sorted(heads):
                pass_or_pair = heads[rank]
                if not all(self._is_ready(stage_pass, over) for stage_pass in passes_in(pass_or_pair)):
                    continue
                yield rank, pass_or_pair
                over.update(passes_in(pass_or_pair))
                following = next(remaining[rank], None)
                if following is None:
                    del heads[rank]
                else:
                    heads[rank] = following
            if waiting == tuple(heads.values()):
                states = ", ".join(f"rank {rank} at {pass_or_pair}" for rank, pass_or_pair in heads.items())
                raise ValueError(
                    f"Expected an order in which no pass waits for a later one, got ranks that wait: {states}. Run "
                    "passes that another rank waits for earlier."
                )

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}  {' '.join(map(str, order))}" for rank, order in enumerate(self.orders))

    def _passes(self) -> Iterator[tuple[int, StagePass]]:
        """Each pass with its rank; a pair gives two passes."""
        for rank, order in enumerate(self.orders):
            for pass_or_pair in order:
                yield from ((rank, stage_pass) for stage_pass in passes_in(pass_or_pair))

    def _is_ready(self, stage_pass: StagePass, over: set[StagePass]) -> bool:
        stage, microbatch = stage_pass.stage, stage_pass.microbatch
        if stage_pass.kind is PassKind.FORWARD:
            return stage == 0 or StagePass(stage - 1, PassKind.FORWARD, microbatch) in over
        if stage_pass.kind is PassKind.WEIGHT_GRADIENT:
            return StagePass(stage, PassKind.INPUT_GRADIENT, microbatch) in over
        if StagePass(stage, PassKind.FORWARD, microbatch) not in over:
            return False
        return stage == self.num_stages - 1 or any(
            StagePass(stage + 1, kind, microbatch) in over for kind in (PassKind.BACKWARD, PassKind.INPUT_GRADIENT)
        )


def _check_stages(pipeline: Pipeline) -> None:
    for rank, order in enumerate(pipeline.orders):
        if not order:
            raise ValueError(f"Expected passes on every rank, got none on rank {rank}. Leave the rank out.")
    ranks: dict[int, set[int]] = {}
    for rank, stage_pass in pipeline._passes():
        ranks.setdefault(stage_pass.stage, set()).add(rank)
    if not ranks:
        raise ValueError("Expected the order of one rank at least, got no rank. Give each rank its passes.")
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"Expected stages 0 to {len(ranks) - 1}, got {sorted(ranks)}. Number the stages from 0.")
    for stage, owners in ranks.items():
        if len(owners) > 1:
            raise ValueError(
                f"Expected each stage on one rank, got stage {stage} on ranks {sorted(owners)}. Give a stage's passes "
                "to one rank."
            )


def _check_passes(pipeline: Pipeline) -> None:
    counts = Counter(stage_pass for _, stage_pass in pipeline._passes())
    for stage_pass, num in counts.items():
        if num > 1:
            raise ValueError(f"Expected each pass once, got {stage_pass} {num} times. Leave the repetitions out.")
        if stage_pass.microbatch < 0:
            raise ValueError(f"Expected microbatches from 0 on, got {stage_pass}. Number the microbatches from 0.")
    for stage in range(pipeline.num_stages):
        for microbatch in range(pipeline.num_microbatches):
            kinds = {kind for kind in PassKind if StagePass(stage, kind, microbatch) in counts}
            if kinds not in [{PassKind.FORWARD, *backward} for backward in _BACKWARDS]:
                raise ValueError(
                    f"Expected a forward and one backward, whole or in two parts, for stage {stage} and microbatch "
                    f"{microbatch}, got {', '.join(sorted(kinds)) or 'nothing'}. Give each stage every microbatch."
                )
