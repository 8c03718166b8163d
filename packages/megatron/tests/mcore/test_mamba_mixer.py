"""megatron-core's own Mamba mixer, step by step: every parameter trains, the cached ones too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamella_engine import fully_shard
from lamella_mamba import bind_live_parameters
from lamella_testing import assert_trains_as_unsharded, run_ranks
from lamella_testing.megatron import MAMBA, seed_random_states, tiny_config

BATCH = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))
CACHED = {"A_log", "D", "dt_bias", "conv1d_weight", "conv1d_bias"}


class _Block(nn.Module):
    def __init__(self) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.mixer = MambaMixer(
            tiny_config(**MAMBA),
            MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            d_model=32,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mixer(x.transpose(0, 1))[0].transpose(0, 1)
        return out


def _make() -> nn.Module:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    seed_random_states(0)
    return nn.Sequential(_Block(), _Block())


def _shard(model: nn.Module) -> None:
    bind_live_parameters(model)
    for block in model.children():
        fully_shard(block)
    fully_shard(model)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = 10 * model(batch).square().mean()
    return loss


def test_two_ranks_train_as_the_unsharded_mixer_does() -> None:
    assert_trains_as_unsharded(_make, _shard, _loss, BATCH)


def test_bind_live_parameters_binds_the_mamba_mixers_cached_parameters() -> None:
    def bound() -> list[str]:
        return bind_live_parameters(_make())

    [paths] = run_ranks(bound, 1)
    assert {path.removesuffix("_cp1").rpartition(".")[2] for path in paths} == CACHED
    assert len(paths) == 2 * len(CACHED)


def test_a_mamba_mixer_with_unbound_parameters_is_refused() -> None:
    def check() -> None:
        with pytest.raises(ValueError, match=r"of a MambaContextParallel too"):
            fully_shard(_make())

    run_ranks(check, 1)
