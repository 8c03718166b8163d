"""Weights as a gather leaves them."""

from __future__ import annotations

import torch

from lamella_precision import Float8Recipe, MXFP8Recipe, QuantizedWeight, WeightRows
from lamella_precision.testing import encode_into, measured


def gathered(weight: torch.Tensor, recipe: Float8Recipe | MXFP8Recipe) -> QuantizedWeight:
    """A whole weight in a recipe's format, with the payloads of both directions."""
    scales = _scales(weight, recipe) if isinstance(recipe, Float8Recipe) else None
    formats = recipe.payloads(weight.shape, weight.dtype)
    payloads = [
        torch.empty(payload_format.shape, dtype=payload_format.dtype, device=weight.device)
        for payload_format in formats
    ]
    encode_into(recipe, weight, payloads, WeightRows(tuple(weight.shape), 0, scales))
    return recipe.decode(payloads, weight.shape, scales)


def _scales(weight: torch.Tensor, recipe: Float8Recipe) -> torch.Tensor:
    amaxes = measured(recipe, [weight], weight.shape)
    scales = torch.empty_like(amaxes)
    recipe.rescale(amaxes, scales, torch.empty(0, len(amaxes), device=weight.device))
    return scales.view(recipe.scale_shape(weight.shape))
