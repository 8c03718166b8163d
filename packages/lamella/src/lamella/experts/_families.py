"""Models that are known: their decoders, sparse layers and classes."""

from __future__ import annotations

from typing import Any, Final, cast

import torch.nn as nn

_FAMILIES: Final = ("mixtral", "qwen3_moe")


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


def is_sparse(module: Any) -> bool:
    """Whether a module is a layer's block of router and experts."""
    return hasattr(module, "gate") and hasattr(module, "experts")


def decoder_of(model: nn.Module) -> Any:
    """Embedding, layers and last norm."""
    return cast(Any, model).model


def family_class(model: nn.Module) -> type:
    """The model's class in transformers: `fully_shard` puts a class of its own before."""
    return next(each for each in type(model).__mro__ if each.__module__.startswith("transformers.models."))
