"""Configs by name, as the values of a transformers config: data, so that nothing has to be installed to read them."""

from collections.abc import Mapping
from types import MappingProxyType

NAMED_CONFIGS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        # Every kind of layer the dense text models have (three gated delta nets, then one attention) at a size that
        # trains on a CPU. The vocabulary is one that a byte-pair tokenizer can fill.
        "qwen3.5-tiny": MappingProxyType(
            {
                "model_type": "qwen3_5_text",
                "vocab_size": 1024,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 4,
                "max_position_embeddings": 2048,
            }
        ),
    }
)
"""Name -> values for `AutoConfig.for_model(**values)`."""
