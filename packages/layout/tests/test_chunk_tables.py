"""Regions and chunk tables against torch's own arithmetic, without a process group on either side."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lamella_layout import (
    Chunk,
    EvenLayout,
    FlatLayout,
    Partial,
    RaggedShard,
    Range,
    Region,
    Replicate,
    Rows,
    Shard,
    mesh_chunks,
    mesh_owners,
    mesh_region,
    strided_placements,
)

SHAPES = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def placed(draw: st.DrawFn, *, strided: bool) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape, mesh_shape = draw(SHAPES), draw(MESHES)
    dims = st.integers(0, len(shape) - 1)
    kinds = [dims.map(Shard), st.just(Replicate()), st.just(Partial())]
    if strided:
        kinds.append(st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4)))
    return shape, mesh_shape, [draw(st.one_of(kinds)) for _ in mesh_shape]


def coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh_shape)))


def pick(full: torch.Tensor, region: Region) -> torch.Tensor:
    """Index a tensor by a region, by brute force."""
    for dim, runs in enumerate(region.runs):
        full = full.index_select(dim, torch.tensor([index for run in runs for index in range(*run)], dtype=torch.int))
    return full


def cut_as_torch_does(full: torch.Tensor, placement: Placement, num_ranks: int, rank: int) -> torch.Tensor:
    """DTensor's own function to cut a tensor along one axis."""
    if isinstance(placement, Shard | _StridedShard):
        return placement._split_tensor(full, num_ranks, with_padding=False)[0][rank]
    return full


@given(placed(strided=True))
def test_every_rank_holds_the_elements_that_dtensor_gives_it_in_the_same_order(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    shape, mesh_shape, placements = case
    for coordinate in coordinates(mesh_shape):
        full = torch.arange(prod(shape)).view(shape)
        expected = full
        for placement, num_ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
            expected = cut_as_torch_does(expected, placement, num_ranks, rank)
        region = mesh_region(shape, mesh_shape, placements, coordinate)
        assert region.shape == expected.shape
        assert torch.equal(pick(full, region), expected)


@given(placed(strided=True))
def test_local_shapes_and_offsets_are_those_torch_computes_for_checkpoints(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    shape, mesh_shape, placements = case
    table = mesh_chunks(shape, mesh_shape, placements)
    for coordinate, chunks in zip(coordinates(mesh_shape), table, strict=True):
        local_shape, offsets = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
        assert mesh_region(shape, mesh_shape, placements, coordinate).shape == local_shape
        assert sum(chunk.numel for chunk in chunks) == prod(local_shape)
        if chunks:
            assert chunks[0].offsets == offsets


@given(placed(strided=True), st.randoms(use_true_random=False))
def test_shards_own_every_element_once_for_any_placements_and_order(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], random: object
) -> None:
    shape, mesh_shape, placements = case
    plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements]
    order = sorted(range(len(mesh_shape)), key=lambda _: random.random())  # type: ignore[attr-defined]
    copies = prod(n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate | Partial))
    for table in (mesh_chunks(shape, mesh_shape, placements), mesh_chunks(shape, mesh_shape, plain, order=order)):
        owners = torch.zeros(shape, dtype=torch.int)
        for chunk in (chunk for chunks in table for chunk in chunks):
            assert chunk.numel > 0
            owners[tuple(slice(*indices) for indices in chunk.ranges)] += 1
        assert bool((owners == copies).all())


@given(placed(strided=True), st.data())
def test_a_box_of_a_ranks_region_is_the_same_box_of_its_local_tensor(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], data: st.DataObject
) -> None:
    shape, mesh_shape, placements = case
    full = torch.arange(prod(shape)).view(shape)
    region = mesh_region(shape, mesh_shape, placements, data.draw(st.sampled_from(coordinates(mesh_shape))))
    ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in region.shape]
    box = Chunk.of([Range(*limits) for limits in ends])
    expected = pick(full, region)[tuple(slice(*indices) for indices in box.ranges)]
    assert torch.equal(pick(full, region.take(box)), expected)
    held_elements = [
        full[tuple(slice(*indices) for indices in chunk.ranges)].flatten() for chunk in region.take(box).chunks
    ]
    assert sorted(torch.cat([*held_elements, full.flatten()[:0]]).tolist()) == sorted(expected.flatten().tolist())


@st.composite
def placed_with_ragged_axes(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement], tuple[int, ...]]:
    """A ragged cut of one or two axes, with other cuts before and after, on axes in any order."""
    shape, mesh_shape, placements = draw(placed(strided=False))
    order = draw(st.permutations(range(len(mesh_shape))))
    first = draw(st.integers(0, len(order) - 1))
    ragged = order[first : first + draw(st.integers(1, 2))]
    num_parts = prod(mesh_shape[axis] for axis in order[:first] if placements[axis] == Shard(0))
    rows, num_ranks = shape[0], prod(mesh_shape[axis] for axis in ragged)  # bounds are the same for all parts
    bounds = [0, *sorted(draw(st.integers(0, rows)) for _ in range(num_ranks - 1)), rows]
    stride = 1
    for axis in draw(st.permutations(ragged)):
        placements[axis] = RaggedShard(bounds, stride)
        stride *= mesh_shape[axis]
    return (rows * num_parts, *shape[1:]), mesh_shape, placements, tuple(order)


@given(placed_with_ragged_axes())
def test_a_ragged_cut_beside_others_takes_the_rows_between_the_bounds(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement], tuple[int, ...]],
) -> None:
    shape, mesh_shape, placements, order = case
    full, owners = torch.arange(prod(shape)).view(shape), torch.zeros(shape, dtype=torch.int)
    for coordinate in coordinates(mesh_shape):
        ragged = [
            (placement, at)
            for placement, at in zip(placements, coordinate, strict=True)
            if isinstance(placement, RaggedShard)
        ]
        bounds, rank = ragged[0][0].bounds, sum(placement.stride * at for placement, at in ragged)
        expected, is_cut = full, False
        for axis in order:
            if not isinstance(placements[axis], RaggedShard):
                expected = cut_as_torch_does(expected, placements[axis], mesh_shape[axis], coordinate[axis])
            elif not is_cut:
                expected, is_cut = expected[bounds[rank] : bounds[rank + 1]], True
        region = mesh_region(shape, mesh_shape, placements, coordinate, order=order)
        assert region.shape == expected.shape
        assert torch.equal(pick(full, region), expected)
        owners.view(-1)[expected.flatten()] += 1
    copies = prod(n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate | Partial))
    assert bool((owners == copies).all())


@given(placed(strided=True), st.integers(1, 5), st.data())
def test_even_and_flat_layouts_inside_outer_cuts_partition_the_outer_regions(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], num_shards: int, data: st.DataObject
) -> None:
    shape, mesh_shape, placements = case
    copies = prod(n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate | Partial))
    owners = {True: torch.zeros(shape, dtype=torch.int), False: torch.zeros(shape, dtype=torch.int)}
    dim = data.draw(st.integers(0, len(shape) - 1))
    for coordinate in coordinates(mesh_shape):
        outer = mesh_region(shape, mesh_shape, placements, coordinate)
        even = EvenLayout.build([outer.shape], num_shards, dims=[dim])
        flat = FlatLayout.build([outer.shape], num_shards, alignment=data.draw(st.sampled_from([1, 4])))
        for layout in (even, flat):
            for rank in range(num_shards):
                for chunk in layout.chunks(0, rank, outer_region=outer):
                    owners[layout is even][tuple(slice(*indices) for indices in chunk.ranges)] += 1
    assert all(bool((owner_counts == copies).all()) for owner_counts in owners.values())


@given(placed(strided=False), st.data())
def test_strided_placements_keep_any_order_when_dims_divide(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], data: st.DataObject
) -> None:
    shape, mesh_shape, placements = case
    shape = tuple(size * prod(mesh_shape) for size in shape)
    order = data.draw(st.permutations(range(len(mesh_shape))))
    strided = strided_placements(mesh_shape, placements, order=order)
    assert mesh_chunks(shape, mesh_shape, strided) == mesh_chunks(shape, mesh_shape, placements, order=order)


def test_strided_placements_of_an_uneven_dim_can_differ_from_the_order_as_documented() -> None:
    placements = [Shard(0), Shard(0)]
    ordered = mesh_chunks((9,), (4, 2), placements, order=(1, 0))
    strided = mesh_chunks((9,), (4, 2), strided_placements((4, 2), placements, order=(1, 0)))
    assert ordered[6:] == ((), (Chunk((8,), (1,)),))  # ranks (3, 0) and (3, 1)
    assert strided[6:] == ((Chunk((8,), (1,)),), ())
    assert ordered[:6] == strided[:6]


def test_strided_placements_do_not_guess_whether_two_dims_are_one() -> None:
    with pytest.raises(ValueError, match=r"all counted from the first, or all from the last, got \(Shard\(dim=0\), "):
        strided_placements((2, 2), [Shard(0), Shard(-2)], order=(1, 0))
    assert strided_placements((2, 2), [Shard(-2), Shard(-2)], order=(1, 0))[0] == _StridedShard(-2, split_factor=2)


def test_the_fsdp_and_tp_order_of_torch_s_own_documentation_is_reproduced() -> None:
    strided = strided_placements((2, 2), [Shard(0), Shard(0)], order=(1, 0))
    assert strided == (_StridedShard(0, split_factor=2), Shard(0))
    offsets = [chunks[0].offsets[0] for chunks in mesh_chunks((8, 8), (2, 2), strided)]
    assert offsets == [0, 4, 2, 6]


def test_hfsdp_cuts_the_inner_axis_first_and_the_outer_one_within_the_inner_shard() -> None:
    # Mesh (outer 2, inner 3) over 10 rows: inner shards are 0-3, 4-7 and 8-9, each halved by the outer axis.
    table = mesh_chunks((10, 4), (2, 3), [Shard(0), Shard(0)], order=(1, 0))
    rows = [chunk.ranges[0] for chunks in table for chunk in chunks]
    assert rows == [(0, 2), (4, 6), (8, 9), (2, 4), (6, 8), (9, 10)]

    even = EvenLayout.build([(10, 4)], 3)
    regions = [even.region(0, inner).shard(0, 2, outer) for outer in range(2) for inner in range(3)]
    assert tuple(region.chunks for region in regions) == table


def test_a_flat_shard_strided_over_an_outer_axis_falls_apart_into_its_boxes() -> None:
    # TP cuts columns after an interleaving of two blocks: the local (4, 2) tensor is columns 0 and 2 of (4, 4).
    outer = Region.whole((4, 4)).strided_shard(1, 2, 0, split_factor=2)
    layout = FlatLayout.build([outer.shape], 2, alignment=2)
    assert layout.chunks(0, 1, outer_region=outer) == (Chunk((2, 0), (2, 1)), Chunk((2, 2), (2, 1)))


def fused_table(tp_rows: int, columns: int, dp_cut: int, component: Range) -> list[tuple[Chunk, ...]]:
    """Boxes of one component of a fused weight, by rank of a (dp 2, tp 2) mesh: TP outermost, DP cut by the argument.

    Every TP rank holds rows `component` of its own fused rows; on disk, the component is joined over the TP ranks.
    """
    shard_rows = max(dp_cut, tp_rows - dp_cut)
    layout = FlatLayout(
        shapes=((tp_rows, columns),),
        keep=(Rows(1),),
        num_shards=2,
        alignment=1,
        shard_numel=shard_rows * columns,
        starts=((shard_rows - dp_cut) * columns,),
    )
    box = Chunk((component.start, 0), (component.numel, columns))
    table = []
    for dp, tp in coordinates((2, 2)):
        outer = Region.whole((2 * component.numel, columns)).shard(0, 2, tp)
        (owned,) = layout.chunks(0, dp)
        table.append(outer.take(box.intersection(owned).relative_to(box)).chunks)
    return table


def test_an_uneven_cut_inside_tp_blocks_splits_a_fused_gate_and_up_weight() -> None:
    # [8, 2] over TP 2 and DP 2: TP-local [4, 2], of which DP rank 0 owns 3 rows.
    gate, up = (fused_table(4, 2, 3, rows) for rows in (Range(0, 2), Range(2, 4)))
    assert gate == [(((0, 0), (2, 2)),), (((2, 0), (2, 2)),), (), ()]
    assert up == [(((0, 0), (1, 2)),), (((2, 0), (1, 2)),), (((1, 0), (1, 2)),), (((3, 0), (1, 2)),)]


def test_an_empty_piece_of_a_component_lies_at_the_component_s_end() -> None:
    component, owned = Chunk((0, 0), (2, 2)), Chunk((3, 0), (1, 2))
    assert component.intersection(owned) == Chunk((2, 0), (0, 2))


@pytest.mark.parametrize(
    ("component", "chunks"),
    [
        (Range(0, 2), {(0, 2), (2, 2)}),  # query
        (Range(2, 4), {(0, 2), (2, 2)}),  # key
        (Range(4, 8), {(0, 2), (4, 2), (2, 2), (6, 2)}),  # value
        (Range(8, 12), {(0, 4), (4, 4)}),  # z
        (Range(12, 14), {(0, 2), (2, 2)}),  # beta
        (Range(14, 16), {(0, 2), (2, 2)}),  # alpha
    ],
)
def test_an_uneven_cut_inside_tp_blocks_splits_a_fused_input_projection(
    component: Range, chunks: set[tuple[int, int]]
) -> None:
    # [32, 1] over TP 2 and DP 2: TP-local 16 rows of six components, of which DP rank 0 owns 6 rows.
    table = fused_table(16, 1, 6, component)
    assert {(chunk.offsets[0], chunk.sizes[0]) for rank_chunks in table for chunk in rank_chunks} == chunks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placements": [Shard(0)]}, r"Expected one placement an axis \(2 axes\), got 1"),
        ({"placements": [Shard(0), Shard(2)]}, r"Expected a dim of a tensor of shape \(4, 6\), got 2"),
        ({"mesh_shape": (2, 0)}, "Expected ranks along every axis of at least 1, got 0"),
        ({"order": (0, 0)}, r"Expected an order of the axes 0..1, each once, got \(0, 0\)"),
        ({"placements": [_StridedShard(0, split_factor=2), Shard(0)], "order": (1, 0)}, "says the order itself"),
    ],
)
def test_bad_meshes_are_refused_by_name_and_value(arguments: dict[str, object], message: str) -> None:
    good = {"shape": (4, 6), "mesh_shape": (2, 2), "placements": [Shard(0), Shard(0)]}
    with pytest.raises(ValueError, match=message):
        mesh_chunks(**(good | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), RaggedShard((0, 1, 4))])
def test_a_coordinate_outside_the_mesh_is_refused(placement: Placement) -> None:
    for order in (None, (0,)):
        with pytest.raises(ValueError, match=r"Expected a rank in 0..1 \(num_shards=2\), got 2"):
            mesh_region((4,), (2,), [placement], (2,), order=order)
        for coordinate in ((), (0, 0)):
            with pytest.raises(ValueError, match=r"Expected one coordinate an axis \(1 axes\), got \("):
                mesh_region((4,), (2,), [placement], coordinate, order=order)


def test_a_box_outside_the_local_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inside the local tensor of shape \(4, 2\)"):
        Region.whole((4, 2)).take(Chunk((3, 0), (2, 2)))


def test_a_layout_inside_a_region_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected a region of shape \(4, 2\), .* got one of \(8, 2\)"):
        EvenLayout.build([(4, 2)], 2).chunks(0, 0, outer_region=Region.whole((8, 2)))


@given(placed(strided=True), st.booleans(), st.data())
def test_owners_are_the_ranks_with_chunks(
    tensor: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], ragged: bool, data: st.DataObject
) -> None:
    shape, mesh_shape, placements = tensor
    order = None
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        order = data.draw(st.permutations(range(len(mesh_shape))))
    if ragged:  # One axis cuts the rows that the others leave whole.
        num_cuts = mesh_shape[0] - 1
        cuts = sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=num_cuts, max_size=num_cuts)))
        others = [placement for placement in placements[1:] if getattr(placement, "dim", 1) != 0]
        mesh_shape, order = mesh_shape[: len(others) + 1], None
        placements = [RaggedShard((0, *cuts, shape[0])), *others]
    expected = tuple(bool(chunks) for chunks in mesh_chunks(shape, mesh_shape, placements, order=order))
    assert mesh_owners(shape, mesh_shape, placements, order=order) == expected


def test_owners_on_a_large_mesh_need_no_region_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella_layout._mesh.mesh_region", None)
    inner_first = strided_placements((128, 128), [Shard(0), Shard(0)], order=(1, 0))
    assert sum(mesh_owners((1024, 8), (128, 128), [Replicate(), Shard(0)])) == 128 * 128
    assert sum(mesh_owners((1024, 8), (16384,), [Shard(0)])) == 1024
    assert sum(mesh_owners((65536, 8), (128, 128), inner_first)) == 128 * 128
    layout = FlatLayout.build([(1024, 8)], 16384, alignment=8)
    assert sum(mesh_owners((1024, 8), (16384,), [layout.placement(0)])) == 1024
