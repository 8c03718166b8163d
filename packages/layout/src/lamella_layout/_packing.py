"""Pack tensors into one buffer that is cut into equal shards, where few places of a tensor may be cut.

The buffer has to be one piece per tensor (it is gathered in place and used as it lies), so a tensor covers a run of
elements and every shard boundary inside it must fall between two of its blocks. Two things waste memory:

* at a boundary, the tensor that would be cut in a wrong place is moved on, which leaves a gap;
* a tensor that covers a shard from end to end is cut at both ends, so the shard's size must be a multiple of its
  block. Only tensors longer than a shard can do that.

Packing is the classic search for the smallest bin size: one pass tries a shard size, a bisection chooses the next.
A pass goes through the tensors with large blocks first and puts each into the smallest gap that holds it, else at
the head, moved on by what the next boundary needs. For tensors kept whole this is MULTIFIT with best fit.

Note [Packing bound]
    Let `step` be the elements between two places where a tensor may be cut *and* both sides stay aligned. A pass
    leaves at most one gap a boundary, smaller than the largest step. So it succeeds whenever the shard size is a
    multiple of the steps of all tensors longer than it (so that they fit wherever they start), holds every whole
    tensor, and num_shards times it is at least the aligned tensors plus (num_shards - 1) * (largest step -
    alignment). `_safe_sizes` lists such sizes, and the search only ever goes down from the smallest of them.

Source: E. G. Coffman, M. R. Garey, D. S. Johnson, "An application of bin-packing to multiprocessor scheduling", 1978.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from lamella_layout._arithmetic import ceil_div, round_up
from lamella_layout._range import Range


@dataclass(frozen=True, kw_only=True)
class Item:
    """One tensor to place.

    Attributes:
        index: Of the tensor, in the order that the caller knows.
        numel: Elements of it, at least 1.
        kept_numel: Elements of one block; `numel` when the tensor must not be cut at all.
        alignment: Elements that its start is a multiple of.
    """

    index: int
    numel: int
    kept_numel: int
    alignment: int

    @cached_property
    def is_whole(self) -> bool:
        """Tell that no boundary may fall inside."""
        return self.kept_numel >= self.numel

    @cached_property
    def padded_numel(self) -> int:
        """Count the elements until the next tensor may start."""
        return round_up(self.numel, self.alignment)

    @cached_property
    def step(self) -> int:
        """Count the elements between two places where a cut breaks no block and leaves both sides aligned."""
        return self.padded_numel if self.is_whole else lcm(self.kept_numel, self.alignment)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where everything lies: elements of one shard, and the start of each item in the whole buffer, by its index."""

    shard_numel: int
    starts: dict[int, int]


def pack(items: Sequence[Item], num_shards: int) -> Packing:
    """Find a small shard size and a place for every item.

    Args:
        items: Tensors that are not empty, all of one alignment.
        num_shards: Equal shards of the buffer.

    Returns:
        The same packing on every rank: it follows from the arguments alone.

    Effects: none.
    """
    if not items:
        return Packing(shard_numel=0, starts={})
    # Large blocks first: they have the fewest places to be cut at, and the gaps they leave take the small ones.
    ordered = sorted(items, key=lambda item: (-item.step, -item.numel, item.index))
    safe_sizes = sorted(_safe_sizes(ordered, num_shards))
    best = _fit(ordered, num_shards, safe_sizes[0][0])
    assert best is not None, "Note [Packing bound]"
    lowest = _lowest_size(ordered, num_shards)
    for _, quantum in safe_sizes:
        candidates = range(round_up(lowest, quantum), best.shard_numel, quantum)
        best = _search(ordered, num_shards, candidates) or best
    return best


def _search(items: Sequence[Item], num_shards: int, candidates: range) -> Packing | None:
    """Look for a small candidate that fits: the lowest, which often does, then by bisection.

    That one size fits does not promise that all larger ones do, so this may miss the smallest.
    """
    best = None
    low = middle = 0
    high = len(candidates)
    while low < high:
        found = _fit(items, num_shards, candidates[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
        middle = (low + high) // 2
    return best


def _lowest_size(items: Sequence[Item], num_shards: int) -> int:
    """Return a shard size below which nothing can fit: all items in equal parts, and the largest block in one."""
    equal_part = ceil_div(sum(item.padded_numel for item in items), num_shards)
    return round_up(max(equal_part, *(item.kept_numel for item in items)), items[0].alignment)


def _safe_sizes(items: Sequence[Item], num_shards: int) -> Iterator[tuple[int, int]]:
    """Yield shard sizes that a pass is sure to fill, each with the quantum that makes it so.

    See Note [Packing bound]. The quantum is a common multiple of the steps of tensors longer than the shard. A larger
    shard is shorter than fewer tensors: go from "no tensor is longer" to "all may be", and stop where the quantum
    alone exceeds a size already found.
    """
    alignment = items[0].alignment
    gaps = (num_shards - 1) * (max(item.step for item in items) - alignment)
    enough = ceil_div(sum(item.padded_numel for item in items) + gaps, num_shards)
    enough = max([enough, *(item.numel for item in items if item.is_whole)])
    cuttable = sorted((item for item in items if not item.is_whole), key=lambda item: -item.numel)

    first = round_up(max([enough, *(item.numel for item in cuttable[:1])]), alignment)
    quantum = alignment
    for item in cuttable:
        if quantum % item.step:  # the last size that needs no more than this quantum still holds `item` whole
            yield round_up(max(enough, item.numel), quantum), quantum
            quantum = lcm(quantum, item.step)
        if quantum > first:
            return
    yield round_up(enough, quantum), quantum


def _fit(items: Sequence[Item], num_shards: int, shard_numel: int) -> Packing | None:
    """Place the items in the order given into shards of this size, if they fit."""
    starts: dict[int, int] = {}
    gaps: list[tuple[int, int]] = []  # (numel, start), sorted: the smallest that holds an item is found by bisection
    head = 0
    for item in items:
        smallest = bisect_left(gaps, (item.padded_numel, 0))
        if smallest < len(gaps):
            numel, start = gaps.pop(smallest)
            unused = [Range(start + item.padded_numel, start + numel)]
        else:
            found = _next_start(item, head, shard_numel)
            if found is None or found + item.numel > num_shards * shard_numel:
                return None
            start = found
            unused = _split_at_boundary(Range(head, start), shard_numel)
            head = start + item.padded_numel
        starts[item.index] = start
        for gap in unused:
            if gap.numel:
                insort(gaps, (gap.numel, gap.start))
    return Packing(shard_numel=shard_numel, starts=starts)


def _split_at_boundary(gap: Range, shard_numel: int) -> list[Range]:
    """Split a gap that reaches into the next shard: what is put into a gap must not be cut."""
    boundary = gap.start - gap.start % shard_numel + shard_numel
    return [Range(gap.start, boundary), Range(boundary, gap.stop)] if gap.stop > boundary else [gap]


def _next_start(item: Item, head: int, shard_numel: int) -> int | None:
    """Return the first place at or after `head` where every boundary inside the item falls between its blocks.

    Looks no further than the next shard; None when neither it nor this one has such a place.
    """
    room = shard_numel - head % shard_numel
    if item.numel <= room:
        return head
    for boundary, available in ((head + room, room), (head + room + shard_numel, shard_numel)):
        before = available - available % item.step  # elements of the item before the boundary
        if item.numel - before <= shard_numel or shard_numel % item.step == 0:
            return boundary - before
    return None
