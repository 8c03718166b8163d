"""EvenLayout against torch: the chunks are torch's chunks, and lie in buffers at the layout's offsets."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamella_layout import EvenLayout, Range

NUM_RANKS = st.integers(1, 64)
DIM_SIZES = st.one_of(st.integers(0, 9), st.integers(1, 130))
SHAPES = st.one_of(
    st.tuples(st.integers(0, 600)),
    st.tuples(DIM_SIZES, st.integers(1, 6)),
    st.lists(st.integers(0, 5), min_size=3, max_size=4).map(tuple),
)


@st.composite
def even_layouts(draw: st.DrawFn) -> EvenLayout:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    dims = [draw(st.integers(-len(shape), len(shape) - 1)) for shape in shapes]
    return EvenLayout.build(
        shapes,
        draw(NUM_RANKS),
        dims=dims,
        alignment=draw(st.sampled_from([1, 3, 16, 256])),
    )


def torch_chunks(shape: tuple[int, ...], dim: int, num_shards: int) -> list[torch.Tensor]:
    """The oracle: torch.chunk of a tensor whose values are its flat indices; missing chunks are empty."""
    chunks = list(torch.arange(torch.Size(shape).numel()).view(shape).chunk(num_shards, dim))
    empty = chunks[0].narrow(dim, 0, 0)
    return chunks + [empty] * (num_shards - len(chunks))


@given(even_layouts())
def test_every_rank_owns_the_chunk_that_torch_chunk_gives_it(
    layout: EvenLayout,
) -> None:
    for index, (shape, dim) in enumerate(zip(layout.shapes, layout.dims, strict=True)):
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        for rank, expected in enumerate(torch_chunks(shape, dim, layout.num_shards)):
            offsets, sizes = layout.chunk(index, rank)
            box = full[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            assert torch.equal(box, expected)
            assert layout.shard_shape(index, rank) == sizes == tuple(expected.shape)
            assert layout.shard_offsets(index, rank) == offsets


@given(even_layouts())
def test_slots_are_aligned_in_order_and_do_not_overlap(layout: EvenLayout) -> None:
    for slots, numel in (
        ([layout.shard_slot(i) for i in range(layout.num_tensors)], layout.shard_numel),
        ([layout.full_slot(i) for i in range(layout.num_tensors)], layout.full_numel),
    ):
        assert all(slot.start % layout.alignment == 0 for slot in slots)
        assert all(lower.stop <= upper.start < lower.stop + layout.alignment for lower, upper in pairwise(slots))
        assert slots[-1].stop == numel


@given(even_layouts())
def test_a_slot_holds_every_rank_s_chunk_and_the_unsharded_slot_holds_every_rank_s_slot(
    layout: EvenLayout,
) -> None:
    for index, shape in enumerate(layout.shapes):
        ranks = range(layout.num_shards)
        chunk_numels = [layout.chunk(index, rank).numel for rank in ranks]
        assert sum(chunk_numels) == torch.Size(shape).numel()
        assert layout.slot_numel(index) == layout.shard_slot(index).numel == max(chunk_numels)
        assert [layout.local_slot(index, rank).numel for rank in ranks] == chunk_numels
        assert all(layout.local_slot(index, rank).start == layout.shard_slot(index).start for rank in ranks)
        pieces = [layout.full_shard(index, rank) for rank in ranks]
        assert [piece.numel for piece in pieces] == [layout.slot_numel(index)] * layout.num_shards
        assert (pieces[0].start, pieces[-1].stop) == layout.full_slot(index)
        assert all(lower.stop == upper.start for lower, upper in pairwise(pieces))


@given(even_layouts())
def test_contiguous_means_exactly_that_chunks_gathered_into_the_slot_are_the_tensor(
    layout: EvenLayout,
) -> None:
    for index, (shape, dim) in enumerate(zip(layout.shapes, layout.dims, strict=True)):
        full = torch.arange(torch.Size(shape).numel())
        slot = torch.full((layout.full_slot(index).numel,), -1)
        for rank, chunk in enumerate(torch_chunks(shape, dim, layout.num_shards)):
            place = layout.full_shard(index, rank).shift(-layout.full_slot(index).start)
            slot[place.start : place.start + chunk.numel()] = chunk.flatten()
        assert torch.equal(slot[: full.numel()], full) == layout.is_contiguous(index)


@given(even_layouts())
def test_wire_slots_are_all_slots_and_a_tensor_lies_first_in_its_slot(layout: EvenLayout) -> None:
    indices = range(layout.num_tensors)
    assert layout.wire_slots == tuple(layout.shard_slot(i) for i in indices)
    assert layout.wire_full_slots == tuple(layout.full_slot(i) for i in indices)
    for i, shape in enumerate(layout.shapes):
        slot, lies = layout.full_slot(i), layout.tensor_range(i)
        assert (lies.start, lies.numel) == (slot.start, torch.Size(shape).numel())
        assert layout.in_equal_chunks[i] == (layout.divides(i) and layout.is_contiguous(i))
        assert not layout.in_equal_chunks[i] or lies == slot


@given(even_layouts())
def test_owned_ranges_of_contiguous_tensors_are_the_flat_elements_of_the_chunks(
    layout: EvenLayout,
) -> None:
    for index, (shape, dim) in enumerate(zip(layout.shapes, layout.dims, strict=True)):
        if layout.is_contiguous(index):
            for rank, chunk in enumerate(torch_chunks(shape, dim, layout.num_shards)):
                assert list(range(*layout.owned(index, rank))) == chunk.flatten().tolist()
        else:
            with pytest.raises(ValueError, match=r"Use chunk\(\)"):
                layout.owned(index, 0)


@given(even_layouts())
def test_a_tensor_divides_exactly_when_all_ranks_hold_the_same_shape(
    layout: EvenLayout,
) -> None:
    for index in range(layout.num_tensors):
        shapes = {layout.shard_shape(index, rank) for rank in range(layout.num_shards)}
        assert layout.divides(index) == (len(shapes) == 1)


@given(st.integers(1, 40), NUM_RANKS, st.integers(1, 3))
def test_a_negative_dim_counts_from_the_last(size: int, num_shards: int, dim: int) -> None:
    shape = (size, 2, 5)
    assert EvenLayout.build([shape], num_shards, dims=[-dim]) == EvenLayout.build([shape], num_shards, dims=[3 - dim])


def test_a_small_group_lies_where_the_picture_in_the_docstring_draws_it() -> None:
    layout = EvenLayout.build([(7,), (3, 2)], 2, dims=[0, 1], alignment=3)
    assert [layout.shard_slot(i) for i in (0, 1)] == [Range(0, 4), Range(6, 9)]
    assert [layout.full_slot(i) for i in (0, 1)] == [Range(0, 8), Range(9, 15)]
    assert layout.chunk(0, 1) == ((4,), (3,))
    assert layout.chunk(1, 1) == ((0, 1), (3, 1))
    assert not layout.divides(0) and layout.divides(1)
    assert layout.is_contiguous(0) and not layout.is_contiguous(1)
    assert layout.owned(0, 1) == (4, 7)


def test_a_group_of_no_tensors_takes_no_memory() -> None:
    layout = EvenLayout.build([], 4)
    assert (layout.num_tensors, layout.shard_numel, layout.full_numel) == (0, 0, 0)


def test_layouts_compare_and_hash_by_value_whatever_sequences_they_were_built_from() -> None:
    built = {
        EvenLayout.build([torch.Size([4, 2])], 2),
        EvenLayout.build([[4, 2]], 2, dims=[0]),
    }
    assert len(built) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": [(2,), ()], "num_shards": 2}, "0-D tensor at index 1"),
        ({"shapes": [(2, -1)], "num_shards": 2}, r"got shape \(2, -1\) at index 0"),
        (
            {"shapes": [(2,)], "num_shards": 0},
            "Expected num_shards of at least 1, got 0",
        ),
        (
            {"shapes": [(2,)], "num_shards": 1, "alignment": 0},
            "Expected alignment of at least 1, got 0",
        ),
        (
            {"shapes": [(2,)], "num_shards": 2, "dims": [1]},
            r"Expected a dim of a tensor of shape \(2,\), got 1",
        ),
        (
            {"shapes": [(2,)], "num_shards": 2, "dims": [-2]},
            r"Expected a dim of a tensor of shape \(2,\), got -2",
        ),
        (
            {"shapes": [(2,)], "num_shards": 2, "dims": [0, 0]},
            r"one dim a tensor \(1 tensors\), got 2",
        ),
        (
            {"shapes": [(2,)], "num_shards": 2, "dims": []},
            r"one dim a tensor \(1 tensors\), got 0",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvenLayout.build(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 2])
@pytest.mark.parametrize(
    "method",
    ["full_shard", "local_slot", "shard_shape", "shard_offsets", "chunk", "owned"],
)
def test_a_rank_without_a_shard_is_refused(method: str, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"Expected a rank in 0..1 \(num_shards=2\), got {rank}"):
        getattr(EvenLayout.build([(4,)], 2), method)(0, rank)
