"""Scales from amaxes, and data times scales."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lamella_precision._scales.tiles import Block, tiles_of

_SMALLEST_SCALE = 2.0**-126  # no subnormal scale: its reciprocal overflows, and kernels may flush it to zero


def scale_for(amaxes: torch.Tensor, largest: float, *, power_of_two: bool) -> torch.Tensor:
    """`amax / largest`, at least 2^-126; as a power of two, rounded up."""
    # A tensor as divisor: CUDA multiplies by the reciprocal of a number, which rounds twice.
    scales = (amaxes / torch.full_like(amaxes, largest)).clamp_min(_SMALLEST_SCALE)
    if not power_of_two:
        return scales
    return power_of(exponents_for(scales))


def write_scales(
    scales: torch.Tensor, amaxes: torch.Tensor, past: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the scales of measured amaxes (current scaling), or of the largest of the latest amaxes (delayed scaling).

    Args:
        scales: (n,), fp32; left as they are where nothing was ever measured but zeros.
        amaxes: (n,), fp32, measured since the last call; 0 where nothing was.
        past: (num_past, n), fp32, the latest amaxes first; negative where nothing was measured, 0 for a block that had
            zeros alone. Written. No rows: current scaling.
        scale: A scale for each of some amaxes.
    """
    if not len(past):
        scales.copy_(scale(amaxes))
        return
    # An unchanged weight (a second microbatch, an evaluation) is not measured twice.
    is_new = (amaxes != 0) & (amaxes != past[0])
    past.copy_(torch.where(is_new, torch.cat([amaxes[None], past[:-1]]), past))
    latest = past.amax(0)
    scales.copy_(torch.where(latest <= 0, scales, scale(latest)))


def exponents_for(scales: torch.Tensor) -> torch.Tensor:
    """Biased exponents (int32, 1 to 254) of positive normal fp32 numbers rounded up to powers of two; NaN, inf: 255."""
    # On bits, since neither `log2` nor `pow` is exact on every device. Rounded up, the bits of NaN would overflow.
    return ((scales.view(torch.int32) & 0x7FFFFFFF).clamp_max(0x7F800000) + 0x7FFFFF) >> 23


def power_of(exponents: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers with the biased exponents 1 to 254; inf for 255."""
    return (exponents << 23).view(torch.float32)


def times_scales(
    payload: torch.Tensor, scales: torch.Tensor, shape: torch.Size, block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """Whole data times the scales of its blocks, in `dtype`."""
    weight = torch.empty(shape, dtype=dtype, device=payload.device)
    for tile in tiles_of(shape, shape, 0, block):
        blocks = tile.of(payload)
        tile.of(weight).copy_(blocks.float() * tile.cells(scales, len(blocks)))
    return weight
