"""Float8 with block scales from live shards: a block shared by several ranks has one scale, agreed on by all.

Note [Blocks across borders]
    A block's scale depends on the block's largest magnitude, and at a border between ranks' boxes no rank holds the
    whole block. So each rank finds the maxima of its blocks, and sends the maxima of partly held blocks.
    Blocks wholly inside a box need no communication. Ranks exchange 12 bytes a block along the borders: for a
    matrix of 4096 columns, cut between rows for 8 ranks, 32 blocks at each of 7 borders at most.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from lamella_checkpoint.extending import Item, exchange, num_ranks
from lamella_convert._formats.float8 import (
    BLOCK,
    FLOAT8,
    PIECE_NUMEL,
    blocks_of,
    check_quantisable,
    largest,
    num_blocks,
    quantise,
    scale_name,
    scales_of,
)
from lamella_convert._formats.safetensors_write import Blank
from lamella_files import TensorInfo, box_of, own_name, pieces
from lamella_layout import Chunk

Which = Callable[[str, TensorInfo], bool]


class Scaled(NamedTuple):
    """A box of a weight to quantise, and the scales of all blocks touching the box."""

    chunk: Chunk
    values: torch.Tensor
    scales: torch.Tensor


_Shared = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By weight: linear indices of blocks, and the blocks' largest magnitudes."""


def chosen_of(blanks: Mapping[str, Blank], choice: Which) -> frozenset[str]:
    """The tensors to quantise; each must be a matrix, or a stack of matrices.

    Args:
        blanks: By native name.
        which: Called with the name in the files.

    Raises:
        ValueError: A chosen tensor is no floating-point matrix.
    """
    chosen = set()
    for name, blank in blanks.items():
        model_name = own_name(name)
        if choice(model_name, TensorInfo(blank.shape, blank.dtype, ())):
            check_quantisable(model_name, blank.shape, blank.dtype)
            chosen.add(name)
    return frozenset(chosen)


def with_scales(blanks: Mapping[str, Blank], chosen: frozenset[str]) -> dict[str, Blank]:
    """The contents of the files: chosen weights in float8, each followed by its scales."""
    stored_blanks: dict[str, Blank] = {}
    for name, blank in blanks.items():
        stored_blanks[name] = blank._replace(dtype=FLOAT8) if name in chosen else blank
        if name in chosen:
            stored_blanks[scale_name(name)] = Blank(num_blocks(blank.shape, BLOCK), torch.float32)
    return stored_blanks


def agree_on_scales(items: Sequence[Item], chosen: frozenset[str]) -> dict[str, list[Scaled]]:
    """This rank's boxes of chosen weights, with the blocks' scales: Note [Blocks across borders].

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        ValueError: A weight holds infinities or NaNs.

    Effects: collective on the default group, if any (one small object exchange); waits for the device.
    """
    mine: dict[str, list[tuple[Item, torch.Tensor]]] = {}

    def find() -> _Shared:
        for item in items:
            if item.names[0] in chosen and item.chunk is not None and item.chunk.numel:
                maxima = _maxima(item)
                scales_of(own_name(item.names[0]), maxima)  # Refuses infinities and NaNs before the exchange.
                mine.setdefault(item.names[0], []).append((item, maxima))
        return {name: _maximal([_parts(*box) for box in boxes]) for name, boxes in mine.items()}

    def unite(rank_amaxes: list[_Shared]) -> list[_Shared]:
        names = {name for shared in rank_amaxes for name in shared}
        united = {name: _maximal([shared[name] for shared in rank_amaxes if name in shared]) for name in sorted(names)}
        return [united] * num_ranks()

    shared = exchange("find the scales of its blocks", find, unite)
    return {name: [_scaled(name, item, maxima, shared[name]) for item, maxima in boxes] for name, boxes in mine.items()}


def quantised_pieces(scaled: Scaled) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """The box in float8, a bounded piece at a time."""
    touched = blocks_of(scaled.chunk, BLOCK)
    for piece in pieces(scaled.chunk, PIECE_NUMEL):
        # A copy: `quantise` overwrites its argument, and an fp32 box would alias the live weights.
        values = box_of(scaled.values, piece.relative_to(scaled.chunk)).float().clone()
        scales = box_of(scaled.scales, blocks_of(piece, BLOCK).relative_to(touched)).to(values.device)
        yield piece, quantise(values, scales, piece, BLOCK)


def _maxima(item: Item) -> torch.Tensor:
    """The largest magnitude of each block touching a box, on the host."""
    assert isinstance(item.value, torch.Tensor) and item.chunk is not None
    touched = blocks_of(item.chunk, BLOCK)
    amaxes = torch.zeros(touched.sizes)
    for piece in pieces(item.chunk, PIECE_NUMEL):
        values = box_of(item.value.detach(), piece.relative_to(item.chunk)).float()
        into = box_of(amaxes, blocks_of(piece, BLOCK).relative_to(touched))
        into.copy_(torch.maximum(into, largest(values, piece, BLOCK).cpu()))
    return amaxes


def _parts(item: Item, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks partly inside a box: indices and maxima."""
    assert item.chunk is not None and item.shape is not None
    touched = blocks_of(item.chunk, BLOCK)
    rows, columns = (
        _is_whole(item.chunk, touched, dim, edge, item.shape[dim]) for dim, edge in zip((-2, -1), BLOCK, strict=True)
    )
    is_part = ~(rows[:, None] & columns).expand(touched.sizes)
    return _indices(item)[is_part], maxima[is_part]


def _is_whole(box: Chunk, touched: Chunk, dim: int, edge: int, size: int) -> torch.Tensor:
    """Which of the touched blocks are wholly inside the box along a dim."""
    starts = edge * (torch.arange(touched.sizes[dim]) + touched.offsets[dim])
    return (starts >= box.ranges[dim].start) & ((starts + edge).clamp(max=size) <= box.ranges[dim].stop)


def _indices(item: Item) -> torch.Tensor:
    """Linear indices of the blocks touching a box, among all blocks of the weight."""
    assert item.chunk is not None and item.shape is not None
    numbers = torch.zeros((), dtype=torch.int64)
    for along, num in zip(blocks_of(item.chunk, BLOCK).ranges, num_blocks(item.shape, BLOCK), strict=True):
        numbers = numbers[..., None] * num + torch.arange(along.start, along.stop)
    return numbers


def _maximal(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block once, in order, with the maximum over all parts."""
    indices, places = torch.unique(torch.cat([part_indices for part_indices, _ in parts]), return_inverse=True)
    maxima = torch.zeros(len(indices)).scatter_reduce_(
        0, places, torch.cat([part_maxima for _, part_maxima in parts]), "amax"
    )
    return indices, maxima


def _scaled(name: str, item: Item, maxima: torch.Tensor, shared: tuple[torch.Tensor, torch.Tensor]) -> Scaled:
    assert isinstance(item.value, torch.Tensor) and item.chunk is not None
    indices, shared_maxima = shared
    mine = _indices(item)
    if len(indices):
        places = torch.searchsorted(indices, mine).clamp_(max=len(indices) - 1)
        maxima = torch.where(indices[places] == mine, shared_maxima[places], maxima)
    return Scaled(item.chunk, item.value.detach(), scales_of(own_name(name), maxima))
