"""Megatron-Bridge's names of a Qwen3.5's tensors, beside Hugging Face's.

Frozen from the wheel of megatron-bridge 0.6.2: `models/qwen/qwen35_bridge.py` and `models/qwen_vl/qwen35_vl_bridge.py`.
`*` is a number; several names of Hugging Face's are one tensor of Megatron's, or the reverse with packed experts. Left
out are second names of one tensor: experts that are modules of their own, and norms apart from their projections.
"""

from collections.abc import Mapping

from lamella_testing.qwen import Kind

_ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}
_DELTA_NET = {
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.weight": "linear_attn.in_proj_qkv.weight linear_attn.in_proj_z.weight "
    "linear_attn.in_proj_b.weight linear_attn.in_proj_a.weight",
    "self_attention.conv1d.weight": "linear_attn.conv1d.weight",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
}
_DENSE = {
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_MIXTURE = {
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_expert.gate_proj.weight mlp.shared_expert.up_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_SINGLE_EXPERTS = {
    "mlp.experts.linear_fc1.weight*": "mlp.experts.*.gate_proj.weight mlp.experts.*.up_proj.weight",
    "mlp.experts.linear_fc2.weight*": "mlp.experts.*.down_proj.weight",
}
_PACKED_EXPERTS = {
    "mlp.experts.linear_fc1.weight*": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight*": "mlp.experts.down_proj",
}
_PREDICTION = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "final_layernorm.weight": "norm.weight",
}
_VISION = {
    "patch_embed.proj.weight": "patch_embed.proj.weight",
    "patch_embed.proj.bias": "patch_embed.proj.bias",
    "pos_embed.weight": "pos_embed.weight",
    "merger.patch_norm.weight": "merger.norm.weight",
    "merger.patch_norm.bias": "merger.norm.bias",
    "merger.linear_fc1.weight": "merger.linear_fc1.weight",
    "merger.linear_fc1.bias": "merger.linear_fc1.bias",
    "merger.linear_fc2.weight": "merger.linear_fc2.weight",
    "merger.linear_fc2.bias": "merger.linear_fc2.bias",
}
_VISION_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "norm1.weight",
    "self_attention.linear_qkv.layer_norm_bias": "norm1.bias",
    "self_attention.linear_qkv.weight": "attn.qkv.weight",
    "self_attention.linear_qkv.bias": "attn.qkv.bias",
    "self_attention.linear_proj.weight": "attn.proj.weight",
    "self_attention.linear_proj.bias": "attn.proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "norm2.weight",
    "mlp.linear_fc1.layer_norm_bias": "norm2.bias",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias": "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias": "mlp.linear_fc2.bias",
}


def bridge_names(kind: Kind, *, packed: bool, packed_mtp: bool) -> dict[str, frozenset[str]]:
    """Hugging Face's names by Megatron's, for a model with the layer that predicts further tokens.

    Args:
        kind: The model's kind.
        packed: True for experts stacked in one tensor in Hugging Face's files.
        packed_mtp: True for stacked experts of the layer that predicts further tokens.
    """
    vision, mixture = kind.startswith("vision"), kind.endswith("moe")
    megatron, hf = ("language_model.", "model.language_model.") if vision else ("", "model.")
    experts, mtp_experts = (_PACKED_EXPERTS if is_packed else _SINGLE_EXPERTS for is_packed in (packed, packed_mtp))
    mlp, mtp_mlp = (_MIXTURE | experts, _MIXTURE | mtp_experts) if mixture else (_DENSE, _DENSE)
    names = {
        f"{megatron}embedding.word_embeddings.weight": frozenset({f"{hf}embed_tokens.weight"}),
        f"{megatron}decoder.final_layernorm.weight": frozenset({f"{hf}norm.weight"}),
        f"{megatron}output_layer.weight": frozenset({"lm_head.weight"}),
    }
    names |= _below(f"{megatron}decoder.layers.*.", f"{hf}layers.*.", _ATTENTION | _DELTA_NET | mlp)
    names |= _below(f"{megatron}mtp.layers.*.", "mtp.", _PREDICTION)
    names |= _below(f"{megatron}mtp.layers.*.mtp_model_layer.", "mtp.layers.*.", _ATTENTION | mtp_mlp)
    if vision:
        names |= _below("vision_model.", "model.visual.", _VISION)
        names |= _below("vision_model.decoder.layers.*.", "model.visual.blocks.*.", _VISION_LAYER)
    return names


def _below(megatron: str, hf: str, names: Mapping[str, str]) -> dict[str, frozenset[str]]:
    return {f"{megatron}{name}": frozenset(f"{hf}{part}" for part in parts.split()) for name, parts in names.items()}
