"""Reads equal the stored values bit by bit: any boxes, dtypes and devices' strides, by one thread or several."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lamella_checkpoint import CheckpointDamaged, Wanted, load, save
from lamella_checkpoint._base.live_boxes import local_boxes
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_files import whole_box
from lamella_files._archives import items as _items
from lamella_layout import Chunk
from lamella_testing import run_ranks
from lamella_testing.bits import bits
from lamella_testing.harmed_files import flip
from lamella_testing.plain_dcp import change_metadata, dcp_save
from lamella_testing.reads import counted_reads
from lamella_testing.tiny import Kit

SHAPES = [(), (1,), (7,), (0, 3), (5, 3), (4, 1, 3), (64, 3, 40), (3, 300, 40)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return dcp_save({"model": tensors}, path)


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_items, "num_threads", lambda: request.param)


@pytest.fixture(params=[True, False], ids=["verified", "unverified"])
def verify(request: pytest.FixtureRequest) -> bool:
    is_verified: bool = request.param
    return is_verified


def boxes(shape: tuple[int, ...]) -> Iterator[Chunk]:
    """All of it, each edge, and a part inside."""
    yield whole_box(shape)
    for dim, size in enumerate(shape):
        for start, stop in {(0, size // 2), (size // 2, size), (size // 3, size - size // 3)}:
            box = [(0, length) for length in shape]
            box[dim] = (start, stop)
            yield Chunk(tuple(a for a, _ in box), tuple(b - a for a, b in box))
    if shape:
        yield Chunk(tuple(size // 3 for size in shape), tuple(size // 2 for size in shape))


@pytest.mark.parametrize("small_bytes", [0, 1 << 30])
def test_any_box_of_any_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None, verify: bool, small_bytes: int
) -> None:
    monkeypatch.setattr(_items, "_SMALL_BYTES", small_bytes)
    monkeypatch.setattr(_items, "_PIECE_BYTES", 1000)
    tensors = {f"{shape} {dtype}": values(shape, dtype) for shape in SHAPES for dtype in DTYPES}
    stored = StoredCheckpoint(saved(tmp_path / "a", tensors), verify=verify)
    reads, expected = [], []
    for name, tensor in tensors.items():
        for box in boxes(tuple(tensor.shape)):
            reads.append(Wanted(f"model.{name}", box, torch.empty(box.sizes, dtype=tensor.dtype)))
            expected.append(tensor[tuple(slice(along.start, along.stop) for along in box.ranges)])
    stored.read(reads)
    for read, part in zip(reads, expected, strict=True):
        assert torch.equal(bits(read.into), bits(part)), (read.name, read.chunk)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=4, max_size=4),
    piece=st.integers(1, 200),
    verified=st.booleans(),
)
def test_boxes_read_from_dcp_are_slices_of_the_full_tensor(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    cuts: list[tuple[float, float]],
    piece: int,
    verified: bool,
) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    path = saved(tmp_path_factory.mktemp("a"), {"x": tensor})
    slices = [slice(*sorted((int(a * size), int(b * size) + 1))) for (a, b), size in zip(cuts, shape, strict=False)]
    expected = tensor[tuple(slices)]
    box = Chunk(
        tuple(dim_slice.indices(size)[0] for dim_slice, size in zip(slices, shape, strict=False)), tuple(expected.shape)
    )
    into = torch.empty_like(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_items, "_SMALL_BYTES", 0)
        patch.setattr(_items, "_PIECE_BYTES", piece)
        StoredCheckpoint(path, verify=verified).read([Wanted("model.x", box, into)])
    assert torch.equal(into, expected)


def test_stored_values_are_cast_into_targets_of_other_dtypes_and_strides(tmp_path: Path, verify: bool) -> None:
    tensor = values((300, 40), torch.float32) + 0.3
    stored = StoredCheckpoint(saved(tmp_path / "a", {"x": tensor}), verify=verify)
    half, transposed, leaf = (
        torch.zeros(300, 40, dtype=torch.bfloat16),
        torch.zeros(40, 300).t(),
        torch.zeros(300, 40, requires_grad=True),
    )
    stored.read([Wanted("model.x", whole_box((300, 40)), into) for into in (half, transposed, leaf)])
    assert torch.equal(half, tensor.bfloat16()) and torch.equal(transposed, tensor) and torch.equal(leaf, tensor)
    assert leaf.grad_fn is None


@pytest.mark.usefixtures("threads")
def test_inference_tensors_are_filled_by_any_thread(tmp_path: Path, verify: bool) -> None:
    tensors = {name: values((300, 40), torch.float32) + number for number, name in enumerate("abc")}
    stored = StoredCheckpoint(saved(tmp_path / "a", tensors), verify=verify)
    with torch.inference_mode():
        targets = {name: torch.zeros(300, 40, dtype=torch.float64) for name in tensors}
        stored.read([Wanted(f"model.{name}", whole_box((300, 40)), into) for name, into in targets.items()])
    assert all(torch.equal(targets[name], tensor.double()) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "tensor",
    [
        values((300, 40), torch.float32).t(),
        values((8, 3, 32, 32), torch.float32).to(memory_format=torch.channels_last),
        values((300, 40), torch.complex64).conj(),
    ],
    ids=["transposed", "channels last", "conjugated"],
)
def test_transposed_channels_last_and_conjugated_tensors_are_read_equal(
    tmp_path: Path, verify: bool, tensor: torch.Tensor
) -> None:
    stored = StoredCheckpoint(saved(tmp_path / "a", {"x": tensor}), verify=verify)
    into = torch.empty(tensor.shape, dtype=tensor.dtype)
    stored.read([Wanted("model.x", whole_box(tensor.shape), into)])
    assert torch.equal(into, tensor)


@pytest.mark.parametrize("num_rows", [4, 4000], ids=["small", "large"])
def test_lazily_conjugated_and_negated_buffers_are_saved_and_loaded_equal(tmp_path: Path, num_rows: int) -> None:
    numbers = torch.complex(torch.rand(num_rows), torch.rand(num_rows))

    def views(base: torch.Tensor) -> nn.Module:
        model = nn.Module()
        for name, rows in (("all", slice(None)), ("part", slice(1, -1))):
            model.register_buffer(f"conjugated_{name}", base.clone()[rows].conj())
            model.register_buffer(f"negated_{name}", base.clone()[rows].conj().imag)
        return model

    model, other = views(numbers), views(torch.zeros_like(numbers))
    save(tmp_path / "a", model=model)
    load(tmp_path / "a", model=other)
    assert all(torch.equal(buffer, other.get_buffer(name)) for name, buffer in model.named_buffers())


def test_a_stored_chunk_is_read_once_however_many_boxes_want_it(tmp_path: Path) -> None:
    stored = StoredCheckpoint(saved(tmp_path / "a", {"x": values((1000, 64), torch.float32)}))
    with counted_reads() as sizes:
        stored.read([Wanted("model.x", Chunk((row, 0), (1, 64)), torch.empty(1, 64)) for row in range(1000)])
    assert 256_000 <= sum(sizes) < 256_000 + 10_000


@pytest.mark.parametrize("box", [Chunk((500, 0), (2, 64)), Chunk((500, 8), (2, 8))])
def test_of_a_large_chunk_only_the_rows_of_a_box_are_read(tmp_path: Path, box: Chunk) -> None:
    stored = StoredCheckpoint(saved(tmp_path / "a", {"x": values((100_000, 64), torch.float32)}), verify=False)
    with counted_reads() as sizes:
        stored.read([Wanted("model.x", box, torch.empty(box.sizes))])
    assert sum(sizes) < 10_000


def test_a_large_chunk_that_is_read_part_by_part_is_verified_once(tmp_path: Path) -> None:
    tensor = values((1000, 64), torch.float32)
    stored = StoredCheckpoint(saved(tmp_path / "a", {"x": tensor}))
    with counted_reads() as sizes:
        for row in range(0, 1000, 10):
            stored.read([Wanted("model.x", Chunk((row, 0), (10, 64)), into := torch.empty(10, 64))])
            assert torch.equal(into, tensor[row : row + 10])
    assert tensor.nbytes <= sum(sizes) < 3.5 * tensor.nbytes


def test_of_long_rows_only_the_wanted_part_is_read(tmp_path: Path) -> None:
    tensor = values((4, 1 << 20), torch.uint8)
    stored = StoredCheckpoint(saved(tmp_path / "a", {"x": tensor}), verify=False)
    into = torch.empty(4, 1 << 19, dtype=torch.uint8)
    with counted_reads() as sizes:
        stored.read([Wanted("model.x", Chunk((0, 100), (4, 1 << 19)), into)])
    assert torch.equal(into, tensor[:, 100 : 100 + (1 << 19)]) and sum(sizes) < (1 << 21) + 10_000


def test_contiguous_tensors_are_read_without_memory_beside_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = values((1000, 1000), torch.float32)
    stored = StoredCheckpoint(saved(tmp_path / "a", {"x": tensor}))
    into = torch.empty(1000, 1000)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory beside the target"))
    stored.read([Wanted("model.x", whole_box((1000, 1000)), into)])
    assert torch.equal(into, tensor)


def test_files_without_requested_chunks_stay_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_from_each() -> None:
        local = torch.full((2, 3), float(torch.distributed.get_rank()))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (3,))
        dcp.save(  # type: ignore[attr-defined]
            {"x": torch.distributed.tensor.DTensor.from_local(local, mesh, [torch.distributed.tensor.Shard(0)])},
            checkpoint_id=tmp_path / "a",
        )

    run_ranks(save_from_each, 3)
    stored = StoredCheckpoint(tmp_path / "a")
    opened: list[str] = []
    os_open = os.open

    def open_and_note(path: Path, *flags: Any) -> int:
        opened.append(os.path.basename(path))
        return os_open(path, *flags)

    monkeypatch.setattr(os, "open", open_and_note)
    into = torch.empty(3, 3)
    stored.read([Wanted("x", Chunk((1, 0), (3, 3)), into)])
    assert into[:, 0].tolist() == [0, 1, 1] and sorted(opened) == ["__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("shape", [(3, 3), (200, 200)])
def test_a_flipped_bit_in_a_checkpoint_of_plain_torch_is_found(
    tmp_path: Path, threads: None, shape: tuple[int, ...]
) -> None:
    path = saved(tmp_path / "a", {"x": torch.zeros(shape), "y": torch.zeros(shape)})
    position = (path / "__0_0.distcp").read_bytes().rfind(b"\0" * 36)
    flip(path / "__0_0.distcp", position)
    names = {"model.x", "model.y"}
    for box in (whole_box(shape), Chunk((0, 0), (1, 1))):
        reads = [Wanted(name, box, torch.empty(box.sizes)) for name in names]
        with pytest.raises(CheckpointDamaged, match=r"with the checksum \w+ for 'model.[xy]'") as info:
            StoredCheckpoint(path).read(reads)
        assert info.value.file == str(path / "__0_0.distcp")
        StoredCheckpoint(path, verify=False).read(reads)


def test_chunks_that_overlap_and_leave_a_hole_are_no_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", {"x": torch.zeros(6, 2)})

    def overlap(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["model.x"]
        assert isinstance(entry, TensorStorageMetadata)
        info = metadata.storage_data.pop(MetadataIndex("model.x", (0, 0)))
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size((3, 2))) for offsets in ((0, 0), (2, 0))]
        entry.chunks = chunks
        metadata.storage_data |= {MetadataIndex("model.x", chunk.offsets): info for chunk in chunks}

    change_metadata(path, overlap)
    with pytest.raises(CheckpointDamaged, match="overlap"):
        StoredCheckpoint(path).read([Wanted("model.x", Chunk((0, 0), (1, 2)), torch.empty(1, 2))])


def test_an_item_of_another_shape_is_not_taken_for_the_chunk(tmp_path: Path, verify: bool) -> None:
    for shape in ((6, 2), (600, 20)):
        path = saved(tmp_path / str(shape), {"x": torch.zeros(shape), "y": torch.zeros(shape).t().contiguous()})

        def exchange(metadata: Metadata) -> None:
            x, y = MetadataIndex("model.x", (0, 0)), MetadataIndex("model.y", (0, 0))
            metadata.storage_data[x], metadata.storage_data[y] = metadata.storage_data[y], metadata.storage_data[x]

        change_metadata(path, exchange)
        with pytest.raises(CheckpointDamaged, match="expected a chunk of shape"):
            StoredCheckpoint(path, verify=verify).read([Wanted("model.x", whole_box(shape), torch.empty(shape))])


def test_local_boxes_of_any_sharding_hold_the_global_tensors_values(kit: Kit) -> None:
    """HSDP, several axes on one dim, uneven and strided shards: each box holds the global tensor's values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    def all_placements() -> bool:
        mesh = init_device_mesh("cpu", (2, 2))
        placements: list[Placement] = [Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2)]
        for outer in placements:
            for inner in placements[:3]:
                num_rows = 8 if isinstance(outer, _StridedShard) else 7  # torch itself refuses strides that do not fit
                matrix = torch.arange(num_rows * 5).reshape(num_rows, 5)
                covered = torch.zeros_like(matrix)
                tensor = distribute_tensor(matrix, mesh, [outer, inner])
                for chunk, local in local_boxes(tensor):
                    slices = tuple(slice(along.start, along.stop) for along in chunk.ranges)
                    assert torch.equal(local, matrix[slices]), (outer, inner)
                    covered[slices] = 1
                torch.distributed.all_reduce(covered)
                assert bool((covered >= 1).all())
        return True

    assert run_ranks(all_placements, 4) == [True] * 4


def test_boxes_of_uneven_shards_come_from_the_local_tensors_chunk_list() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    def uneven() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
        local = torch.zeros((3, 1)[rank], 2)
        dtensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1))
        with pytest.raises(ValueError, match="bring `__create_chunk_list__`"):
            local_boxes(dtensor)
        chunk = ChunkStorageMetadata(torch.Size(((0, 3)[rank], 0)), local.shape)
        dtensor._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
        return [(tuple(box.chunk.offsets), tuple(box.chunk.sizes)) for box in local_boxes(dtensor)]

    assert run_ranks(uneven, 2) == [[((0, 0), (3, 2))], [((3, 0), (1, 2))]]
