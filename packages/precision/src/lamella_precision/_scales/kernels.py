"""Encoding and measuring in blocks as one Triton kernel for all weights of a call.

A program serves a chunk of one block, with a single number as scale:

    lines    one for each run of equal blocks: where source, destination and cells begin, sizes, strides
    program  its line, its block within the line, its chunk within the block

Lines hold offsets from the beginning of a storage, never addresses: made once, offsets stay true when memory
is given back and taken again elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lamella_precision._scales.tiles import TiledShard

_ELEMENTS = 4096  # of a chunk
_ALIGNMENT = 16  # elements: with every offset a multiple, a thread reads and writes whole vectors
_CACHED = 1 << 14  # lists of lines: one or two a unit and direction, a few hundred bytes each


class _EncodingLaunch(NamedTuple):
    """A kernel's arguments for tensors in the same four storages.

    Attributes:
        lines: (lines, fields), int64: a line's first program, its fields as `TiledShard.lines` has them, and its chunks
            along a block's columns.
        line_of: (programs,), int32: each program's line.
        sizes: Rows and columns of a chunk, and a common divisor of all offsets.
    """

    lines: torch.Tensor
    line_of: torch.Tensor
    sizes: dict[str, int]


def encode(cuts: Sequence[TiledShard], largest: float, *, multiplies: bool) -> None:
    """Divide every block by its cell, or multiply it, saturate, and round into the destination's float8 format.

    Cuts with amaxes are measured by the same read, as `measure` does; all cuts or none.

    Effects: one kernel on the current stream for all cuts in the same storages, no temporary memory, no host sync; but
    the first call with new shapes copies their lines to the device, for which the host waits.
    """
    measures = bool(cuts[0].amaxes)
    for (source, into, cells, amaxes), launch in _launches(cuts):
        raised = amaxes.view(torch.int32) if measures else cells
        arguments = source, into, cells, raised, launch.lines, launch.line_of, largest
        _encode[(len(launch.line_of),)](*arguments, multiplies=multiplies, measures=measures, **launch.sizes)


def measure(cuts: Sequence[TiledShard]) -> None:
    """Raise every block's cell to the largest magnitude of the block; a NaN is largest.

    Effects: one kernel on the current stream for all cuts in the same storages, no temporary memory, no host sync; but
        the first call with new shapes copies their lines to the device, for which the host waits.
    """
    for (source, _, cells, _), launch in _launches(cuts):
        arguments = source, cells.view(torch.int32), launch.lines, launch.line_of
        _measure[(len(launch.line_of),)](*arguments, **launch.sizes)


def _launches(cuts: Sequence[TiledShard]) -> list[tuple[tuple[torch.Tensor, ...], _EncodingLaunch]]:
    by_storages: dict[tuple[int, ...], list[TiledShard]] = {}
    for cut in cuts:
        by_storages.setdefault(cut.storages, []).append(cut)
    launches = []
    for storage_cuts in by_storages.values():
        launch = _launch(tuple([cut.lines for cut in storage_cuts]), storage_cuts[0].beginnings[0].device)
        launches.append((storage_cuts[0].beginnings, launch))
    return launches


@lru_cache(_CACHED)
def _launch(lines_of_cuts: tuple[tuple[tuple[int, ...], ...], ...], device: torch.device) -> _EncodingLaunch:
    lines = [line for lines in lines_of_cuts for line in lines]
    columns = min(_ELEMENTS, triton.next_power_of_2(max(line[8] for line in lines)))
    rows = min(_ELEMENTS // columns, triton.next_power_of_2(max(line[7] for line in lines)))
    line_fields, program_counts, first = [], [], 0
    for line in lines:
        matrices, grid_rows, grid_columns, num_rows, num_columns = line[4:9]
        chunks = -(-num_columns // columns)
        line_fields.append((first, *line, chunks))
        program_counts.append(matrices * grid_rows * grid_columns * -(-num_rows // rows) * chunks)
        first += program_counts[-1]
    is_aligned = all(extent % _ALIGNMENT == 0 for line in lines for extent in (*line[:2], *line[8:11]))
    return _EncodingLaunch(
        torch.tensor(line_fields, device=device),
        torch.arange(len(lines), dtype=torch.int32).repeat_interleave(torch.tensor(program_counts)).to(device),
        {"chunk_rows": rows, "chunk_columns": columns, "alignment": _ALIGNMENT if is_aligned else 1},
    )


@triton.jit  # type: ignore[untyped-decorator]
def _chunk(lines, line_of, chunk_rows: tl.constexpr, chunk_columns: tl.constexpr, alignment: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's offsets into source and destination, the mask of existing elements, the cell's and the amax's.

    Args:
        lines: The lines of an `_EncodingLaunch`, whose fields are read by number.
    """
    program = tl.program_id(0)
    line = lines + tl.load(line_of + program) * 16
    source, into = tl.load(line + 1), tl.load(line + 2)
    grid_rows, grid_columns = tl.load(line + 6), tl.load(line + 7)
    num_rows, num_columns = tl.load(line + 8), tl.load(line + 9)
    row_stride, matrix_stride = tl.load(line + 10), tl.load(line + 11)
    chunks = tl.load(line + 15)

    remainder = program - tl.load(line)
    chunk_column, remainder = remainder % chunks, remainder // chunks
    row_chunks = (num_rows + chunk_rows - 1) // chunk_rows
    chunk_row, remainder = remainder % row_chunks, remainder // row_chunks
    grid_column, remainder = remainder % grid_columns, remainder // grid_columns
    grid_row, matrix = remainder % grid_rows, remainder // grid_rows
    block = matrix * tl.load(line + 12) + grid_row * tl.load(line + 13) + grid_column * tl.load(line + 14)

    begin = matrix * matrix_stride + (grid_row * num_rows + chunk_row * chunk_rows) * row_stride
    begin = tl.multiple_of(begin + grid_column * num_columns + chunk_column * chunk_columns, alignment)
    # Within a chunk 32 bits suffice, and arithmetic on vectors of 64 bits would take longer than the memory.
    rows, columns = tl.arange(0, chunk_rows), tl.arange(0, chunk_columns)
    chunk_offsets = rows[:, None] * tl.multiple_of(row_stride.to(tl.int32), alignment) + columns[None, :]
    rows_left = tl.minimum(num_rows - chunk_row * chunk_rows, chunk_rows).to(tl.int32)
    columns_left = tl.minimum(num_columns - chunk_column * chunk_columns, chunk_columns).to(tl.int32)
    exists = (rows < rows_left)[:, None] & (columns < tl.multiple_of(columns_left, alignment))[None, :]
    source = tl.multiple_of(source, alignment) + begin + chunk_offsets
    into = tl.multiple_of(into, alignment) + begin + chunk_offsets
    return source, into, exists, tl.load(line + 3) + block, tl.load(line + 4) + block


@triton.jit  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    source,
    into,
    cells,
    amaxes,
    lines,
    line_of,
    largest,
    multiplies: tl.constexpr,
    measures: tl.constexpr,
    chunk_rows: tl.constexpr,
    chunk_columns: tl.constexpr,
    alignment: tl.constexpr,
):
    source_offsets, into_offsets, exists, cell, amax = _chunk(lines, line_of, chunk_rows, chunk_columns, alignment)
    values = tl.load(source + source_offsets, mask=exists, other=0.0).to(tl.float32)
    if measures:
        _raise(amaxes + amax, values)
    scale = tl.load(cells + cell)
    # Rounded as on a CPU: an approximate division may round an element to its neighbour.
    values = values * scale if multiplies else tl.div_rn(values, scale)
    # Comparisons keep NaN, where a minimum and a maximum would drop it.
    values = tl.where(values > largest, largest, values)
    values = tl.where(values < -largest, -largest, values)
    tl.store(into + into_offsets, values.to(into.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    source,
    cells,
    lines,
    line_of,
    chunk_rows: tl.constexpr,
    chunk_columns: tl.constexpr,
    alignment: tl.constexpr,
):
    source_offsets, _, exists, cell, _ = _chunk(lines, line_of, chunk_rows, chunk_columns, alignment)
    values = tl.load(source + source_offsets, mask=exists, other=0.0).to(tl.float32)
    _raise(cells + cell, values)


@triton.jit
def _raise(cell, values):  # type: ignore[no-untyped-def]
    """Raise the bits of a cell to those of the largest magnitude."""
    # Bits of non-negative numbers have the order of the numbers, and NaN's bits come after infinity's.
    bits = tl.reduce(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, None, _larger)
    # A cell only rises: in a cell already raised by another program an atomic operation would wait in vain.
    tl.atomic_max(cell, bits, mask=bits > tl.load(cell))


@triton.jit
def _larger(one, other):  # type: ignore[no-untyped-def]
    return tl.maximum(one, other)
