"""Pack tensors into one buffer of equal shards, cutting tensors only between their blocks.

The buffer is gathered in place and used without a copy, so each tensor is contiguous and every shard boundary inside
a tensor must fall between two of its blocks. Memory is lost in two ways:

* at a shard boundary, a tensor whose blocks do not meet the boundary moves on and leaves a gap;
* a tensor that covers a shard from end to end is cut at both ends, so the shard's size must be a multiple of the
  tensor's block. Only tensors longer than a shard do so.

Packing is the classic search for the smallest bin size: a pass tries one shard size, a bisection chooses the next.
A pass takes tensors with large blocks first. Each tensor goes into the smallest gap that fits, else to the head of the
buffer, moved on as far as the next boundary needs. For tensors kept whole the search is MULTIFIT with best fit.

Note [Packing bound]
    Let `step` be the smallest distance between cuts that break no block and leave both sides aligned. A pass leaves
    at most one gap per boundary, smaller than the largest step. A pass therefore succeeds when the shard size is a
    multiple of the steps of all tensors longer than a shard (such tensors then fit at any start), holds every whole
    tensor, and num_shards * shard size is at least the aligned tensors plus (num_shards - 1) * (largest step -
    alignment). `_safe_sizes` lists such sizes, and the search only goes down from the smallest safe size.

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
class PackedTensor:
    """One tensor to place.

    Attributes:
        index: Index of the tensor in the caller's order.
        numel: Elements of the tensor, at least 1.
        kept_numel: Elements of one block; `numel` when the tensor must stay whole.
        alignment: The tensor's start is a multiple of this number of elements.
    """

    index: int
    numel: int
    kept_numel: int
    alignment: int

    @cached_property
    def is_whole(self) -> bool:
        """True when no boundary may fall inside the tensor."""
        return self.kept_numel >= self.numel

    @cached_property
    def padded_numel(self) -> int:
        """Count the elements from the tensor's start to the next possible start."""
        return round_up(self.numel, self.alignment)

    @cached_property
    def step(self) -> int:
        """Count the elements between two cuts that break no block and leave both sides aligned."""
        return self.padded_numel if self.is_whole else lcm(self.kept_numel, self.alignment)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The result: elements of one shard, and the start of each item in the unsharded buffer, by item index."""

    shard_numel: int
    starts: dict[int, int]


def pack(tensors: Sequence[PackedTensor], num_shards: int) -> Packing:
    """Find a small shard size and a place for every item.

    Args:
        tensors: Non-empty tensors, all of one alignment.
        num_shards: Number of equal shards of the buffer.

    Returns:
        The same packing on every rank, a function of the arguments alone.
    """
    if not tensors:
        return Packing(shard_numel=0, starts={})
    # Large blocks first: they allow the fewest cuts, and small blocks fill the gaps left behind.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.step, -tensor.numel, tensor.index))
    safe_sizes = sorted(_safe_sizes(ordered, num_shards))
    best = _fit(ordered, num_shards, safe_sizes[0][0])
    assert best is not None, "Note [Packing bound]"
    lowest = _lowest_size(ordered, num_shards)
    for _, quantum in safe_sizes:
        candidates = range(round_up(lowest, quantum), best.shard_numel, quantum)
        best = _search(ordered, num_shards, candidates) or best
    return best


def _search(tensors: Sequence[PackedTensor], num_shards: int, candidates: range) -> Packing | None:
    """Look for a small candidate that fits: first the lowest, a frequent hit, then by bisection.

    Fitting is not monotonic in the shard size, so bisection may miss the smallest candidate.
    """
    best = None
    low = middle = 0
    high = len(candidates)
    while low < high:
        packing = _fit(tensors, num_shards, candidates[middle])
        if packing is None:
            low = middle + 1
        else:
            best, high = packing, middle
        middle = (low + high) // 2
    return best


def _lowest_size(tensors: Sequence[PackedTensor], num_shards: int) -> int:
    """Return a lower bound of the shard size: an equal part of all items, and at least the largest block."""
    equal_part = ceil_div(sum(tensor.padded_numel for tensor in tensors), num_shards)
    return round_up(max(equal_part, *(tensor.kept_numel for tensor in tensors)), tensors[0].alignment)


def _safe_sizes(tensors: Sequence[PackedTensor], num_shards: int) -> Iterator[tuple[int, int]]:
    """Yield shard sizes at which a pass must succeed, each with its quantum; see Note [Packing bound].

    The quantum is a common multiple of the steps of tensors longer than the shard. The walk goes from large shards (no
    tensor is longer) to small shards (all may be longer), and stops when the quantum alone exceeds the first size.
    """
    alignment = tensors[0].alignment
    gaps = (num_shards - 1) * (max(tensor.step for tensor in tensors) - alignment)
    enough = ceil_div(sum(tensor.padded_numel for tensor in tensors) + gaps, num_shards)
    enough = max([enough, *(tensor.numel for tensor in tensors if tensor.is_whole)])
    cuttable = sorted((tensor for tensor in tensors if not tensor.is_whole), key=lambda tensor: -tensor.numel)

    first = round_up(max([enough, *(tensor.numel for tensor in cuttable[:1])]), alignment)
    quantum = alignment
    for tensor in cuttable:
        if quantum % tensor.step:  # the smallest size for the quantum so far still holds `tensor` whole
            yield round_up(max(enough, tensor.numel), quantum), quantum
            quantum = lcm(quantum, tensor.step)
        if quantum > first:
            return
    yield round_up(enough, quantum), quantum


def _fit(tensors: Sequence[PackedTensor], num_shards: int, shard_numel: int) -> Packing | None:
    """Place the items, in the given order, into shards of `shard_numel`; None when an item does not fit."""
    starts: dict[int, int] = {}
    gaps: list[tuple[int, int]] = []  # (numel, start), sorted: bisection finds the smallest sufficient gap
    head = 0
    for tensor in tensors:
        smallest = bisect_left(gaps, (tensor.padded_numel, 0))
        if smallest < len(gaps):
            numel, start = gaps.pop(smallest)
            unused = [Range(start + tensor.padded_numel, start + numel)]
        else:
            next_start = _next_start(tensor, head, shard_numel)
            if next_start is None or next_start + tensor.numel > num_shards * shard_numel:
                return None
            start = next_start
            unused = _split_at_boundary(Range(head, start), shard_numel)
            head = start + tensor.padded_numel
        starts[tensor.index] = start
        for gap in unused:
            if gap.numel:
                insort(gaps, (gap.numel, gap.start))
    return Packing(shard_numel=shard_numel, starts=starts)


def _split_at_boundary(gap: Range, shard_numel: int) -> list[Range]:
    """Split a gap at the shard boundary: items placed into gaps must not be cut."""
    boundary = gap.start - gap.start % shard_numel + shard_numel
    return [Range(gap.start, boundary), Range(boundary, gap.stop)] if gap.stop > boundary else [gap]


def _next_start(tensor: PackedTensor, head: int, shard_numel: int) -> int | None:
    """Return the first start at or after `head` from which no boundary inside the item cuts a block.

    Searches the shard of `head` and the next shard; None when neither has such a start.
    """
    room = shard_numel - head % shard_numel
    if tensor.numel <= room:
        return head
    for boundary, available in ((head + room, room), (head + room + shard_numel, shard_numel)):
        before = available - available % tensor.step  # elements of the item before the boundary
        if tensor.numel - before <= shard_numel or shard_numel % tensor.step == 0:
            return boundary - before
    return None
