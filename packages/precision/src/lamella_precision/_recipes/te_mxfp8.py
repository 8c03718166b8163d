"""Transformer Engine's `MXFP8Tensor` as a recipe: its bytes travel, by rows in forward and by columns in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lamella_precision._protocol import Direction, PayloadFormat, WeightRows
from lamella_precision._recipes.mxfp8 import MXFP8Recipe, encode_directions, exponents_of
from lamella_precision._scales.scales import power_of
from lamella_precision._scales.tiles import Tiles

MULTIPLE = 128  # of both sizes: the class's scales are padded to multiples of 128 rows or columns, and payloads are not
_SMALLEST = 448 * 2.0**-127  # amax with the byte 0; data is not scaled then


@dataclass(frozen=True)
class MXFP8Weights:
    """The recipe of `MXFP8Tensor`: a power of two for 32 elements, in Transformer Engine's arithmetic.

    The class has data and scales of both directions from the start, over payloads of which a pass gathers its own. The
    bytes of a whole weight are those of Transformer Engine's own quantisation.

    Args:
        kind: The class.
        metadata: Arguments of the class, but shape, dtype and tensors. Not compared.
        compute_dtype: Dtype that the weight stands for, and of its gradient.

    Source: Transformer Engine 2.11, `common/util/ptx.cuh` (`float_to_e8m0`, `exp2f_rcp`).
    """

    kind: type[torch.Tensor]
    metadata: Mapping[str, Any] = field(compare=False, repr=False)
    compute_dtype: torch.dtype

    @cached_property
    def _format(self) -> MXFP8Recipe:
        return MXFP8Recipe(self.compute_dtype)

    @property
    def block_rows(self) -> int:
        """Rows of a block along columns."""
        return self._format.block_rows

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        """Data and scales by rows for forward, data and scales by columns for backward."""
        return self._format.payloads(shape, main_dtype)

    def columns(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weight_rows: Sequence[WeightRows],
    ) -> tuple[Sequence[object] | None, ...]:
        """For each direction views of equal blocks: sources, data and scales of each weight."""
        return self._format.columns(shards, payloads, weight_rows)

    def encode(self, *columns: Sequence[Tiles] | None) -> None:
        """Find the amaxes, then scale by Transformer Engine's powers of two and round.

        Effects: a kernel a weight and direction, then multi-tensor calls; a temporary fp32 copy of the shards, for one
            direction at a time.
        """
        encode_directions(columns, _scales)

    def decode(
        self, payloads: Sequence[torch.Tensor], shape: torch.Size, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A tensor of `kind` over the four payloads, two of which have bytes in a pass."""
        names = "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"
        tensors = {name: payload.view(torch.uint8) for name, payload in zip(names, payloads, strict=True)}
        make: Any = self.kind
        options = {"shape": shape, "dtype": self.compute_dtype, "device": payloads[0].device, "requires_grad": False}
        weight: torch.Tensor = make(**options, **{**self.metadata, **tensors})
        return weight

    def dequantize(
        self, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: torch.Size, direction: Direction
    ) -> torch.Tensor:
        """Data times scales of a direction, multiplied in fp32 and rounded to `compute_dtype`."""
        return self._format.dequantize(payloads, scales, shape, direction)


def _scales(amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponents, is_tiny = exponents_of(amaxes), amaxes <= _SMALLEST
    return exponents.masked_fill(is_tiny, 0), power_of(exponents).masked_fill(is_tiny, 1.0)
