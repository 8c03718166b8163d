"""Tiny models of transformers."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES: Mapping[str, int] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED_SIZES: Mapping[str, int] = {  # Two query heads share a head of keys.
    **_SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_SIZES, "num_key_value_heads": 2},
    **dict.fromkeys(("qwen2", "qwen3", "olmo2", "phi3", "gemma3_text"), GROUPED_SIZES),
    "mixtral": {
        **_SIZES,
        "num_key_value_heads": 1,
        "num_local_experts": 12,
        "num_experts_per_tok": 2,
    },
    "bert": _SIZES,
    "roberta-prelayernorm": _SIZES,
    "megatron-bert": _SIZES,
    "bigbird_pegasus": {
        "vocab_size": 300,
        "d_model": 16,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 24,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "pad_token_id": 0,
    },
    "xlm": {"vocab_size": 300, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0},
    "apertus": _SIZES,
    "gpt2": {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "openai-gpt": {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "mamba2": {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 1,
    },
    "modernbert-decoder": {**_SIZES, "pad_token_id": 0},
    "rwkv": {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 64},
    "xlnet": {"vocab_size": 300, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "dropout": 0.0},
}


def make_spec(model_type: str, **changes: Any) -> Any:
    """Make the config of a tiny model."""
    return AutoConfig.for_model(model_type, **{**SIZES[model_type], **changes})


def make_model(model_type: str, **changes: Any) -> nn.Module:
    """Make a tiny model whose weights are those of one seed."""
    torch.manual_seed(1)
    return cast(nn.Module, AutoModelForCausalLM.from_config(make_spec(model_type, **changes)))  # type: ignore[no-untyped-call]
