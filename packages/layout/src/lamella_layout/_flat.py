"""The flat layout: a group packed into one buffer and cut into equal shards between blocks of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

from lamella_layout._arithmetic import ceil_div
from lamella_layout._checks import Shape, as_shapes, check_at_least_one, check_rank, check_shapes, per_tensor
from lamella_layout._chunk import Chunk
from lamella_layout._keep import Keep, Rows, Whole, kept_numel
from lamella_layout._packing import PackedTensor, pack
from lamella_layout._ragged import RaggedShard, packed_placement
from lamella_layout._range import Range
from lamella_layout._region import Region, region_of

ANY_ROW = Rows(1)


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """A group of tensors in one flat buffer, cut into `num_shards` equal shards.

    One collective gathers the buffer, and each tensor is contiguous in the buffer. Cuts fall only between the blocks
    named by `keep`, so a rank may own many rows of a tensor or none: shards differ from torch's `Shard(0)` chunks, and
    a `DTensor` placed `Shard(0)` over a shard is wrong (see `placement`). Three tensors on three ranks, `b` kept whole,
    `a` cut between rows of 6:

        rank 0  bbbbbbbbccc.aaaaaa    c fills the gap that the cut of a left
        rank 1  aaaaaaaaaaaaaaaaaa
        rank 2  aaaaaa............    '.' padding

    All numbers are elements. `FlatLayout.build` packs; layouts made by hand or read from a file pass the same checks.

    Attributes:
        shapes: Shapes of the unsharded tensors.
        keep: Block of each tensor that stays on one rank.
        num_shards: Number of ranks along the sharded axis.
        alignment: Every start, and the shard's size, is a multiple of this number of elements.
        shard_numel: Elements of one shard, equal on every rank.
        starts: Start of each tensor in the unsharded buffer.
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

        Padding is at most one gap per cut, each smaller than the largest block (or the least common multiple of block
        and alignment, when the alignment does not divide the block), plus the rounding of the shard to a multiple of
        the blocks of tensors longer than a shard. Row sizes with large common multiples (4096 and 4097) therefore
        cost memory when both tensors span several ranks: put such tensors into separate groups.

        Args:
            shapes: Shape of each unsharded tensor, at least one dim each. Their order does not fix the order in memory.
            num_shards: Number of ranks along the sharded axis. With a second sharding axis (HFSDP), the product of
                both; see `merge_shards`.
            keep: Block of a tensor that stays on one rank: one for all tensors, or one per tensor.
            alignment: Every start is a multiple of this number of elements, in the unsharded buffer and in each shard.

        Raises:
            ValueError: A tensor is 0-D or has a negative size, `keep` and `shapes` differ in length, or `num_shards`
                or `alignment` is below 1.
        """
        frozen = as_shapes(shapes)
        keeps = [keep] * len(frozen) if isinstance(keep, Rows | Whole) else keep
        keeps = per_tensor("keep", keeps, len(frozen))
        check_at_least_one("num_shards", num_shards)
        check_at_least_one("alignment", alignment)
        check_shapes(frozen)
        packing = pack(
            [
                PackedTensor(
                    index=index, numel=prod(shape), kept_numel=kept_numel(shape, tensor_keep), alignment=alignment
                )
                for index, (shape, tensor_keep) in enumerate(zip(frozen, keeps, strict=True))
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
        """Verify alignment, bounds, overlap and cuts independently of the packing."""
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
    def _hash(self) -> int:  # computed once: layouts hold thousands of numbers and serve as keys of caches
        return hash((self.shapes, self.keep, self.num_shards, self.alignment, self.shard_numel, self.starts))

    @property
    def num_tensors(self) -> int:
        """Count the tensors of the group."""
        return len(self.shapes)

    @property
    def full_numel(self) -> int:
        """Elements of the unsharded buffer: all shards, one after another."""
        return self.num_shards * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the unsharded buffer outside every tensor."""
        return self.full_numel - sum(prod(shape) for shape in self.shapes)

    def shard_range(self, rank: int) -> Range:
        """Return the range of `rank`'s shard in the unsharded buffer."""
        check_rank(rank, self.num_shards)
        return Range(0, self.shard_numel).shift(rank * self.shard_numel)

    def tensor_range(self, index: int) -> Range:
        """Return the range of tensor `index` in the unsharded buffer, without padding."""
        return Range(0, prod(self.shapes[index])).shift(self.starts[index])

    def owned(self, index: int, rank: int) -> Range:
        """Return the range of the flattened tensor `index` owned by `rank`; may be empty."""
        return self.tensor_range(index).intersection(self.shard_range(rank)).shift(-self.starts[index])

    def local_slot(self, index: int, rank: int) -> Range:
        """Return the range within `rank`'s shard of the elements of tensor `index`; may be empty."""
        shard = self.shard_range(rank)
        return shard.intersection(self.tensor_range(index)).shift(-shard.start)

    def chunk(self, index: int, rank: int) -> Chunk:
        """Return the rows of tensor `index` owned by `rank`, as a box. The box is exact: cuts fall between rows."""
        shape = self.shapes[index]
        row_numel = max(1, prod(shape[1:]))
        owned = self.owned(index, rank)
        rows = Range(owned.start // row_numel, ceil_div(owned.stop, row_numel))
        if not prod(shape):  # a tensor without elements: `owned` tells no ranks apart, so rank 0 gets all rows
            rows = Range(0, shape[0]) if rank == 0 else Range(shape[0], shape[0])
        elif not owned.numel:
            rows = Range(rows.start, rows.start)
        return Chunk.of([rows, *(Range(0, size) for size in shape[1:])])

    def shard_shape(self, index: int, rank: int) -> Shape:
        """Return the sizes of `rank`'s chunk of tensor `index`; one may be 0."""
        return self.chunk(index, rank).sizes

    def placement(self, index: int, *, stride: int = 1) -> RaggedShard:
        """Return the placement of tensor `index` along the sharded axis.

        Args:
            index: Index of the tensor.
            stride: See `RaggedShard`.
        """
        return packed_placement(self.starts[index], self.shapes[index], self.shard_numel, self.num_shards, stride)

    @property
    def wire_slots(self) -> tuple[Range, ...]:
        """Return the ranges of the sharded buffer to communicate, one payload each: the whole shard."""
        return (Range(0, self.shard_numel),)

    @property
    def wire_full_slots(self) -> tuple[Range, ...]:
        """Return the range of each gathered payload in the unsharded buffer: all of the buffer."""
        return (Range(0, self.full_numel),)

    @cached_property
    def gaps(self) -> tuple[Range, ...]:
        """Return the ranges of the unsharded buffer outside every tensor, in order."""
        tensor_ranges = sorted(lies for index in range(self.num_tensors) if (lies := self.tensor_range(index)).numel)
        edges = [Range(0, 0), *tensor_ranges, Range(self.full_numel, self.full_numel)]
        return tuple(Range(a.stop, b.start) for a, b in pairwise(edges) if b.start > a.stop)

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

    def merge_shards(self, num_merged: int) -> "FlatLayout":
        """Return the same buffer shared by fewer ranks, each with `num_merged` consecutive shards.

        HFSDP shards over the inner axis, then each inner shard over the outer axis. Build the layout for
        num_inner * num_outer shards: a rank keeps shard `inner_rank * num_outer + outer_rank`. Merging by `num_outer`
        gives the layout of the parameter gathers along the inner axis.

        Raises:
            ValueError: `num_merged` does not divide `num_shards`.
        """
        check_at_least_one("num_merged", num_merged)
        if self.num_shards % num_merged:
            raise ValueError(f"Expected a divisor of num_shards={self.num_shards}, got num_merged={num_merged!r}.")
        return replace(self, num_shards=self.num_shards // num_merged, shard_numel=self.shard_numel * num_merged)

    def with_shapes(self, shapes: Iterable[Sequence[int]]) -> "FlatLayout":
        """Return the layout of other forms of the same tensors, cut between the same rows on every rank.

        Args:
            shapes: Shapes of the other forms, in which one element stands for equally many of every tensor (the scales
                of quantised blocks), a divisor of the alignment.

        Raises:
            ValueError: the elements of some tensor are no such multiple of its form's, or a cut would fall within a
                block of rows.

        Effects: none.
        """
        frozen = as_shapes(shapes)
        if frozen == self.shapes:
            return self
        pairs = [
            (prod(own_numel), prod(shape))
            for own_numel, shape in zip(self.shapes, frozen, strict=True)
            if prod(own_numel)
        ]
        ratios = {own_numel // numel if numel and own_numel % numel == 0 else 0 for own_numel, numel in pairs}
        ratio = next(iter(ratios), 1)
        if len(ratios) > 1 or not ratio or self.alignment % ratio:
            raise ValueError(
                f"Expected forms with one element for as many of every tensor, a divisor of alignment={self.alignment},"
                f" got shapes {frozen!r} for {self.shapes!r}. Pack tensors whose blocks do not fill them apart."
            )
        return FlatLayout(
            shapes=frozen,
            keep=(ANY_ROW,) * self.num_tensors,
            num_shards=self.num_shards,
            alignment=self.alignment // ratio,
            shard_numel=self.shard_numel // ratio,
            starts=tuple(start // ratio for start in self.starts),
        )

    def _check_alignment(self) -> None:
        for name, value in (("shard_numel", self.shard_numel), *((f"start {i}", s) for i, s in enumerate(self.starts))):
            if value % self.alignment:
                raise ValueError(f"Expected {name} at a multiple of alignment={self.alignment}, got {value!r}.")

    def _check_bounds(self) -> None:
        for index in range(self.num_tensors):
            lies = self.tensor_range(index)
            if lies.start < 0 or lies.stop > self.full_numel:
                raise ValueError(f"Expected tensor {index} inside the {self.full_numel} elements, got {lies!r}.")

    def _check_overlap(self) -> None:
        ranges = ((self.tensor_range(index), index) for index in range(self.num_tensors))
        for (lower, lower_index), (upper, upper_index) in pairwise(sorted(lies for lies in ranges if lies[0].numel)):
            if lower.stop > upper.start:
                raise ValueError(
                    f"Expected tensors apart, got {lower_index} in {lower!r} and {upper_index} in {upper!r}"
                )

    def _check_cuts(self) -> None:
        """Check that no shard boundary falls inside a block. Shards tile the buffer: every element has one owner."""
        for index, (shape, keep) in enumerate(zip(self.shapes, self.keep, strict=True)):
            lies = self.tensor_range(index)
            if not lies.numel:
                continue
            first_cut = (lies.start // self.shard_numel + 1) * self.shard_numel
            # Cuts are equally far apart: with the first two between blocks, so are all.
            for cut in range(first_cut, lies.stop, self.shard_numel)[:2]:
                if (cut - lies.start) % kept_numel(shape, keep):
                    raise ValueError(
                        f"Expected tensor {index} of shape {shape!r} cut only where {keep!r} allows, "
                        f"got a cut after {cut - lies.start} elements, before rank {cut // self.shard_numel}."
                    )
