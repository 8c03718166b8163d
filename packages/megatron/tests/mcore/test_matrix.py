"""Every kind of model, over every layout of ranks and in every ZeRO stage, trains as on a single rank.

A sample runs with each change, the rest with the slow tests.
"""

from __future__ import annotations

import itertools

import pytest
from matrix import CASES, SAMPLE

from lamella_engine import ZERO1, ZERO2, ZERO3, ShardingOptions
from lamella_megatron import fully_shard_model
from lamella_testing.megatron_parity import Layout, assert_trains_as_on_one_rank

STAGES = {"ZeRO-1": ZERO1, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3, "HSDP": None}


@pytest.mark.parametrize(
    ("kind", "layout", "stage"),
    [
        *SAMPLE,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.chain(*CASES.values())
            if case not in SAMPLE
        ),
    ],
    ids=str,
)
def test_a_model_trains_as_on_one_rank(kind: str, layout: Layout, stage: str) -> None:
    options = ShardingOptions(placements=STAGES[stage])
    assert_trains_as_on_one_rank(kind, layout, lambda model: fully_shard_model(model, options=options))
