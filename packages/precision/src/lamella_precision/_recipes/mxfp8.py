"""MXFP8: blocks of 32 elements with a power of two, by rows for forward and by columns for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from lamella_precision._protocol import Direction, PayloadFormat, WeightRows
from lamella_precision._scales.encoding import as_float, round_to
from lamella_precision._scales.scales import exponents_for, power_of, scale_for, times_scales
from lamella_precision._scales.tiles import Block, Tiles, grid_of, tiles_of
from lamella_precision._weights.quantized import QuantizedWeight

_LENGTH = 32
_ROWS: Block = (1, _LENGTH)
_COLUMNS: Block = (_LENGTH, 1)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class MXFP8Recipe:
    """The microscaling format of the OCP: float8 (e4m3) data, and a scale in E8M0 for 32 elements.

    Forward's payloads have blocks along rows (the columns of one row are added up in forward's product), backward's
    have blocks along columns. A scale is a power of two, rounded up so that no element saturates, and its byte is the
    biased exponent in fp32. The scales of columns need 32 rows on one rank.

    Args:
        compute_dtype: Dtype of the dequantised weight and of its gradient.
        gathers_both: Gather the payloads of both directions in each pass, at twice the bytes. A compiled module needs
            both, as its graphs may read either payload in either pass.

    Source: OCP Microscaling Formats (MX) Specification 1.0, with scales rounded up in place of down.
    """

    compute_dtype: torch.dtype = torch.bfloat16
    gathers_both: bool = False

    @property
    def block_rows(self) -> int:
        """Rows of a block along columns."""
        return _LENGTH

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        """Data and scales by rows for forward, data and scales by columns for backward.

        Raises:
            ValueError: The weight is no matrix.
        """
        if len(shape) != 2:
            raise ValueError(f"Expected a matrix for {self}, got shape {tuple(shape)}. Give the weight no recipe.")
        return tuple(
            PayloadFormat(dtype, tuple(payload_shape), Direction.BOTH if self.gathers_both else direction)
            for direction, block in ((Direction.FORWARD, _ROWS), (Direction.BACKWARD, _COLUMNS))
            for dtype, payload_shape in ((torch.float8_e4m3fn, shape), (torch.uint8, grid_of(shape, block)))
        )

    def columns(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weight_rows: Sequence[WeightRows],
    ) -> tuple[Sequence[object] | None, ...]:
        """For each direction views of equal blocks: sources, data and scales of each weight."""
        views: list[Sequence[object] | None] = []
        by_rows, row_scales, by_columns, column_scales = payloads
        for block, data, scales in ((_ROWS, by_rows, row_scales), (_COLUMNS, by_columns, column_scales)):
            if data is None or scales is None:
                views += [None, None, None]
                continue
            # Cuts fall between blocks: a shard's blocks are counted from its own first row.
            tilings = [tiles_of(shard.shape, shard.shape, 0, block) for shard in shards]
            views.append([[tile.of(shard) for tile in tiling] for tiling, shard in zip(tilings, shards, strict=True)])
            views.append([[tile.of(payload) for tile in tiling] for tiling, payload in zip(tilings, data, strict=True)])
            views.append(
                [[tile.cells(grid, 1) for tile in tiling] for tiling, grid in zip(tilings, scales, strict=True)]
            )
        return tuple(views)

    def encode(self, *columns: Sequence[Tiles] | None) -> None:
        """Find the amaxes, a kernel a weight and direction, then scale and round all weights by multi-tensor calls.

        Effects: a temporary fp32 copy of the shards, for one direction at a time.
        """
        encode_directions(columns, _scales)

    def decode(
        self, payloads: Sequence[torch.Tensor], shape: torch.Size, scales: torch.Tensor | None = None
    ) -> QuantizedWeight:
        """A wrapper over the four payloads, two of which have bytes in a pass."""
        return QuantizedWeight(payloads, None, shape, self)

    def dequantize(
        self, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: torch.Size, direction: Direction
    ) -> torch.Tensor:
        """Data times scales of a direction, multiplied in fp32 and rounded to `compute_dtype`."""
        is_backward = direction is Direction.BACKWARD
        payload, exponents = payloads[2:] if is_backward else payloads[:2]
        return times_scales(
            payload, power_of(exponents.int()), shape, _COLUMNS if is_backward else _ROWS, self.compute_dtype
        )


def encode_directions(
    columns: Sequence[Sequence[Tiles] | None], scales_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Write data and scales of both directions, or of one.

    Args:
        columns: Sources, data and scales, from `MXFP8Recipe.columns`.
        scales_of: From amaxes of blocks, fp32: biased exponents (int32), and the numbers that data is divided by.
    """
    for direction in (columns[:3], columns[3:]):
        sources, data, scales = (list(chain.from_iterable(column or ())) for column in direction)
        if not sources:
            continue
        sources = as_float(sources)
        amaxes = [torch.linalg.vector_norm(blocks, float("inf"), (2, 4), True) for blocks in sources]
        exponents, divisors = scales_of(torch.cat([block_amaxes.view(-1) for block_amaxes in amaxes]))
        numels = [block_amaxes.numel() for block_amaxes in amaxes]
        exponents_by_weight, divisors_by_weight = (
            torch.split(exponents.to(torch.uint8), numels),
            torch.split(divisors, numels),
        )
        torch._foreach_copy_(scales, [e.view(like.shape) for e, like in zip(exponents_by_weight, amaxes, strict=True)])
        shaped_divisors = [
            block_divisors.view(like.shape) for block_divisors, like in zip(divisors_by_weight, amaxes, strict=True)
        ]
        round_to(data, torch._foreach_div(sources, shaped_divisors), _LARGEST)


def exponents_of(amaxes: torch.Tensor) -> torch.Tensor:
    """Biased exponents (int32, at least 1) of scales with which no element saturates."""
    return exponents_for(scale_for(amaxes, _LARGEST, power_of_two=False))


def _scales(amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = exponents_of(amaxes)
    return exponents, power_of(exponents)
