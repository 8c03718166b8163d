"""megatron-core's model of a Qwen3.5, by the specs and fields that Megatron-Bridge takes, on CPU ranks."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional
from resuming import World
from torch import nn

from lamella_testing.megatron import LENGTH, seed_random_states, tiny_config


class _Norm(nn.Module):
    """An RMS norm with weights around zero, as Transformer Engine's."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def make_qwen(world: World, published: Any, seed: int = 0) -> nn.Module:
    """A GPTModel with initial weights, of a rank, after megatron-core's groups.

    The layers are those of megatron-core's own spec for Transformer Engine, with torch's operators in the place of
    Transformer Engine's. Experts are a module each: their grouped form needs kernels of a GPU.

    Args:
        world: The parallel sizes.
        published: transformers' config of the text model.
        seed: The seed of the initial weights.

    Source: fields and spec of megatron-bridge 0.6.2, `models/qwen/qwen35_bridge.py` and
    `models/conversion/model_bridge.py`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
    )
    seed_random_states(seed)
    config = tiny_config(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        sequence_parallel=world.tp > 1,
        deterministic_mode=True,
        moe_grouped_gemm=False,
        **_fields(published),
    )
    variants = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    layers = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    operators = _torchs_operators()
    with (
        patch.object(variants, "TESpecProvider", operators, create=True),
        patch.object(layers, "TESpecProvider", operators, create=True),
    ):
        spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
    rotary = published.rope_parameters
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=published.vocab_size,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        rotary_percent=rotary["partial_rotary_factor"],
        rotary_base=rotary["rope_theta"],
        share_embeddings_and_output_weights=published.tie_word_embeddings,
    )
    return model


def _fields(published: Any) -> dict[str, Any]:
    """Fields of `TransformerConfig`."""
    fields = {
        "num_layers": published.num_hidden_layers,
        "hidden_size": published.hidden_size,
        "num_attention_heads": published.num_attention_heads,
        "num_query_groups": published.num_key_value_heads,
        "kv_channels": published.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": published.rms_norm_eps,
        "layernorm_zero_centered_gamma": True,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in published.layer_types],
    }
    for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads"):
        fields[f"linear_{name}"] = getattr(published, f"linear_{name}")
    if not hasattr(published, "num_experts"):
        return fields | {"ffn_hidden_size": published.intermediate_size}
    return fields | {
        "num_moe_experts": published.num_experts,
        "moe_ffn_hidden_size": published.moe_intermediate_size,
        "moe_router_topk": published.num_experts_per_tok,
        "moe_router_pre_softmax": False,
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": published.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _torchs_operators() -> type:
    """A provider of megatron-core's specs: modules named as Transformer Engine's, that run on a CPU."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class NormAndLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.eps = config.layernorm_epsilon
            self.layer_norm_weight = nn.Parameter(torch.zeros(input_size))
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            normed = functional.rms_norm(x, x.shape[-1:], 1 + self.layer_norm_weight, self.eps)
            return super().forward(normed, *args, **kwargs)

    class TorchsOperators(LocalSpecProvider):  # type: ignore[misc]
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type[nn.Module]:
            return NormAndLinear

        def layer_norm(self, *_: object, **__: object) -> type[nn.Module]:
            return _Norm

    return TorchsOperators
