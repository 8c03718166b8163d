"""A group of tensors in one flat allocation: a rank's shards, or the whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import torch

from lamella_buffers._allocator import Allocator
from lamella_buffers._payload import Filling, Payload, Payloads
from lamella_layout import EvenLayout, FlatLayout

Layout = EvenLayout | FlatLayout


class ShardedBuffer:
    """One rank's shards of a group of tensors, in one flat tensor.

    In an even layout each lies in a slot of its own, which ends in padding where torch's chunks run short; in a flat
    one they are packed, and the whole is one slot. Padding travels with the slot and nobody reads it.

    Args:
        layout: Where each shard lies.
        rank: Whose shards.
        flat: (layout.shard_numel,), whose contents become the shards.

    Attributes:
        flat: (layout.shard_numel,), all of them.

    Effects: none; the buffer is a view of `flat`.
    """

    def __init__(self, layout: Layout, rank: int, flat: torch.Tensor) -> None:
        self.layout = layout
        self.rank = rank
        self.flat = flat

    # Views are made when they are first asked for: of what is reduced somebody wants the one, of what is installed the
    # other.

    @cached_property
    def slots(self) -> tuple[torch.Tensor, ...]:
        """What travels, flat: each tensor's padded slot in an even layout, everything as one in a flat one."""
        return tuple(self.flat[slice(*slot)] for slot in self.layout.wire_slots)

    @cached_property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """For each tensor a view of shape layout.shard_shape(i, rank): what a DTensor holds."""
        flat = self.flat
        start = flat.storage_offset()
        places = _shards(self.layout, self.rank)
        return tuple([flat.as_strided(shape, stride, start + offset) for shape, stride, offset in places])

    def cast_to(self, dtype: torch.dtype) -> ShardedBuffer:
        """The same values in another dtype.

        Effects: allocates them, and one multi-tensor copy, on the current stream.
        """
        cast = ShardedBuffer.empty(self.layout, self.rank, dtype, self.flat.device)
        # Not `Tensor.to`, whose kernel keeps all multiprocessors from compute, and takes half as long again.
        torch._foreach_copy_([cast.flat], [self.flat])
        return cast

    @classmethod
    def empty(cls, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> ShardedBuffer:
        """A buffer whose contents are undefined.

        Effects: allocates shard_numel * itemsize bytes on the current stream.
        """
        return cls(layout, rank, torch.empty(layout.shard_numel, dtype=dtype, device=device))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of every shard."""
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        """Where the shards lie."""
        return self.flat.device

    def copy_from(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep this rank's chunk of each whole tensor.

        Args:
            tensors: One whole tensor a slot, of the layout's shapes; read only, cast to the buffer's dtype.

        Raises:
            ValueError: They have other shapes. A smaller one would be repeated on some ranks, and fail on others.

        Effects: zeroes the buffer, then one copy a tensor, on the current stream; not a collective.
        """
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        if shapes != self.layout.shapes:
            raise ValueError(f"Expected whole tensors of the layout's shapes {self.layout.shapes!r}, got {shapes!r}.")
        self.flat.zero_()
        for i, (shard, tensor) in enumerate(zip(self.shards, tensors, strict=True)):
            chunk = self.layout.chunk(i, self.rank)
            index = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            shard.copy_(tensor.detach()[index])


class UnshardedBuffer:
    """A group of whole tensors in one flat allocation whose bytes come and go; the views of it stay.

        even   | slot 0: rank 0's piece, rank 1's piece, ... , slack | slot 1: ...
        views  | tensor 0                                |           | tensor 1

        flat   | the one slot: rank 0's piece  | rank 1's piece          | ...
        views  | tensor 2    | tensor 0                  |    | tensor 1

    Args:
        layout: Where each tensor lies. A tensor whose chunks are not contiguous in it must divide over the ranks.
        rank: This rank, whose pieces are `own`.
        dtype: Dtype of all tensors.
        device: Where they lie.
        allocator: Gives the bytes and takes them back.

    Note [Version counters]. Autograd may hold views of `tensors` from forward to backward, and refuses them if their
    version counter has moved on. Bytes that come again hold the same values, which is no modification. So what a
    gather writes, `flat` and its views `slots` and `own`, has a version counter of its own.

    Attributes:
        allocator: Whose bytes the next ones are.
        flat: (layout.full_numel,).
        slots: Where a gather lands, flat: one a slot of a `ShardedBuffer`, num_shards times as long.
        own: For each slot this rank's piece of it: where an in-place gather starts from.
        tensors: For each tensor a view in its own shape.

    Raises:
        NotImplementedError: A tensor's chunks are neither contiguous nor equal (a dim other than the first).

    Effects: born without bytes, but for a moment during construction.
    """

    def __init__(
        self, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device, allocator: Allocator
    ) -> None:
        if isinstance(layout, EvenLayout):
            _check_gatherable(layout)
        self.layout = layout
        self.allocator = allocator
        whole = allocator.create(layout.full_numel, dtype, device)
        self.flat = whole.data  # the same bytes: see the note
        self.slots = tuple(self.flat[slice(*slot)] for slot in layout.wire_full_slots)
        self.own = tuple(torch.tensor_split(slot, layout.num_shards)[rank] for slot in self.slots)
        self.tensors = tuple(whole[slice(*layout.tensor_range(i))].view(shape) for i, shape in enumerate(layout.shapes))
        allocator.free(self.flat)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of every tensor."""
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.flat.device

    def lands_in_place(self, slot: int) -> bool:
        """Whether the ranks' pieces of a slot, one after another, are what the slot holds."""
        return isinstance(self.layout, FlatLayout) or self.layout.is_contiguous(slot)

    def by_rank(self, slot: int) -> torch.Tensor:
        """A view of a slot of an even layout in the order in which pieces come: (num_shards, *chunk's shape)."""
        assert isinstance(self.layout, EvenLayout)
        whole = self.flat[slice(*self.layout.tensor_range(slot))].view(self.layout.shapes[slot])
        return by_rank(whole, self.layout, slot)

    @property
    def has_bytes(self) -> bool:
        """Whether there is something to free."""
        return self.flat.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Take the bytes; their contents are undefined until a gather fills them.

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


class GatherPlan:
    """The payloads of a gather into unsharded buffers with the same tensors, put together once.

    Several buffers are several forms of the tensors (quantised data, and its scales): the same ranks own the same
    rows in each. A tensor's payloads travel one after another, so that a tensor that is written is ready to be sent.

    Args:
        moves: For each buffer its slots, in memory that the plan's owner keeps where it is: those of a `ShardedBuffer`,
            or the buffer's own pieces. Slots of another dtype than the buffer's are cast into those pieces by each
            gather, if `fill` is None.
        fill: Writes this rank's pieces before they are sent; see `Filling`. None: they are there.
        columns: The arguments of `fill`, one entry for each of `tensors`.
        tensors: Indices of the tensors that `fill` writes.

    Attributes:
        payloads: Those that land where they belong.
        beside: Those that come in another order than they lie in: shard, slot, and a view of the slot in the order in
            which they come.

    Effects: none. Slots without elements are left out.
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
        self.beside: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        found: list[Payload] = []
        begins = []
        for i, pieces in enumerate(zip(*(slots for slots, _ in moves), strict=True)):
            begins.append(len(found))
            for shard, (_, into) in zip(pieces, moves, strict=True):
                if shard.numel() == 0:
                    continue
                if into.lands_in_place(i):
                    found.append(Payload(shard, into.slots[i]))
                else:
                    self.beside.append((shard, into.slots[i], into.by_rank(i)))
        fillings = []
        if fill is not None and found + self.beside:
            # A flat layout's one slot, and pieces that travel after all others, are written before any is sent.
            is_whole = self.beside or len(begins) == 1
            fillings = [Filling(fill, columns, [0 if is_whole else begins[i] for i in tensors])]
        self.payloads = Payloads(found, fillings)


def _with_casts(
    moves: Sequence[tuple[Sequence[torch.Tensor], UnshardedBuffer]],
) -> tuple[
    list[tuple[Sequence[torch.Tensor], UnshardedBuffer]],
    Callable[..., object],
    tuple[Sequence[object] | None, ...],
    Sequence[int],
]:
    """A plan's arguments for the one buffer whose slots have another dtype: a multi-tensor copy into its own pieces."""
    ((slots, into),) = moves
    cast = [i for i, slot in enumerate(slots) if slot.numel() > 0]
    columns = ([into.own[i] for i in cast], [slots[i] for i in cast])
    return [(into.own, into)], torch._foreach_copy_, columns, cast


def shards_in(slots: Sequence[torch.Tensor], layout: Layout, rank: int) -> list[torch.Tensor]:
    """A rank's shards as views of flat slots, wherever those lie: of a buffer's own pieces, say.

    Returns:
        For each tensor a view of shape layout.shard_shape(i, rank).

    Effects: none.
    """
    is_flat = isinstance(layout, FlatLayout)
    places = [layout.local_slot(i, rank) for i in range(layout.num_tensors)]
    flats = [slots[0][slice(*place)] if is_flat else slots[i][: place.numel] for i, place in enumerate(places)]
    return [flat.view(layout.shard_shape(i, rank)) for i, flat in enumerate(flats)]


def by_rank(tensor: torch.Tensor, layout: EvenLayout, i: int) -> torch.Tensor:
    """A view of whole tensor `i` of a layout, one rank's chunk after another: (num_shards, *chunk's shape).

    Effects: none.
    """
    shape, dim = tensor.shape, layout.dims[i]
    return tensor.view(*shape[:dim], layout.num_shards, -1, *shape[dim + 1 :]).movedim(dim, 0)


def standalone(view: torch.Tensor) -> torch.Tensor:
    """A tensor over the same bytes as a contiguous view, whose storage holds nothing else.

    What pickles or deep-copies a tensor takes its whole storage; of a shard in a flat buffer that is every shard. A
    `DTensor` made over a view also takes over the view's offset, and torch then takes it for a tensor with data.

    Effects: none. The new storage keeps the old one alive; neither can be resized while both are.
    """
    if view.is_meta:
        return view
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


@lru_cache(maxsize=4096)  # every reduction makes a buffer, of one of few layouts
def _shards(layout: Layout, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Each of a rank's shards as a view of all of them: its shape, strides, and the element that it starts at."""
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
