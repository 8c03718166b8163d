"""Blocks of a matrix as strided views: a kernel over a view then serves every block, without padding.

A shard of rows 100 to 300 of a (300, 200) matrix, in blocks of 128 x 128:

    rows 100-128 | 1 x 1 blocks of 28 x 128  | 1 x 1 of 28 x 72        a cut block: the rest is on the rank before
    rows 128-256 | 1 x 1 blocks of 128 x 128 | 1 x 1 of 128 x 72
    rows 256-300 | 1 x 1 blocks of 44 x 128  | 1 x 1 of 44 x 72
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

Block = tuple[int | None, int | None]
Tiles = Sequence[torch.Tensor]


class _Run(NamedTuple):
    """Neighbouring blocks of equal length along a dim: elements, and cells of the grid."""

    start: int
    stop: int
    first_cell: int
    num_cells: int


class Tile(NamedTuple):
    """A part of a shard with blocks of equal size. A parameter of more than two dims is a stack of matrices.

    Attributes:
        matrix: (rows, columns) of a matrix in the shard.
        grid: (rows, columns) of the blocks of a whole matrix.
        first_matrix: The shard's first matrix in the whole parameter.
        rows: Rows in the shard, and their cells.
        columns: Columns, and their cells.
    """

    matrix: tuple[int, int]
    grid: tuple[int, int]
    first_matrix: int
    rows: _Run
    columns: _Run

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """The tile of a contiguous shard: (matrices, grid rows, block rows, grid columns, block columns), a view."""
        cut = shard.view(-1, *self.matrix)[:, self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]
        matrices, num_rows, num_columns = cut.shape
        rows, columns = self.rows.num_cells, self.columns.num_cells
        # Strides of a cut stay regular within each dim, so that both dims divide without a copy.
        return cut.view(matrices, rows, num_rows // rows, columns, num_columns // columns)

    def cells(self, grid: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """The tile's cells of a grid, maybe of padded rows: (num_matrices, grid rows, 1, grid columns, 1), a view."""
        matrices = grid.view(-1, *self.grid)[self.first_matrix : self.first_matrix + num_matrices]
        rows, columns = self.rows, self.columns
        cut = matrices[:, rows.first_cell : rows.first_cell + rows.num_cells]
        return cut[:, :, columns.first_cell : columns.first_cell + columns.num_cells][:, :, None, :, None]


class TiledShard:
    """A weight's rows on this rank as tiles, for kernels: of the source, the destination, the scales and the amaxes.

    Args:
        tiles: The shard's tiles.
        shard: The main weight's rows, contiguous.
        into: Contiguous memory of the shard's shape, to be written; the shard itself where nothing is written.
        grid: A cell for each block of the whole weight, contiguous or with padded rows.
        amaxes: Cells like those of `grid`, for the largest magnitudes; None where nothing is measured.

    Attributes:
        sources: Views of the shard, a tile each, as `Tile.of`.
        into: Views of the destination, a tile each.
        cells: The tiles' cells, as `Tile.cells`.
        amaxes: The tiles' cells of the amaxes, or none.
        beginnings: One element at the beginning of each of the four storages: a view, whose address is read when a
            kernel is launched. Without amaxes, the storage of the cells stands in the place.
        storages: Numbers that identify the four storages.
        lines: Each tile's place in the storages, in elements: the offsets of source, destination, cells and
            amaxes; matrices, grid rows, grid columns, rows and columns of a block; the strides of rows and matrices;
            the strides of matrices, rows and columns of cells and amaxes.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        shard: torch.Tensor,
        into: torch.Tensor,
        grid: torch.Tensor,
        amaxes: torch.Tensor | None = None,
    ) -> None:
        self.sources = [tile.of(shard) for tile in tiles]
        self.into = [tile.of(into) for tile in tiles]
        self.cells = _cells(tiles, self.sources, grid)
        self.amaxes = [] if amaxes is None else _cells(tiles, self.sources, amaxes)
        owners = (shard, into, grid, grid if amaxes is None else amaxes)
        self.beginnings = tuple([owner.as_strided((1,), (1,), 0) for owner in owners])
        self.storages = tuple([owner.untyped_storage()._cdata for owner in owners])
        tensors_by_tile = zip(self.sources, self.into, self.cells, self.amaxes or self.cells, strict=True)
        self.lines = tuple([_line(*tensors) for tensors in tensors_by_tile])


def _cells(tiles: Sequence[Tile], sources: Sequence[torch.Tensor], grid: torch.Tensor) -> list[torch.Tensor]:
    return [tile.cells(grid, len(source)) for tile, source in zip(tiles, sources, strict=True)]


def _line(source: torch.Tensor, into: torch.Tensor, cells: torch.Tensor, amaxes: torch.Tensor) -> tuple[int, ...]:
    matrices, grid_rows, rows, grid_columns, columns = source.shape
    matrix_stride, _, row_stride, _, _ = source.stride()
    if grid_columns == 1 and row_stride == columns:  # whole rows, one after the other: a single long row
        rows, columns, row_stride = 1, rows * columns, rows * columns
    offsets = [int(tensor.storage_offset()) for tensor in (source, into, cells, amaxes)]
    assert cells.stride() == amaxes.stride()
    cell_strides = (cells.stride(0), cells.stride(1), cells.stride(3))
    return (*offsets, matrices, grid_rows, grid_columns, rows, columns, row_stride, matrix_stride, *cell_strides)


def grid_of(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """The number of blocks along each dim of a parameter: the leading dims unchanged."""
    rows, columns = (_num_blocks(numel, length) for numel, length in zip(shape[-2:], block, strict=True))
    return (*shape[:-2], rows, columns)


def tiles_of(shard: Sequence[int], parameter_shape: Sequence[int], first_row: int, block: Block) -> list[Tile]:
    """The tiles of a shard: none if the shard has no elements.

    Args:
        shard: Shape of the shard, which differs from `parameter_shape` along dim 0 alone.
        parameter_shape: Shape of the parameter, of at least two dims.
        first_row: The shard's first index along dim 0 of the parameter.
        block: Rows and columns of a block; None for all.
    """
    if not prod(shard):
        return []
    matrix = (shard[-2], shard[-1])
    is_stack = len(parameter_shape) > 2
    first_matrix = first_row * prod(parameter_shape[1:-2]) if is_stack else 0
    start = 0 if is_stack else first_row
    num_rows, num_columns = grid_of(parameter_shape, block)[-2:]
    return [
        Tile(matrix, (num_rows, num_columns), first_matrix, rows, columns)
        for rows in _runs(start, matrix[0], block[0] or parameter_shape[-2])
        for columns in _runs(0, matrix[1], block[1] or parameter_shape[-1])
    ]


def _num_blocks(numel: int, length: int | None) -> int:
    return 1 if length is None else -(-numel // length)


def _runs(first: int, numel: int, length: int) -> Iterator[_Run]:
    """Runs of equal blocks in elements `first` to `first + numel` of a dim: a cut head, whole blocks, a cut tail."""
    stop = first + numel
    head = min(-(-first // length) * length, stop)
    tail = max(stop // length * length, head)
    for a, b in ((first, head), (head, tail), (tail, stop)):
        if a < b:
            yield _Run(a - first, b - first, a // length, -(-(b - a) // length))
