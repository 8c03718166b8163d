"""Communication formats of weights: main weights are encoded into payloads, payloads are decoded.

main weight, all ranks' rows    --measure-->  scales of whole tensors        once a pass, for current scaling
main weight, this rank's rows   --encode-->  payloads, this rank's rows     with every gather, a group at a time
payloads, all rows              --decode-->  the module's compute tensor    once; gathers refill its storage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


class WeightRows(NamedTuple):
    """A rank's rows of a weight, for an encoding.

    Attributes:
        shape: Shape of the whole weight.
        first_row: The first of this rank's rows (slices along dim 0) in the whole weight.
        scales: Scales of the whole weight, of `ScaledRecipe.scale_shape`; None for a recipe without.
        amaxes: Memory of the same shape, raised by the encoding to the amaxes of this rank's rows; None: not measured.
    """

    shape: tuple[int, ...]
    first_row: int
    scales: torch.Tensor | None
    amaxes: torch.Tensor | None = None


@runtime_checkable
class Recipe(Protocol):
    """A weight's communication and compute format: the payloads, their encoding and their decoding.

    A plain recipe has a single payload, the weight in the compute dtype. A block-scaled recipe has 1-byte data and
    scales, maybe quantised along rows for forward and along columns for backward. Recipes are compared and hashed: a
    single call encodes weights with equal recipes. `lamella_precision.testing.check_recipe` tests any implementation.
    """

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of the decoded weight and of its gradient; None for the main weight's."""
        ...

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

    def columns(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weight_rows: Sequence[WeightRows],
    ) -> tuple[Sequence[object] | None, ...]:
        """The arguments of `encode`, made once for many gathers from the same memory.

        Args:
            shards: This rank's rows of each main weight, at least one element each. Read by `encode`, never written.
            payloads: Destinations, the same rows of each weight for each payload. None: unused in this gather's
                direction. With `is_main_weight` a destination may be the shard itself.
            weight_rows: The rows' place in each weight.

        Returns:
            Columns with an entry for each weight, or None: `encode` may be called with a slice of every column, or with
            columns of several groups one after the other.
        """
        ...

    def encode(self, *columns: Any) -> None:
        """Write this rank's rows of the payloads of a group of weights, or of a part of the group.

        Args:
            columns: From `columns`.

        Effects: a few multi-tensor kernels on the current stream, which may differ from call to call; no host sync;
            not a collective. Temporary memory of the shards' size at most.
        """
        ...

    def decode(self, payloads: Sequence[torch.Tensor], shape: torch.Size, scales: torch.Tensor | None) -> torch.Tensor:
        """The module's compute tensor, made once: later gathers refill the payloads.

        Args:
            payloads: Each whole payload, in its shape. A payload's storage has no bytes between uses, nor in a pass
                without need of the payload.
            shape: The weight's whole shape.
            scales: Scales of the whole weight, always the same tensor, whose values follow the main weights
                (`ScaledRecipe`); else None.

        Returns:
            A tensor of `shape` over the payloads' storage: a refill of the payloads refills the tensor. A view, or a
            wrapper subclass with a `detach` over the same payloads. Its operators may read the payloads of the running
            pass, and should save the wrapper for backward, never tensors computed from the payloads.
        """
        ...


@runtime_checkable
class ScaledRecipe(Recipe, Protocol):
    """A recipe with scales of blocks that a cut between ranks may divide, as of a whole tensor.

    Each rank measures its rows, the engine reduces the amaxes (largest magnitudes) of many units by one MAX reduction,
    and every rank computes all scales.

    With delayed scaling (`num_past` above 0) `encode` measures too, into `WeightRows.amaxes`: the next scales need no
    other read of the weights. Only weights never measured before are measured by themselves.
    """

    @property
    def num_past(self) -> int:
        """Number of the latest measurements that scales depend on (delayed scaling); 0 for the weight's own alone."""
        ...

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a weight of `shape`."""
        ...

    def measure_columns(
        self, shards: Sequence[torch.Tensor], weight_rows: Sequence[WeightRows]
    ) -> tuple[Sequence[object], ...]:
        """The arguments of `measure`, made once for many measurements of the same memory.

        Args:
            shards: This rank's rows of each main weight, at least one element each.
            weight_rows: The rows' place in each weight, with fp32 memory for amaxes in place of scales.
        """
        ...

    def measure(self, *columns: Any) -> None:
        """Raise amaxes to those of this rank's rows.

        Args:
            columns: From `measure_columns`.

        Effects: a few kernels on the current stream; no host sync; not a collective.
        """
        ...

    def rescale(self, amaxes: torch.Tensor, scales: torch.Tensor, past: torch.Tensor) -> None:
        """Compute scales from amaxes of whole blocks.

        Args:
            amaxes: (n,), fp32, reduced over the ranks: of one group of weights, or of several one after the other. 0
                where nothing was measured since.
            scales: (n,), fp32, written.
            past: (num_past, n), fp32, the recipe's to read and write; -1 before the first measurement, and 0 after a
                first measurement of zeros alone, which should keep the scale from before.

        Effects: a few kernels on the current stream; no host sync; not a collective.
        """
        ...


@runtime_checkable
class DivisibleRecipe(Recipe, Protocol):
    """A recipe that serves the parts of a weight that comes as a DTensor, as of experts on several ranks.

    A part is a weight of its own: the engine reduces no amaxes over the ranks with other parts, and makes the decoded
    part the DTensor's local tensor, whose operators know no direction.
    """

    def divides_at(self, shape: Sequence[int], row: int) -> bool:
        """Whether the rows before and from `row` on, each encoded as a weight of its own, are those of the whole.

        Args:
            shape: Shape of the whole weight, of at least two dims.
            row: An index along dim 0. For 0, which cuts nothing: whether a DTensor is served at all.
        """
        ...


@runtime_checkable
class CachingRecipe(Recipe, Protocol):
    """A recipe of weights that cache tensors computed from the payloads, as a transpose for backward."""

    def cached_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the tensors that a weight of `shape` caches at most, beside its payloads."""
        ...

    def drop_caches(self, weights: Sequence[torch.Tensor]) -> None:
        """Drop the caches: the payloads lose their bytes, or get new values before the next use.

        Args:
            weights: From `decode`, as modules hold the weights: detached, as parameters.

        Effects: frees memory; no kernel, no host sync; not a collective.
        """
        ...
