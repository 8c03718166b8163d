"""The devices that multiply in float8."""

from __future__ import annotations

import torch

from lamella_precision._products import squares
from lamella_precision._recipes.float8 import Float8Recipe
from lamella_precision._scales.encoding import has_float8


def multiplies_in_float8(recipe: Float8Recipe, device: torch.device) -> bool:
    """Whether layers of `use_float8_matmul` run float8 kernels; else the same values are multiplied in fp32.

    Args:
        recipe: The recipe of the layers.
        device: The device of the layers. CUDA without an index is the current device.
    """
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    block = (squares.LENGTH, squares.LENGTH)
    return bool(squares._has_kernels(index)) if recipe.block == block else has_float8(index)
