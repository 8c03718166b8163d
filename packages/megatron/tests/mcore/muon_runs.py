"""Models of megatron-core under Muon, for tests that compare, save and resume runs."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import ShardingOptions
from lamella_testing.megatron import NUM_EXPERTS, ddp_config, token_losses
from lamella_testing.megatron_parity import BATCH, Layout, make_model

if TYPE_CHECKING:
    from lamella_megatron.training import ShardedModel, ShardedOptimizer

STAGES = {"DDP": "no_shard", "ZeRO-1": "optim", "ZeRO-3": "optim_grads_params"}
NUM_STEPS = 3


@contextmanager
def products_in_fp64() -> Iterator[None]:
    """Let Muon multiply in fp64: in bf16 the sums of two ranks round to other numbers than a single rank's."""
    with (
        patch("torch.optim._muon._zeropower_via_newtonschulz", _orthogonal),
        patch("lamella_optim._cut_matrices.WIRE_DTYPE", torch.float32),  # else the exchange would round
    ):
        yield


def _orthogonal(
    update: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """torch's Newton-Schulz iteration, in fp64."""
    a, b, c = coefficients
    matrix = update.double() / update.double().norm().clamp(min=eps)
    for _ in range(num_steps):
        square = matrix @ matrix.T
        matrix = a * matrix + (b * square + c * square @ square) @ matrix
    return torch.as_tensor(matrix, dtype=update.dtype)


def muon_config(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(optimizer="adam", lr=0.02, weight_decay=0.0, clip_grad=0.5, adam_eps=1e-3)
    torchs = {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "muon_nesterov": True}
    for name, value in {**torchs, **fields}.items():
        setattr(config, name, value)  # The constructor asks for emerging_optimizers.
    return config


def _fill(model: nn.Module) -> None:
    """Weights of each parameter by name, with the global numbers of experts, and by tensor-parallel part."""
    from megatron.core import parallel_state

    first = NUM_EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first *= parallel_state.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        full_name = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{first + int(m[1])}", name)
        is_part = getattr(parameter, "tensor_model_parallel", False)
        full_name += str(parallel_state.get_tensor_model_parallel_rank() if is_part else 0)
        generator = torch.Generator().manual_seed(zlib.crc32(full_name.encode()))
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1, generator=generator)


def made(kind: str, layout: Layout) -> nn.Module:
    model = make_model(kind, layout)
    _fill(model)
    return model


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def wrapped(kind: str, layout: Layout, stage: str = "ZeRO-3", *, for_muon: bool = True, **fields: Any) -> ShardedModel:
    """A sharded model; keywords change fields of `ddp_config`.

    Args:
        kind: The kind of model for `make_model`.
        layout: The layout of ranks for `make_model`.
        stage: A key of `STAGES`.
        for_muon: Keep matrices whole on single ranks; False shards all parameters evenly.
    """
    from lamella_megatron._model.configuration import placements_of
    from lamella_megatron.training import ShardedModel, keep_matrices

    model: Any = made(kind, layout)
    instances = {"num_distributed_optimizer_instances": layout.instances}
    config = ddp_config(data_parallel_sharding_strategy=STAGES[stage], **instances, **fields)
    keep = keep_matrices if for_muon else None
    options = ShardingOptions(placements=placements_of(config), keep_together=keep)
    return ShardedModel(model.config, config, model, options=options)


def train(model: ShardedModel, optimizer: ShardedOptimizer, num_steps: int = NUM_STEPS) -> None:
    """Steps on this rank's rows of one batch."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    rows = BATCH.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    for _ in range(num_steps):
        optimizer.zero_grad()
        token_losses(model, rows).mean().backward()  # type: ignore[no-untyped-call]
        finalize_model_grads([model])
        success, norm, _ = optimizer.step()
        assert success
        assert norm is not None
