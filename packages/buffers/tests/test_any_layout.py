"""Gathers and reductions of any layout, number of ranks and dtypes against whole tensors, by property."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import SimulatedTransport, on_simulated_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_buffers import CachingAllocator, ShardedBuffer, UnshardedBuffer, all_gather, reduce_scatter
from lamella_buffers.testing import check_transport
from lamella_layout import EvenLayout, FlatLayout, Rows, Whole

Layout = EvenLayout | FlatLayout
CPU = torch.device("cpu")
NUM_RANKS = st.integers(1, 4)
MAIN_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.complex64])
REAL = torch.float32, torch.bfloat16, torch.float64


@st.composite
def even_layouts(draw: st.DrawFn, num_ranks: int) -> EvenLayout:
    """Any shapes; shapes cut along another dim than the first divide, as required."""
    shapes, dims = [], []
    for _ in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        if dim > 0 or draw(st.booleans()):
            shape[dim] *= num_ranks
        shapes.append(shape)
        dims.append(dim)
    return EvenLayout.build(shapes, num_ranks, dims=dims, alignment=draw(st.sampled_from([1, 3, 16])))


@st.composite
def flat_layouts(draw: st.DrawFn, num_ranks: int) -> FlatLayout:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4))
    kinds: list[Rows | Whole] = [Rows(1), Rows(2), Whole()]
    keep = [draw(st.sampled_from(kinds)) for _ in shapes]
    return FlatLayout.build(shapes, num_ranks, keep=keep, alignment=draw(st.sampled_from([1, 2, 16])))


@dataclass(frozen=True)
class Group:
    """Tensors of one layout and dtype, sent together with further groups, and some tensors' sources."""

    layout: Layout
    dtype: torch.dtype  # of the shards
    wire: torch.dtype
    gradient_dtype: torch.dtype
    seed: int
    absent: frozenset[int]  # tensors without a part in the reduction
    missing: frozenset[tuple[int, int]]  # ranks without a gradient, and the tensor
    transposed: bool  # gradients do not lie as the tensors do

    def wholes(self, rank: int = -1) -> list[torch.Tensor]:
        """Small integers, whose sums every dtype holds: the weights, or a rank's gradients."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * (rank + 1))
        return [torch.randint(-8, 8, shape, generator=generator).to(self.dtype) for shape in self.layout.shapes]

    def gradients(self, rank: int) -> dict[int, torch.Tensor | None]:
        gradients: dict[int, torch.Tensor | None] = {}
        for i, tensor in enumerate(self.wholes(rank)):
            if i in self.absent:
                continue
            gradient = tensor.to(self.gradient_dtype)
            if self.transposed:
                gradient = gradient.mT.contiguous().mT if gradient.ndim > 1 else gradient.repeat_interleave(2)[::2]
            gradients[i] = None if (rank, i) in self.missing else gradient
        return gradients


@st.composite
def groups(draw: st.DrawFn, num_ranks: int) -> Group:
    layout = draw(st.one_of(even_layouts(num_ranks), flat_layouts(num_ranks)))
    dtype = draw(MAIN_DTYPES)
    tensors, ranks = st.integers(0, 3), st.integers(0, num_ranks - 1)
    return Group(
        layout=layout,
        dtype=dtype,
        wire=dtype if dtype.is_complex else draw(st.sampled_from(REAL)),
        gradient_dtype=dtype if dtype.is_complex else draw(st.sampled_from(REAL)),
        seed=draw(st.integers(0, 1000)),
        absent=draw(st.frozensets(tensors, max_size=2)),
        missing=draw(st.frozensets(st.tuples(ranks, tensors), max_size=4)),
        transposed=draw(st.booleans()),
    )


@st.composite
def units(draw: st.DrawFn) -> tuple[int, list[Group]]:
    """The moves of one call."""
    num_ranks = draw(NUM_RANKS)
    return num_ranks, draw(st.lists(groups(num_ranks), min_size=1, max_size=2))


def _sharded(group: Group, rank: int, wholes: Sequence[torch.Tensor], dtype: torch.dtype) -> ShardedBuffer:
    buffer = ShardedBuffer.empty(group.layout, rank, dtype, CPU)
    buffer.copy_from(wholes)
    return buffer


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_simulated_transport_conforms(num_ranks: int) -> None:
    on_simulated_ranks(num_ranks, check_transport)


@settings(max_examples=200)
@given(units())
def test_any_tensors_are_gathered_whole_whatever_dtype_their_shards_have(unit: tuple[int, list[Group]]) -> None:
    num_ranks, members = unit

    def check(transport: SimulatedTransport) -> None:
        buffers = []
        for group in members:
            into = UnshardedBuffer(group.layout, transport.rank, group.wire, CPU, CachingAllocator())
            into.allocate()
            into.flat.fill_(99)
            buffers.append((_sharded(group, transport.rank, group.wholes(), group.dtype).slots, into))
        all_gather(buffers, transport).wait()
        for group, (_, into) in zip(members, buffers, strict=True):
            for tensor, full_tensor in zip(into.tensors, group.wholes(), strict=True):
                assert torch.equal(tensor, full_tensor.to(group.wire))
            into.free()

    on_simulated_ranks(num_ranks, check)


@settings(max_examples=200)
@given(units(), st.sampled_from([dist.ReduceOp.SUM, dist.ReduceOp.AVG]))
def test_any_gradients_are_reduced_into_the_shards_of_their_sum(
    unit: tuple[int, list[Group]], op: dist.ReduceOp.RedOpType
) -> None:
    num_ranks, members = unit

    def expected(group: Group, i: int) -> torch.Tensor:
        contributions = [
            gradients[i] for rank in range(num_ranks) if (gradients := group.gradients(rank))[i] is not None
        ]
        wide = torch.promote_types(group.dtype, torch.float64)
        total = sum(
            (contribution.to(wide) for contribution in contributions if contribution is not None),
            torch.zeros(group.layout.shapes[i]),
        )
        return (total / (num_ranks if op == dist.ReduceOp.AVG else 1)).to(group.dtype)

    def check(transport: SimulatedTransport) -> None:
        moves = []
        for group in members:
            into = ShardedBuffer.empty(group.layout, transport.rank, group.dtype, CPU)
            into.flat.fill_(99)
            moves.append((group.gradients(transport.rank), group.wire, into))
        reduce_scatter(moves, transport, op).wait()
        for group, (gradients, _, into) in zip(members, moves, strict=True):
            sums = [
                expected(group, i) if i in gradients else torch.zeros(shape, dtype=group.dtype)
                for i, shape in enumerate(group.layout.shapes)
            ]
            expected_shards = _sharded(group, transport.rank, sums, group.dtype)
            for i, (shard, sum_) in enumerate(zip(into.shards, expected_shards.shards, strict=True)):
                if i in gradients or isinstance(group.layout, FlatLayout):
                    assert torch.equal(shard, sum_), i
                else:
                    assert bool((shard == 99).all()), "a tensor that takes no part must be left as it is"

    on_simulated_ranks(num_ranks, check)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [EvenLayout, FlatLayout])
def test_a_buffer_of_thousands_of_ranks_has_no_view_a_rank(layout: type[EvenLayout | FlatLayout]) -> None:
    with Operators() as operators:  # type: ignore[no-untyped-call]
        buffer = UnshardedBuffer(layout.build([(8192, 2), (3, 5)], 4096), 4095, torch.float32, CPU, CachingAllocator())
    assert operators.count < 50
    assert [piece.numel() * 4096 for piece in buffer.local_pieces] == [slot.numel() for slot in buffer.slots]
    ends = [piece.storage_offset() + piece.numel() for piece in buffer.local_pieces]
    assert ends == [slot.storage_offset() + slot.numel() for slot in buffer.slots]
