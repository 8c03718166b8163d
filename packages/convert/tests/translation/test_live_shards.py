"""Shards of fused tensors are written by component, at any tensor-parallel size, with rows cut anywhere.

Tensors, cuts and expected columns come from a run of Megatron's own splitter on four ranks: two data-parallel by
two tensor-parallel, the latter outermost. Values are flat indices: a misplaced value shows.
"""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lamella_checkpoint import Correspondence, load, save
from lamella_checkpoint._state.shards import LiveCut, LivePiece, LiveShard, written_pieces
from lamella_convert._translation.megatron import BRIDGE, RELEASE_0_19, Dialect
from lamella_convert._translation.megatron_model import from_megatron_model
from lamella_files import places_in_memory
from lamella_layout import Chunk, Range, Region, mesh_region
from lamella_testing import run_ranks

FC1, IN_PROJ = "mlp.linear_fc1.weight", "self_attention.in_proj.weight"
SHAPES = {FC1: (8, 2), "mlp.linear_fc2.weight": (2, 4), IN_PROJ: (32, 1)}
PARTS = ("query", "key", "value", "z", "beta", "alpha")
GDN_SIZES = {"qk": 4, "v": 8, "nvh": 4}

# By rank, dp * 2 + tp: of the tensor-parallel rank's part, laid out flat.
FC1_SLICES = [Range(0, 6), Range(0, 6), Range(6, 8), Range(6, 8)]
IN_PROJ_SLICES = [Range(0, 6), Range(0, 6), Range(6, 16), Range(6, 16)]

ON_DISK: dict[str, tuple[list[Any], list[Any]]] = {
    f"{FC1}_w": ([[0, 1], [2, 3], [8, 9], [10, 11]], [((0, 0), (2, 2)), ((2, 0), (2, 2))]),
    f"{FC1}_v": ([[4, 5], [6, 7], [12, 13], [14, 15]], [((row, 0), (1, 2)) for row in range(4)]),
    f"{IN_PROJ}.query": ([0, 1, 16, 17], [(0, 2), (2, 2)]),
    f"{IN_PROJ}.key": ([2, 3, 18, 19], [(0, 2), (2, 2)]),
    f"{IN_PROJ}.value": ([4, 5, 6, 7, 20, 21, 22, 23], [(0, 2), (2, 2), (4, 2), (6, 2)]),
    f"{IN_PROJ}.z": ([8, 9, 10, 11, 24, 25, 26, 27], [(0, 4), (4, 4)]),
    f"{IN_PROJ}.beta": ([12, 13, 28, 29], [(0, 2), (2, 2)]),
    f"{IN_PROJ}.alpha": ([14, 15, 30, 31], [(0, 2), (2, 2)]),
}


def flat_indices(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def cut(num_tp: int = 2, dialect: Dialect = BRIDGE) -> LiveCut:
    return LiveCut(from_megatron_model(SHAPES, sizes={"tp": num_tp, **GDN_SIZES}, dialect=dialect), to="left")


def shard_of(name: str, rank: int) -> LiveShard:
    slices = FC1_SLICES if name == FC1 else IN_PROJ_SLICES
    return LiveShard.of_rows(SHAPES[name], slices[rank], tp_dim=0, num_tp=2, tp_rank=rank % 2)


def held_of(name: str, rank: int) -> torch.Tensor:
    """The rank's rows of the global tensor."""
    indices, shard = flat_indices(SHAPES[name]), shard_of(name, rank)
    return torch.cat([indices[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]] for chunk in shard.region.chunks])


def as_table(pieces: Iterable[LivePiece]) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    return {piece.name: (piece.chunk.offsets, piece.values.flatten().tolist()) for piece in pieces}


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, {f"{FC1}_w": ((0, 0), [0, 1, 2, 3]), f"{FC1}_v": ((0, 0), [4, 5])}),
        (1, {f"{FC1}_w": ((2, 0), [8, 9, 10, 11]), f"{FC1}_v": ((2, 0), [12, 13])}),
        (2, {f"{FC1}_v": ((1, 0), [6, 7])}),
        (3, {f"{FC1}_v": ((3, 0), [14, 15])}),
    ],
)
@pytest.mark.parametrize("shape", [(-1, 2), (-1,)])
def test_halves_of_a_gated_layer(
    rank: int, expected: dict[str, tuple[tuple[int, ...], list[float]]], shape: tuple[int, ...]
) -> None:
    rows = held_of(FC1, rank)
    assert as_table(cut().pieces(FC1, shard_of(FC1, rank), rows.reshape(shape))) == expected


def test_data_parallel_shards_of_one_tensor_parallel_rank_share_the_value_component() -> None:
    pieces = [
        as_table(
            cut(num_tp=1).pieces(
                IN_PROJ, LiveShard.of_rows((32, 1), elements), flat_indices((32, 1))[elements.start : elements.stop]
            )
        )
        for elements in [Range(0, 12), Range(12, 32)]
    ]
    assert pieces[0] == {
        f"{IN_PROJ}.query": ((0, 0), [0, 1, 2, 3]),
        f"{IN_PROJ}.key": ((0, 0), [4, 5, 6, 7]),
        f"{IN_PROJ}.value": ((0, 0), [8, 9, 10, 11]),
    }
    assert pieces[1] == {
        f"{IN_PROJ}.value": ((4, 0), [12, 13, 14, 15]),
        f"{IN_PROJ}.z": ((0, 0), list(range(16, 24))),
        f"{IN_PROJ}.beta": ((0, 0), [24, 25, 26, 27]),
        f"{IN_PROJ}.alpha": ((0, 0), [28, 29, 30, 31]),
    }


def test_release_0_19_stores_gated_delta_projections_in_rank_order() -> None:
    pieces = cut(dialect=RELEASE_0_19).pieces(IN_PROJ, shard_of(IN_PROJ, 3), held_of(IN_PROJ, 3))
    assert as_table(pieces) == {IN_PROJ: ((22, 0), list(range(22, 32)))}


def global_dtensor(name: str, mesh: DeviceMesh) -> torch.Tensor:
    """As in Megatron-FSDP: the whole mesh, tensor-parallel outermost, beyond plain placements."""
    rows = held_of(name, dist.get_rank())
    shape = torch.Size(SHAPES[name])
    return DTensor.from_local(
        rows, mesh, [Shard(0), Shard(0)], run_check=False, shape=shape, stride=flat_indices(shape).stride()
    )


def tp_local_dtensor(name: str, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor-parallel rank's part, on the data-parallel axis alone, unaware of further parts."""
    rows = held_of(name, dist.get_rank())
    shape = torch.Size([SHAPES[name][0] // 2, SHAPES[name][1]])
    stride = flat_indices(shape).stride()
    return DTensor.from_local(rows, mesh["dp"], [Shard(0)], run_check=False, shape=shape, stride=stride)


def plain(name: str, mesh: DeviceMesh) -> torch.Tensor:
    return held_of(name, dist.get_rank())


Make = Callable[[str, DeviceMesh], torch.Tensor]


def save_by_four(path: Path, make: Make) -> None:
    def save_mine() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensors = {name: (shard_of(name, dist.get_rank()), make(name, mesh)) for name in [FC1, IN_PROJ]}
        dcp.save(dict(written_pieces(cut(), tensors)), checkpoint_id=path)  # type: ignore[attr-defined]

    run_ranks(save_mine, 4)


def stored(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    """The values read by one process without a group, and the chunks in the metadata."""
    metadata: dict[str, TensorStorageMetadata] = {}
    for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        metadata[name] = entry
    tensors = {name: torch.full(tuple(info.size), -1.0) for name, info in metadata.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A warning: no group is initialized.
        dcp.load(tensors, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    chunks = {
        name: sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in info.chunks)
        for name, info in metadata.items()
    }
    return tensors, chunks


@pytest.mark.parametrize("make", [global_dtensor, tp_local_dtensor, plain])
def test_four_ranks_write_the_columns_that_one_process_reads(tmp_path: Path, make: Make) -> None:
    save_by_four(tmp_path / "saved", make)
    tensors, chunks = stored(tmp_path / "saved")
    assert tensors.keys() == ON_DISK.keys()
    for name, (values, boxes) in ON_DISK.items():
        assert tensors[name].squeeze(-1).tolist() == values, name
        expected = [box if isinstance(box[0], tuple) else ((box[0], 0), (box[1], 1)) for box in boxes]
        assert chunks[name] == sorted(expected), name


def test_by_its_own_coordinates_half_of_a_tensor_would_be_lost(tmp_path: Path) -> None:
    """The reason to place a tensor-parallel rank's part by its parameter: DCP takes any places without an error."""

    def save_mine() -> None:
        rank = dist.get_rank()
        rows = Range(0, 6) if rank < 2 else Range(6, 16)
        shard = LiveShard.of_rows((16, 1), rows)
        model = from_megatron_model({IN_PROJ: (16, 1)}, sizes={"tp": 1, "qk": 2, "v": 4, "nvh": 2}, dialect=BRIDGE)
        tensors = {IN_PROJ: (shard, held_of(IN_PROJ, rank))}
        dcp.save(dict(written_pieces(LiveCut(model, to="left"), tensors)), checkpoint_id=tmp_path / "lost")  # type: ignore[attr-defined]

    run_ranks(save_mine, 4)
    tensors, _ = stored(tmp_path / "lost")
    elements = {value for tensor in tensors.values() for value in tensor.flatten().tolist()}
    assert len(elements) == 16
    save_by_four(tmp_path / "whole", tp_local_dtensor)
    tensors, _ = stored(tmp_path / "whole")
    elements = {value for part in PARTS for value in tensors[f"{IN_PROJ}.{part}"].flatten().tolist()}
    assert len(elements) == 32


def test_meshes_that_say_their_order_are_believed(tmp_path: Path) -> None:
    """Megatron-FSDP's: with even cuts, the only sign of tensor-parallel ranks coming first."""
    values = flat_indices((8, 2))

    def save_and_load() -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh._shard_order = [1, 0]  # type: ignore[attr-defined]
        dp, tp = divmod(dist.get_rank(), 2)
        part = values.chunk(2)[tp].chunk(2)[dp]
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(DTensor.from_local(part.clone(), mesh, [Shard(0), Shard(0)]))
        save(tmp_path / "saved", model=model)
        with torch.no_grad():
            model.weight.to_local().zero_()  # type: ignore[attr-defined]
        load(tmp_path / "saved", model=model)
        return torch.equal(model.weight.to_local(), part)  # type: ignore[attr-defined]

    assert run_ranks(save_and_load, 4) == [True] * 4
    tensors, _ = stored(tmp_path / "saved")
    assert torch.equal(tensors["model.weight"], values)


@pytest.mark.parametrize("rank_tensor", [flat_indices((4, 2)), flat_indices((8, 2)), flat_indices((2, 2))])
def test_a_tensor_of_another_size_than_the_ranks_shard_is_refused(rank_tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"the 6 elements that this rank holds of '{FC1}'.*got {rank_tensor.numel()}"):
        cut().pieces(FC1, shard_of(FC1, 0), rank_tensor)


def test_elements_that_split_a_row_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"whole rows of a part of shape \(4, 2\), got elements Range\(start=0, stop=5\)"
    ):
        LiveShard.of_rows((8, 2), Range(0, 5), tp_dim=0, num_tp=2)


def test_pieces_are_views_that_a_read_may_fill() -> None:
    rows = held_of(FC1, 0)
    for piece in cut().pieces(FC1, shard_of(FC1, 0), rows):
        piece.values.fill_(-1)
    assert rows.tolist() == [[-1, -1]] * 3


def test_a_live_tensor_that_no_rule_matches_keeps_its_name_and_box() -> None:
    region = Region.whole((4, 4)).shard(1, 2, 1).shard(0, 2, 0)
    shard = LiveShard(shape=(4, 4), region=region)
    [piece] = cut().pieces("linear_proj.weight", shard, torch.ones(2, 2))
    assert (piece.name, piece.chunk) == ("linear_proj.weight", Chunk((0, 2), (2, 2)))
    assert cut().shapes("linear_proj.weight", (4, 4)) == {"linear_proj.weight": (4, 4)}


def test_a_shift_is_not_for_live_tensors() -> None:
    with pytest.raises(ValueError, match="got a shift"):
        LiveCut([Correspondence.rename("a", "b", (2,), shift=1.0)], to="right")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ranks_of_any_mesh_write_every_element_once_and_where_it_belongs(data: st.DataObject) -> None:
    num_dp, num_tp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    qk, v, nvh = (num_tp * data.draw(st.integers(1, 3)) for _ in range(3))
    columns = data.draw(st.integers(1, 3))
    shape = (2 * qk + 2 * v + 2 * nvh, columns)
    sizes = {"tp": num_tp, "qk": qk, "v": v, "nvh": nvh}
    live_cut = LiveCut(from_megatron_model({IN_PROJ: shape}, sizes=sizes), to="left")
    indices = flat_indices(shape)
    written = {name: torch.full(part, -1.0) for name, part in live_cut.shapes(IN_PROJ, shape).items()}
    for dp in range(num_dp):
        for tp in range(num_tp):
            region = mesh_region(shape, (num_dp, num_tp), [Shard(0), Shard(0)], (dp, tp), order=(1, 0))
            rank_rows = torch.zeros(region.shape)
            for chunk, box in zip(region.chunks, places_in_memory(region), strict=True):
                rank_rows[box.offsets[0] : box.offsets[0] + box.sizes[0]] = indices[
                    chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]
                ]
            for piece in live_cut.pieces(IN_PROJ, LiveShard(shape=shape, region=region), rank_rows):
                rows = slice(piece.chunk.offsets[0], piece.chunk.offsets[0] + piece.chunk.sizes[0])
                assert (written[piece.name][rows] == -1).all()
                written[piece.name][rows] = piece.values
    ranks = [indices[rank * shape[0] // num_tp : (rank + 1) * shape[0] // num_tp] for rank in range(num_tp)]
    parts = [part.split([size // num_tp for size in (qk, qk, v, v, nvh, nvh)]) for part in ranks]  # type: ignore[no-untyped-call]
    for index, name in enumerate(PARTS):
        assert torch.equal(written[f"{IN_PROJ}.{name}"], torch.cat([rank_part[index] for rank_part in parts]))
