"""The even layout: every tensor chunked along one dim by the rule of torch's `Shard(dim)`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from lamella_layout._arithmetic import ceil_div, round_up, torch_chunk
from lamella_layout._checks import (
    Shape,
    as_shapes,
    check_at_least_one,
    check_dim,
    check_rank,
    check_shapes,
    normal_dim,
    per_tensor,
)
from lamella_layout._chunk import Chunk
from lamella_layout._range import Range
from lamella_layout._region import Region, region_of


@dataclass(frozen=True, kw_only=True)
class EvenLayout:
    """A group of tensors in two flat buffers, each tensor chunked along one dim by the rule of `torch.chunk`.

    Shards are plain `Shard(dim)` chunks: a `DTensor` over a shard needs no private metadata. Both buffers are ordered
    by tensor, not by rank: each unsharded tensor is contiguous, and one (grouped) all-gather per tensor writes straight
    into the tensor's slot, with no copy afterwards. Two tensors on two ranks, aligned to 3:

        rank 0     aaaa..bbb          sharded: one slot per tensor, at the same offset on every rank
        rank 1     aaa-..bbb          '-' slack: a chunk shorter than rank 0's; '.' alignment
        unsharded  aaaaaaa-.bbbbbb    each tensor in one piece, slack at its end

    All numbers are elements. `EvenLayout.build` also accepts lists and negative dims.

    Attributes:
        shapes: Shapes of the unsharded tensors.
        dims: Sharded dim of each tensor, counted from the first.
        num_shards: Number of ranks along the sharded axis.
        alignment: Every slot starts at a multiple of this number of elements, in both buffers.
    """

    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    num_shards: int
    alignment: int

    @classmethod
    def build(
        cls,
        shapes: Iterable[Sequence[int]],
        num_shards: int,
        *,
        dims: Sequence[int] | None = None,
        alignment: int = 256,
    ) -> "EvenLayout":
        """Lay tensors out in the order given.

        Args:
            shapes: Shape of each unsharded tensor, at least one dim each.
            num_shards: Number of ranks along the sharded axis.
            dims: Sharded dim of each tensor; negative dims count from the last. None means 0 for all.
            alignment: Every slot starts at a multiple of this number of elements, in both buffers. 256 elements are
                at least 256 bytes in every dtype, so one layout serves every dtype of a group's casts.

        Raises:
            ValueError: A tensor is 0-D or has a negative size, a dim is out of range, `dims` and `shapes` differ in
                length, or `num_shards` or `alignment` is below 1.
        """
        frozen = as_shapes(shapes)
        requested_dims = per_tensor("dim", [0] * len(frozen) if dims is None else dims, len(frozen))
        normal = tuple(normal_dim(dim, len(shape)) for dim, shape in zip(requested_dims, frozen, strict=True))
        return cls(shapes=frozen, dims=normal, num_shards=num_shards, alignment=alignment)

    def __post_init__(self) -> None:
        check_at_least_one("num_shards", self.num_shards)
        check_at_least_one("alignment", self.alignment)
        check_shapes(self.shapes)
        for dim, shape in zip(self.dims, self.shapes, strict=True):
            check_dim(dim, shape)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # computed once: layouts hold thousands of numbers and serve as keys of caches
        return hash((self.shapes, self.dims, self.num_shards, self.alignment))

    @property
    def num_tensors(self) -> int:
        """Count the tensors of the group."""
        return len(self.shapes)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's sharded buffer, equal on every rank."""
        return self._shard_slots[-1].stop if self.shapes else 0

    @cached_property
    def full_numel(self) -> int:
        """Elements of the unsharded buffer."""
        return self._full_slots[-1].stop if self.shapes else 0

    def slot_numel(self, index: int) -> int:
        """Return the elements, slack included, that each rank sends when tensor `index` is gathered."""
        return self._slot_numels[index]

    def shard_slot(self, index: int) -> Range:
        """Return the slot of tensor `index` in every rank's sharded buffer: the rank's chunk first, slack last."""
        return self._shard_slots[index]

    def full_slot(self, index: int) -> Range:
        """Return the slot of tensor `index` in the unsharded buffer: the tensor first, slack last.

        Returns:
            `num_shards * slot_numel(index)` elements: room for equal pieces from every rank.
        """
        return self._full_slots[index]

    def tensor_range(self, index: int) -> Range:
        """Return the range of tensor `index` in the unsharded buffer: `full_slot` without the slack."""
        return Range(0, prod(self.shapes[index])).shift(self._full_slots[index].start)

    @property
    def wire_slots(self) -> tuple[Range, ...]:
        """Return the ranges of the sharded buffer to communicate, one payload each: every tensor's slot."""
        return self._shard_slots

    @property
    def wire_full_slots(self) -> tuple[Range, ...]:
        """Return the range of each gathered payload in the unsharded buffer."""
        return self._full_slots

    def full_shard(self, index: int, rank: int) -> Range:
        """Return the range of the unsharded buffer filled by `rank` when tensor `index` is gathered in place."""
        check_rank(rank, self.num_shards)
        numel = self._slot_numels[index]
        start = self._full_slots[index].start + rank * numel
        return Range(start, start + numel)

    def local_slot(self, index: int, rank: int) -> Range:
        """Return the range of `rank`'s chunk of tensor `index` in its sharded buffer, without slack."""
        start = self._shard_slots[index].start
        return Range(start, start + prod(self.shard_shape(index, rank)))

    def shard_shape(self, index: int, rank: int) -> Shape:
        """Return the sizes of `rank`'s chunk of tensor `index`, without slack; one may be 0."""
        return self.chunk(index, rank).sizes

    def shard_offsets(self, index: int, rank: int) -> Shape:
        """Return the offsets of `rank`'s chunk within tensor `index`, one per dim."""
        return self.chunk(index, rank).offsets

    def chunk(self, index: int, rank: int) -> Chunk:
        """Return the box of tensor `index` owned by `rank`, by the rule of torch's `Shard(dim)`."""
        check_rank(rank, self.num_shards)
        shape, dim = self.shapes[index], self.dims[index]
        rows = torch_chunk(shape[dim], self.num_shards, rank)
        offsets = (0,) * dim + (rows.start,) + (0,) * (len(shape) - dim - 1)
        return Chunk(offsets, (*shape[:dim], rows.numel, *shape[dim + 1 :]))

    def with_shapes(self, shapes: Iterable[Sequence[int]]) -> "EvenLayout":
        """Return the layout of other forms of the same tensors, cut between the same rows on every rank.

        Args:
            shapes: Shapes of the other forms. One row of a form stands for one row of the tensor or for a block of
                rows (the scales of quantised blocks).

        Raises:
            ValueError: a cut would fall within a block of rows, or a tensor of another shape is sharded along another
                dim than the first.

        Effects: none.
        """
        frozen = as_shapes(shapes)
        if frozen == self.shapes:
            return self
        layout = EvenLayout.build(frozen, self.num_shards, dims=self.dims, alignment=self.alignment)
        for i, (shape, own_shape) in enumerate(zip(frozen, self.shapes, strict=True)):
            if shape != own_shape and not (self.dims[i] == 0 and cuts_alike(own_shape[0], shape[0], self.num_shards)):
                raise ValueError(
                    f"Expected shards of {own_shape!r} along dim 0 whose rows are whole blocks of {shape!r}, got a "
                    f"tensor sharded over {self.num_shards} ranks along dim {self.dims[i]}. Keep blocks of rows "
                    "together."
                )
        return layout

    def region(self, index: int, rank: int, *, outer_region: Region | None = None) -> Region:
        """Return the region of tensor `index` owned by `rank`, ready for further cuts.

        Args:
            index: Index of the tensor.
            rank: Rank along the sharded axis.
            outer_region: Region of the global tensor left by outer axes (TP, EP); its shape is the tensor's. None means
                no outer axis cuts the tensor.

        Raises:
            ValueError: `outer_region` and the tensor differ in shape.
        """
        return region_of(self.chunk(index, rank), self.shapes[index], outer_region)

    def chunks(self, index: int, rank: int, *, outer_region: Region | None = None) -> tuple[Chunk, ...]:
        """Return the boxes of the global tensor owned by `rank`, possibly none. Arguments as for `region`."""
        return self.region(index, rank, outer_region=outer_region).chunks

    def is_contiguous(self, index: int) -> bool:
        """True when the ranks' slots, one after another, form the tensor: an all-gather then needs no staging buffer.

        True along dim 0, along any dim preceded only by dims of size 1, and when one chunk holds the whole tensor.
        """
        return self._contiguous[index]

    def divides(self, index: int) -> bool:
        """True when every rank's chunk of tensor `index` has the same size: no slot holds slack."""
        return self._divides[index]

    def owned(self, index: int, rank: int) -> Range:
        """Return the range of the flattened tensor `index` owned by `rank`; may be empty.

        Raises:
            ValueError: The chunk is not one run of the flattened tensor (`is_contiguous` is false); use `chunk`.
        """
        if not self.is_contiguous(index):
            raise ValueError(
                f"Expected a tensor whose chunks are contiguous, got shape {self.shapes[index]!r} sharded along dim "
                f"{self.dims[index]} at index {index}. Use chunk(), which describes any shard."
            )
        check_rank(rank, self.num_shards)
        slot_numel, numel = self._slot_numels[index], prod(self.shapes[index])
        return Range(min(numel, rank * slot_numel), min(numel, (rank + 1) * slot_numel))

    @cached_property
    def in_equal_chunks(self) -> tuple[bool, ...]:
        """True for each tensor formed by chunks of equal size, one after another: contiguous and without slack."""
        return tuple(self.divides(i) and self.is_contiguous(i) for i in range(self.num_tensors))

    # Computed once: every gather and reduction reads these values for every tensor.

    @cached_property
    def _contiguous(self) -> tuple[bool, ...]:
        return tuple(
            prod(shape[:dim]) == 1 or numel == prod(shape)
            for shape, dim, numel in zip(self.shapes, self.dims, self._slot_numels, strict=True)
        )

    @cached_property
    def _divides(self) -> tuple[bool, ...]:
        return tuple(shape[dim] % self.num_shards == 0 for shape, dim in zip(self.shapes, self.dims, strict=True))

    @cached_property
    def _slot_numels(self) -> tuple[int, ...]:
        # Rank 0's chunk is the largest: torch.chunk rounds up and runs short at the end.
        return tuple(self.chunk(index, 0).numel for index in range(self.num_tensors))

    @cached_property
    def _shard_slots(self) -> tuple[Range, ...]:
        return _lay_out(self._slot_numels, self.alignment)

    @cached_property
    def _full_slots(self) -> tuple[Range, ...]:
        return _lay_out([self.num_shards * numel for numel in self._slot_numels], self.alignment)


def cuts_alike(num_rows: int, num_blocks: int, num_shards: int) -> bool:
    """Tell whether chunks of rows and chunks of blocks of rows, as torch makes both, end at the same rows.

    Effects: none.
    """
    rows, blocks = (torch_chunk(num, num_shards, 0).numel for num in (num_rows, num_blocks))
    if num_shards == 1 or num_rows == num_blocks:
        return True
    return blocks > 0 and rows % blocks == 0 and ceil_div(num_rows, rows // blocks) == num_blocks


def _lay_out(numels: Iterable[int], alignment: int) -> tuple[Range, ...]:
    """Place slots one after another, each at the first aligned element after the last."""
    slots, stop = [], 0
    for numel in numels:
        start = round_up(stop, alignment)
        stop = start + numel
        slots.append(Range(start, stop))
    return tuple(slots)
