"""Overlapped steps of a wrapped model, by our function and by megatron-core's own driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlap_runs import DATA, NUM_STEPS, Case, by_driver, delay_weight_gradients, overlapped

from lamella_testing import run_ranks
from lamella_testing.megatron_parity import Layout, make_model


def test_a_wrapped_model_steps_by_its_optimizer() -> None:
    from lamella_testing.megatron import ddp_config

    def on_each_rank() -> list[float]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        module: Any = make_model("*E*E", Layout(num_ranks=2, ep=2))
        model = ShardedModel(module.config, ddp_config(), module)
        optimizer = sharded_optimizer(OptimizerConfig(optimizer="adam", lr=0.01), [model])
        losses = []
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            trained = overlapped(model, DATA[0], Case(kind="*E*E"))
            finalize_model_grads([model])
            success, _, _ = optimizer.step()
            assert success
            losses.append(float(sum(trained)))
        return losses

    for losses in run_ranks(on_each_rank, 2):
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "groups", "delays", "strategy"),
    [
        pytest.param("moe", None, False, "optim", marks=pytest.mark.slow),
        ("moe", None, True, "optim_grads_params"),
        ("*E/*E", "[*E]", False, "optim_grads_params"),
        ("*E*E", "[*E][*E]", True, "optim"),
    ],
)
def test_megatron_cores_driver_overlaps(kind: str, groups: str | None, delays: bool, strategy: str) -> None:
    from lamella_testing.megatron import ddp_config

    def train(overlaps: bool, delays: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        module: Any = make_model(kind, Layout(num_ranks=2, ep=2))
        config = module.config
        if delays:
            delay_weight_gradients(module)
        config.overlap_moe_expert_parallel_comm = overlaps  # the constructor asks for bf16
        model = ShardedModel(config, ddp_config(data_parallel_sharding_strategy=strategy), module, layer_groups=groups)
        optimizer = sharded_optimizer(OptimizerConfig(optimizer="sgd", lr=0.2), [model])
        config.finalize_model_grads_func = finalize_model_grads

        losses = []
        for step in DATA:
            optimizer.zero_grad()
            stored = by_driver(model, step)
            assert optimizer.step()[0]
            losses += [record["loss"].item() for record in stored]
        return losses, {name: p.detach().full_tensor() for name, p in module.named_parameters()}

    def on_each_rank() -> None:
        from megatron.core import parallel_state

        losses, weights = train(overlaps=True, delays=delays)
        parallel_state.destroy_model_parallel()
        # Without a schedule the driver calls no backward_dw.
        expected_losses, expected_weights = train(overlaps=False, delays=False)
        assert losses == expected_losses
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())

    run_ranks(on_each_rank, 2)
