import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor

from lamella_buffers import (
    CachingAllocator,
    GatherPlan,
    LocalTransport,
    Payload,
    Pending,
    ReduceOp,
    ShardedBuffer,
    Transport,
    UnshardedBuffer,
    all_gather,
    all_reduce,
    reduce_scatter,
    standalone,
    transport_for,
)
from lamella_buffers._payload import Payloads
from lamella_layout import EvenLayout, FlatLayout, Rows, Whole
from lamella_testing import run_ranks

Layout = EvenLayout | FlatLayout
CPU = torch.device("cpu")
# Divides over 1, 2 and 4 ranks; does not; fewer rows than ranks; empty.
SHAPES = [(8, 6), (7, 3), (3,), (0, 4), (1, 2, 2)]


def _tensors(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 8, shape, generator=generator).to(dtype) for shape in SHAPES]


def _axis(build: Callable[..., Layout] = EvenLayout.build) -> tuple[Layout, Transport]:
    group = dist.group.WORLD
    assert group is not None
    transport = transport_for(group, "cpu")
    return build(SHAPES, transport.num_ranks), transport


def _flat(shapes: list[tuple[int, ...]], num_shards: int) -> FlatLayout:
    keep: list[Rows | Whole] = [Rows(1), Rows(2), Whole(), Rows(1), Whole()]
    return FlatLayout.build(shapes, num_shards, keep=keep, alignment=2)


EITHER_LAYOUT = pytest.mark.parametrize("build", [EvenLayout.build, _flat], ids=["even", "flat"])


def _sharded(layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> ShardedBuffer:
    buffer = ShardedBuffer.empty(layout, rank, dtype, CPU)
    buffer.copy_from(_tensors())
    return buffer


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_shards_are_the_chunks_of_torch_chunk(num_ranks: int) -> None:
    layout = EvenLayout.build(SHAPES, num_ranks)
    for rank in range(num_ranks):
        for shard, tensor in zip(_sharded(layout, rank).shards, _tensors(), strict=True):
            chunks = tensor.chunk(num_ranks)
            expected = chunks[rank] if rank < len(chunks) else tensor[:0]
            assert torch.equal(shard, expected)


def test_plans_of_a_unit_are_put_together_once_and_only_while_all_live() -> None:
    layout = EvenLayout.build(SHAPES, 1)
    dtypes = torch.float32, torch.bfloat16, torch.uint8
    wholes = [UnshardedBuffer(layout, 0, dtype, CPU, CachingAllocator()) for dtype in dtypes]
    first, *later_plans = [GatherPlan([(_sharded(layout, 0).slots, buffer)]) for buffer in wholes]

    def gather() -> weakref.ref[Payloads]:
        for buffer in wholes:
            buffer.allocate()
        with patch.object(LocalTransport, "all_gather", autospec=True, side_effect=LocalTransport.all_gather) as sent:
            all_gather([first, *later_plans], LocalTransport())
        for buffer in wholes:
            assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(buffer.tensors, _tensors(), strict=True))
            buffer.free()
        return weakref.ref(sent.call_args.args[1])

    payloads_ref = gather()
    assert payloads_ref() is not None and gather()() is payloads_ref()
    later_plans[0] = GatherPlan([(_sharded(layout, 0).slots, wholes[1])])  # main weights were replaced
    gc.collect()  # the mock's calls
    assert payloads_ref() is None
    assert gather()() is not None


@EITHER_LAYOUT
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gather_gives_back_the_whole_tensors(
    num_ranks: int, dtype: torch.dtype, build: Callable[..., Layout]
) -> None:
    def check() -> None:
        layout, transport = _axis(build)
        sharded = _sharded(layout, transport.rank)
        into = UnshardedBuffer(layout, transport.rank, dtype, CPU, CachingAllocator())
        into.allocate()
        into.flat.fill_(77)
        if dtype == torch.float32:
            sent = sharded.slots
        else:  # a cast lands in this rank's slice: the gather is in place
            torch._foreach_copy_(list(into.local_pieces), list(sharded.slots))
            sent = into.local_pieces
        all_gather([(sent, into)], transport).wait()
        for tensor, expected in zip(into.tensors, _tensors(dtype), strict=True):
            assert torch.equal(tensor, expected)

    run_ranks(check, num_ranks)


@EITHER_LAYOUT
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_gradients_are_the_shards_of_the_mean(
    num_ranks: int, dtype: torch.dtype, build: Callable[..., Layout]
) -> None:
    def check() -> None:
        layout, transport = _axis(build)
        mine: list[torch.Tensor | None] = [*_tensors(seed=transport.rank)]
        mine[2] = None  # no gradient here: zeros travel
        reduced = ShardedBuffer.empty(layout, transport.rank, dtype, CPU)
        reduce_scatter([(dict(enumerate(mine)), dtype, reduced)], transport, dist.ReduceOp.SUM).wait()
        expected = ShardedBuffer.empty(layout, transport.rank, dtype, CPU)
        sums = [sum(parts) for parts in zip(*(_tensors(seed=r) for r in range(num_ranks)), strict=True)]
        sums[2] = torch.zeros(SHAPES[2])
        expected.copy_from(sums)
        for shard, expected_shard in zip(reduced.shards, expected.shards, strict=True):
            assert torch.equal(shard, expected_shard)
        assert not any(bool(slot.isnan().any()) for slot in reduced.slots)  # padding is reduced too

    run_ranks(check, num_ranks)


@EITHER_LAYOUT
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_gradients_of_a_tensor_subclass_travel_as_plain_values(wire: torch.dtype, build: Callable[..., Layout]) -> None:
    def check() -> None:
        layout, transport = _axis(build)
        tensors = enumerate(_tensors(seed=transport.rank))
        wrapped = {i: TwoTensor(gradient, gradient.clone()) for i, gradient in tensors}  # type: ignore[no-untyped-call]
        plain = dict(enumerate(_tensors(seed=transport.rank)))
        results = []
        for gradients in (plain, wrapped):
            sums = ShardedBuffer.empty(layout, transport.rank, torch.float32, CPU)
            plainly: Any = _OnlyPlain(transport)
            reduce_scatter([(gradients, wire, sums)], plainly, dist.ReduceOp.SUM).wait()
            results.append(sums.shards)
        for got, expected_shard in zip(results[1], results[0], strict=True):
            assert type(got) is torch.Tensor and torch.equal(got, expected_shard)

    run_ranks(check, 2)


class _OnlyPlain:
    """A transport's reductions, of plain tensors alone: a collective reads the memory that a wrapper has not."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.num_ranks, self._transport = transport.rank, transport.num_ranks, transport

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        assert {type(tensor) for payload in payloads for tensor in payload} == {torch.Tensor}
        return self._transport.reduce_scatter(payloads, op)


def test_a_gradient_that_divides_over_the_ranks_is_sent_without_a_copy() -> None:
    def check() -> None:
        layout, transport = _axis()
        assert isinstance(layout, EvenLayout)
        gradients = _tensors(seed=transport.rank)
        sent: list[int] = []

        class Watching:
            rank, num_ranks = transport.rank, transport.num_ranks

            def reduce_scatter(self, payloads, op):  # type: ignore[no-untyped-def]
                sent.extend(full.data_ptr() for _, full in payloads)
                return transport.reduce_scatter(payloads, op)

        into = ShardedBuffer.empty(layout, transport.rank, torch.float32, CPU)
        reduce_scatter([(dict(enumerate(gradients)), torch.float32, into)], Watching(), dist.ReduceOp.AVG).wait()  # type: ignore[arg-type]
        for i, gradient in enumerate(gradients):
            if gradient.numel():
                assert (gradient.data_ptr() in sent) == layout.divides(i)

    run_ranks(check, 2)


def test_gathers_and_reductions_of_no_buffer_issue_no_collective() -> None:
    def check() -> None:
        _, transport = _axis()
        with CommDebugMode() as comm:  # type: ignore[no-untyped-call]
            all_gather([], transport).wait()
            reduce_scatter([], transport, dist.ReduceOp.AVG).wait()
        assert not comm.get_comm_counts()

    run_ranks(check, 2)


@pytest.mark.parametrize("shapes", [[(1, 3)], [(9, 3)], [(8, 3), (8, 3)], []])
def test_tensors_of_other_shapes_than_the_layouts_are_refused(shapes: list[tuple[int, ...]]) -> None:
    buffer = ShardedBuffer.empty(EvenLayout.build([(8, 3)], 2), 0, torch.float32, CPU)
    buffer.flat.fill_(7)
    with pytest.raises(ValueError, match=r"Expected whole tensors of the layout's shapes \(\(8, 3\),\), got "):
        buffer.copy_from([torch.zeros(shape) for shape in shapes])
    assert bool((buffer.flat == 7).all())


def test_several_buffers_travel_in_one_collective() -> None:
    def check() -> dict[str, int]:
        layout, transport = _axis()
        buffers = [
            UnshardedBuffer(layout, transport.rank, dtype, CPU, CachingAllocator())
            for dtype in (torch.float32, torch.bfloat16)
        ]
        moves = []
        for buffer in buffers:
            buffer.allocate()
            moves.append((ShardedBuffer.empty(layout, transport.rank, buffer.dtype, CPU).slots, buffer))
        with CommDebugMode() as comm:  # type: ignore[no-untyped-call]
            all_gather(moves, transport).wait()
        return {str(op): count for op, count in comm.get_comm_counts().items()}

    for counts in run_ranks(check, 2):
        assert sum(counts.values()) == 1, counts


def test_all_reduce_leaves_the_mean_on_every_rank() -> None:
    def check() -> list[float]:
        _, transport = _axis()
        tensor = torch.full((3,), float(transport.rank))
        all_reduce([tensor], transport, dist.ReduceOp.AVG).wait()
        return tensor.tolist()

    assert run_ranks(check, 4) == [[1.5] * 3] * 4


def test_an_unsharded_buffer_is_born_without_bytes_and_its_views_survive() -> None:
    layout = EvenLayout.build(SHAPES, 2)
    buffer = UnshardedBuffer(layout, 0, torch.float32, CPU, CachingAllocator())
    assert buffer.flat.untyped_storage().nbytes() == 0
    for value in (1.0, 2.0):
        assert not _has_bytes(buffer)
        buffer.allocate()
        assert _has_bytes(buffer)
        buffer.flat.fill_(value)
        assert all(bool((tensor == value).all()) for tensor in buffer.tensors)
        buffer.free()


def _has_bytes(buffer: UnshardedBuffer) -> bool:
    """Asked anew each time: to mypy an attribute keeps the value that an assertion found."""
    return buffer.has_bytes


def test_shards_in_another_dtype_are_a_copy_with_the_same_values() -> None:
    sharded = _sharded(EvenLayout.build(SHAPES, 2), 1)
    cast = sharded.cast_to(torch.float64)
    assert (cast.dtype, cast.device, cast.rank) == (torch.float64, CPU, 1)
    for shard, wide in zip(sharded.shards, cast.shards, strict=True):
        assert torch.equal(shard.double(), wide)
    sharded.flat.zero_()
    assert bool(cast.flat.any())


def test_a_shard_on_the_meta_device_has_no_bytes_to_share() -> None:
    view = torch.empty(8, device="meta")[2:4]
    assert standalone(view) is view


def test_an_unsharded_buffer_refuses_uneven_chunks_along_dim_1() -> None:
    layout = EvenLayout.build([(4, 5)], 2, dims=[1])
    with pytest.raises(NotImplementedError, match=r"dim 1 of shape \(4, 5\) to divide over 2 ranks"):
        UnshardedBuffer(layout, 0, torch.float32, CPU, CachingAllocator())


def test_a_standalone_shard_shares_bytes_with_its_buffer_and_no_storage() -> None:
    layout = EvenLayout.build(SHAPES, 2)
    buffer = _sharded(layout, 0)
    for shard in buffer.shards:
        alone = standalone(shard)
        assert alone.untyped_storage().nbytes() == shard.numel() * 4
        assert torch.equal(alone, shard)
        alone.fill_(5)
        assert bool((shard == 5).all())
    flat = buffer.flat
    del buffer, shard
    assert bool((flat[: alone.numel()] == 5).all())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [1, 2])
def test_tensors_sharded_along_another_dim_are_gathered_and_reduced(num_ranks: int, dim: int) -> None:
    def check() -> None:
        transport = transport_for(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
        shapes = [(3, 4, 8), (1, 8, 4)]
        layout = EvenLayout.build(shapes, num_ranks, dims=[dim] * 2)
        wholes = [torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) for shape in shapes]
        sharded = ShardedBuffer.empty(layout, transport.rank, torch.float32, CPU)
        sharded.copy_from(wholes)
        into = UnshardedBuffer(layout, transport.rank, torch.float32, CPU, CachingAllocator())
        into.allocate()
        all_gather([(sharded.slots, into)], transport).wait()
        for tensor, expected in zip(into.tensors, wholes, strict=True):
            assert torch.equal(tensor, expected)
        reduced = ShardedBuffer.empty(layout, transport.rank, torch.float32, CPU)
        gradients = dict(enumerate(into.tensors))
        reduce_scatter([(gradients, torch.float32, reduced)], transport, dist.ReduceOp.AVG).wait()
        for shard, expected in zip(reduced.shards, sharded.shards, strict=True):
            torch.testing.assert_close(shard, expected)

    run_ranks(check, num_ranks)


def test_shards_of_tensors_that_take_no_part_in_a_reduction_are_left_as_they_are() -> None:
    def check() -> None:
        layout, transport = _axis()
        gradients = _tensors(seed=transport.rank)
        reduced = ShardedBuffer.empty(layout, transport.rank, torch.float32, CPU)
        reduced.flat.fill_(7)
        reduce_scatter([({1: gradients[1]}, torch.float32, reduced)], transport, dist.ReduceOp.SUM).wait()
        for i, slot in enumerate(reduced.slots):
            assert bool((slot == 7).all()) == (i != 1)

    run_ranks(check, 2)


def test_a_flat_layout_travels_as_one_payload_and_members_that_take_no_part_become_zeros() -> None:
    layout = _flat(SHAPES, 2)
    into = UnshardedBuffer(layout, 1, torch.float32, CPU, CachingAllocator())
    assert [slot.numel() for slot in into.slots] == [layout.full_numel]
    assert [part.numel() for part in into.local_pieces] == [layout.shard_numel]

    def check() -> None:
        layout, transport = _axis(_flat)
        reduced = ShardedBuffer.empty(layout, transport.rank, torch.float32, CPU)
        reduced.flat.fill_(torch.nan)
        reduce_scatter([({0: _tensors()[0]}, torch.float32, reduced)], transport, dist.ReduceOp.AVG).wait()
        expected = _sharded(layout, transport.rank)
        assert torch.equal(reduced.shards[0], expected.shards[0])
        assert reduced.flat.sum() == expected.shards[0].sum()

    run_ranks(check, 2)
