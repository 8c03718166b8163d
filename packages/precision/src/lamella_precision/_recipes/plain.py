"""The weight itself as its payload, in the compute dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch

from lamella_precision._protocol import PayloadFormat, WeightRows


@dataclass(frozen=True)
class PlainRecipe:
    """A single payload for both directions: the weight itself, cast to `compute_dtype` (None: not cast)."""

    compute_dtype: torch.dtype | None = None

    @property
    def block_rows(self) -> int:
        """Cuts are allowed after any row."""
        return 1

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        """The weight in the compute dtype, alone."""
        dtype = self.compute_dtype or main_dtype
        return (PayloadFormat(dtype, tuple(shape), is_main_weight=dtype == main_dtype),)

    def columns(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weight_rows: Sequence[WeightRows] = (),
    ) -> tuple[Sequence[torch.Tensor] | None, ...]:
        """The destinations and the shards."""
        (destinations,) = payloads
        return destinations, None if destinations is None else shards

    def encode(self, *columns: Sequence[torch.Tensor] | None) -> None:
        """Cast each shard into its destination with a multi-tensor copy."""
        destinations, shards = columns
        if not destinations or not shards:
            return
        if any(map(is_, destinations, shards)):
            pairs = [(into, shard) for into, shard in zip(destinations, shards, strict=True) if into is not shard]
            self.encode([into for into, _ in pairs], [shard for _, shard in pairs])
        else:
            torch._foreach_copy_(list(destinations), list(shards))

    def decode(
        self, payloads: Sequence[torch.Tensor], shape: torch.Size, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A view of the payload."""
        (payload,) = payloads
        return payload.view(shape)
