"""The place of each tensor of a Qwen3.5 in a Megatron checkpoint: the family's rules, as data.

On the hf are Hugging Face's names, on the megatron Megatron's canonical names (of megatron-core's modules at a
tensor-parallel size of 1, with gated delta nets by component). Every dialect is written from the canonical names.

Note [How the two sides differ]
    Attention: Megatron keeps queries, output gates, keys and values in one tensor, group by group: the queries with a
    common key, the gates of these queries, the key, the value. In Hugging Face's `q_proj` a query's gate follows the
    query. The vision tower has no gates and as many keys as queries; in the tower's `qkv` all queries come first, then
    all keys, then all values.

    Gated delta nets: a component's name stands for Hugging Face's tensor, whole heads in order. Only the first three
    components are together in Hugging Face's files, in `in_proj_qkv` and in the convolution.

    Feed-forward: gate and up are one tensor in Megatron. The vision tower's feed-forward parts have no gate.

    Tokens: Megatron may pad the rows of the vocabulary, for equal shares of the ranks.

    Norms: Megatron stores a norm with the projection behind it. Both sides store weights around zero (1 is added before
    the product), except the norm at the end of a gated delta net: Hugging Face stores its weights around one.

    Source: the mappings of Megatron-Bridge; `SelfAttention` and `GatedDeltaNet` of megatron-core; `modeling_qwen3_5.py`
    and `modeling_qwen3_5_moe.py` of transformers. Tests compute from the megatron side, in megatron-core's order, what
    transformers computes from the hf.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from lamella_convert import Grouped, Join, Padded, Rule, Rules, Stack
from lamella_qwen._sizes import QwenSizes

EXPERTS: Final = "experts"
"""The name of the number of routed experts, in stacks."""


def megatron_rules(
    config: Mapping[str, object], *, packed_experts: bool = True, packed_mtp_experts: bool = False
) -> Rules:
    """The rules between Hugging Face's names of a Qwen3.5 (hf) and Megatron's canonical names (megatron).

    Text models and models with vision, dense and mixtures of experts, with or without the layer that predicts further
    tokens (held by checkpoints, absent from transformers' modules). Hugging Face's experts are read in either form; the
    arguments choose the form to write. The defaults are the published forms.

    Args:
        config: The values of a `config.json`.
        packed_experts: True for experts stacked in one tensor, like transformers' modules; False for experts stored one
            by one, like `save_pretrained`'s files.
        packed_mtp_experts: True for stacked experts of the layer that predicts further tokens: Qwen3.6's are stacked,
            Qwen3.5's are not.

    Raises:
        ValueError: The config is not a whole Qwen3.5's.
    """
    sizes = QwenSizes.of(config)
    hf, megatron = ("model.", "") if sizes.num_vision_heads is None else ("model.language_model.", "language_model.")
    layers = f"{hf}layers.{{layer}}.", f"{megatron}decoder.layers.{{layer}}."
    rules = [
        Rule(f"{hf}embed_tokens.weight", _padded_vocabulary(f"{megatron}embedding.word_embeddings.weight")),
        Rule(f"{hf}norm.weight", f"{megatron}decoder.final_layernorm.weight"),
        *([] if sizes.tied else [Rule("lm_head.weight", _padded_vocabulary(f"{megatron}output_layer.weight"))]),
        *_attention(*layers),
        *_delta_net(*layers),
        *_feed_forward(*layers, packed_experts=packed_experts),
        *_mtp("mtp.", f"{megatron}mtp.layers.", packed_experts=packed_mtp_experts),
        *_vision("model.visual.", "vision_model."),
    ]
    return Rules(tuple(rules), sizes=_named(sizes), numbered={layers[0]: sizes.num_layers}, stacked=experts_of(sizes))


def experts_of(sizes: QwenSizes) -> dict[str, int]:
    """Return the number of terms in stacks of experts, by its name; nothing for a dense model."""
    return {} if sizes.num_experts is None else {EXPERTS: sizes.num_experts}


def megatron_sizes(config: Mapping[str, object], *, tensor_parallel_size: int) -> dict[str, int]:
    """The sizes by which tensors come apart that Megatron's dialects fuse in the order of tensor-parallel ranks.

    Args:
        config: The values of a `config.json`.
        tensor_parallel_size: The number of tensor-parallel ranks of the Megatron checkpoint's writer, or reader.

    Returns:
        The argument `sizes` of lamella-checkpoint's readers and writers of Megatron's formats.

    Raises:
        ValueError: The config is not a whole Qwen3.5's, or the heads of its gated delta nets cannot be dealt out.
    """
    sizes = QwenSizes.of(config)
    for kind, num in (("key heads", sizes.num_key_heads), ("value heads", sizes.num_value_heads)):
        if tensor_parallel_size < 1 or num % tensor_parallel_size:
            raise ValueError(
                f"Expected a tensor_parallel_size that divides the {num} {kind} of a gated delta net, "
                f"got {tensor_parallel_size!r}."
            )
    return {
        "tp": tensor_parallel_size,
        "qk": sizes.net_query_width,
        "v": sizes.net_value_width,
        "nvh": sizes.num_value_heads,
    }


def _named(sizes: QwenSizes) -> dict[str, int]:
    """The sizes by the names in the rules."""
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return {
        "vocabulary": sizes.vocab_size,
        "heads": sizes.num_heads,
        "groups": sizes.num_kv_heads,
        "query": query,
        "query and gate": 2 * query,
        "key": key,
        "net query": sizes.net_query_width,
        "net value": sizes.net_value_width,
        "vision heads": sizes.num_vision_heads or 1,
    }


def _renames(hf: str, megatron: str, names: Mapping[str, str]) -> Iterable[Rule]:
    return [Rule(f"{hf}{hf_name}", f"{megatron}{megatron_name}") for hf_name, megatron_name in names.items()]


def _padded_vocabulary(name: str) -> Padded:
    return Padded(name, rows="vocabulary", to="padded vocabulary")


_ATTENTION: Final = {
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
}


def _attention(hf: str, megatron: str) -> Iterable[Rule]:
    query, key, value = (f"{hf}self_attn.{part}_proj.weight" for part in "qkv")
    fused = f"{megatron}self_attention.linear_qkv"
    return [
        Rule(f"{hf}input_layernorm.weight", f"{fused}.layer_norm_weight", left_beside=query),
        Rule(
            Join((Grouped(query, groups="heads", sizes=(1, 1)), key, value), sizes=("query and gate", "key", "key")),
            Grouped(f"{fused}.weight", groups="groups", sizes=("query", "query", "key", "key")),
        ),
        *_renames(hf, megatron, _ATTENTION),
    ]


_DELTA_NET: Final = {
    "linear_attn.in_proj_z.weight": "self_attention.in_proj.weight.z",
    "linear_attn.in_proj_b.weight": "self_attention.in_proj.weight.beta",
    "linear_attn.in_proj_a.weight": "self_attention.in_proj.weight.alpha",
    "linear_attn.A_log": "self_attention.A_log",
    "linear_attn.dt_bias": "self_attention.dt_bias",
    "linear_attn.out_proj.weight": "self_attention.out_proj.weight",
}


def _delta_net(hf: str, megatron: str) -> Iterable[Rule]:
    projected, convolved = f"{megatron}self_attention.in_proj", f"{megatron}self_attention.conv1d"
    qkv, convolution = f"{hf}linear_attn.in_proj_qkv.weight", f"{hf}linear_attn.conv1d.weight"
    return [
        Rule(f"{hf}input_layernorm.weight", f"{projected}.layer_norm_weight", left_beside=qkv),
        Rule(qkv, _query_key_value(f"{projected}.weight")),
        Rule(convolution, _query_key_value(f"{convolved}.weight")),
        Rule(f"{hf}linear_attn.norm.weight", f"{megatron}self_attention.out_norm.weight", shift=-1.0),
        *_renames(hf, megatron, _DELTA_NET),
    ]


def _query_key_value(name: str) -> Join:
    terms = f"{name}.query", f"{name}.key", f"{name}.value"
    return Join(terms, sizes=("net query", "net query", "net value"))


_MIXTURE: Final = {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}


def _feed_forward(hf: str, megatron: str, *, packed_experts: bool) -> Iterable[Rule]:
    norm, gate = f"{hf}post_attention_layernorm.weight", f"{hf}mlp.gate_proj.weight"
    packed = _packed_experts(f"{hf}mlp.experts.", f"{megatron}mlp.experts.")
    single = _gated(f"{hf}mlp.experts.{{expert}}.", f"{megatron}mlp.experts.", number="{expert}")
    return [
        Rule(norm, f"{megatron}mlp.linear_fc1.layer_norm_weight", left_beside=gate),
        *_gated(f"{hf}mlp.", f"{megatron}mlp."),
        *_renames(hf, megatron, _MIXTURE),
        *_gated(f"{hf}mlp.shared_expert.", f"{megatron}mlp.shared_experts."),
        # The first fitting rule takes the names: from the megatron, the preferred spelling.
        *((*packed, *single) if packed_experts else (*single, *packed)),
    ]


def _gated(hf: str, megatron: str, number: str = "") -> Iterable[Rule]:
    halves = f"{hf}gate_proj.weight", f"{hf}up_proj.weight"
    return [
        Rule(Join(halves, sizes=(1, 1)), f"{megatron}linear_fc1.weight{number}"),
        Rule(f"{hf}down_proj.weight", f"{megatron}linear_fc2.weight{number}"),
    ]


def _packed_experts(hf: str, megatron: str) -> Iterable[Rule]:
    names = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
    return [
        Rule(f"{hf}{hf_name}", Stack(f"{megatron}{megatron_name}.weight{{expert}}", index="expert", count=EXPERTS))
        for hf_name, megatron_name in names.items()
    ]


_MTP: Final = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "final_layernorm.weight",
}


def _mtp(hf: str, megatron: str, *, packed_experts: bool) -> Iterable[Rule]:
    """The published layer: an attention layer, between norms and a projection of its own."""
    layer = f"{hf}layers.{{layer}}.", f"{megatron}{{layer}}.mtp_model_layer."
    return [
        *_renames(hf, f"{megatron}0.", _MTP),
        *_attention(*layer),
        *_feed_forward(*layer, packed_experts=packed_experts),
    ]


_VISION: Final = {
    "patch_embed.proj.weight": "patch_embed.proj.weight",
    "patch_embed.proj.bias": "patch_embed.proj.bias",
    "pos_embed.weight": "pos_embed.weight",
    "merger.norm.weight": "merger.patch_norm.weight",
    "merger.norm.bias": "merger.patch_norm.bias",
    "merger.linear_fc1.weight": "merger.linear_fc1.weight",
    "merger.linear_fc1.bias": "merger.linear_fc1.bias",
    "merger.linear_fc2.weight": "merger.linear_fc2.weight",
    "merger.linear_fc2.bias": "merger.linear_fc2.bias",
}

_VISION_BLOCK: Final = {
    "norm1.weight": "self_attention.linear_qkv.layer_norm_weight",
    "norm1.bias": "self_attention.linear_qkv.layer_norm_bias",
    "attn.proj.weight": "self_attention.linear_proj.weight",
    "attn.proj.bias": "self_attention.linear_proj.bias",
    "norm2.weight": "mlp.linear_fc1.layer_norm_weight",
    "norm2.bias": "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias": "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias": "mlp.linear_fc2.bias",
}


def _vision(hf: str, megatron: str) -> Iterable[Rule]:
    block = f"{hf}blocks.{{layer}}.", f"{megatron}decoder.layers.{{layer}}."
    yield from _renames(hf, megatron, _VISION)
    yield from _renames(*block, _VISION_BLOCK)
    for part in ("weight", "bias"):
        fused = f"{block[1]}self_attention.linear_qkv.{part}"
        yield Rule(f"{block[0]}attn.qkv.{part}", Grouped(fused, groups="vision heads", sizes=(1, 1, 1)))
