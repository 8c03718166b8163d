"""A group of tensors in one flat allocation: a rank's shards, or the whole tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import torch

from lamella_buffers._allocator import Allocator
from lamella_buffers._payload import Filling, Payload, Payloads
from lamella_layout import EvenLayout, FlatLayout

Layout = EvenLayout | FlatLayout


class ShardedBuffer:
    """A rank's shards of a group of tensors, in a flat tensor.

    In an even layout each shard lies in a separate slot, padded where torch's chunks run short. In a flat layout shards
    are packed, and the whole is a single slot. Padding travels with the slot and is never read.

    Args:
        layout: Offsets of the shards.
        rank: The shards' rank.
        flat: (layout.shard_numel,), aliased by the shards.

    Attributes:
        flat: (layout.shard_numel,), all shards.
        dtype: The shards' dtype.
        device: The shards' device.
    """

    def __init__(self, layout: Layout, rank: int, flat: torch.Tensor) -> None:
        self.layout = layout
        self.rank = rank
        self.flat = flat
        self.dtype, self.device = flat.dtype, flat.device

    # Views cost the host, and are made at first use: reductions read `slots`, modules read `shards`.

    @cached_property
    def slots(self) -> tuple[torch.Tensor, ...]:
        """Flat views for collectives: an even layout's padded slots, or the whole buffer in a flat layout."""
        return tuple(self.flat[slice(*slot)] for slot in self.layout.wire_slots)

    @cached_property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """For each tensor a view of shape layout.shard_shape(i, rank): the local tensor of a DTensor."""
        flat = self.flat
        start = flat.storage_offset()
        places = _shards(self.layout, self.rank)
        return tuple([flat.as_strided(shape, stride, start + offset) for shape, stride, offset in places])

    def cast_to(self, dtype: torch.dtype) -> ShardedBuffer:
        """The same values in another dtype.

        Effects: an allocation and a multi-tensor copy, on the current stream.
        """
        cast = ShardedBuffer.empty(self.layout, self.rank, dtype, self.flat.device)
        # Not `Tensor.to`: its kernel occupies all multiprocessors, and takes half as long again.
        torch._foreach_copy_([cast.flat], [self.flat])
        return cast

    @classmethod
    def empty(cls, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> ShardedBuffer:
        """A buffer with undefined contents.

        Effects: allocates shard_numel * itemsize bytes on the current stream.
        """
        return cls(layout, rank, torch.empty(layout.shard_numel, dtype=dtype, device=device))

    def copy_from(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep this rank's chunk of each whole tensor.

        Args:
            tensors: A whole tensor for each slot, of the layout's shapes; read only, cast to the buffer's dtype.

        Raises:
            ValueError: Wrong shapes. A smaller tensor would be repeated on some ranks, and fail on others.

        Effects: zeroes the buffer, then a copy for each tensor, on the current stream; not a collective.
        """
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        if shapes != self.layout.shapes:
            raise ValueError(f"Expected whole tensors of the layout's shapes {self.layout.shapes!r}, got {shapes!r}.")
        self.flat.zero_()
        for i, (shard, tensor) in enumerate(zip(self.shards, tensors, strict=True)):
            chunk = self.layout.chunk(i, self.rank)
            index = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            # Detached: the copy would otherwise attach the shard to the parameter's graph.
            shard.copy_(tensor.detach()[index])


class UnshardedBuffer:
    """A group of whole tensors in a flat allocation; the bytes come and go, the views stay.

        even   | slot 0: rank 0's piece, rank 1's piece, ... , slack | slot 1: ...
        views  | tensor 0                                |           | tensor 1

        flat   | a single slot: rank 0's piece | rank 1's piece          | ...
        views  | tensor 2    | tensor 0                  |    | tensor 1

    Args:
        layout: Offsets of the tensors. A tensor with non-contiguous chunks must divide over the ranks.
        rank: This rank, owner of `local_pieces`.
        dtype: Dtype of all tensors.
        device: The tensors' device.
        allocator: Gives the bytes and takes them back.

    Note [Version counters]. Autograd may hold views of `tensors` from forward to backward, and refuses views with an
    advanced version counter. A repeated gather writes the same values, which is no modification. So the tensors written
    by a gather (`flat` and its views `slots` and `local_pieces`) have a separate version counter.

    Attributes:
        allocator: Source of the next bytes.
        flat: (layout.full_numel,).
        slots: Flat destinations of a gather: for each slot of a `ShardedBuffer` a tensor num_shards times as long.
        local_pieces: This rank's piece of each slot: the source of an in-place gather.
        tensors: A view of each tensor, in the tensor's shape.

    Raises:
        NotImplementedError: A tensor's chunks are neither contiguous nor equal (a dim other than the first).

    Effects: allocates the bytes, makes the views, and frees the bytes again.
    """

    def __init__(
        self, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device, allocator: Allocator
    ) -> None:
        if isinstance(layout, EvenLayout):
            _check_gatherable(layout)
        self.layout = layout
        self.allocator = allocator
        flat = allocator.create(layout.full_numel, dtype, device)
        self.flat = flat.data  # same bytes, separate version counter: Note [Version counters]
        self.slots = tuple(self.flat[slice(*slot)] for slot in layout.wire_full_slots)
        # Pieces of the destinations: a gather from here is in place, and no piece is copied.
        self.local_pieces = tuple(_piece(slot, layout.num_shards, rank) for slot in self.slots)
        # Views of the tensor as created, with its version counter: gathers, which write `self.flat`, do not advance it.
        self.tensors = tuple(flat[slice(*layout.tensor_range(i))].view(shape) for i, shape in enumerate(layout.shapes))
        # Last: torch makes no view past the end of a storage, so the views above needed the bytes.
        allocator.free(self.flat)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of every tensor."""
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self.flat.device

    def lands_in_place(self, slot: int) -> bool:
        """Whether the ranks' pieces of a slot, in rank order, are the slot's contents."""
        return isinstance(self.layout, FlatLayout) or self.layout.is_contiguous(slot)

    def by_rank(self, slot: int) -> torch.Tensor:
        """A view of an even layout's slot in the order of the ranks' pieces: (num_shards, *chunk's shape)."""
        assert isinstance(self.layout, EvenLayout)
        tensor_view = self.flat[slice(*self.layout.tensor_range(slot))].view(self.layout.shapes[slot])
        return by_rank(tensor_view, self.layout, slot)

    @property
    def has_bytes(self) -> bool:
        """Whether the buffer is allocated."""
        return self.flat.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Take bytes, with undefined contents until a gather.

        Raises:
            RuntimeError: The buffer has its bytes already.

        Effects: full_numel * itemsize bytes from the allocator, on the current stream.
        """
        self.allocator.allocate(self.flat)

    def free(self) -> None:
        """Give the bytes back. The current stream must have waited for the last reader.

        Raises:
            RuntimeError: The buffer has no bytes.
        """
        self.allocator.free(self.flat)


def _piece(slot: torch.Tensor, num_shards: int, rank: int) -> torch.Tensor:
    # Not `tensor_split`, which makes a view for each of the ranks, of which there may be thousands.
    numel = slot.numel() // num_shards
    return slot.narrow(0, rank * numel, numel)


class GatherPlan:
    """The payloads of a gather into unsharded buffers with the same tensors, built once.

    Several buffers are several forms of the tensors (quantised data, and scales): the same ranks own the same rows in
    each. A tensor's payloads are consecutive on the wire: a tensor can be sent as soon as it is written. Slots without
    elements are left out.

    Args:
        moves: The slots of each buffer, at fixed addresses kept by the plan's owner: slots of a `ShardedBuffer`, or
            the buffer's own pieces. If `fill` is None, each gather casts slots with a dtype different from the buffer's
            into the own pieces.
        fill: Writes this rank's pieces before the gather sends them; see `Filling`. None: already written.
        columns: The arguments of `fill`, an entry for each of `tensors`.
        tensors: Indices of the tensors written by `fill`.

    Attributes:
        payloads: Payloads gathered straight into place.
        reordered: Payloads gathered in another order than the slot's: shard, slot, and a view of the slot in gather
            order.
    """

    def __init__(
        self,
        moves: Sequence[tuple[Sequence[torch.Tensor], UnshardedBuffer]],
        fill: Callable[..., object] | None = None,
        columns: tuple[Sequence[object] | None, ...] = (),
        tensors: Sequence[int] = (),
    ) -> None:
        if fill is None and any(
            a.dtype != b.dtype for slots, into in moves for a, b in zip(slots, into.slots, strict=True)
        ):
            moves, fill, columns, tensors = _with_casts(moves)
        self.reordered: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        payloads: list[Payload] = []
        begins = []
        for i, pieces in enumerate(zip(*(slots for slots, _ in moves), strict=True)):
            begins.append(len(payloads))
            for shard, (_, into) in zip(pieces, moves, strict=True):
                if shard.numel() == 0:
                    continue
                if into.lands_in_place(i):
                    payloads.append(Payload(shard, into.slots[i]))
                else:
                    self.reordered.append((shard, into.slots[i], into.by_rank(i)))
        fillings = []
        if fill is not None and payloads + self.reordered:
            # A flat layout's single slot, and pieces sent after all the rest, are written before any sending.
            is_whole = self.reordered or len(begins) == 1
            fillings = [Filling(fill, columns, [0 if is_whole else begins[i] for i in tensors])]
        # Views hold the buffers' storages, not their bytes: between gathers the storages are empty.
        self.payloads = Payloads(payloads, fillings)
        # Weak keys: otherwise the plan of a deleted group, and its main weights, would live as long as its neighbour's
        # plan.
        self._joined: weakref.WeakKeyDictionary[GatherPlan, GatherPlan] = weakref.WeakKeyDictionary()

    def joined(self, other: GatherPlan) -> GatherPlan:
        """The gathers of two plans as a single gather: put together once, and kept as long as both plans live."""
        plan = self._joined.get(other)
        if plan is None:
            plan = self._joined[other] = GatherPlan([])
            plan.payloads = Payloads.joined([self.payloads, other.payloads])
            plan.reordered = [*self.reordered, *other.reordered]
        return plan


def _with_casts(
    moves: Sequence[tuple[Sequence[torch.Tensor], UnshardedBuffer]],
) -> tuple[
    list[tuple[Sequence[torch.Tensor], UnshardedBuffer]],
    Callable[..., object],
    tuple[Sequence[object] | None, ...],
    Sequence[int],
]:
    """A plan's arguments for a buffer with a different dtype of slots: a multi-tensor copy into the own pieces."""
    ((slots, into),) = moves
    cast = [i for i, slot in enumerate(slots) if slot.numel() > 0]
    columns = ([into.local_pieces[i] for i in cast], [slots[i] for i in cast])
    return [(into.local_pieces, into)], torch._foreach_copy_, columns, cast


def shards_in(slots: Sequence[torch.Tensor], layout: Layout, rank: int) -> list[torch.Tensor]:
    """A rank's shards as views of any flat slots, for example of a buffer's own pieces.

    Returns:
        For each tensor a view of shape layout.shard_shape(i, rank).
    """
    is_flat = isinstance(layout, FlatLayout)
    places = [layout.local_slot(i, rank) for i in range(layout.num_tensors)]
    flats = [slots[0][slice(*place)] if is_flat else slots[i][: place.numel] for i, place in enumerate(places)]
    return [flat.view(layout.shard_shape(i, rank)) for i, flat in enumerate(flats)]


def by_rank(tensor: torch.Tensor, layout: EvenLayout, i: int) -> torch.Tensor:
    """A view of whole tensor `i` of a layout as chunks in rank order: (num_shards, *chunk's shape)."""
    shape, dim = tensor.shape, layout.dims[i]
    return tensor.view(*shape[:dim], layout.num_shards, -1, *shape[dim + 1 :]).movedim(dim, 0)


def standalone(view: torch.Tensor) -> torch.Tensor:
    """A tensor over the bytes of a contiguous view, with a storage of exactly these bytes.

    Pickling or deep-copying a tensor takes the whole storage; for a shard in a flat buffer, every shard. A `DTensor`
    over a view also inherits the view's offset, and torch then treats the DTensor as a tensor with data.

    Effects: the new storage keeps the old storage alive; neither can be resized while both live.
    """
    if view.is_meta:
        return view
    # A storage that begins at the view's first byte, over the same memory: no copy, no offset.
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


@lru_cache(maxsize=4096)  # every reduction makes a buffer; layouts are few
def _shards(layout: Layout, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Each of a rank's shards as a view of the shard buffer: shape, strides, and first element."""
    shapes = [layout.shard_shape(i, rank) for i in range(layout.num_tensors)]
    strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
    return [(shape, strides[i], layout.local_slot(i, rank).start) for i, shape in enumerate(shapes)]


def _check_gatherable(layout: EvenLayout) -> None:
    for i in range(layout.num_tensors):
        if not layout.is_contiguous(i) and not layout.divides(i):
            raise NotImplementedError(
                f"Expected dim {layout.dims[i]} of shape {layout.shapes[i]} to divide over {layout.num_shards} "
                "ranks. Shard along dim 0, which need not."
            )
