"""Models of megatron-core for benchmarks: Transformer Engine's layers on GPUs, torch's on a CPU."""

import importlib
from typing import Any, Final

import torch
from torch import nn

VOCAB_SIZE: Final = 256


def float16_model(
    *,
    device: str,
    layers: int,
    hidden: int,
    length: int,
    experts: int,
    top_k: int = 2,
    tp: int = 1,
    ep: int = 1,
    cp: int = 1,
    pattern: str | None = None,
    **changes: Any,
) -> tuple[Any, Any]:
    """Build a model in bf16, with the same weights and later random numbers on each call.

    Args:
        device: `cuda` or `cpu`.
        layers: Number of layers of a GPTModel.
        hidden: Width.
        length: Tokens a sequence.
        experts: Experts a layer; 0 for dense layers.
        top_k: Experts a token.
        tp: Tensor-parallel ranks, with sequence parallelism.
        ep: Expert-parallel ranks.
        cp: Context-parallel ranks.
        pattern: A HybridModel's pattern without brackets, in place of a GPTModel of `layers`.
        changes: Further fields of the `TransformerConfig`.

    Returns:
        A `TransformerConfig`, and the model in a `Float16Module`.
    """
    config_class = importlib.import_module("megatron.core.transformer").TransformerConfig
    expert_fields: dict[str, Any] = {}
    if experts:
        expert_fields = {
            "num_moe_experts": experts,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": top_k,
            "moe_aux_loss_coeff": 1e-2,
            "moe_grouped_gemm": device == "cuda",
        }
    config = config_class(
        num_layers=layers if pattern is None else len(pattern),
        hidden_size=hidden,
        num_attention_heads=max(4, hidden // 128),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        normalization="RMSNorm" if device == "cuda" else "LayerNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=tp > 1,
        use_cpu_initialization=device == "cpu",
        gradient_accumulation_fusion=False,
        **expert_fields,
        **changes,
    )
    importlib.import_module("lamella_testing.megatron").seed_random_states(1234)
    model = _gpt(config, device, length) if pattern is None else _hybrid(config, device, length, pattern)
    return config, importlib.import_module("megatron.core.transformer.module").Float16Module(config, model.to(device))


def _gpt(config: Any, device: str, length: int) -> nn.Module:
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    experts = config.num_moe_experts
    if device == "cuda":
        spec = specs.get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=bool(experts))
    else:
        spec = specs.get_gpt_layer_local_spec(num_experts=experts)
    gpt = importlib.import_module("megatron.core.models.gpt").GPTModel
    model: nn.Module = gpt(config, spec, VOCAB_SIZE, length, position_embedding_type="rope")
    return model


def _hybrid(config: Any, device: str, length: int, pattern: str) -> nn.Module:
    if device == "cpu":
        testing = importlib.import_module("lamella_testing.megatron")
        small: nn.Module = testing.tiny_hybrid(config, pattern, vocab_size=VOCAB_SIZE, max_sequence_length=length)
        return small
    stack = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    hybrid = importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
    built: nn.Module = hybrid(config, stack, VOCAB_SIZE, length, hybrid_layer_pattern=pattern)
    return built
