"""FlatLayout by property for 1 to 64 simulated ranks, and its self-check against layouts made wrong on purpose."""

import copy
import pickle
import time
from dataclasses import replace
from itertools import pairwise
from math import ceil, lcm, prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamella_layout import (
    Chunk,
    FlatLayout,
    Keep,
    RaggedShard,
    Range,
    Replicate,
    Rows,
    Shard,
    Whole,
    mesh_chunks,
    mesh_region,
)

SHAPES = st.one_of(
    st.tuples(st.integers(0, 600)),
    st.tuples(st.integers(0, 130), st.sampled_from([1, 3, 4, 7, 16, 24])),
    st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(1, 4)),
)
KEEPS = st.one_of(st.just(Rows(1)), st.builds(Rows, st.sampled_from([2, 3, 32, 128])), st.just(Whole()))


@st.composite
def flat_layouts(draw: st.DrawFn) -> FlatLayout:
    group = draw(st.lists(st.tuples(SHAPES, KEEPS), min_size=1, max_size=10))
    return FlatLayout.build(
        [shape for shape, _ in group],
        draw(st.integers(1, 64)),
        keep=[keep for _, keep in group],
        alignment=draw(st.sampled_from([1, 4, 16, 100])),
    )


def block_rows(shape: tuple[int, ...], keep: Keep) -> int:
    return shape[0] if isinstance(keep, Whole) else min(keep.num_rows, shape[0])


@given(flat_layouts())
def test_shards_laid_one_after_another_hold_every_tensor_in_one_piece(layout: FlatLayout) -> None:
    tensors = [torch.arange(prod(shape)) + 1000 * index for index, shape in enumerate(layout.shapes)]
    shards = torch.full((layout.num_shards, layout.shard_numel), -1)
    for rank in range(layout.num_shards):
        for index, tensor in enumerate(tensors):
            owned, slot = layout.owned(index, rank), layout.local_slot(index, rank)
            assert (shards[rank, slot.start : slot.stop] == -1).all(), "two tensors in one place"
            shards[rank, slot.start : slot.stop] = tensor[owned.start : owned.stop]
    full = shards.flatten()
    assert full.numel() == layout.full_numel
    for index, tensor in enumerate(tensors):
        lies = layout.tensor_range(index)
        assert torch.equal(full[lies.start : lies.stop], tensor)
    assert int((full == -1).sum()) == layout.padding_numel


@given(flat_layouts())
def test_every_element_is_owned_by_exactly_one_rank_in_rank_order(layout: FlatLayout) -> None:
    for index, shape in enumerate(layout.shapes):
        owned = [layout.owned(index, rank) for rank in range(layout.num_shards)]
        held_ranges = [part for part in owned if part.numel]
        assert [part.stop for part in held_ranges[:-1]] == [part.start for part in held_ranges[1:]]
        assert sum(part.numel for part in held_ranges) == prod(shape)
        assert not held_ranges or (held_ranges[0].start, held_ranges[-1].stop) == (0, prod(shape))


@given(flat_layouts())
def test_starts_are_aligned_in_the_whole_buffer_and_in_every_shard(layout: FlatLayout) -> None:
    for index in range(layout.num_tensors):
        assert layout.tensor_range(index).start % layout.alignment == 0
        for rank in range(layout.num_shards):
            slot = layout.local_slot(index, rank)
            assert 0 <= slot.start <= slot.stop <= layout.shard_numel
            assert not slot.numel or slot.start % layout.alignment == 0


@given(flat_layouts())
def test_blocks_of_rows_kept_together_lie_on_one_rank(layout: FlatLayout) -> None:
    for index, (shape, keep) in enumerate(zip(layout.shapes, layout.keep, strict=True)):
        row_numel = prod(shape[1:])
        held_ranges = [part for rank in range(layout.num_shards) if (part := layout.owned(index, rank)).numel]
        for row in range(0, shape[0] if row_numel else 0, max(1, block_rows(shape, keep))):
            last = min(row + block_rows(shape, keep), shape[0])
            block = Range(row * row_numel, last * row_numel)
            assert sum(part.intersection(block).numel > 0 for part in held_ranges) == 1


@given(flat_layouts())
def test_chunks_are_boxes_of_exactly_the_owned_elements(layout: FlatLayout) -> None:
    for index, shape in enumerate(layout.shapes):
        full = torch.arange(prod(shape)).view(shape)
        for rank in range(layout.num_shards):
            owned, chunks = layout.owned(index, rank), layout.chunks(index, rank)
            assert len(chunks) == (1 if owned.numel else 0)
            for chunk in chunks:
                assert full[tuple(slice(*indices) for indices in chunk.ranges)].flatten().tolist() == [*range(*owned)]


@given(flat_layouts())
def test_padding_stays_below_the_bound_that_is_promised(layout: FlatLayout) -> None:
    """The bound, from the promise alone.

    At most one gap a cut, each smaller than the largest step, and a shard that is a multiple of the steps of all
    longer tensors. `longest` runs over possible sizes of the longest tensor within a shard.
    """
    alignment, num_shards = layout.alignment, layout.num_shards
    tensors = []
    for shape, keep in zip(layout.shapes, layout.keep, strict=True):
        numel, block = prod(shape), block_rows(shape, keep) * prod(shape[1:])
        if numel:
            padded = ceil(numel / alignment) * alignment
            tensors.append((numel, padded, padded if block >= numel else lcm(block, alignment), block >= numel))
    if not tensors:
        assert layout.full_numel == 0
        return
    gaps = (num_shards - 1) * (max(step for *_, step, _ in tensors) - alignment)
    enough = ceil((sum(padded for _, padded, *_ in tensors) + gaps) / num_shards)
    bounds = []
    for longest in {0} | {numel for numel, *_ in tensors}:
        if all(numel <= longest for numel, *_, stays_whole in tensors if stays_whole):
            quantum = lcm(alignment, *(step for numel, _, step, _ in tensors if numel > longest))
            bounds.append(ceil(max(enough, longest) / quantum) * quantum)
    assert layout.shard_numel <= min(bounds)


@given(flat_layouts(), st.data())
def test_merged_shards_are_runs_of_consecutive_shards(layout: FlatLayout, data: st.DataObject) -> None:
    num_merged = data.draw(st.sampled_from([n for n in range(1, 65) if layout.num_shards % n == 0]))
    merged = layout.merge_shards(num_merged)
    assert merged.full_numel == layout.full_numel
    for index in range(layout.num_tensors):
        assert merged.tensor_range(index) == layout.tensor_range(index)
        for rank in range(layout.num_shards):
            part, of = layout.owned(index, rank), merged.owned(index, rank // num_merged)
            assert of.intersection(part) == part or not part.numel


@given(flat_layouts())
def test_tensors_and_gaps_are_the_whole_buffer(layout: FlatLayout) -> None:
    pieces = [layout.tensor_range(index) for index in range(layout.num_tensors)] + [*layout.gaps]
    ordered = sorted(piece for piece in pieces if piece.numel)
    assert [piece.stop for piece in ordered[:-1]] == [piece.start for piece in ordered[1:]]
    assert sum(piece.numel for piece in ordered) == layout.full_numel
    assert all(gap.numel for gap in layout.gaps)


@given(flat_layouts(), st.data())
def test_placements_say_where_the_rows_are_on_one_axis_and_on_two(layout: FlatLayout, data: st.DataObject) -> None:
    num_outer = data.draw(st.sampled_from([n for n in range(1, 65) if layout.num_shards % n == 0]))
    num_inner = layout.num_shards // num_outer
    for index, shape in enumerate(layout.shapes):
        inner, outer = (layout.placement(index, stride=stride) for stride in (num_outer, 1))
        assert inner.bounds == outer.bounds
        assert [inner.rows(rank) for rank in range(layout.num_shards)] == [
            layout.chunk(index, rank).ranges[0] for rank in range(layout.num_shards)
        ]
        tables = [
            mesh_chunks(shape, (layout.num_shards,), [outer]),
            mesh_chunks(shape, (num_inner, num_outer), [inner, outer]),
            mesh_chunks(shape, (num_inner, 1, num_outer), [inner, Replicate(), outer]),
        ]
        assert tables == [tuple(layout.chunks(index, rank) for rank in range(layout.num_shards))] * 3


@given(flat_layouts())
def test_layouts_compare_and_hash_by_value(layout: FlatLayout) -> None:
    assert {layout, copy.copy(layout), pickle.loads(pickle.dumps(layout))} == {layout}
    assert hash(replace(layout, num_shards=2 * layout.num_shards)) != hash(layout)


def test_the_owner_is_the_one_rank_that_has_all_rows() -> None:
    assert RaggedShard((0, 0, 4, 4)).owner == 1
    assert RaggedShard((0, 2, 4)).owner is None
    assert RaggedShard((0, 0)).owner is None


def test_equal_layers_share_the_bounds_of_their_placements() -> None:
    layers = [FlatLayout.build([(1024, 8), (53, 8)], 16384, alignment=8) for _ in range(2)]
    assert layers[0].placement(0) is layers[1].placement(0)
    assert layers[0].placement(0) is not layers[0].placement(1)


def test_placements_compare_hash_and_pickle_by_value_and_are_not_torchs() -> None:
    placement = RaggedShard((0, 2, 2, 5), stride=2)
    assert placement == RaggedShard([0, 2, 2, 5], 2)
    assert hash(placement) == hash(RaggedShard((0, 2, 2, 5), 2))
    assert placement != RaggedShard((0, 2, 2, 5))
    assert pickle.loads(pickle.dumps(placement)) == copy.deepcopy(placement) == placement
    assert not (placement.is_shard() or placement.is_replicate() or placement.is_partial())
    assert Replicate() != placement != Shard(0)
    assert repr(placement) == "RaggedShard((0, 2, 2, 5), stride=2)"


@pytest.mark.parametrize("bounds", [(0,), (1, 2), (0, 3, 2), ()])
def test_bounds_that_are_none_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bounds from 0 on"):
        RaggedShard(bounds)


def test_ragged_placements_of_other_rows_or_ranks_are_refused() -> None:
    for placements, num_ranks in (
        ([RaggedShard((0, 2, 3)), Replicate()], 2),
        ([RaggedShard((0, 1, 4, 4)), Replicate()], 2),  # the third rank's rows would be nobody's
        ([RaggedShard((0, 1, 2)), Shard(0)], 2),  # the rows of a part, of which the first axis knows nothing
    ):
        with pytest.raises(ValueError, match=f"ragged placements of 4 rows over {num_ranks} ranks"):
            mesh_region((4, 2), (2, 2), placements, (0, 0))
    with pytest.raises(ValueError, match="ragged placements of 2 rows over 2 ranks.*`order` tells which axis cuts"):
        mesh_region((4, 2), (2, 2), [RaggedShard((0, 2, 4)), Shard(0)], (0, 0), order=(1, 0))
    with pytest.raises(ValueError, match="ragged placements of None rows over 2 ranks"):
        mesh_region((), (2,), [RaggedShard((0, 2, 4))], (0,))
    with pytest.raises(ValueError, match="the same bounds"):
        mesh_region((4, 2), (2, 2), [RaggedShard((0, 2, 4, 4, 4)), RaggedShard((0, 1, 4, 4, 4), 2)], (0, 0))


def test_a_cut_of_rows_between_two_ragged_axes_is_refused() -> None:
    ragged = [RaggedShard((0, 1, 2, 3, 4), stride) for stride in (2, 1)]
    with pytest.raises(ValueError, match=r"no cut of dim 0 between them, got one by axis 1 .*in the order \(0, 1, 2\)"):
        mesh_region((4, 2), (2, 1, 2), [ragged[0], Shard(-2), ragged[1]], (0, 0, 0))
    columns = [ragged[0], Shard(-1), ragged[1]]
    assert mesh_region((4, 2), (2, 2, 2), columns, (1, 1, 0)).chunks == (Chunk((2, 1), (1, 1)),)


def test_gaps_take_the_tensors_that_fit_and_a_rank_may_own_little() -> None:
    """The picture in the class docstring."""
    layout = FlatLayout.build([(5, 6), (2, 4), (3,)], 3, keep=[Rows(1), Whole(), Rows(1)], alignment=1)
    assert layout.shard_numel == 18
    assert layout.starts == (12, 0, 8)
    assert [layout.owned(0, rank) for rank in range(3)] == [(0, 6), (6, 24), (24, 30)]
    assert layout.chunks(0, 1) == (((1, 0), (3, 6)),)
    assert layout.chunks(1, 2) == ()


def test_a_rank_may_own_nothing_at_all() -> None:
    layout = FlatLayout.build([(4, 4)], 3, keep=Whole(), alignment=1)
    assert [layout.owned(0, rank).numel for rank in range(3)] == [16, 0, 0]


@pytest.mark.parametrize(
    ("num_shards", "keep", "percent"),
    [(4, Rows(1), 0.01), (8, Rows(1), 0.02), (64, Rows(1), 0.2), (8, Rows(32), 1), (4, Rows(128), 1), (4, Whole(), 8)],
)
def test_a_transformer_block_wastes_little(num_shards: int, keep: Keep, percent: float) -> None:
    hidden, wide = 4096, 14336
    square, narrow = (hidden, hidden), (1024, hidden)
    shapes = [square, narrow, narrow, square, (wide, hidden), (wide, hidden), (hidden, wide), (hidden,), (hidden,)]
    layout = FlatLayout.build(shapes, num_shards, keep=keep)
    assert 100 * layout.padding_numel <= percent * sum(map(prod, shapes))


def test_whole_tensors_are_spread_as_evenly_as_best_fit_can() -> None:
    # Ten tensors of sizes 1 to 10 on 5 ranks: 55 elements, and a perfect packing of 11 each exists.
    layout = FlatLayout.build([(size,) for size in range(1, 11)], 5, keep=Whole(), alignment=1)
    assert layout.shard_numel == 11 and layout.padding_numel == 0


def test_a_gap_that_reaches_into_the_next_shard_is_not_filled_across_the_boundary() -> None:
    # The last tensor is longer than a shard; without room for its start in this shard, two shards have room.
    layout = FlatLayout.build([(1, 3), (2, 4), (4, 4)], 3, keep=[Whole(), Whole(), Rows(1)], alignment=1)
    for index in (0, 1):
        assert sum(layout.owned(index, rank).numel > 0 for rank in range(3)) == 1


def test_thousands_of_tensors_are_packed_in_under_a_second() -> None:
    shapes = [(1 + 37 * i % 2999, (1, 64, 100, 768, 1000, 3072)[i % 6]) for i in range(2500)]
    started = time.process_time()
    FlatLayout.build(shapes, 1024)
    FlatLayout.build(shapes, 64, keep=Whole())
    assert time.process_time() - started < 1


def test_empty_tensors_and_empty_groups_take_no_memory() -> None:
    empty = FlatLayout.build([(0, 4), (3, 0)], 4)
    assert (empty.full_numel, empty.owned(1, 3), empty.chunks(0, 0)) == (0, Range(0, 0), ())
    assert FlatLayout.build([], 4).full_numel == 0


def test_tensors_in_a_single_shard_are_packed_with_gaps_below_the_alignment() -> None:
    layout = FlatLayout.build([(10,), (7,), (30,)], 1, alignment=8)
    ranges = sorted(layout.tensor_range(index) for index in range(3))
    assert all(upper.start - lower.stop < 8 for lower, upper in pairwise(ranges))
    assert layout.shard_numel == 56


GOOD = FlatLayout(
    shapes=((6, 4), (8,)), keep=(Rows(2), Whole()), num_shards=2, alignment=4, shard_numel=16, starts=(0, 24)
)


@pytest.mark.parametrize("change", [{"starts": (8, 0)}, {"starts": (4, 28), "shard_numel": 20}])
def test_a_layout_made_by_hand_may_lie_anywhere_that_is_legal(change: dict[str, object]) -> None:
    assert replace(GOOD, **change).num_tensors == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_numel": 18}, "Expected shard_numel at a multiple of alignment=4, got 18"),
        ({"starts": (0, 26)}, "Expected start 1 at a multiple of alignment=4, got 26"),
        ({"starts": (0, 28)}, r"Expected tensor 1 inside the 32 elements, got Range\(start=28, stop=36\)"),
        ({"starts": (-4, 24)}, r"Expected tensor 0 inside the 32 elements, got Range\(start=-4, stop=20\)"),
        ({"starts": (0, 20)}, r"Expected tensors apart, got 0 in Range.* and 1 in Range\(start=20"),
        ({"starts": (4, 28), "shard_numel": 24}, "cut only where Rows.*got a cut after 20 elements, before rank 1"),
        ({"starts": (8, 0), "shard_numel": 4, "num_shards": 8}, "cut only where Rows.*got a cut after 4 elements"),
        ({"starts": (0,)}, r"Expected one start a tensor \(2 tensors\), got 1"),
        ({"keep": (Rows(2),)}, r"Expected one keep a tensor \(2 tensors\), got 1"),
        ({"num_shards": 0}, "Expected num_shards of at least 1, got 0"),
        ({"alignment": 0}, "Expected alignment of at least 1, got 0"),
        ({"shapes": ((6, 4), ())}, "0-D tensor at index 1"),
    ],
)
def test_a_layout_made_by_hand_is_proved_as_one_that_was_built(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": [()]}, "0-D tensor at index 0"),
        ({"num_shards": 0}, "Expected num_shards of at least 1, got 0"),
        ({"alignment": -1}, "Expected alignment of at least 1, got -1"),
        ({"keep": [Rows(1), Rows(1)]}, r"Expected one keep a tensor \(1 tensors\), got 2"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatLayout.build(**({"shapes": [(4,)], "num_shards": 2} | arguments))  # type: ignore[arg-type]


def test_blocks_of_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected num_rows of at least 1, got 0"):
        Rows(0)


def test_shards_merge_only_by_divisors() -> None:
    with pytest.raises(ValueError, match="Expected a divisor of num_shards=2, got num_merged=3"):
        GOOD.merge_shards(3)


@pytest.mark.parametrize("rank", [-1, 2])
@pytest.mark.parametrize("method", ["owned", "local_slot", "region", "chunks"])
def test_a_rank_without_a_shard_is_refused(method: str, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"Expected a rank in 0..1 \(num_shards=2\), got {rank}"):
        getattr(GOOD, method)(0, rank)
