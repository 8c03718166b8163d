"""How sharded main weights become what travels, and what travels becomes what computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Recipe(Protocol):
    """The number format of the weights on the wire.

    A parameter travels as one or more *payloads*, each a flat tensor of one dtype: a plain recipe has one (the
    weight in the compute dtype), a block-scaled one two (1-byte data and its scales).
    `lamella_precision.testing.check_recipe` tests any implementation.
    """

    @property
    def block_rows(self) -> int:
        """Rows (slices along dim 0) that must stay on one rank; 1 where any row may be cut off."""
        ...

    def payload_dtypes(self, main_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The dtype of each payload of a parameter whose main weight has `main_dtype`."""
        ...

    def encode(self, shards: Sequence[torch.Tensor], payloads: Sequence[Sequence[torch.Tensor]]) -> None:
        """Write the main weights' wire form.

        Args:
            shards: One flat main-weight shard a parameter, (slot_numel,). Read only.
            payloads: For each payload, one flat destination a parameter. A destination may alias its shard; then
                it already holds what `encode` would write.

        Effects: one or a few multi-tensor kernels on the current stream; no allocation of the shards' size; no
        host sync; not a collective.
        """
        ...

    def decode(self, payloads: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """The tensor that the module computes with.

        Args:
            payloads: One gathered tensor a payload, flat, starting at the parameter's first element.
            shape: The parameter's global shape.

        Returns:
            A tensor of `shape` that shares the payloads' storage, so that a refill of it refills the result.
        """
        ...


@dataclass(frozen=True)
class PlainRecipe:
    """One payload: the weight itself, cast to `compute_dtype` (None: as it is stored)."""

    compute_dtype: torch.dtype | None = None

    @property
    def block_rows(self) -> int:
        """Any row may be cut off."""
        return 1

    def payload_dtypes(self, main_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The compute dtype, alone."""
        return (self.compute_dtype or main_dtype,)

    def encode(self, shards: Sequence[torch.Tensor], payloads: Sequence[Sequence[torch.Tensor]]) -> None:
        """Cast each shard into its destination with one multi-tensor copy."""
        (destinations,) = payloads
        into, source = [], []
        for destination, shard in zip(destinations, shards, strict=True):
            if destination.data_ptr() != shard.data_ptr() and shard.numel() > 0:
                into.append(destination)
                source.append(shard)
        if into:
            torch._foreach_copy_(into, source)

    def decode(self, payloads: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """A view of the one payload."""
        (payload,) = payloads
        return payload[: shape.numel()].view(shape)
