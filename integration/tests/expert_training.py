"""Training of transformers' mixtures of experts: alone, with spread experts by hooks, and under a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from lamella_engine import FSDPModule, MixedPrecisionPolicy, UnitResidence
from lamella_precision import Float8Recipe, matrices_of
from lamella_schedule import run
from lamella_transformers.experts import chunk, shard_with_experts, spread_experts

MICROBATCHES, LENGTH, VOCABULARY = 4, 10, 32
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def _hybrid(num_layers: int) -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    linear = {f"linear_{part}_head_dim": 8 for part in ("key", "value")} | {"linear_num_value_heads": 4}
    return {
        **linear,
        "linear_num_key_heads": 2,
        "shared_expert_intermediate_size": 12,
        "layer_types": kinds[:num_layers],
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "initializer_range": 0.1,  # at 0.3 a difference of one ulp grows to 2e-3 of the loss in three steps
    }


QWENS: dict[str, tuple[Any, Any, Callable[[int], dict[str, Any]]]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, lambda _: {"mlp_only_layers": [1], "head_dim": 4}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, lambda _: {"shared_expert_intermediate_size": 12}),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, lambda num: {**_hybrid(num), "mlp_only_layers": [1]}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _hybrid),
}
Batch = dict[str, Any]


def moe(
    family: str, experts: str = "eager", width: int = 12, num_layers: int = 3, seed: int = 3, num_experts: int = 4
) -> nn.Module:
    torch.manual_seed(seed)
    model: Any
    sizes = {**SIZES, "num_hidden_layers": num_layers}
    implementations: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": experts}
    if "qwen" in family:
        config_class, model_class, family_sizes = QWENS[family.partition(",")[0]]
        sizes |= {"moe_intermediate_size": width, "num_experts": num_experts, **family_sizes(num_layers)}
        if "window" in family:
            sizes |= {"use_sliding_window": True, "sliding_window": 4}
        model = model_class(config_class(**sizes, **implementations))
    else:
        window = 4 if "window" in family else None
        config = MixtralConfig(**sizes, num_local_experts=4, sliding_window=window, **implementations)
        model = MixtralForCausalLM(config)
    network: nn.Module = model.train()
    return network


def sharded(
    model: nn.Module, ep: int, device: str = "cpu", recipe: Float8Recipe | None = None, **options: Any
) -> nn.Module:
    """Experts on `ep` ranks and sharded over the other ranks, all else sharded over all ranks."""
    world = dist.get_world_size()
    if device != "cpu":  # models on the meta device stay on meta
        model.to(device)
    spread_experts(model, init_device_mesh(device, (world // ep, ep), mesh_dim_names=("edp", "ep")))
    if recipe:
        options["mp_policy"] = float8_policy(model, recipe)
    shard_with_experts(model, mesh=init_device_mesh(device, (world,), mesh_dim_names=("dp",)), **options)
    return model


def float8_policy(model: Any, recipe: Float8Recipe) -> MixedPrecisionPolicy:
    """The layers' matrices in a recipe's format, other parameters in the compute dtype."""
    return MixedPrecisionPolicy(recipe.compute_dtype, torch.float32, recipe=matrices_of(model.model.layers, recipe))


def batches_of(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(MICROBATCHES):
        starts = torch.randint(VOCABULARY, (2, 1), generator=generator)
        tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
        mask = torch.ones_like(tokens)
        mask[1, LENGTH - 3 :] = 0  # padding
        batches.append({"input_ids": tokens, "labels": tokens.where(mask > 0, -100), "attention_mask": mask})
    return batches


def plain_step(model: nn.Module, batches: list[Batch]) -> list[torch.Tensor]:
    """Forward and backward by hooks, microbatch after microbatch."""
    losses = []
    for i, batch in enumerate(batches):
        cast(FSDPModule, model).set_is_last_backward(i == len(batches) - 1)
        loss = model(**batch, use_cache=False).loss * (1 / len(batches))
        loss.backward()
        losses.append(loss.detach())
    return losses


def scheduled_step(model: nn.Module, batches: list[Batch], device: str = "cpu") -> list[torch.Tensor]:
    """The forward of each microbatch beside the backward before."""
    # With a stage of their own a layer's experts are a unit inside the layer's.
    units = [[m for m in layer.modules() if isinstance(m, FSDPModule)] for layer in cast(Any, model).model.layers]
    residence = UnitResidence(model, cast(Any, units))
    chunks = [chunk(model, **batch, scale=1 / len(batches)) for batch in batches]
    return run(chunks, residence=residence, device=device)
