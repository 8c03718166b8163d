"""An overlapped step refuses by name what no order keeps."""

from __future__ import annotations

from typing import Any

import pytest
from overlap_runs import share

from lamella_engine import FSDPModule, fully_shard
from lamella_testing import run_ranks
from lamella_testing.megatron_parity import Layout, make_model

REFUSED = [
    ("mlp_chunks_for_training", 2),
    ("cpu_offloading", True),
    ("fine_grained_activation_offloading", True),
    ("virtual_pipeline_model_parallel_size", 2),
    ("recompute_granularity", "full"),
    ("recompute_modules", ["moe"]),
    ("moe_shared_expert_overlap", True),
    ("moe_token_dispatcher_type", "allgather"),
    ("cuda_graph_impl", "local"),
    ("overlap_dispatch_backward_with_experts_wgrad", True),
    ("fp8", "hybrid"),
    ("fp4", "e2m1"),
]


def test_an_option_that_no_order_keeps_is_refused() -> None:
    def on_one_rank() -> None:
        from lamella_megatron.training import forward_backward_overlapped

        model: Any = make_model("moe", Layout(num_ranks=1))
        for field, value in REFUSED:
            usual = getattr(model.config, field)
            setattr(model.config, field, value)
            with pytest.raises(ValueError, match=f"`config.{field}` .*{value if isinstance(value, str) else ''}"):
                forward_backward_overlapped(model, [], share)
            setattr(model.config, field, usual)
        assert not isinstance(model, FSDPModule)

    run_ranks(on_one_rank, 1)


def test_stages_are_refused_for_megatron_cores_driver() -> None:
    def on_one_rank() -> None:
        from lamella_megatron.training import ShardedModel
        from lamella_testing.megatron import ddp_config

        model: Any = make_model("moe", Layout(num_ranks=1))
        model.config.overlap_moe_expert_parallel_comm = True
        model.config.pipeline_model_parallel_size = 2
        with pytest.raises(ValueError, match=r"`config.pipeline_model_parallel_size` to be 1 .*got 2"):
            ShardedModel(model.config, ddp_config(), model)

    run_ranks(on_one_rank, 1)


def test_a_unit_of_nonadjacent_layers_is_refused_in_an_overlapped_step() -> None:
    def on_one_rank() -> None:
        from lamella_megatron.training import forward_backward_overlapped

        model: Any = make_model("*E*E", Layout(num_ranks=1))
        layers = model.decoder.layers
        for unit in ([layers[0], layers[2]], [layers[1]], [layers[3]], model):
            fully_shard(unit)
        with pytest.raises(ValueError, match=r"next to each other .*'decoder.layers.0, decoder.layers.2' with others"):
            forward_backward_overlapped(model, [], share)

    run_ranks(on_one_rank, 1)
