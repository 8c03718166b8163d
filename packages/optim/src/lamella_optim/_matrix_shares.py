"""The matrices that ranks share: the ranks' parts of each, the rank that orthogonalises each, and the rounds.

Everything follows from shapes and placements alone, equal on all ranks.

Note [Rounds]
    All matrices at once would need 8 bytes for each element of a rank's shards. A round exchanges about `ROUND_NBYTES`
    a rank. Matrices of like cost share a round, so that no rank waits long for another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes

from lamella_layout import Range, Region, mesh_region

ROUND_NBYTES = 256 << 20
_WIRE_ITEMSIZE = 2

# Of ranks along several axes, by the world's group: the table must not outlive the groups.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


class MatrixUpdate(NamedTuple):
    """A parameter's step under way.

    Attributes:
        parameter: A matrix or a stack of matrices, as a DTensor that some axes cut inside matrices.
        gradient: On the parameter's placements.
        momentum: On the parameter's placements.
        options: Options of torch's Muon.
        turn: The rows of each of several matrices in a turn, as in `OwnerMuon`; empty for a single matrix.
    """

    parameter: DTensor
    gradient: torch.Tensor
    momentum: torch.Tensor
    options: Mapping[str, Any]
    turn: tuple[int, ...] = ()

    @property
    def kind(self) -> Hashable:
        """The facts that an `MatrixExchange` knows of the parameter."""
        return self.parameter.shape, self.parameter.device_mesh, self.parameter.placements, self.turn


Index = slice | torch.Tensor
"""Indices along a dim: of one run, or as numbers where runs lie apart."""


class MatrixPiece(NamedTuple):
    """A rank's part of a matrix.

    Attributes:
        place: The matrix among the matrices of the local stack.
        shape: Rows and columns of the part.
        local_rows: The rows of the local matrix.
        rows: The rows of the matrix.
        columns: The columns of the matrix, one for each local column.
    """

    place: int
    shape: tuple[int, int]
    local_rows: Index
    rows: Index
    columns: Index

    def on(self, device: torch.device) -> MatrixPiece:
        """The same on a device."""
        indices = (self.local_rows, self.rows, self.columns)
        return MatrixPiece(self.place, self.shape, *(on_device(index, device) for index in indices))

    @property
    def elements(self) -> tuple[Index, Index]:
        """The elements of the matrix, as its index."""
        if isinstance(self.rows, torch.Tensor) and isinstance(self.columns, torch.Tensor):
            return self.rows[:, None], self.columns
        return self.rows, self.columns


@dataclass(frozen=True)
class CutMatrix:
    """A matrix of a parameter, and the ranks' parts of it.

    Attributes:
        index: The parameter's index among a step's.
        shape: Rows and columns.
        pieces: By rank of the group; None for a rank without elements.
        owner: The rank of the group that orthogonalises the matrix.
    """

    index: int
    shape: tuple[int, int]
    pieces: tuple[MatrixPiece | None, ...]
    owner: int

    def numel_on(self, rank: int) -> int:
        """Number of elements of a rank's part."""
        piece = self.pieces[rank]
        return 0 if piece is None else prod(piece.shape)


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether ranks share the elements of a matrix, or of a matrix of a stack."""
    return isinstance(parameter, DTensor) and _is_cut(parameter.shape, parameter.device_mesh, parameter.placements)


@lru_cache(4096)
def _is_cut(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    """The answer for all parameters alike: a step asks once a parameter."""
    coordinates = product(*(range(size) for size in mesh.shape))
    regions = (mesh_region(shape, mesh.shape, placements, coordinate) for coordinate in coordinates)
    return any(region.shape[-2:] != shape[-2:] for region in regions if prod(region.shape))


def group_of(parameter: DTensor) -> dist.ProcessGroup:
    """The process group of the ranks that share a parameter.

    Effects: for a parameter cut along several axes, the first call creates the group, a collective on its ranks.
    """
    mesh, axes = parameter.device_mesh, _cut_axes(parameter)
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    ranks = tuple(_coordinates(parameter))
    world = dist.group.WORLD
    assert world is not None
    groups = _groups.setdefault(world, {})
    if ranks not in groups:
        # Local: other ranks have other parameters, and never make this call.
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]


def cost(rows: int, columns: int) -> int:
    """Multiplications of an iteration: a product of the matrix with itself, one of the result, and one of both."""
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)


def matrices_of(index: int, update: MatrixUpdate, device: torch.device) -> Iterator[tuple[int, tuple[int, int], Any]]:
    """The matrices of a parameter: index, shape and pieces by rank."""
    parameter = update.parameter
    regions = [_region(parameter, coordinate) for coordinate in _coordinates(parameter).values()]
    turns = _row_numbers(parameter.shape[-2], update.turn) if update.turn else [None]
    for at in product(*(range(size) for size in parameter.shape[:-2])):
        for numbers in turns:
            num_rows = parameter.shape[-2] if numbers is None else len(numbers)
            pieces = [_piece(at, numbers, region.runs) for region in regions]
            placed = tuple(None if piece is None else piece.on(device) for piece in pieces)
            yield index, (num_rows, parameter.shape[-1]), placed


def _piece(at: tuple[int, ...], numbers: torch.Tensor | None, runs: Sequence[Sequence[Range]]) -> MatrixPiece | None:
    """A rank's part of a matrix.

    Args:
        at: The matrix's indices in the stack.
        numbers: The parameter's rows that are the matrix, in ascending order; None for all.
        runs: The global indices of the rank's local tensor along each dim.
    """
    *stack, rows, columns = runs
    place = 0
    for position, along in zip(at, stack, strict=True):
        if (offset := _offset(position, along)) is None:
            return None
        place = place * _numel(along) + offset
    num_columns, column_index = _numel(columns), _index(columns)
    if numbers is None:
        if not (_numel(rows) and num_columns):
            return None
        return MatrixPiece(place, (_numel(rows), num_columns), slice(None), _index(rows), column_index)
    row_numbers = _numbers(rows)
    # Positions of the local rows in the sorted numbers of the matrix's rows.
    positions = torch.searchsorted(numbers, row_numbers).clamp(max=len(numbers) - 1)
    local_rows = (numbers[positions] == row_numbers).nonzero().flatten()
    if not (len(local_rows) and num_columns):
        return None
    return MatrixPiece(place, (len(local_rows), num_columns), local_rows, positions[local_rows], column_index)


def on_device(index: Index, device: torch.device) -> Index:
    """The same indices on a device; a slice has none."""
    return index.to(device) if isinstance(index, torch.Tensor) else index


def _offset(position: int, runs: Iterable[Range]) -> int | None:
    """The place of an index among runs; None outside."""
    start = 0
    for run in runs:
        if run.start <= position < run.stop:
            return start + position - run.start
        start += run.numel
    return None


def _numel(runs: Iterable[Range]) -> int:
    return sum(run.numel for run in runs)


def _index(runs: Sequence[Range]) -> Index:
    # Numbers of each rank's rows and columns would take the memory of a layer on hundreds of ranks, and a GPU copies
    # slices faster.
    return slice(runs[0].start, runs[0].stop) if len(runs) == 1 else _numbers(runs)


def _numbers(runs: Iterable[Range]) -> torch.Tensor:
    """The indices of runs, in order."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(run.start, run.stop) for run in runs)])


def _row_numbers(num_rows: int, turn: Sequence[int]) -> list[torch.Tensor]:
    """The rows of each matrix in a parameter with rows in turns, in ascending order."""
    turns = torch.arange(num_rows).view(-1, sum(turn))
    return [rows.flatten() for rows in torch.split(turns, list(turn), 1)]


def balanced(
    matrices: Iterable[tuple[int, tuple[int, int], Any]], num_ranks: int
) -> tuple[list[list[CutMatrix]], list[int]]:
    """Rounds of matrices, each with a rank: the costliest first, to the rank with the least work so far."""
    loads, rounds, numel = [0] * num_ranks, list[list[CutMatrix]](), 0
    limit = num_ranks * ROUND_NBYTES // _WIRE_ITEMSIZE
    for index, shape, pieces in sorted(matrices, key=lambda matrix: -cost(*matrix[1])):
        if not rounds or (numel + prod(shape) > limit and len(rounds[-1]) >= num_ranks):
            rounds.append([])
            numel = 0
        owner = loads.index(min(loads))
        loads[owner] += cost(*shape)
        numel += prod(shape)
        rounds[-1].append(CutMatrix(index, shape, pieces, owner))
    return rounds, loads


def _cut_axes(parameter: DTensor) -> list[int]:
    mesh = parameter.device_mesh
    placements = enumerate(parameter.placements)
    return [axis for axis, placement in placements if not placement.is_replicate() and mesh.size(axis) > 1]


def _coordinates(parameter: DTensor) -> dict[int, tuple[int, ...]]:
    """The places on the mesh of the ranks that share a parameter, by global rank in ascending order."""
    mesh, cut = parameter.device_mesh, _cut_axes(parameter)
    own_place = mesh.get_coordinate()
    assert own_place is not None
    ranges = [range(mesh.size(axis)) if axis in cut else (own_place[axis],) for axis in range(mesh.ndim)]
    with _disable_current_modes():  # Under an estimate's modes the tensor of ranks would have no values.
        ranks = mesh.mesh
        coordinates = {int(ranks[coordinate]): coordinate for coordinate in product(*ranges)}
    return dict(sorted(coordinates.items()))


def _region(parameter: DTensor, coordinate: Sequence[int]) -> Region:
    return mesh_region(parameter.shape, parameter.device_mesh.shape, parameter.placements, coordinate)
