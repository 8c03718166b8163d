"""What this rank has of a live tensor: boxes of the whole one."""

from collections.abc import Iterator
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from lamella_layout import Chunk, Range, mesh_region


def own_boxes(tensor: torch.Tensor) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """The boxes of a tensor that are this rank's to write, with their values.

    Together the ranks of a DTensor's mesh have each element once: where axes replicate it, the first rank along them
    does. A plain tensor is one box, whoever has it.

    Raises:
        ValueError: The tensor is still to be reduced, or its local tensor is not what its placements say.

    Effects: none; views.
    """
    if not isinstance(tensor, DTensor):
        yield Chunk((0,) * tensor.ndim, tuple(tensor.shape)), tensor.detach()
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"Expected a tensor that is reduced, got placements {tensor.placements}.")
    if coordinate is None:
        return
    if any(at and isinstance(each, Replicate) for at, each in zip(coordinate, tensor.placements, strict=True)):
        return
    with torch.no_grad():
        local = tensor.to_local()
    region = mesh_region(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements, coordinate)
    if region.shape != tuple(local.shape) and (local.numel() or region.chunks):
        raise ValueError(
            f"Expected a local tensor of shape {region.shape}, as {tensor.placements} cut {tuple(tensor.shape)}, got "
            f"{tuple(local.shape)}."
        )
    local_runs = [list(_positions(runs)) for runs in region.runs]
    for chunk, ranges in zip(region.chunks, product(*local_runs), strict=True):
        yield chunk, local[tuple(slice(each.start, each.stop) for each in ranges)]


def _positions(runs: tuple[Range, ...]) -> Iterator[Range]:
    """Where runs of global indices lie in the local tensor: one behind the other."""
    start = 0
    for run in runs:
        yield Range(start, start + run.numel)
        start += run.numel
