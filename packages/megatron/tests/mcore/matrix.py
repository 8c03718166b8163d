"""Kinds of models, layouts of ranks and ZeRO stages: all that fit together, and a sample.

No attention of megatron-core runs context-parallel without Transformer Engine: context parallelism is shown by models
of Mamba and expert layers.
"""

from __future__ import annotations

import itertools
import random

from lamella_testing.megatron_parity import Layout, has_experts

KINDS = ("gpt", "moe", "tied", "mtp", "*E*E", "M*M*", "MEME")
STAGES = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "HSDP")
Case = tuple[str, Layout, str]


def _cases(kind: str) -> list[Case]:
    axes = (
        (1, 2),
        (1, 2) if has_experts(kind) else (1,),
        (1, 2) if kind == "moe" else (None,),
        (1, 2) if kind == "MEME" else (1,),
        STAGES,
    )
    cases = []
    for tp, ep, expert_tp, cp, stage in itertools.product(*axes):
        layout = Layout(tp=tp, ep=ep, expert_tp=expert_tp, cp=cp, instances=2 if stage == "HSDP" else 1)
        # megatron-core asks for as many ranks with the same experts as instances.
        if layout.num_ranks % (layout.instances * ep * (expert_tp or tp)) == 0:
            cases.append((kind, layout, stage))
    return cases


def _sampled(cases: dict[str, list[Case]]) -> set[Case]:
    """One case of each kind, and five more."""
    rng = random.Random(0)
    one_of_each = [rng.choice(cases_of_kind) for cases_of_kind in cases.values()]
    remaining_cases = [case for cases_of_kind in cases.values() for case in cases_of_kind if case not in one_of_each]
    return {*one_of_each, *rng.sample(remaining_cases, 5)}


CASES = {kind: _cases(kind) for kind in KINDS}
SAMPLE = _sampled(CASES)
