"""A profile shows FSDP2's names for the phases, and costs nothing while no profiler runs."""

from __future__ import annotations

from unittest.mock import patch

import torch
from engine_models import Net, inputs
from torch.profiler import ProfilerActivity, profile

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_testing import run_ranks

X = inputs()

OF_A_UNIT = {
    *("pre_forward", "all_gather", "post_forward", "pre_backward"),
    *("post_backward_reshard", "post_backward_reduce"),
}
OF_A_PASS = {
    *("root_pre_forward", "root_post_backward_callback", "post_backward_rs_wait"),
    *("forward_prefetch for layers.2", "backward_prefetch for layers.1"),
    *("cast_forward_inputs", "cast_forward_outputs"),
}


def test_phases_have_fsdp2s_names_and_the_units() -> None:
    def check() -> None:
        model = Net()
        for layer in model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
        model(X).mean().backward()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            model(X).mean().backward()
        names = {event.name for event in profiler.events() or () if event.name.startswith("FSDP::")}
        for phase in OF_A_UNIT:
            assert {f"FSDP::{phase}", *(f"FSDP::{phase} (layers.{i})" for i in range(3))} <= names
        assert {f"FSDP::{phase}" for phase in OF_A_PASS} <= names

    run_ranks(check, 2)


def test_without_a_profiler_no_range_is_opened() -> None:
    def check() -> None:
        model = fully_shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with patch("lamella_engine._common.labels.record_function", side_effect=AssertionError):
            model(X).mean().backward()

    run_ranks(check, 1)
