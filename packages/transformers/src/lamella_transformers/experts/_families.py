"""Models that are known: their decoders, sparse layers and classes, and what their layers read beside hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.nn as nn
import transformers
from transformers import masking_utils

# One kind of attention in all layers, by the config's window.
_OF_ONE_KIND: Final = ("mixtral", "qwen3_moe")
# Positions of text, time, height and width: equal for text.
_OF_FOUR_POSITIONS: Final = ("qwen3_5_moe_text",)
_FAMILIES: Final = (*_OF_ONE_KIND, "qwen2_moe", "qwen3_next", *_OF_FOUR_POSITIONS)
_MASKS: Final = {
    "full_attention": "create_causal_mask",
    "sliding_attention": "create_sliding_window_causal_mask",
    "linear_attention": "create_recurrent_attention_mask",
}


def check_family(model: nn.Module) -> None:
    """Refuse a model of another family.

    Raises:
        ValueError: Always for another model.
    """
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in _FAMILIES or not hasattr(model, "lm_head"):
        raise ValueError(
            f"Expected a causal language model of {' or '.join(_FAMILIES)}, got {type(model).__name__} ({family}). "
            "Write the layer's slots by hand: lamella_schedule.LayerSlots."
        )


def layer_kinds(config: Any) -> list[str]:
    """The kind of attention of each layer, as transformers names it."""
    if config.model_type not in _OF_ONE_KIND:
        return list(config.layer_types)
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


def mask_function(kind: str) -> Callable[..., Any]:
    """Transformers' function that makes the mask of a kind of attention.

    Raises:
        ValueError: Another kind of attention, or a transformers without the function.
    """
    function = getattr(masking_utils, _MASKS.get(kind, ""), None)
    if function is None:
        raise ValueError(
            f"Expected layers of {' or '.join(_MASKS)} with transformers' function that makes their mask, got {kind!r} "
            f"and transformers {transformers.__version__}. Install transformers 5.23 or newer."
        )
    return cast(Callable[..., Any], function)


def positions_of(
    config: Any, hidden: torch.Tensor, text_positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the text, for attention and masks; and positions for rotary embeddings, as each family takes them.

    Args:
        config: The config of the model.
        hidden: (num_rows, length, width).
        text_positions: (num_rows, length) positions in the text, or None for positions from 0 on.
    """
    length = hidden.shape[1]
    positions = torch.arange(length, device=hidden.device).unsqueeze(0) if text_positions is None else text_positions
    if config.model_type not in _OF_FOUR_POSITIONS:
        return positions, positions
    row_positions = positions.expand(hidden.shape[0], -1)
    return row_positions, row_positions.unsqueeze(0).expand(3, -1, -1)


def is_sparse(module: Any) -> bool:
    """Whether a module is a layer's block of router and experts."""
    return hasattr(module, "gate") and hasattr(module, "experts")


def decoder_of(model: nn.Module) -> Any:
    """Embedding, layers and last norm."""
    return cast(Any, model).model


def family_class(model: nn.Module) -> type:
    """The model's class in transformers: `fully_shard` puts a class of its own before."""
    return next(base for base in type(model).__mro__ if base.__module__.startswith("transformers.models."))
