"""Float8 with a scale a block: whole tensors, rows, or squares. Data travels; every rank computes all scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lamella_precision._protocol import Direction, PayloadFormat, WeightRows
from lamella_precision._scales.encoding import encode_cuts, measure_cuts
from lamella_precision._scales.scales import scale_for, times_scales, write_scales
from lamella_precision._scales.tiles import Block, TiledShard, grid_of, tiles_of
from lamella_precision._weights.quantized import QuantizedWeight

_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


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
            saturates. The first scale is of the current weight; of zeros, as of LoRA's second matrix, one that suits an
            optimizer's first update.
        power_of_two: Round scales up to a power of two: dequantisation is then exact.
        compute_dtype: Dtype of the dequantised weight and of its gradient.

    Raises:
        TypeError: `num_past_amaxes` is not an int.
        ValueError: `dtype` is no float8 format, `block` is no tuple of two positive sizes or None, or
            `num_past_amaxes` is negative.
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
        unchecked_num: object = self.num_past_amaxes
        if isinstance(unchecked_num, bool) or not isinstance(unchecked_num, int):
            raise TypeError(f"Expected `num_past_amaxes` to be an int, got {unchecked_num!r}.")
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
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weight_rows: Sequence[WeightRows],
    ) -> tuple[Sequence[TiledShard] | None]:
        """For each weight the views of equal blocks: sources, destinations and scales."""
        (destinations,) = payloads
        if destinations is None:
            return (None,)
        return ([self._cut(*arguments) for arguments in zip(shards, destinations, weight_rows, strict=True)],)

    def encode(self, *columns: Sequence[TiledShard] | None) -> None:
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

    def measure_columns(
        self, shards: Sequence[torch.Tensor], weight_rows: Sequence[WeightRows]
    ) -> tuple[Sequence[TiledShard]]:
        """For each weight the views of equal blocks, and of their amaxes."""
        return ([self._cut(shard, shard, rows) for shard, rows in zip(shards, weight_rows, strict=True)],)

    def measure(self, *columns: Sequence[TiledShard]) -> None:
        """Raise amaxes to the largest magnitude of each block's part on this rank.

        Effects: a kernel for all weights; where Triton does not run, two multi-tensor calls, and with several scales a
            matrix a kernel for each run of equal blocks too.
        """
        (cuts,) = columns
        measure_cuts(cuts)

    def _cut(self, shard: torch.Tensor, into: torch.Tensor, rows: WeightRows) -> TiledShard:
        assert rows.scales is not None
        return TiledShard(
            tiles_of(shard.shape, rows.shape, rows.first_row, self.block), shard, into, rows.scales, rows.amaxes
        )

    def rescale(self, amaxes: torch.Tensor, scales: torch.Tensor, past: torch.Tensor) -> None:
        """Compute the scales of all blocks of some groups from amaxes of whole blocks, and note the amaxes.

        Args:
            amaxes: (blocks,), fp32; 0 where nothing was measured since.
            scales: (blocks,), fp32, written.
            past: (num_past, blocks), fp32, the latest amaxes first; negative where nothing was measured, 0 for a block
                that had zeros alone.

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
        (payload,) = payloads
        assert scales is not None
        return times_scales(payload, scales, shape, self.block, self.compute_dtype)


def _is_block(block: object) -> bool:
    def is_length(length: object) -> bool:
        return length is None or (isinstance(length, int) and length >= 1)

    return isinstance(block, tuple) and len(block) == 2 and all(map(is_length, block))
