"""Pipelines of every schedule, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from torch_schedules import SINGLE, V_SHAPED

from lamella_schedule import Pipeline, pipeline

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    schedule = draw(st.sampled_from(SCHEDULES))
    num_ranks, num_rounds = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    stages_per_rank = 1 if schedule in SINGLE else 2 if schedule in V_SHAPED else draw(st.integers(1, 3))
    # Numbers that every schedule takes: whole rounds, and a microbatch for each stage of a V.
    return pipeline(schedule, num_ranks, num_rounds * num_ranks, stages_per_rank=stages_per_rank)
