"""Tiny models of transformers."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "mixtral": {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 12,
        "num_experts_per_tok": 2,
    },
    "bert": {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "roberta-prelayernorm": {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "xlm": {"vocab_size": 300, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0},
    "xlnet": {"vocab_size": 300, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "dropout": 0.0},
}


def make_spec(model_type: str, **changes: Any) -> Any:
    """Make the config of a tiny model."""
    return AutoConfig.for_model(model_type, **{**SIZES[model_type], **changes})


def make_model(model_type: str, **changes: Any) -> nn.Module:
    """Make a tiny model whose weights are those of one seed."""
    torch.manual_seed(1)
    return cast(nn.Module, AutoModelForCausalLM.from_config(make_spec(model_type, **changes)))  # type: ignore[no-untyped-call]
