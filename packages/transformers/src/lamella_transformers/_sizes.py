"""Numbers out of a config and the sizes of a model: operations, positions, the weight of a loss."""

from collections.abc import Callable, Mapping
from typing import cast

from torch import nn

from lamella_transformers._construction import ModelSpec


def flops_per_token(
    model: nn.Module, spec: ModelSpec, sequence_length: int, is_trained: Callable[[str], bool] = lambda name: True
) -> float:
    """Return the floating-point operations of one token's forward and backward, as counted for MFU.

    Six operations a trained parameter, four a frozen one, and twelve a pair of positions in an attention layer. Of
    stacked experts a token's own count, and of input embeddings none. Causal masking and recomputation are not counted.

    Args:
        model: The model, with its adapters; may be on the meta device.
        spec: The model's config.
        sequence_length: Positions that a token attends to.
        is_trained: Whether the parameter of a name is trained.
    """
    values = spec.to_dict()
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    unread = set() if values.get("tie_word_embeddings") else set(map(id, tables))
    num_experts, share = _experts(spec)
    operations = 12.0 * _attention_width(values) * sequence_length
    for name, parameter in model.named_parameters():
        if id(parameter) not in unread:
            is_stack = parameter.ndim == 3 and len(parameter) == num_experts
            operations += (6 if is_trained(name) else 4) * parameter.numel() * (share if is_stack else 1)
    return operations


def _experts(spec: ModelSpec) -> tuple[int | None, float]:
    """The number of experts in a layer, and the share of them that a token visits; None and 1 without experts."""
    num_experts = getattr(spec, "num_local_experts", None) or getattr(spec, "num_experts", None)
    num_visited = getattr(spec, "num_experts_per_tok", None)
    if not isinstance(num_experts, int) or not isinstance(num_visited, int):
        return None, 1.0
    return num_experts, num_visited / num_experts


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
