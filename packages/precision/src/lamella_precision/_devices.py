"""The devices that multiply in float8."""

from __future__ import annotations

import torch

from lamella_precision import _blockwise
from lamella_precision._float8 import Float8Recipe, has_float8


def multiplies_in_float8(recipe: Float8Recipe, device: torch.device) -> bool:
    """Whether layers of `use_float8_matmul` run float8 kernels; else the same values are multiplied in fp32.

    Args:
        recipe: Of the layers.
        device: Of the layers. CUDA without an index is the current device.
    """
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    squares = (_blockwise.LENGTH, _blockwise.LENGTH)
    return bool(_blockwise._has_kernels(index)) if recipe.block == squares else has_float8(index)
