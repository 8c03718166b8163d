"""Tiny models of transformers' families with state-space or gated-delta layers, by the name of the config."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 64
BATCH = torch.randint(VOCAB_SIZE, (4, 17), generator=torch.Generator().manual_seed(1))

_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "initializer_range": 0.1}
_ATTENTION = {**_HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
_MAMBA1 = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {**_HIDDEN, "state_size": 8},
    "mamba2": {**_HIDDEN, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": {**_HIDDEN, "state_size": 8},
    "nemotron_h": {
        **_ATTENTION,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "bamba": {**_ATTENTION, **_MAMBA2, "attn_layer_indices": [1]},
    "jamba": {
        **_ATTENTION,
        **_MAMBA1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "num_experts": 4,
    },
    "zamba": {
        **_ATTENTION,
        **_MAMBA1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        **_ATTENTION,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "chunk_size": 8,
    },
    "falcon_h1": {**_ATTENTION, **_MAMBA2, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "granitemoehybrid": {
        **_ATTENTION,
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
    },
    "qwen3_next": {
        **_ATTENTION,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
"""Names are transformers' model types."""

# Models import flash-linear-attention where it is installed, and its import uses CUDA: no rank could be forked.
if find_spec("fla") is None:
    for model_type in CONFIGS:  # Imported by the first model: here once, not once in every forked rank.
        import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def make_model(model_type: str, **changes: Any) -> nn.Module:
    """A causal language model in fp32 with the same weights on every call; keywords change the config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes})
    model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.train()


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next tokens, 0-D, in fp32."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
