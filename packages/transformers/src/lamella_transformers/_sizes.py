"""Numbers out of a config and the sizes of a model: operations, positions, the weight of a loss."""

from collections.abc import Mapping
from typing import cast

from torch import nn

from lamella_transformers._construction import ModelSpec


def flops_per_token(model: nn.Module, spec: ModelSpec, sequence_length: int) -> float:
    """Return the floating-point operations of one token's forward and backward, as counted for MFU.

    Six operations a parameter without the input embedding, and twelve a pair of positions in an attention layer.
    Causal masking and recomputation are not counted.
    """
    values = spec.to_dict()
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    tied = bool(values.get("tie_word_embeddings"))
    weights = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else embeddings)
    return 6.0 * weights + 12.0 * _attention_width(values) * sequence_length


def _attention_width(values: Mapping[str, object]) -> int:
    """Heads times head dim, summed over the layers with attention to all positions."""
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return 0
    kinds, head_dim = values.get("layer_types"), values.get("head_dim")
    num_layers = kinds.count("full_attention") if isinstance(kinds, list) else values.get("num_hidden_layers", 0)
    width = heads * head_dim if isinstance(head_dim, int) else hidden
    return width * cast(int, num_layers)


def num_positions(spec: ModelSpec) -> int | None:
    """Return the number of positions of a model; None if its config names no bound.

    Some configs of stretched rotary positions name the bound before the stretch, others the bound after the stretch.
    """
    positions = getattr(spec, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    rope = getattr(spec, "rope_parameters", None)
    if not isinstance(rope, dict):
        return positions
    before, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if isinstance(before, int) and isinstance(factor, int | float):
        return max(positions, int(before * factor))
    return positions


def balance_coefficient(spec: ModelSpec) -> float:
    """Return the weight of the loss that balances experts, by the config's name for the weight."""
    values = spec.to_dict()
    return cast(float, values.get("router_aux_loss_coef", values.get("aux_loss_coef", 0.0)))
