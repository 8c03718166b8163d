"""Communication formats of weights: main weights are encoded into payloads, payloads are decoded.

main weight, this rank's rows   --encode-->  payloads, this rank's rows     with every gather, a group at a time
payloads, all rows              --decode-->  the module's compute tensor    once; gathers refill its storage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Protocol, runtime_checkable

import torch


class Direction(Enum):
    """The passes in need of a payload, or served by a gather."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "forward and backward"

    # By identity, as members are compared: the hash of an enum member's name is computed in Python, and slow.
    __hash__ = object.__hash__

    def meets(self, other: Direction | None) -> bool:
        """Whether the two share a pass; None has no pass."""
        return self is other or (other is not None and (self is Direction.BOTH or other is Direction.BOTH))

    def joined(self, other: Direction | None) -> Direction:
        """The passes of either."""
        return self if other is None or self is other else Direction.BOTH


@dataclass(frozen=True)
class PayloadFormat:
    """A tensor in a weight's communication format.

    Attributes:
        dtype: Dtype of the elements. Bytes (`torch.uint8`) if collectives lack the dtype.
        shape: Shape of the whole payload. Dim 0 has an element for each row of the weight, or for each block of
            `Recipe.block_rows` rows: a rank owns the same rows of weight and payload.
        direction: The passes in need of the payload.
        is_main_weight: The payload is the main weight itself, sent in place and never encoded.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    direction: Direction = Direction.BOTH
    is_main_weight: bool = False


@runtime_checkable
class Recipe(Protocol):
    """A weight's communication and compute format: the payloads, their encoding and their decoding.

    A plain recipe has a single payload, the weight in the compute dtype. A block-scaled recipe has 1-byte data and
    scales, maybe quantised along rows for forward and along columns for backward. Recipes are compared and hashed: a
    single call encodes weights with equal recipes. `lamella_precision.testing.check_recipe` tests any implementation.
    """

    @property
    def block_rows(self) -> int:
        """Rows (slices along dim 0) to keep on the same rank; 1 allows a cut after any row."""
        ...

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> Sequence[PayloadFormat]:
        """The payloads of a weight, the same dtypes and directions for every shape.

        Args:
            shape: Shape of the whole weight.
            main_dtype: Dtype of the main weight.
        """
        ...

    def encode(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Write this rank's rows of the payloads of a group of weights, or of a part of the group.

        Args:
            shards: This rank's rows of each main weight, at least one shard. Read only.
            payloads: For each payload the same rows of each weight. None: unused in this gather's direction. With
                `is_main_weight` a destination may be the shard itself.
            weights: For each weight the result of `decode`, which may carry state such as the scale of a whole tensor.

        Effects: a few multi-tensor kernels on the current stream, which may differ from call to call; no allocation of
            the shards' size; no host sync; not a collective. Version counters of `weights` stay.
        """
        ...

    def decode(self, payloads: Sequence[torch.Tensor], shape: torch.Size, main_weight: torch.Tensor) -> torch.Tensor:
        """The module's compute tensor, made once: later gathers refill the payloads.

        Args:
            payloads: Each whole payload, in its shape. A payload's storage has no bytes between uses, nor in a pass
                without need of the payload.
            shape: The weight's whole shape; for a weight given as a DTensor (tensor parallel), the shape of this rank's
                part.
            main_weight: The sharded weight, always the same DTensor object. A recipe with scales of whole tensors
                reduces the largest elements of all weights at once, after the optimizer's step.

        Returns:
            A tensor of `shape` over the payloads' storage: a refill of the payloads refills the tensor. A view, or a
            wrapper subclass with a `detach` over the same payloads. Its operators may read the payloads of the running
            pass, and should save the wrapper for backward, never tensors computed from the payloads.
        """
        ...


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

    def encode(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weights: Sequence[torch.Tensor] = (),
    ) -> None:
        """Cast each shard into its destination with a multi-tensor copy."""
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
        """A view of the payload."""
        (payload,) = payloads
        return payload.view(shape)
