"""Models and optimizers with gradients, moments and main weights in dtypes of their own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lamella_testing.megatron import (
    LENGTH,
    VOCAB_SIZE,
    ddp_config,
    seed_random_states,
    tiny_config,
    tiny_gpt,
    token_losses,
)

if TYPE_CHECKING:
    from lamella_megatron.training import ShardedModel, ShardedOptimizer

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))


AWARE = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": BF16,
    "exp_avg_dtype": BF16,
    "exp_avg_sq_dtype": BF16,
    "store_param_remainders": False,
}
NARROW_GRADS = {"megatron_fsdp_main_grads_dtype": BF16}
NARROW_MAIN = {**NARROW_GRADS, "megatron_fsdp_main_params_dtype": BF16}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32 main weights": (NARROW_GRADS, AWARE),
    "bf16 main weights and fp32 copies": (NARROW_MAIN, AWARE),
    "bf16 main weights and remainders": (NARROW_MAIN, {**AWARE, "store_param_remainders": True}),
    "gradients in fp32": ({"megatron_fsdp_main_grads_dtype": FP32}, {**AWARE, "main_grads_dtype": FP32}),
}


def optimizer_config(**fields: Any) -> Any:
    """megatron-core's OptimizerConfig for Adam, with more fields set."""
    from megatron.core.optimizer import OptimizerConfig

    defaults = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-3}
    config = OptimizerConfig(**{**defaults, "use_distributed_optimizer": True})
    for name, value in fields.items():
        setattr(config, name, value)  # The constructor asks for Transformer Engine itself.
    return config


def make_model(ddp: dict[str, Any], *, device: str = "cpu", **fields: Any) -> ShardedModel:
    """A GPTModel that computes in bf16, in units over all ranks."""
    from megatron.core import parallel_state

    from lamella_megatron.training import ShardedModel

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    seed_random_states(0)
    config = tiny_config(bf16=True, params_dtype=BF16, **fields)
    return ShardedModel(config, ddp_config(**ddp), tiny_gpt(config).to(device, BF16))


def make_optimizer(model: ShardedModel, **fields: Any) -> ShardedOptimizer:
    """The optimizer of such a config."""
    from lamella_megatron.training import sharded_optimizer

    return sharded_optimizer(optimizer_config(**fields), [model])


def backward(model: ShardedModel) -> None:
    """Forward and backward of this rank's rows. Effects: collective over all ranks."""
    rows = ROWS.chunk(dist.get_world_size())[dist.get_rank()].to(next(model.parameters()).device)
    loss = token_losses(model, rows).float().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    model.finish_grad_sync()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def over_copies(optimizer: ShardedOptimizer) -> tuple[Optimizer, dict[torch.Tensor, nn.Parameter]]:
    """The same optimizer over plain copies of this rank's shards."""
    copies = {p: nn.Parameter(local_of(p).detach().clone()) for p in optimizer.get_parameters()}
    groups = [{**group, "params": [copies[p] for p in group["params"]]} for group in optimizer.optimizer.param_groups]
    names = ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "master_weight_dtype", "store_param_remainders")
    options: dict[str, Any] = {name: getattr(optimizer.optimizer, name) for name in names}
    options |= {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}  # each group has its own
    kind: Any = importlib.import_module("megatron.core.optimizer").Adam
    return kind(groups, **options, adam_w_mode=True, use_decoupled_grad=True), copies
