"""The even layout: every tensor is chunked along one dim as torch's `Shard(dim)` does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from lamella_layout._arithmetic import round_up, torch_chunk
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
    """A group of tensors in two flat buffers, each tensor chunked along its dim as `torch.chunk` chunks it.

    Shards are plain `Shard(dim)` chunks, so a `DTensor` over them is right without private metadata. Both buffers
    are tensor by tensor, never rank by rank: the unsharded tensor lies in one piece, and each is gathered into its
    own slot by its own (grouped) call, with nothing to copy afterwards. Two tensors on two ranks, aligned to 3:

        rank 0     aaaa..bbb          sharded: one slot a tensor, at the same place on every rank
        rank 1     aaa-..bbb          '-' slack: a chunk shorter than rank 0's; '.' alignment
        unsharded  aaaaaaa-.bbbbbb    each tensor in one piece, its slack behind it

    All numbers are elements. Build one with `EvenLayout.build`, which also accepts lists and negative dims.

    Attributes:
        shapes: Of the whole tensors.
        dims: Dim that each tensor is sharded along, counted from the first.
        num_shards: Ranks that share each tensor.
        alignment: Elements that every slot start is a multiple of, in both buffers.
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
            shapes: Shape of each whole (unsharded) tensor, at least one dim each.
            num_shards: Ranks that share each tensor.
            dims: Dim that each tensor is sharded along; negative ones count from the last. None means 0 for all.
            alignment: Elements that every slot start is a multiple of, in both buffers. 256 elements are at least
                256 bytes for every dtype, so one layout serves all dtypes that a group is cast to.

        Raises:
            ValueError: a tensor is 0-D or has a negative size, a dim is out of range, `dims` does not name one dim
                a tensor, or `num_shards` or `alignment` is below 1.

        Effects: none.
        """
        frozen = as_shapes(shapes)
        given = per_tensor("dim", [0] * len(frozen) if dims is None else dims, len(frozen))
        normal = tuple(normal_dim(dim, len(shape)) for dim, shape in zip(given, frozen, strict=True))
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
    def _hash(self) -> int:  # of many numbers; layouts are keys of what is kept for them
        return hash((self.shapes, self.dims, self.num_shards, self.alignment))

    @property
    def num_tensors(self) -> int:
        """Count the tensors of the group."""
        return len(self.shapes)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of the whole sharded buffer of one rank, equal on every rank."""
        return self._shard_slots[-1].stop if self.shapes else 0

    @cached_property
    def full_numel(self) -> int:
        """Elements of the whole unsharded buffer."""
        return self._full_slots[-1].stop if self.shapes else 0

    def slot_numel(self, index: int) -> int:
        """Return the padded elements of tensor `index` on one rank: what each rank sends in its gather.

        Effects: none.
        """
        return self._slot_numels[index]

    def shard_slot(self, index: int) -> Range:
        """Return where tensor `index` lies in every rank's sharded buffer: the rank's chunk first, slack last.

        Effects: none.
        """
        return self._shard_slots[index]

    def full_slot(self, index: int) -> Range:
        """Return where tensor `index` lies in the unsharded buffer: the tensor first, slack last.

        Returns:
            `num_shards * slot_numel(index)` elements, so that equal pieces from every rank fit.

        Effects: none.
        """
        return self._full_slots[index]

    def tensor_range(self, index: int) -> Range:
        """Return where tensor `index` lies in the unsharded buffer: `full_slot` without the slack.

        Effects: none.
        """
        return Range(0, prod(self.shapes[index])).shift(self._full_slots[index].start)

    @property
    def wire_slots(self) -> tuple[Range, ...]:
        """Return what travels of a rank's sharded buffer: every slot, as a payload of its own."""
        return self._shard_slots

    @property
    def wire_full_slots(self) -> tuple[Range, ...]:
        """Return where each payload of all ranks lies in the unsharded buffer."""
        return self._full_slots

    def full_shard(self, index: int, rank: int) -> Range:
        """Return the part of the unsharded buffer that `rank` fills when tensor `index` is gathered in place.

        Effects: none.
        """
        check_rank(rank, self.num_shards)
        numel = self._slot_numels[index]
        start = self._full_slots[index].start + rank * numel
        return Range(start, start + numel)

    def local_slot(self, index: int, rank: int) -> Range:
        """Return where the elements that `rank` owns lie in its sharded buffer: `shard_slot` without the slack.

        Effects: none.
        """
        start = self._shard_slots[index].start
        return Range(start, start + prod(self.shard_shape(index, rank)))

    def shard_shape(self, index: int, rank: int) -> Shape:
        """Return the sizes of `rank`'s chunk of tensor `index`, without slack; may hold a 0.

        Effects: none.
        """
        return self.chunk(index, rank).sizes

    def shard_offsets(self, index: int, rank: int) -> Shape:
        """Return where `rank`'s chunk of tensor `index` starts in it, one offset a dim.

        Effects: none.
        """
        return self.chunk(index, rank).offsets

    def chunk(self, index: int, rank: int) -> Chunk:
        """Return the box of tensor `index` that `rank` owns, as torch's `Shard(dim)` places it.

        Effects: none.
        """
        check_rank(rank, self.num_shards)
        shape, dim = self.shapes[index], self.dims[index]
        rows = torch_chunk(shape[dim], self.num_shards, rank)
        offsets = (0,) * dim + (rows.start,) + (0,) * (len(shape) - dim - 1)
        return Chunk(offsets, (*shape[:dim], rows.numel, *shape[dim + 1 :]))

    def region(self, index: int, rank: int, *, inside: Region | None = None) -> Region:
        """Return what `rank` owns of tensor `index`, ready for further cuts.

        Args:
            index: Of the tensor.
            rank: Of the axis that this layout shards over.
            inside: What the tensor is of a global one when outer axes (TP, EP) cut it first. None: it is whole.

        Raises:
            ValueError: `inside` has another shape than the tensor.

        Effects: none.
        """
        return region_of(self.chunk(index, rank), self.shapes[index], inside)

    def chunks(self, index: int, rank: int, *, inside: Region | None = None) -> tuple[Chunk, ...]:
        """Return the global boxes of tensor `index` that `rank` owns; none when it owns nothing.

        Takes the arguments of `region`. Effects: none.
        """
        return self.region(index, rank, inside=inside).chunks

    def is_contiguous(self, index: int) -> bool:
        """Tell whether the ranks' slots laid one after another are the tensor: it is gathered with no staging.

        True along dim 0, along any dim when the dims before it are 1, and when one chunk holds the whole tensor.

        Effects: none.
        """
        return self._contiguous[index]

    def divides(self, index: int) -> bool:
        """Tell whether every rank's chunk of tensor `index` has the same size: its slots hold no slack.

        Effects: none.
        """
        return self._divides[index]

    def owned(self, index: int, rank: int) -> Range:
        """Return the elements of the flattened tensor `index` that `rank` owns; may be empty.

        Raises:
            ValueError: the chunk is not one run of the flattened tensor (`is_contiguous` is false); use `chunk`.

        Effects: none.
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
        """Tell of each tensor whether it is its ranks' chunks, of the same size, laid one after another."""
        return tuple(self.divides(i) and self.is_contiguous(i) for i in range(self.num_tensors))

    # Asked of every tensor at every gather and reduction.

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


def _lay_out(numels: Iterable[int], alignment: int) -> tuple[Range, ...]:
    """Place slots one after another, each at the first aligned element after the last."""
    slots, stop = [], 0
    for numel in numels:
        start = round_up(stop, alignment)
        stop = start + numel
        slots.append(Range(start, stop))
    return tuple(slots)
