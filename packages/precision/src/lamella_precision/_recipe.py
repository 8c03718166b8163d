"""The formats in which weights travel between ranks: main weights are encoded into payloads, payloads are decoded.

main weight, this rank's rows   --encode-->  payloads, this rank's rows     with every gather, a group at a time
payloads, all rows              --decode-->  the tensor that a module uses  once; gathers refill its storage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Protocol, runtime_checkable

import torch


class Direction(Enum):
    """The passes that need a payload, or that a gather is for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "forward and backward"

    # By identity, as members are compared; an enum's own hash is that of its name, in Python.
    __hash__ = object.__hash__

    def meets(self, other: Direction | None) -> bool:
        """Whether a pass is in both; None has no pass."""
        return self is other or (other is not None and (self is Direction.BOTH or other is Direction.BOTH))

    def joined(self, other: Direction | None) -> Direction:
        """The passes of either."""
        return self if other is None or self is other else Direction.BOTH


@dataclass(frozen=True)
class PayloadFormat:
    """One of the tensors that a weight travels as.

    Attributes:
        dtype: Of its elements. Bytes (`torch.uint8`) where collectives do not know the dtype.
        shape: Of the whole payload. Dim 0 has an element for each row of the weight, or for each block of
            `Recipe.block_rows` rows, so that ranks own the same rows of both.
        direction: The passes that need the payload.
        is_main_weight: The payload is the main weight itself, sent from where it lies and never encoded.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    direction: Direction = Direction.BOTH
    is_main_weight: bool = False


@runtime_checkable
class Recipe(Protocol):
    """The format in which a weight travels and computes: one or more payloads, and how they are made and used.

    A plain recipe has one payload, the weight in the compute dtype. A block-scaled one has 1-byte data and its scales,
    maybe quantised along rows for forward and along columns for backward. A recipe is compared and hashed: weights with
    equal recipes are encoded by one call. `lamella_precision.testing.check_recipe` tests any implementation.
    """

    @property
    def block_rows(self) -> int:
        """Rows (slices along dim 0) that must stay on one rank; 1 where any row may be cut off."""
        ...

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> Sequence[PayloadFormat]:
        """The payloads of a weight, the same dtypes and directions for every shape.

        Args:
            shape: Of the whole weight.
            main_dtype: Of the main weight.
        """
        ...

    def encode(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Write this rank's rows of the payloads: of a whole group of weights, or of a part of one.

        Args:
            shards: This rank's rows of each main weight, at least one. Read only.
            payloads: For each payload the same rows of each weight. None: the gather has no use for the payload (it is
                of the other direction). The destination of a payload that is the main weight may be its shard.
            weights: For each weight the tensor that `decode` made: it may carry state, as the scale of a whole tensor.

        Effects: one or a few multi-tensor kernels on the current stream, which need not be that of the call before; no
            allocation of the shards' size; no host sync; not a collective. Version counters of `weights` stay.
        """
        ...

    def decode(self, payloads: Sequence[torch.Tensor], shape: torch.Size, main_weight: torch.Tensor) -> torch.Tensor:
        """The tensor that the module computes with, made once: later gathers refill the payloads.

        Args:
            payloads: Each whole payload, in its own shape. Between uses the storage of a payload has no bytes, and in a
                pass that does not need the payload none either.
            shape: The weight's whole shape; of its part on this rank, if it came as a DTensor (tensor parallel).
            main_weight: The sharded weight, a DTensor that stays the same object. A recipe that scales whole tensors
                reduces the largest elements of all of them at once, after the optimizer's step.

        Returns:
            A tensor of `shape` that shares the payloads' storage, so that a refill of it refills the result. A view, or
            a wrapper subclass whose `detach` shares the same payloads. Its operators may read the payloads of the pass
            that they run in, and should save the wrapper for backward, not what they compute from it.
        """
        ...


@dataclass(frozen=True)
class PlainRecipe:
    """One payload for both directions: the weight itself, cast to `compute_dtype` (None: as it is stored)."""

    compute_dtype: torch.dtype | None = None

    @property
    def block_rows(self) -> int:
        """Any row may be cut off."""
        return 1

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        """The weight in the compute dtype, alone."""
        dtype = self.compute_dtype or main_dtype
        return (PayloadFormat(dtype, tuple(shape), is_main_weight=dtype == main_dtype),)

    def encode(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weights: Sequence[torch.Tensor] = (),
    ) -> None:
        """Cast each shard into its destination with one multi-tensor copy."""
        (destinations,) = payloads
        if destinations is None or not shards:
            return
        if any(map(is_, destinations, shards)):
            pairs = [(into, shard) for into, shard in zip(destinations, shards, strict=True) if into is not shard]
            self.encode([shard for _, shard in pairs], [[into for into, _ in pairs]])
        else:
            torch._foreach_copy_(list(destinations), list(shards))

    def decode(
        self, payloads: Sequence[torch.Tensor], shape: torch.Size, main_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A view of the one payload."""
        (payload,) = payloads
        return payload.view(shape)
