"""Tiny Qwen3.5 models of every kind, made by transformers. Only this module of the package needs transformers."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

Kind = Literal["dense", "moe", "vision", "vision-moe"]
KINDS: tuple[Kind, ...] = ("dense", "moe", "vision", "vision-moe")

# Numbers of heads divisible over four tensor-parallel ranks; three gated delta nets, then an attention layer.
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_DENSE = _TEXT | {"intermediate_size": 48}
_MOE = _TEXT | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}
_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}


def make_config(kind: Kind, **sizes: int) -> Any:
    """Make a transformers config; "vision" ties its embeddings. Keywords change sizes of the text model."""
    dense, moe = _DENSE | sizes, _MOE | sizes
    match kind:
        case "dense":
            return AutoConfig.for_model("qwen3_5_text", **dense)
        case "moe":
            return AutoConfig.for_model("qwen3_5_moe_text", **moe)
        case "vision":
            text = dense | {"tie_word_embeddings": True}
            return Qwen3_5Config(text_config=text, vision_config=_VISION, tie_word_embeddings=True)
        case "vision-moe":
            return Qwen3_5MoeConfig(text_config=moe, vision_config=_VISION)


def make_empty_model(kind: Kind, **sizes: int) -> Any:
    """Make a model with transformers' initial weights, for a test to overwrite."""
    config = make_config(kind, **sizes)
    match kind:
        case "vision":
            return Qwen3_5ForConditionalGeneration(config)
        case "vision-moe":
            return Qwen3_5MoeForConditionalGeneration(config)
        case _:
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def make_model(kind: Kind, *, spread: float = 0.2, **sizes: int) -> Any:
    """Make a model with distinct weights: norms of ones alone would hide wrong offsets."""
    torch.manual_seed(0)
    model = make_empty_model(kind, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return model.eval()


def make_mtp(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make weights of the multi-token-prediction layer, which transformers has no module for.

    The layer is an attention layer like the last of `weights`, with norms and a projection around the layer.
    """
    torch.manual_seed(1)
    last = {name.partition("layers.3.")[2]: tensor for name, tensor in weights.items() if "layers.3." in name}
    norm = last["input_layernorm.weight"]
    mtp = {name: torch.randn_like(norm) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    mtp["fc"] = torch.randn(len(norm), 2 * len(norm), dtype=norm.dtype)
    layer = {f"mtp.layers.0.{name}": tensor + 1 for name, tensor in last.items()}
    return {f"mtp.{name}.weight": tensor for name, tensor in mtp.items()} | layer
