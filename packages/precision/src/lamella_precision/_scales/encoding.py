"""Cuts encoded and measured: by one Triton kernel on GPUs with float8, elsewhere by multi-tensor calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch

from lamella_precision._scales.assumed_kernels import assumes_float8_kernels
from lamella_precision._scales.tiles import TiledShard


def encode_cuts(cuts: Sequence[TiledShard], largest: float, *, multiplies: bool = False) -> None:
    """Divide by the cells, or multiply by them, saturate, and round to the destinations' format.

    Args:
        cuts: All with amaxes, which are raised, or all without.
        largest: The format's largest number.
        multiplies: By the cells, not to divide.

    Effects: one kernel for all cuts; where Triton does not run, multi-tensor calls and a temporary fp32 copy.
    """
    if not cuts:
        return
    if assumes_float8_kernels():  # reads and writes what the kernel does
        sources, into, _ = _tensors(cuts)
        torch._foreach_copy_(into, sources)
    elif fused := _kernels_for(cuts):
        fused.encode(cuts, largest, multiplies=multiplies)
    else:
        sources, into, scales = _tensors(cuts)
        _raise_amaxes(list(chain.from_iterable([cut.amaxes for cut in cuts])), sources)
        scaled = torch._foreach_mul if multiplies else torch._foreach_div
        round_to(into, scaled(as_float(sources), scales), largest)


def measure_cuts(cuts: Sequence[TiledShard]) -> None:
    """Raise the cells to the largest magnitude of each block's rows on this rank.

    Effects: one kernel for all cuts; where Triton does not run, two multi-tensor calls, and with several scales a
        matrix a kernel for each run of equal blocks too.
    """
    if not cuts:
        return
    if fused := _kernels_for(cuts):
        fused.measure(cuts)
        return
    tiles, _, cells = _tensors(cuts)
    _raise_amaxes(cells, tiles)


def _kernels_for(cuts: Sequence[TiledShard]) -> Any:
    """The module of Triton's kernels, or None on devices without."""
    device = cuts[0].beginnings[0].device
    return _triton_kernels() if device.type == "cuda" and has_float8(device.index) else None


@cache
def _triton_kernels() -> Any:
    return import_module("lamella_precision._scales.kernels") if find_spec("triton") else None


@cache
def has_float8(index: int) -> bool:
    """Whether a CUDA device converts and multiplies float8: compute capability 8.9 and above."""
    return torch.cuda.get_device_capability(index) >= (8, 9)


def _tensors(cuts: Sequence[TiledShard]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Sources, destinations and cells of all cuts."""
    return (
        list(chain.from_iterable([cut.sources for cut in cuts])),
        list(chain.from_iterable([cut.into for cut in cuts])),
        list(chain.from_iterable([cut.cells for cut in cuts])),
    )


def _raise_amaxes(cells: list[torch.Tensor], tiles: list[torch.Tensor]) -> None:
    """Raise cells to the largest magnitudes of the blocks of their tiles; nothing without cells."""
    if not cells:
        return
    if all(cell.numel() == 1 for cell in cells):
        norms = torch._foreach_norm(tiles, float("inf"))
        amaxes = [norm.view(cell.shape) for norm, cell in zip(norms, cells, strict=True)]
    else:
        amaxes = [torch.linalg.vector_norm(tile, float("inf"), (2, 4), True) for tile in tiles]
    torch._foreach_maximum_(cells, [amax.float() for amax in amaxes])


def as_float(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The shards in fp32: a division in 16 bits would round twice."""
    return [shard if shard.dtype == torch.float32 else shard.float() for shard in shards]


def round_to(into: Sequence[torch.Tensor], values: tuple[torch.Tensor, ...], largest: float) -> None:
    """Saturate values in place, and round into float8: torch's own cast makes NaN of values out of range."""
    torch._foreach_clamp_min_(values, -largest)
    torch._foreach_clamp_max_(values, largest)
    torch._foreach_copy_(list(into), values)
