"""Operands of float8 products: matrices quantised at use, by current scaling, and their product in fp32."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch

from lamella_precision._scales.scales import scale_for
from lamella_precision._scales.tiles import Block
from lamella_precision._weights.linear_arguments import is_autocast

_DTYPE = torch.float8_e4m3fn


class Operand(NamedTuple):
    """Float8 data, (rows, columns), and fp32 scales of its blocks, (grid rows, grid columns)."""

    data: torch.Tensor
    scales: torch.Tensor


def quantised(
    matrix: torch.Tensor, block: Block, dtype: torch.dtype = _DTYPE, *, power_of_two: bool = False
) -> Operand:
    """A matrix by current scaling, with a scale for each block; its sizes are multiples of the block's.

    Args:
        matrix: (rows, columns), with elements.
        block: Rows and columns of a block; None for all.
        dtype: A float8 format.
        power_of_two: Round scales up to a power of two.
    """
    largest = torch.finfo(dtype).max
    rows, columns = (length or numel for length, numel in zip(block, matrix.shape, strict=True))
    tiles = matrix.view(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)
    scales = scale_for(tiles.abs().amax((1, 3), keepdim=True).float(), largest, power_of_two=power_of_two)
    elements = (tiles / scales).clamp(-largest, largest).to(dtype)
    return Operand(elements.reshape(matrix.shape).contiguous(), scales.squeeze((1, 3)))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b.T` in fp32, whatever autocast asks of products."""
    with torch.autocast(a.device.type, enabled=False) if is_autocast(a.device) else nullcontext():
        return a.float() @ b.float().t()
