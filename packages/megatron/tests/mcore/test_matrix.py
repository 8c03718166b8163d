"""Every kind of model, over every layout of ranks and in every ZeRO stage, trains as on a single rank.

A sample runs with each change, the rest with the slow tests. No attention of megatron-core runs context-parallel
without Transformer Engine: context parallelism is shown by models of Mamba and expert layers.
"""

from __future__ import annotations

import itertools
import random

import pytest

from lamella_engine import ZERO1, ZERO2, ZERO3, ShardingOptions
from lamella_megatron import fully_shard_model
from lamella_testing.megatron_parity import Layout, assert_trains_as_on_one_rank, has_experts

KINDS = ("gpt", "moe", "tied", "mtp", "*E*E", "M*M*", "MEME")
STAGES = {"ZeRO-1": ZERO1, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3, "HSDP": None}
Case = tuple[str, Layout, str]


def _cases(kind: str) -> list[Case]:
    axes = (
        (1, 2),
        (1, 2) if has_experts(kind) else (1,),
        (1, 2) if kind == "moe" else (None,),
        (1, 2) if kind == "MEME" else (1,),
        STAGES,
    )
    found = []
    for tp, ep, expert_tp, cp, stage in itertools.product(*axes):
        layout = Layout(tp=tp, ep=ep, expert_tp=expert_tp, cp=cp, instances=2 if stage == "HSDP" else 1)
        # megatron-core asks for as many ranks with the same experts as instances.
        if layout.num_ranks % (layout.instances * ep * (expert_tp or tp)) == 0:
            found.append((kind, layout, stage))
    return found


def _sampled(cases: dict[str, list[Case]]) -> set[Case]:
    """One case of each kind, and five more."""
    rng = random.Random(0)
    one_of_each = [rng.choice(of_kind) for of_kind in cases.values()]
    rest = [case for of_kind in cases.values() for case in of_kind if case not in one_of_each]
    return {*one_of_each, *rng.sample(rest, 5)}


CASES = {kind: _cases(kind) for kind in KINDS}
SAMPLE = _sampled(CASES)


@pytest.mark.parametrize(
    ("kind", "layout", "stage"),
    [
        pytest.param(*case, id=" ".join(map(str, case)), marks=() if case in SAMPLE else pytest.mark.slow)
        for case in itertools.chain(*CASES.values())
    ],
)
def test_a_model_trains_as_on_one_rank(kind: str, layout: Layout, stage: str) -> None:
    options = ShardingOptions(placements=STAGES[stage])
    assert_trains_as_on_one_rank(kind, layout, lambda model: fully_shard_model(model, options=options))
