"""A group's unsharded parameters: a buffer for each payload of the recipe, and the gathers that fill the buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lamella_buffers import (
    Allocator,
    GatherPlan,
    Payload,
    ShardedBuffer,
    Transport,
    UnshardedBuffer,
    shards_in,
)
from lamella_engine._scaling.scales import Scales, parts_in
from lamella_layout import EvenLayout, FlatLayout
from lamella_precision import CachingRecipe, Direction, PayloadFormat, Recipe

Layout = EvenLayout | FlatLayout


@dataclass(frozen=True)
class _Encode:
    """A recipe's `encode`. Equal for equal recipes, whose weights one call encodes."""

    recipe: Recipe

    def __call__(self, *columns: Sequence[object] | None) -> None:
        self.recipe.encode(*columns)


class PayloadLayouts:
    """The payloads of a group of parameters, and their layouts.

    Args:
        recipe: The recipe of all of the parameters.
        layout: The layout of the parameters.
        main_dtype: The dtype of the parameters' main weights.

    Attributes:
        formats: The formats of the payloads; a format's shape is the first parameter's.
        layouts: The layouts of the payloads, in the unsharded buffers.
        cached_nbytes: Bytes of the tensors that unsharded weights cache at most.

    Raises:
        ValueError: The layout cuts a block of rows apart.
    """

    def __init__(self, recipe: Recipe, layout: Layout, main_dtype: torch.dtype) -> None:
        self.recipe = recipe
        parameter_formats = [recipe.payloads(shape, main_dtype) for shape in layout.shapes]
        self.formats: Sequence[PayloadFormat] = parameter_formats[0]
        self._shapes = [[formats[p].shape for formats in parameter_formats] for p in range(len(self.formats))]
        self.layouts = self.like(layout)
        self.cached_nbytes = cached_nbytes(recipe, layout.shapes)

    def like(self, layout: Layout) -> list[Layout]:
        """The payloads' layouts where the parameters lie as in `layout`."""
        return [layout.with_shapes(shapes) for shapes in self._shapes]

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads, unsharded."""
        pairs = zip(self.formats, self.layouts, strict=True)
        return sum(layout.full_numel * payload.dtype.itemsize for payload, layout in pairs)

    def chosen(self, direction: Direction, gathered_for: Direction | None) -> tuple[int, ...]:
        """Indices of the payloads that a direction needs and `gathered_for` does not."""
        needed = [payload_format_direction.direction for payload_format_direction in self.formats]
        return tuple(
            p
            for p, payload_format_direction in enumerate(needed)
            if payload_format_direction.meets(direction) and not payload_format_direction.meets(gathered_for)
        )


def cached_nbytes(recipe: Recipe, shapes: Iterable[Sequence[int]]) -> int:
    """Bytes of the tensors that weights cache at most; 0 for a recipe without caches."""
    return sum(map(recipe.cached_nbytes, shapes)) if isinstance(recipe, CachingRecipe) else 0


def _piece(slot: torch.Tensor, axis: Transport) -> torch.Tensor:
    """This rank's piece of a slot that all ranks of an axis fill with equal pieces."""
    numel = slot.numel() // axis.num_ranks
    return slot.narrow(0, axis.rank * numel, numel)


class UnshardedWeight:
    """The payloads of a group's parameters on this rank, and over them the weights for modules.

    Args:
        payloads: The formats and layouts.
        layout: The layout of gathered shards.
        main_layout: The layout of the main weights.
        ranks: This rank's places in the two layouts.
        device: The device of the buffers.
        allocator: Gives the buffers their bytes.
        scales: The scales of the parameters, for a recipe with scales of whole tensors.

    Attributes:
        buffers: One a payload.
        weights: From the recipe's `decode`, one a parameter.

    Effects: allocates the buffers, on the current stream; the caller frees the buffers when Parameters are made.
    """

    def __init__(
        self,
        payloads: PayloadLayouts,
        layout: Layout,
        main_layout: Layout,
        ranks: tuple[int, int],
        device: torch.device,
        allocator: Allocator,
        scales: Scales | None,
    ) -> None:
        # Made once with the group's buffers, and anew when main weights move: plans refer to views of both.
        self._payloads = payloads
        self._main_layouts = payloads.like(main_layout)
        self._rank, self._main_rank = ranks
        self._encode = _Encode(payloads.recipe)
        self._scales = [None] * layout.num_tensors if scales is None else scales.parameter_scales
        self._amaxes = scales.amaxes_of_each if scales is not None and scales.num_past else None
        pairs = list(zip(payloads.formats, payloads.layouts, strict=True))
        self.buffers = tuple(
            UnshardedBuffer(payload_layout, ranks[0], payload_format.dtype, device, allocator)
            for payload_format, payload_layout in pairs
        )
        for buffer in self.buffers:  # for a moment: torch refuses views beyond a storage's bytes
            buffer.allocate()
        # Decoded once, over views of the buffers: autograd holds the weights while the bytes come and go.
        decode = payloads.recipe.decode
        wholes = zip(*(buffer.tensors for buffer in self.buffers), strict=True)
        tensors_and_scales = zip(wholes, layout.shapes, self._scales, strict=True)
        self.weights = [
            decode(payloads_of_tensor, torch.Size(shape), own_scales)
            for payloads_of_tensor, shape, own_scales in tensors_and_scales
        ]

    def plan(self, chosen: Sequence[int], main_weight: ShardedBuffer) -> GatherPlan:
        """A gather of some payloads from main weights on the device: sent in place, or encoded first.

        The plan keeps the main weights alive.
        """
        formats, buffers = self._payloads.formats, self.buffers
        # Views alone: a plan that is kept between gathers holds no bytes of the buffers, which come and go.
        moves = [
            (main_weight.slots if formats[p].is_main_weight else buffers[p].local_pieces, buffers[p]) for p in chosen
        ]
        # Encoded into this rank's slots of the buffer itself: the gather sends from the place that it fills.
        encoded = [p for p in chosen if not formats[p].is_main_weight]
        if not encoded:
            return GatherPlan(moves)
        encoded_shards = {p: shards_in(buffers[p].local_pieces, self._payloads.layouts[p], self._rank) for p in encoded}
        tensors, columns = self._columns(main_weight, encoded_shards)
        return GatherPlan(moves, self._encode, columns, tensors)

    def _columns(
        self, main_weight: ShardedBuffer, into: dict[int, list[torch.Tensor]]
    ) -> tuple[list[int], tuple[Sequence[object] | None, ...]]:
        """The parameters with rows on this rank, and the arguments of `_Encode` for them."""
        owned, shards, parts = parts_in(main_weight, self._scales, self._amaxes)
        payloads = [[into[p][i] for i in owned] if p in into else None for p in range(len(self.buffers))]
        return owned, self._payloads.recipe.columns(shards, payloads, parts)

    def plan_from(self, shards: dict[int, ShardedBuffer], chosen: Sequence[int]) -> GatherPlan:
        """A gather of some payloads from encoded shards."""
        return GatherPlan([(shards[p].slots, self.buffers[p]) for p in chosen])

    def gather_shards(
        self, chosen: Sequence[int], main_weight: ShardedBuffer, outer: Transport
    ) -> dict[int, ShardedBuffer]:
        """This rank's shards of some payloads, gathered from parts that each rank of the outer axis encodes.

        Effects: allocates the shards on the current stream; a collective on the outer axis; blocks the host on gloo.
        """
        shards = {}
        for p in chosen:
            buffer = self.buffers[p]
            shards[p] = ShardedBuffer.empty(self._payloads.layouts[p], self._rank, buffer.dtype, buffer.device)
        # Views of the shards: encoded in place, and gathered in place.
        parts = {p: [_piece(slot, outer) for slot in shards[p].slots] for p in chosen}
        encoded_parts = {p: shards_in(parts[p], self._main_layouts[p], self._main_rank) for p in chosen}
        owned, columns = self._columns(main_weight, encoded_parts)
        # A rank without rows encodes nothing, and still takes part in the collective below.
        if owned:
            self._encode(*columns)
        transfers = [transfer for p in chosen for transfer in zip(parts[p], shards[p].slots, strict=True)]
        payloads = [Payload(part, full_slot) for part, full_slot in transfers if full_slot.numel() > 0]
        if payloads:  # the ranks of the outer axis hold the same shard: all of them have none, or all have some
            # Waited for at once: gloo fills the shards in `wait`, and the gather over the shard axis sends them next.
            outer.all_gather(payloads).wait()
        return shards
