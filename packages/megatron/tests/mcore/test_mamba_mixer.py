"""megatron-core's own Mamba mixer, with a plain kernel: every parameter trains, the cached ones too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lamella_engine import fully_shard
from lamella_mamba import bind_live_parameters
from lamella_testing import assert_trains_as_unsharded, run_ranks
from lamella_testing.megatron import megatron_on_cpu, tiny_config

BATCH = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))
CACHED = {"A_log", "D", "dt_bias", "conv1d_weight", "conv1d_bias"}

pytestmark = pytest.mark.filterwarnings("ignore::Warning:megatron")


def _plain_kernel(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  # the kernel's name
    *_: Any,
    D: torch.Tensor,  # noqa: N803
    headdim: int,
    **__: Any,
) -> torch.Tensor:
    """Reads each argument of the fused kernel that is a parameter; no state-space model."""
    num_heads, inner = A.numel(), A.numel() * headdim
    gate, rest, dt = zxbcdt.split([inner, zxbcdt.shape[-1] - inner - num_heads, num_heads], dim=-1)  # type: ignore[no-untyped-call]
    padded = F.pad(rest.transpose(1, 2), (weight.shape[1] - 1, 0))
    x = F.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2)[..., :inner]
    per_head = (F.softplus(dt + dt_bias) * A + D).repeat_interleave(headdim, dim=-1)
    return F.silu(gate) * x * per_head


@pytest.fixture(scope="module", autouse=True)
def mixer_on_cpu() -> Iterator[None]:
    with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
        mixers = importlib.import_module("megatron.core.ssm.mamba_mixer")
        patch.setattr(mixers, "HAVE_MAMBA_SSM", True)
        patch.setattr(mixers, "mamba_split_conv1d_scan_combined", _plain_kernel, raising=False)
        yield


class _Block(nn.Module):
    def __init__(self) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.mixer = MambaMixer(
            tiny_config(mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=8),
            MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            d_model=32,
            rmsnorm=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mixer(x.transpose(0, 1))[0].transpose(0, 1)
        return out


def _make() -> nn.Module:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
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


def test_the_mixers_helper_is_what_is_bound() -> None:
    def bound() -> list[str]:
        return bind_live_parameters(_make())

    [paths] = run_ranks(bound, 1)
    assert {path.removesuffix("_cp1").rpartition(".")[2] for path in paths} == CACHED
    assert len(paths) == 2 * len(CACHED)


def test_without_it_the_engine_refuses_the_mixer() -> None:
    def check() -> None:
        with pytest.raises(ValueError, match=r"of a MambaContextParallel too"):
            fully_shard(_make())

    run_ranks(check, 1)
