"""The flat layout: a group packed into one buffer, cut into equal shards where blocks of rows end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

from lamella_layout._arithmetic import ceil_div
from lamella_layout._checks import Shape, as_shapes, check_at_least_one, check_rank, check_shapes, per_tensor
from lamella_layout._chunk import Chunk
from lamella_layout._keep import Keep, Rows, Whole, kept_numel
from lamella_layout._packing import Item, pack
from lamella_layout._ragged import RaggedShard
from lamella_layout._range import Range
from lamella_layout._region import Region, region_of

ANY_ROW = Rows(1)


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """A group of tensors in one flat buffer that is cut into `num_shards` equal shards.

    The buffer is gathered by one collective, and each tensor lies in it in one piece. Cuts never break what has to
    stay together, so a rank may own many rows of a tensor or none: these are not torch's `Shard(0)` chunks, and a
    plain `DTensor` over them is wrong. Three tensors on three ranks, `b` kept whole, `a` cut between rows of 6:

        rank 0  bbbbbbbbccc.aaaaaa    c fills the gap that the cut of a left
        rank 1  aaaaaaaaaaaaaaaaaa
        rank 2  aaaaaa............    '.' padding

    All numbers are elements. `FlatLayout.build` packs; one made by hand or read from a file is checked just as well.

    Attributes:
        shapes: Of the whole tensors.
        keep: What stays together, one a tensor.
        num_shards: Ranks that share the buffer.
        alignment: Elements that every start, and the shard's size, are multiples of.
        shard_numel: Elements of one shard, equal on every rank.
        starts: Where each tensor starts in the whole buffer.
    """

    shapes: tuple[Shape, ...]
    keep: tuple[Keep, ...]
    num_shards: int
    alignment: int
    shard_numel: int
    starts: tuple[int, ...]

    @classmethod
    def build(
        cls,
        shapes: Iterable[Sequence[int]],
        num_shards: int,
        *,
        keep: Keep | Sequence[Keep] = ANY_ROW,
        alignment: int = 256,
    ) -> "FlatLayout":
        """Pack tensors with little padding; the same arguments give the same layout on every rank.

        Padding is at most one gap a cut, each smaller than the largest block (or the least common multiple of block
        and alignment, when the alignment does not divide the block), plus what rounds the shard up to a multiple of
        the blocks of tensors longer than a shard. Row sizes with large common multiples (4096 and 4097) therefore
        cost memory when both span several ranks: put them into groups of their own.

        Args:
            shapes: Shape of each whole tensor, at least one dim each; the order does not decide who lies where.
            num_shards: Ranks that share the buffer. With an outer axis that shards too (HFSDP), pass inner times
                outer and see `merge_shards`.
            keep: What stays on one rank, one for all tensors or one a tensor.
            alignment: Elements that every start is a multiple of, in the whole buffer and in each shard.

        Raises:
            ValueError: a tensor is 0-D or has a negative size, `keep` does not name one a tensor, or `num_shards` or
                `alignment` is below 1.

        Effects: none.
        """
        frozen = as_shapes(shapes)
        keeps = [keep] * len(frozen) if isinstance(keep, Rows | Whole) else keep
        keeps = per_tensor("keep", keeps, len(frozen))
        check_at_least_one("num_shards", num_shards)
        check_at_least_one("alignment", alignment)
        check_shapes(frozen)
        packing = pack(
            [
                Item(index=index, numel=prod(shape), kept_numel=kept_numel(shape, kept), alignment=alignment)
                for index, (shape, kept) in enumerate(zip(frozen, keeps, strict=True))
                if prod(shape)
            ],
            num_shards,
        )
        return cls(
            shapes=frozen,
            keep=keeps,
            num_shards=num_shards,
            alignment=alignment,
            shard_numel=packing.shard_numel,
            starts=tuple(packing.starts.get(index, 0) for index in range(len(frozen))),
        )

    def __post_init__(self) -> None:
        """Prove the layout without trusting who made it."""
        check_at_least_one("num_shards", self.num_shards)
        check_at_least_one("alignment", self.alignment)
        check_shapes(self.shapes)
        per_tensor("keep", self.keep, self.num_tensors)
        per_tensor("start", self.starts, self.num_tensors)
        self._check_alignment()
        self._check_bounds()
        self._check_overlap()
        self._check_cuts()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # of many numbers; layouts are keys of what is kept for them
        return hash((self.shapes, self.keep, self.num_shards, self.alignment, self.shard_numel, self.starts))

    @property
    def num_tensors(self) -> int:
        """Count the tensors of the group."""
        return len(self.shapes)

    @property
    def full_numel(self) -> int:
        """Elements of the whole buffer: all shards, one after another."""
        return self.num_shards * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the whole buffer that belong to no tensor."""
        return self.full_numel - sum(prod(shape) for shape in self.shapes)

    def shard_range(self, rank: int) -> Range:
        """Return where `rank`'s shard lies in the whole buffer.

        Effects: none.
        """
        check_rank(rank, self.num_shards)
        return Range(0, self.shard_numel).shift(rank * self.shard_numel)

    def tensor_range(self, index: int) -> Range:
        """Return where tensor `index` lies in the whole buffer, in one piece and without padding.

        Effects: none.
        """
        return Range(0, prod(self.shapes[index])).shift(self.starts[index])

    def owned(self, index: int, rank: int) -> Range:
        """Return the elements of the flattened tensor `index` that `rank` owns; may be empty.

        Effects: none.
        """
        return self.tensor_range(index).intersection(self.shard_range(rank)).shift(-self.starts[index])

    def local_slot(self, index: int, rank: int) -> Range:
        """Return where the elements of tensor `index` that `rank` owns lie in its shard; may be empty.

        Effects: none.
        """
        shard = self.shard_range(rank)
        return shard.intersection(self.tensor_range(index)).shift(-shard.start)

    def chunk(self, index: int, rank: int) -> Chunk:
        """Return the rows of tensor `index` that `rank` owns, as a box. Cuts fall between rows, so it is exact.

        Effects: none.
        """
        shape = self.shapes[index]
        row_numel = max(1, prod(shape[1:]))
        owned = self.owned(index, rank)
        rows = Range(owned.start // row_numel, ceil_div(owned.stop, row_numel))
        if not prod(shape):  # there are no elements that somebody could own: the first rank has the rows
            rows = Range(0, shape[0]) if rank == 0 else Range(shape[0], shape[0])
        elif not owned.numel:
            rows = Range(rows.start, rows.start)
        return Chunk.of([rows, *(Range(0, size) for size in shape[1:])])

    def shard_shape(self, index: int, rank: int) -> Shape:
        """Return the sizes of what `rank` owns of tensor `index`; may hold a 0.

        Effects: none.
        """
        return self.chunk(index, rank).sizes

    def placement(self, index: int, *, stride: int = 1) -> RaggedShard:
        """Return how tensor `index` lies along the axis that this layout shards over.

        Args:
            index: Of the tensor.
            stride: See `RaggedShard`.

        Effects: none.
        """
        starts = (self.chunk(index, rank).offsets[0] for rank in range(self.num_shards))
        return RaggedShard((*starts, self.shapes[index][0]), stride)

    @property
    def wire_slots(self) -> tuple[Range, ...]:
        """Return what travels of a rank's sharded buffer: all of it, as one payload."""
        return (Range(0, self.shard_numel),)

    @property
    def wire_full_slots(self) -> tuple[Range, ...]:
        """Return where the payload of all ranks lies in the whole buffer."""
        return (Range(0, self.full_numel),)

    @cached_property
    def gaps(self) -> tuple[Range, ...]:
        """Return the parts of the whole buffer that belong to no tensor, in order."""
        taken = sorted(lies for index in range(self.num_tensors) if (lies := self.tensor_range(index)).numel)
        edges = [Range(0, 0), *taken, Range(self.full_numel, self.full_numel)]
        return tuple(Range(a.stop, b.start) for a, b in pairwise(edges) if b.start > a.stop)

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

    def merge_shards(self, num_merged: int) -> "FlatLayout":
        """Return the same buffer shared by fewer ranks, each with `num_merged` consecutive shards.

        HFSDP shards over the inner axis, then each inner shard over the outer one: build for inner * outer shards,
        where shard `inner_rank * num_outer + outer_rank` is what a rank keeps, and merge by `num_outer` for the
        layout in which parameters are gathered.

        Raises:
            ValueError: `num_merged` does not divide `num_shards`.

        Effects: none.
        """
        check_at_least_one("num_merged", num_merged)
        if self.num_shards % num_merged:
            raise ValueError(f"Expected a divisor of num_shards={self.num_shards}, got num_merged={num_merged!r}.")
        return replace(self, num_shards=self.num_shards // num_merged, shard_numel=self.shard_numel * num_merged)

    def _check_alignment(self) -> None:
        for what, value in (("shard_numel", self.shard_numel), *((f"start {i}", s) for i, s in enumerate(self.starts))):
            if value % self.alignment:
                raise ValueError(f"Expected {what} at a multiple of alignment={self.alignment}, got {value!r}.")

    def _check_bounds(self) -> None:
        for index in range(self.num_tensors):
            lies = self.tensor_range(index)
            if lies.start < 0 or lies.stop > self.full_numel:
                raise ValueError(f"Expected tensor {index} inside the {self.full_numel} elements, got {lies!r}.")

    def _check_overlap(self) -> None:
        ranges = ((self.tensor_range(index), index) for index in range(self.num_tensors))
        for (left, left_index), (right, right_index) in pairwise(sorted(lies for lies in ranges if lies[0].numel)):
            if left.stop > right.start:
                raise ValueError(f"Expected tensors apart, got {left_index} in {left!r} and {right_index} in {right!r}")

    def _check_cuts(self) -> None:
        """Prove that shard boundaries break no block. Shards tile the buffer, so every element has one owner."""
        for index, (shape, keep) in enumerate(zip(self.shapes, self.keep, strict=True)):
            lies = self.tensor_range(index)
            if not lies.numel:
                continue
            first_cut = (lies.start // self.shard_numel + 1) * self.shard_numel
            for cut in range(first_cut, lies.stop, self.shard_numel):
                if (cut - lies.start) % kept_numel(shape, keep):
                    raise ValueError(
                        f"Expected tensor {index} of shape {shape!r} cut only where {keep!r} allows, "
                        f"got a cut after {cut - lies.start} elements, before rank {cut // self.shard_numel}."
                    )
