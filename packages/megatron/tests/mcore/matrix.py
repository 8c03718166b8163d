"""Kinds of models, layouts of ranks and ZeRO stages: all that fit together, and a sample with each value.

No attention of megatron-core runs context-parallel without Transformer Engine: context parallelism is shown by models
of Mamba and expert layers.
"""

from __future__ import annotations

import itertools

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


CASES = {kind: _cases(kind) for kind in KINDS}
SAMPLE: list[Case] = [
    ("gpt", Layout(tp=2), "ZeRO-3"),
    ("moe", Layout(tp=2, expert_tp=2), "ZeRO-2"),
    ("moe", Layout(tp=2, ep=2, expert_tp=1), "ZeRO-2"),
    ("tied", Layout(tp=2), "ZeRO-3"),
    ("mtp", Layout(instances=2), "HSDP"),
    ("*E*E", Layout(tp=2, ep=2), "ZeRO-1"),
    ("M*M*", Layout(tp=2, instances=2), "HSDP"),
    ("MEME", Layout(ep=2, cp=2), "ZeRO-1"),
    ("MEME", Layout(instances=2), "HSDP"),
]
