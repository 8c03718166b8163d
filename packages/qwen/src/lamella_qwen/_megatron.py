"""Where each tensor of a Qwen3.5 lies in a Megatron checkpoint: the family's rules, as data.

On the left are Hugging Face's names, on the right those of an `fsdp_dtensor` checkpoint of megatron-core's model,
without the prefixes of its sections.

Note [How the two sides differ]
    Attention: Megatron keeps queries, output gates, keys and values in one tensor, group by group: the queries that
    share a key, the gates of these queries, the key, the value. In Hugging Face's `q_proj` each query is followed by
    its gate. The vision tower has no gates and as many keys as queries; its `qkv` has all queries, then all keys, then
    all values.

    Gated delta nets: Megatron keeps all that is projected from the input in one tensor and all that is convolved in
    another. Each rank of tensor parallelism has its share of every component, one component after another, and the
    ranks' rows follow each other. By itself a component is what Hugging Face has: whole heads in order. The dialect
    `bridge` stores components. `release-0.19` stores the fused tensors, whose order depends on the number of ranks.

    Feed-forward: both dialects store the halves of a gated projection apart, as `_w` (gate) and `_v` (up). The vision
    tower's is not gated.

    Norms: Megatron stores a norm with the projection behind it. Both sides store weights around zero (1 is added before
    they multiply), but for the norm at the end of a gated delta net, which Hugging Face stores around one.

    Source: the mappings of Megatron-Bridge; `SelfAttention` and `GatedDeltaNet` of megatron-core; `modeling_qwen3_5.py`
    and `modeling_qwen3_5_moe.py` of transformers. Tests compute from the right side, in megatron-core's order, what
    transformers computes from the left.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias

from lamella_checkpoint import Grouped, Join, Rule, Rules, Stack
from lamella_qwen._sizes import QwenSizes

Dialect: TypeAlias = Literal["bridge", "release-0.19"]
"""How gated delta nets are stored: by component, or fused, in the order of tensor-parallel ranks."""

MtpLayer: TypeAlias = Literal["mtp_model_layer", "transformer_layer"]
"""Megatron's two names for the layer inside a block that predicts a further token."""


def megatron_rules(
    config: Mapping[str, object],
    *,
    tensor_parallel_size: int = 1,
    dialect: Dialect = "bridge",
    packed_experts: bool = True,
    packed_mtp_experts: bool = False,
    mtp_layer: MtpLayer = "mtp_model_layer",
) -> Rules:
    """What corresponds between Hugging Face's names of a Qwen3.5 (left) and Megatron's (right).

    Text models and those with vision, dense and mixtures of experts, with or without the layer that predicts further
    tokens (which checkpoints hold and transformers' modules do not). What has two spellings is read in either; the
    arguments say which one is written. The defaults are what is published.

    Args:
        config: The values of a `config.json`.
        tensor_parallel_size: Of the ranks that wrote the Megatron checkpoint, or will read it; `bridge` stores the same
            for any number.
        packed_experts: Whether Hugging Face's experts are stacked in one tensor, as in transformers' modules; else they
            are stored one by one, as `save_pretrained` stores them.
        packed_mtp_experts: The same for the layer that predicts further tokens: Qwen3.6 packs them, Qwen3.5 does not.
        mtp_layer: Megatron's name for that layer.

    Raises:
        ValueError: The config is not a whole Qwen3.5's, or its heads cannot be dealt out to the ranks.
    """
    sizes = QwenSizes.of(config)
    _check_ranks(sizes, tensor_parallel_size)
    left, right = ("model.", "") if sizes.num_vision_heads is None else ("model.language_model.", "language_model.")
    layers = f"{left}layers.{{layer}}.", f"{right}decoder.layers.{{layer}}."
    rules = [
        *_renames(left, right, _ENDS),
        *([] if sizes.tied else [Rule("lm_head.weight", f"{right}output_layer.weight")]),
        *_attention(*layers),
        *_delta_net(*layers, dialect),
        *_feed_forward(*layers, packed_experts=packed_experts),
        *_mtp("mtp.", f"{right}mtp.layers.{{layer}}.", mtp_layer, packed_experts=packed_mtp_experts),
        *_vision("model.visual.", "vision_model."),
    ]
    return Rules(tuple(rules), sizes=_named(sizes, tensor_parallel_size))


def _check_ranks(sizes: QwenSizes, num_ranks: int) -> None:
    heads = {
        "query heads": sizes.num_heads,
        "key heads of a gated delta net": sizes.num_key_heads,
        "value heads of a gated delta net": sizes.num_value_heads,
    }
    for kind, num in heads.items():
        if num_ranks < 1 or num % num_ranks:
            raise ValueError(f"Expected a tensor_parallel_size that divides the {num} {kind}, got {num_ranks!r}.")


def _named(sizes: QwenSizes, num_ranks: int) -> dict[str, int]:
    """The sizes by the names that the rules use."""
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    net_query, net_value = sizes.num_key_heads * sizes.key_head_dim, sizes.num_value_heads * sizes.value_head_dim
    return {
        "tp": num_ranks,
        "heads": sizes.num_heads,
        "kv heads": sizes.num_kv_heads,
        "query": query,
        "query and gate": 2 * query,
        "key": key,
        "net query": net_query,
        "net value": net_value,
        "net query, key and value": 2 * net_query + net_value,
        "net value heads": sizes.num_value_heads,
        "vision heads": sizes.num_vision_heads or 1,
    }


def _renames(left: str, right: str, names: Mapping[str, str]) -> Iterable[Rule]:
    return [Rule(f"{left}{mine}", f"{right}{theirs}") for mine, theirs in names.items()]


_ENDS: Final = {
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
}

_ATTENTION: Final = {
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
}


def _attention(left: str, right: str) -> Iterable[Rule]:
    query, key, value = (f"{left}self_attn.{part}_proj.weight" for part in "qkv")
    fused = f"{right}self_attention.linear_qkv"
    return [
        Rule(f"{left}input_layernorm.weight", f"{fused}.layer_norm_weight", left_beside=query),
        Rule(
            Join((Grouped(query, groups="heads", sizes=(1, 1)), key, value), sizes=("query and gate", "key", "key")),
            Grouped(f"{fused}.weight", groups="kv heads", sizes=("query", "query", "key", "key")),
        ),
        *_renames(left, right, _ATTENTION),
    ]


_DELTA_NET: Final = {
    "linear_attn.A_log": "self_attention.A_log",
    "linear_attn.dt_bias": "self_attention.dt_bias",
    "linear_attn.out_proj.weight": "self_attention.out_proj.weight",
}


def _delta_net(left: str, right: str, dialect: Dialect) -> Iterable[Rule]:
    qkv, z, beta, alpha = (f"{left}linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    convolution = f"{left}linear_attn.conv1d.weight"
    projected, convolved = f"{right}self_attention.in_proj.weight", f"{right}self_attention.conv1d.weight"
    parts = ("net query", "net query", "net value")
    if dialect == "bridge":
        cut = [
            Rule(qkv, Join(tuple(f"{projected}.{part}" for part in ("query", "key", "value")), sizes=parts)),
            Rule(convolution, Join(tuple(f"{convolved}.{part}" for part in ("query", "key", "value")), sizes=parts)),
            *(Rule(mine, f"{projected}.{theirs}") for mine, theirs in ((z, "z"), (beta, "beta"), (alpha, "alpha"))),
        ]
    else:
        rest = ("net value", "net value heads", "net value heads")
        cut = [
            Rule(
                Join((qkv, z, beta, alpha), sizes=("net query, key and value", *rest)),
                Grouped(projected, groups="tp", sizes=(*parts, *rest)),
            ),
            Rule(convolution, Grouped(convolved, groups="tp", sizes=parts)),
        ]
    return [
        Rule(f"{left}input_layernorm.weight", f"{right}self_attention.in_proj.layer_norm_weight", left_beside=qkv),
        *cut,
        Rule(f"{left}linear_attn.norm.weight", f"{right}self_attention.out_norm.weight", shift=-1.0),
        *_renames(left, right, _DELTA_NET),
    ]


_GATED: Final = {
    "gate_proj.weight": "linear_fc1.weight_w",
    "up_proj.weight": "linear_fc1.weight_v",
    "down_proj.weight": "linear_fc2.weight",
}

_MIXTURE: Final = {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}


def _feed_forward(left: str, right: str, *, packed_experts: bool) -> Iterable[Rule]:
    norm, gate = f"{left}post_attention_layernorm.weight", f"{left}mlp.gate_proj.weight"
    experts = [_packed_experts(left, right), _single_experts(left, right)]
    preferred, other = experts if packed_experts else reversed(experts)
    return [
        Rule(norm, f"{right}mlp.linear_fc1.layer_norm_weight", left_beside=gate),
        *_renames(f"{left}mlp.", f"{right}mlp.", _GATED),
        *_renames(left, right, _MIXTURE),
        *_renames(f"{left}mlp.shared_expert.", f"{right}mlp.shared_experts.", _GATED),
        *preferred,
        *other,
    ]


def _packed_experts(left: str, right: str) -> Iterable[Rule]:
    halves = tuple(f"{right}mlp.experts.linear_fc1.weight{{expert}}_{half}" for half in "wv")
    return [
        Rule(f"{left}mlp.experts.gate_up_proj", Stack(Join(halves, sizes=(1, 1)), index="expert")),
        Rule(f"{left}mlp.experts.down_proj", Stack(f"{right}mlp.experts.linear_fc2.weight{{expert}}", index="expert")),
    ]


def _single_experts(left: str, right: str) -> Iterable[Rule]:
    expert = f"{left}mlp.experts.{{expert}}."
    return [
        Rule(f"{expert}gate_proj.weight", f"{right}mlp.experts.linear_fc1.weight{{expert}}_w"),
        Rule(f"{expert}up_proj.weight", f"{right}mlp.experts.linear_fc1.weight{{expert}}_v"),
        Rule(f"{expert}down_proj.weight", f"{right}mlp.experts.linear_fc2.weight{{expert}}"),
    ]


_MTP: Final = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "final_layernorm.weight",
}


def _mtp(left: str, right: str, preferred: MtpLayer, *, packed_experts: bool) -> Iterable[Rule]:
    """The one published layer: an attention layer between norms and a projection of its own."""
    first = right.format(layer=0)
    yield from _renames(left, first, _MTP)
    names: tuple[MtpLayer, MtpLayer] = ("mtp_model_layer", "transformer_layer")
    for name in sorted(names, key=lambda each: each != preferred):
        layer = f"{left}layers.{{layer}}.", f"{right}{name}."
        yield from _attention(*layer)
        yield from _feed_forward(*layer, packed_experts=packed_experts)


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


def _vision(left: str, right: str) -> Iterable[Rule]:
    block = f"{left}blocks.{{layer}}.", f"{right}decoder.layers.{{layer}}."
    yield from _renames(left, right, _VISION)
    yield from _renames(*block, _VISION_BLOCK)
    for part in ("weight", "bias"):
        fused = f"{block[1]}self_attention.linear_qkv.{part}"
        yield Rule(f"{block[0]}attn.qkv.{part}", Grouped(fused, groups="vision heads", sizes=(1, 1, 1)))
