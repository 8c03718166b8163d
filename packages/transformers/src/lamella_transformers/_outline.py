"""The outline of a model without memory for weights: a trial before a run."""

import torch
from torch import nn

from lamella_transformers._causality import check_causal
from lamella_transformers._construction import ModelSpec, constructed
from lamella_transformers._errors import ModelError, in_short
from lamella_transformers._units import sharding_units


def outline(spec: ModelSpec, *, is_checked: bool = False) -> nn.Module:
    """Build the model of a config without memory for its weights.

    Args:
        spec: The config.
        is_checked: The model has been outlined before, and is not tried again.

    Raises:
        ModelError: transformers cannot build the model, the model names no layers and has no list of layers, or
            positions see the tokens to predict. Names the model type and the reason.

    Effects: as `check_causal`, unless `is_checked`.
    """
    try:
        model, _ = constructed(spec, torch.device("meta"))
    except Exception as error:
        raise ModelError(
            f"Expected a causal language model that transformers can build, got {spec.model_type!r}: {in_short(error)}"
        ) from error
    if not is_checked:
        check_causal(model, spec)
        sharding_units(model)
    return model
