"""megatron-core would compute from the translated tensors the same numbers as transformers from its own.

The references follow megatron-core's order of operations on the rows of each tensor-parallel rank, and sum over the
ranks at its row-parallel projections.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qwen_tiny import MemorySource, config_of, read_all, translated, weights_of

from lamella_convert._translation.megatron import RELEASE_0_19, write_fsdp_dtensor
from lamella_qwen import megatron_rules, megatron_sizes
from lamella_testing.qwen import Kind, make_model

NUM_HEADS, NUM_GROUPS, HEAD_DIM = 4, 2, 8
NUM_KEY_HEADS, NUM_VALUE_HEADS, KEY_DIM, VALUE_DIM = 4, 8, 4, 6
TOKENS = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(3))


def make_pair(kind: Kind, prefix: str, tensor_parallel_size: int = 1) -> tuple[Any, dict[str, torch.Tensor]]:
    """A transformers model, and the tensors below `prefix` that megatron-core 0.19 would load."""
    model = make_model(kind)
    weights = weights_of(model)
    model.load_state_dict(weights, strict=False)
    source = MemorySource({f"model.{name}": tensor for name, tensor in weights.items()})
    ours = translated(source, megatron_rules(config_of(kind)), "right")
    sizes = megatron_sizes(config_of(kind), tensor_parallel_size=tensor_parallel_size)
    tensors = read_all(write_fsdp_dtensor(ours, RELEASE_0_19, sizes=sizes))
    prefix = f"model.module.{prefix}"
    return model, {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def rank_rows(
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    num_ranks: int,
    *,
    column_parallel: Sequence[str] = (),
    row_parallel: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """A rank's tensors: rows of some, columns of others."""
    rows = {name: tensors[name].chunk(num_ranks)[rank] for name in column_parallel}
    return rows | {name: tensors[name].chunk(num_ranks, dim=1)[rank] for name in row_parallel}


def norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm with weights around zero: megatron-core's `layernorm_zero_centered_gamma`."""
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings of the first dims of each head; (batch, tokens, heads, dim)."""
    cos, sin, width = cos[:, :, None], sin[:, :, None], cos.shape[-1]
    turned, unturned = heads[..., :width], heads[..., width:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, unturned], -1)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """(batch, tokens, heads, dim), keys and values already one for each query."""
    query, key, value = (heads.transpose(1, 2) for heads in (queries, keys, values))
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)


def gated_attention(
    hidden: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    rotary: tuple[torch.Tensor, torch.Tensor],
    rank: int,
    num_ranks: int,
) -> torch.Tensor:
    """One rank's part of an attention layer with an output gate."""
    projections = rank_rows(
        tensors, rank, num_ranks, column_parallel=["linear_qkv.weight"], row_parallel=["linear_proj.weight"]
    )
    num_groups = NUM_GROUPS // num_ranks
    per_group = NUM_HEADS // NUM_GROUPS
    mixed = norm(hidden, tensors["linear_qkv.layer_norm_weight"]) @ projections["linear_qkv.weight"].T
    mixed = mixed.unflatten(-1, (num_groups, (2 * per_group + 2) * HEAD_DIM))  # type: ignore[no-untyped-call]
    widths = [per_group * HEAD_DIM, per_group * HEAD_DIM, HEAD_DIM, HEAD_DIM]
    queries, gates, keys, values = mixed.split(widths, dim=-1)
    queries = norm(queries.reshape(*hidden.shape[:2], -1, HEAD_DIM), tensors["q_layernorm.weight"])
    keys = norm(keys, tensors["k_layernorm.weight"])
    queries, keys = rotate(queries, *rotary), rotate(keys, *rotary)
    keys, values = (heads.repeat_interleave(per_group, dim=2) for heads in (keys, values))
    output = attend(queries, keys, values, is_causal=True).flatten(2) * gates.flatten(2).sigmoid()
    part: torch.Tensor = output @ projections["linear_proj.weight"].T
    return part


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_attention_from_the_fused_projection_is_transformers(num_ranks: int) -> None:
    model, tensors = make_pair("dense", "decoder.layers.3.self_attention.", num_ranks)
    layer = model.model.layers[3]
    positions = torch.arange(7).expand(3, 2, 7)
    rotary = model.model.rotary_emb(TOKENS, positions)
    with torch.no_grad():
        expected, _ = layer.self_attn(layer.input_layernorm(TOKENS), rotary, attention_mask=None)
        parts = [gated_attention(TOKENS, tensors, rotary, rank, num_ranks) for rank in range(num_ranks)]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


def delta_rule(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule, token by token."""
    state = torch.zeros(queries.shape[0], queries.shape[2], KEY_DIM, VALUE_DIM)
    outputs = []
    for token in range(queries.shape[1]):
        query, key, value = (sequence[:, token] for sequence in (queries, keys, values))
        state = state * decay[:, token, :, None, None].exp()
        update = (value - torch.einsum("bhk,bhkv->bhv", key, state)) * beta[:, token, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key, update)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return torch.stack(outputs, dim=1)


def unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


def delta_net(hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> torch.Tensor:
    """One rank's part of a gated delta net."""
    projections = rank_rows(
        tensors,
        rank,
        num_ranks,
        column_parallel=["in_proj.weight", "conv1d.weight", "A_log", "dt_bias"],
        row_parallel=["out_proj.weight"],
    )
    key_heads, value_heads = NUM_KEY_HEADS // num_ranks, NUM_VALUE_HEADS // num_ranks
    query_width, value_width = key_heads * KEY_DIM, value_heads * VALUE_DIM
    mixed = norm(hidden, tensors["in_proj.layer_norm_weight"]) @ projections["in_proj.weight"].T
    mixed, gate, beta, alpha = mixed.split([2 * query_width + value_width, value_width, value_heads, value_heads], -1)  # type: ignore[no-untyped-call]
    convolved = F.conv1d(mixed.transpose(1, 2), projections["conv1d.weight"], padding=3, groups=mixed.shape[-1])
    mixed = F.silu(convolved[..., : hidden.shape[1]]).transpose(1, 2)
    queries, keys, values = mixed.split([query_width, query_width, value_width], -1)  # type: ignore[no-untyped-call]
    queries, keys = (unit(heads.unflatten(-1, (key_heads, KEY_DIM))) for heads in (queries, keys))
    queries, keys = (heads.repeat_interleave(value_heads // key_heads, dim=2) for heads in (queries, keys))
    decay = -projections["A_log"].exp() * F.softplus(alpha + projections["dt_bias"])
    values = values.unflatten(-1, (value_heads, VALUE_DIM))
    output = delta_rule(queries * KEY_DIM**-0.5, keys, values, decay, beta.sigmoid())
    output = norm(output, tensors["out_norm.weight"]) * F.silu(gate.unflatten(-1, (value_heads, VALUE_DIM)))
    return output.flatten(2) @ projections["out_proj.weight"].T


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_gated_delta_net_from_the_fused_tensors_is_transformers(num_ranks: int) -> None:
    model, tensors = make_pair("dense", "decoder.layers.0.self_attention.", num_ranks)
    layer = model.model.layers[0]
    with torch.no_grad():
        expected = layer.linear_attn(layer.input_layernorm(TOKENS))
        parts = [delta_net(TOKENS, tensors, rank, num_ranks) for rank in range(num_ranks)]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


def test_the_norm_at_the_end_of_a_delta_net_multiplies_by_the_same_numbers() -> None:
    model, tensors = make_pair("dense", "decoder.layers.0.self_attention.")
    heads = torch.randn(5, VALUE_DIM, generator=torch.Generator().manual_seed(4))
    gates = torch.ones_like(heads)
    with torch.no_grad():
        expected = model.model.layers[0].linear_attn.norm(heads, gates)
    torch.testing.assert_close(norm(heads, tensors["out_norm.weight"]) * F.silu(gates), expected)


def gated(hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor], fc1: str, fc2: str) -> torch.Tensor:
    return (F.silu(hidden @ tensors[f"{fc1}_w"].T) * (hidden @ tensors[f"{fc1}_v"].T)) @ tensors[fc2].T


def test_a_feed_forward_part_is_transformers() -> None:
    model, tensors = make_pair("dense", "decoder.layers.2.mlp.")
    layer = model.model.layers[2]
    with torch.no_grad():
        expected = layer.mlp(layer.post_attention_layernorm(TOKENS))
    hidden = norm(TOKENS, tensors["linear_fc1.layer_norm_weight"])
    output = gated(hidden, tensors, "linear_fc1.weight", "linear_fc2.weight")
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_a_mixture_of_experts_is_transformers() -> None:
    model, tensors = make_pair("moe", "decoder.layers.1.")
    layer = model.model.layers[1]
    with torch.no_grad():
        expected = layer.mlp(layer.post_attention_layernorm(TOKENS))
    hidden = norm(TOKENS, tensors["pre_mlp_layernorm.weight"])
    chosen = (hidden @ tensors["mlp.router.weight"].T).softmax(-1).topk(2, dim=-1)
    weights = torch.zeros(2, 7, 4).scatter(-1, chosen.indices, chosen.values / chosen.values.sum(-1, keepdim=True))
    fc1, fc2 = "mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"
    outputs = [gated(hidden, tensors, f"{fc1}{expert}", f"{fc2}{expert}") for expert in range(4)]
    shared = gated(hidden, tensors, "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight")
    shared = shared * (hidden @ tensors["mlp.shared_experts.gate_weight"].T).sigmoid()
    output = sum(weights[..., expert, None] * expert_output for expert, expert_output in enumerate(outputs)) + shared
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_attention_of_the_vision_tower_is_transformers(num_ranks: int) -> None:
    model, tensors = make_pair("vision", "vision_model.decoder.layers.1.", num_ranks)
    patches = torch.randn(6, 16, generator=torch.Generator().manual_seed(5))
    angles = torch.randn(6, 8, generator=torch.Generator().manual_seed(6))
    block = model.model.visual.blocks[1]
    with torch.no_grad():
        expected = block.attn(block.norm1(patches), torch.tensor([0, 6]), (angles.cos(), angles.sin()))
    attention = {
        name.removeprefix("self_attention."): tensor
        for name, tensor in tensors.items()
        if name.startswith("self_attention.")
    }
    weight, bias = attention["linear_qkv.layer_norm_weight"], attention["linear_qkv.layer_norm_bias"]
    hidden = F.layer_norm(patches, (16,), weight, bias, eps=1e-6)
    parts = []
    for rank in range(num_ranks):
        projections = rank_rows(
            attention,
            rank,
            num_ranks,
            column_parallel=["linear_qkv.weight", "linear_qkv.bias"],
            row_parallel=["linear_proj.weight"],
        )
        mixed = F.linear(hidden, projections["linear_qkv.weight"], projections["linear_qkv.bias"])
        queries, keys, values = mixed.unflatten(-1, (2 // num_ranks, 3 * 8))[None].chunk(3, -1)  # type: ignore[no-untyped-call]
        rotary = angles.cos()[None], angles.sin()[None]
        output = attend(rotate(queries, *rotary), rotate(keys, *rotary), values, is_causal=False)
        parts.append(output.flatten(2)[0] @ projections["linear_proj.weight"].T)
    torch.testing.assert_close(sum(parts) + attention["linear_proj.bias"], expected, rtol=1e-4, atol=1e-5)
