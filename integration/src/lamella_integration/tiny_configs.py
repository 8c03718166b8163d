"""Tiny configs of all model types that transformers trains as causal language models, by one set of sizes."""

import re
from collections.abc import Mapping
from typing import Any, Final

VOCAB_SIZE: Final = 512

# By every name that a config has for a size; a config takes the names that it knows.
_SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("attention_hidden_size", "embedding_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("expert_ffn_hidden_size", "attention_window_size", "sliding_window", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "dense_intermediate_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_attention_groups", "linear_num_key_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "expand", "index_n_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "conv_kernel"), 4),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_head_dim", "attn_head_dim", "kv_channels", "state_size"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_head_dim", "ssm_state_size", "index_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 16),
    "query_pre_attn_scalar": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "time_step_rank", "num_heads"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_topk"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len"), 256),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "n_groups"), 1),
    **dict.fromkeys(("moe_layer_start_index", "moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "is_decoder": True,
    "causal": True,
    "scale_depth": 1.0,
}

_CHANGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "llama4_text": {"intermediate_size_mlp": 128},
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "mamba", "attention"]},
    "rwkv": {"context_length": 256},
}
"""By model type, sizes that fit no other type."""

_NOISE: Final = re.compile(r"drop|jitter")
_LAYER_LISTS: Final = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "moe_layers")


def tiny_config(model_type: str) -> Any:
    """Make the config of a tiny model without dropout.

    Raises:
        Exception: transformers refuses the sizes.
    """
    from transformers import AutoConfig

    cls = type(AutoConfig.for_model(model_type))
    defaults = cls().to_dict()
    option_names = {*defaults, *getattr(cls, "attribute_map", {})}
    changes = _CHANGES.get(model_type, {})
    values = {name: value for name, value in _SIZES.items() if name in option_names} | dict(changes)
    noise = [name for name, value in defaults.items() if _NOISE.search(name) and isinstance(value, float)]
    values |= dict.fromkeys(noise, 0.0)
    if "qk_rope_head_dim" in option_names and "head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]
    for name in _LAYER_LISTS:
        if isinstance(defaults.get(name), list) and name not in changes:
            values[name] = _shortened(defaults[name], values.get("num_hidden_layers", 2))
    return cls(**values)


def _shortened(kinds: list[Any], num_layers: int) -> list[Any]:
    """Return the kinds of a few layers: each kind in its turn."""
    if not all(isinstance(kind, str) for kind in kinds):
        return kinds[:num_layers]
    distinct = list(dict.fromkeys(kinds))
    return (distinct * num_layers)[:num_layers]
