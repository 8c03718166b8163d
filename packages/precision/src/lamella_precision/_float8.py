"""Float8 with a scale a block: whole tensors, rows, or squares. Data travels; every rank computes all scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch

from lamella_precision._quantized import QuantizedWeight
from lamella_precision._recipe import Direction, Part, PayloadFormat
from lamella_precision._tiles import Block, Cut, grid_of, tiles_of

_SMALLEST_SCALE = 2.0**-126  # no subnormal scale: its reciprocal overflows, and kernels may flush it to zero
_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)

Tiles = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Float8Recipe:
    """A byte an element: `round(weight / scale)` in float8, with `scale = amax / (the format's largest number)`.

    The largest magnitudes (amaxes) of all blocks are MAX-reduced over the ranks, so that a cut may fall anywhere: the
    shards' encodings are the encoding of the whole, to the bit. The scales never travel. A parameter of more than two
    dims is a stack of matrices, each with scales of its own.

    Args:
        block: Rows and columns with a common scale; None for all. (None, None): a scale a matrix. (1, None): a scale a
            row. (128, 128): a scale a square.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        num_past_amaxes: 0: current scaling. Else delayed scaling: the scale comes from the largest of that many amaxes
            of earlier steps' weights, measured as they were encoded, with no other read; a weight that grew since
            saturates. The first scale is of the current weight.
        power_of_two: Round scales up to a power of two: dequantisation is then exact.
        compute_dtype: Dtype of the dequantised weight and of its gradient.

    Raises:
        ValueError: `dtype` is no float8 format, or `block` is no tuple of two positive sizes or None.
    """

    block: Block = (None, None)
    dtype: torch.dtype = torch.float8_e4m3fn
    num_past_amaxes: int = 0
    power_of_two: bool = False
    compute_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in _FORMATS:
            raise ValueError(f"Expected `dtype` to be one of {_FORMATS}, got {self.dtype}.")
        if not _is_block(self.block):
            raise ValueError(
                f"Expected `block` to be a tuple of two positive sizes or None, got {self.block!r}. Pass (128, 128) "
                "for squares, (1, None) for rows."
            )
        if self.num_past_amaxes < 0:
            raise ValueError(f"Expected `num_past_amaxes` to be at least 0, got {self.num_past_amaxes}.")

    @property
    def block_rows(self) -> int:
        """Cuts are allowed after any row: amaxes are of all ranks."""
        return 1

    @property
    def largest(self) -> float:
        """The format's largest number."""
        return torch.finfo(self.dtype).max

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        """The data, for both directions.

        Raises:
            ValueError: The weight is no matrix, and no stack of matrices.
        """
        if len(shape) < 2:
            raise ValueError(
                f"Expected a weight of at least two dims for {self}, got shape {tuple(shape)}. Give it no recipe."
            )
        return (PayloadFormat(self.dtype, tuple(shape)),)

    def columns(
        self, shards: Sequence[torch.Tensor], payloads: Sequence[Sequence[torch.Tensor] | None], parts: Sequence[Part]
    ) -> tuple[Sequence[Cut] | None]:
        """For each weight the views of equal blocks: sources, destinations and scales."""
        (destinations,) = payloads
        if destinations is None:
            return (None,)
        return ([self._cut(*each) for each in zip(shards, destinations, parts, strict=True)],)

    def encode(self, *columns: Sequence[Cut] | None) -> None:
        """Divide by the scales, saturate, and round to the format: one kernel for all weights, or multi-tensor calls.

        Amaxes of parts that have them are raised on the way.

        Effects: a temporary fp32 copy of the shards, where Triton does not run.
        """
        (cuts,) = columns
        encode_cuts(cuts or (), self.largest)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the grid of blocks."""
        return grid_of(shape, self.block)

    def divides_at(self, shape: Sequence[int], row: int) -> bool:
        """Between any matrices of a stack; in a matrix, between its blocks."""
        if len(shape) > 2 or row == 0:
            return True
        num_rows, _ = self.block
        return num_rows is not None and row % num_rows == 0

    @property
    def num_past(self) -> int:
        """Number of the latest measurements that scales depend on."""
        return self.num_past_amaxes

    def measure_columns(self, shards: Sequence[torch.Tensor], parts: Sequence[Part]) -> tuple[Sequence[Cut]]:
        """For each weight the views of equal blocks, and of their amaxes."""
        return ([self._cut(shard, shard, part) for shard, part in zip(shards, parts, strict=True)],)

    def measure(self, *columns: Sequence[Cut]) -> None:
        """Raise amaxes to the largest magnitude of each block's part on this rank.

        Effects: a kernel for all weights; where Triton does not run, two multi-tensor calls, and with several scales a
            matrix a kernel for each run of equal blocks too.
        """
        (cuts,) = columns
        if not cuts:
            return
        if fused := _kernels_for(cuts):
            fused.measure(cuts)
            return
        tiles, _, cells = _tensors(cuts)
        _raise_amaxes(cells, tiles)

    def _cut(self, shard: torch.Tensor, into: torch.Tensor, part: Part) -> Cut:
        assert part.scales is not None
        return Cut(tiles_of(shard.shape, part.shape, part.first_row, self.block), shard, into, part.scales, part.amaxes)

    def rescale(self, amaxes: torch.Tensor, scales: torch.Tensor, past: torch.Tensor) -> None:
        """Compute the scales of all blocks of some groups from amaxes of whole blocks, and note the amaxes.

        Args:
            amaxes: (blocks,), fp32; 0 where nothing was measured since.
            scales: (blocks,), fp32, written.
            past: (num_past, blocks), fp32, the latest amaxes first; negative where nothing was measured.

        Effects: a few kernels on the current stream, no host sync.
        """
        write_scales(scales, amaxes, past, self._scale)

    def _scale(self, amaxes: torch.Tensor) -> torch.Tensor:
        return scale_for(amaxes, self.largest, power_of_two=self.power_of_two)

    def decode(
        self, payloads: Sequence[torch.Tensor], shape: torch.Size, scales: torch.Tensor | None = None
    ) -> QuantizedWeight:
        """A wrapper over data and scales."""
        return QuantizedWeight(payloads, scales, shape, self)

    def dequantize(
        self, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: torch.Size, direction: Direction
    ) -> torch.Tensor:
        """Data times scales, multiplied in fp32 and rounded to `compute_dtype`: the same values for both directions."""
        (data,) = payloads
        assert scales is not None
        return times_scales(data, scales, shape, self.block, self.compute_dtype)


def _is_block(value: object) -> bool:
    def is_length(each: object) -> bool:
        return each is None or (isinstance(each, int) and each >= 1)

    return isinstance(value, tuple) and len(value) == 2 and all(map(is_length, value))


def encode_cuts(cuts: Sequence[Cut], largest: float, *, multiplies: bool = False) -> None:
    """Divide by the cells, or multiply by them, saturate, and round to the destinations' format.

    Args:
        cuts: All with amaxes, which are raised, or all without.
        largest: The format's largest number.
        multiplies: By the cells, not to divide.

    Effects: one kernel for all cuts; where Triton does not run, multi-tensor calls and a temporary fp32 copy.
    """
    if not cuts:
        return
    if fused := _kernels_for(cuts):
        fused.encode(cuts, largest, multiplies=multiplies)
    else:
        sources, into, scales = _tensors(cuts)
        _raise_amaxes(list(chain.from_iterable([cut.amaxes for cut in cuts])), sources)
        scaled = torch._foreach_mul if multiplies else torch._foreach_div
        round_to(into, scaled(as_float(sources), scales), largest)


def _kernels_for(cuts: Sequence[Cut]) -> Any:
    """The module of Triton's kernels, or None on devices without."""
    device = cuts[0].beginnings[0].device
    return _fused() if device.type == "cuda" and has_float8(device.index) else None


@cache
def _fused() -> Any:
    return import_module("lamella_precision._fused") if find_spec("triton") else None


@cache
def has_float8(index: int) -> bool:
    """Whether a CUDA device converts and multiplies float8: compute capability 8.9 and above."""
    return torch.cuda.get_device_capability(index) >= (8, 9)


def _tensors(cuts: Sequence[Cut]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
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
        found = [norm.view(cell.shape) for norm, cell in zip(norms, cells, strict=True)]
    else:
        found = [torch.linalg.vector_norm(tile, float("inf"), (2, 4), True) for tile in tiles]
    torch._foreach_maximum_(cells, [each.float() for each in found])


def as_float(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The shards in fp32: a division in 16 bits would round twice."""
    return [shard if shard.dtype == torch.float32 else shard.float() for shard in shards]


def round_to(into: Sequence[torch.Tensor], values: tuple[torch.Tensor, ...], largest: float) -> None:
    """Saturate values in place, and round into float8: torch's own cast makes NaN of values out of range."""
    torch._foreach_clamp_min_(values, -largest)
    torch._foreach_clamp_max_(values, largest)
    torch._foreach_copy_(list(into), values)


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
        past: (num_past, n), fp32, the latest amaxes first; negative where nothing was measured. Written. No rows:
            current scaling.
        scale: A scale for each of some amaxes.
    """
    if not len(past):
        scales.copy_(scale(amaxes))
        return
    # An unchanged weight (a second microbatch, an evaluation) is not measured twice.
    is_new = (amaxes != 0) & (amaxes != past[0])
    past.copy_(torch.where(is_new, torch.cat([amaxes[None], past[:-1]]), past))
    latest = past.amax(0)
    scales.copy_(torch.where(latest < 0, scales, scale(latest)))


def exponents_for(scales: torch.Tensor) -> torch.Tensor:
    """Biased exponents (int32, 1 to 254) of positive normal fp32 numbers rounded up to powers of two; NaN, inf: 255."""
    # On bits, since neither `log2` nor `pow` is exact on every device.
    return ((scales.view(torch.int32) & 0x7FFFFFFF) + 0x7FFFFF) >> 23


def power_of(exponents: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers with the biased exponents 1 to 254; inf for 255."""
    return (exponents << 23).view(torch.float32)


def times_scales(
    data: torch.Tensor, scales: torch.Tensor, shape: torch.Size, block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """Whole data times the scales of its blocks, in `dtype`."""
    values = torch.empty(shape, dtype=dtype, device=data.device)
    for tile in tiles_of(shape, shape, 0, block):
        blocks = tile.of(data)
        tile.of(values).copy_(blocks.float() * tile.cells(scales, len(blocks)))
    return values
