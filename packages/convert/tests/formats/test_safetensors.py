"""Safetensors files and indices, read box by box, and with damage refused by file and tensor."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lamella_checkpoint import CheckpointDamaged, Wanted
from lamella_checkpoint.testing import read_tensor
from lamella_convert._formats import safetensors as _safetensors
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.safetensors_header import DTYPES
from lamella_files import box_of, whole_box
from lamella_files._base import file_boxes as _file_boxes
from lamella_layout import Chunk
from lamella_testing.bits import random_bits, same_bits
from lamella_testing.reads import counted_reads

Box = tuple[tuple[int, ...], Chunk]
Sharded = tuple[Path, dict[str, torch.Tensor]]


def write_raw(path: Path, header: object, data: bytes = b"", *, nbytes: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if nbytes is None else nbytes).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype is not torch.float8_e8m0fnu], ids=str)
def test_every_dtype_that_the_library_writes_is_read_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": random_bits((3, 5), dtype), "scalar": random_bits((), dtype), "empty": random_bits((0, 4), dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert set(source.tensors) == set(tensors) and not source.objects
    for name, tensor in tensors.items():
        assert source.tensors[name].dtype == dtype
        assert same_bits(read_tensor(source, name), tensor)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True)]
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return tuple(shape), Chunk(tuple(starts), sizes)


@pytest.mark.parametrize(("buffer", "gap"), [(8 << 20, 32 << 10), (40, 0), (16, 12), (8, 0)])
def test_any_box_of_a_safetensors_file_is_read_with_any_buffer_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int, gap: int
) -> None:
    monkeypatch.setattr(_file_boxes, "BUFFER_NBYTES", buffer)
    monkeypatch.setattr(_file_boxes, "_GAP_NBYTES", gap)

    @settings(max_examples=60, deadline=None)
    @given(boxes(), st.sampled_from([torch.float32, torch.float64]), st.booleans())
    def check(box: Box, dtype: torch.dtype, transposed: bool) -> None:
        shape, chunk = box
        tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        save_file({"a": tensor, "b": -tensor}, tmp_path / "a.safetensors")
        source = SafetensorsSource(tmp_path / "a.safetensors")
        into = torch.full(chunk.sizes, torch.nan, dtype=dtype)
        if transposed:
            into = torch.full(chunk.sizes[::-1], torch.nan, dtype=dtype).permute(list(range(len(shape)))[::-1])
        source.read([Wanted("b", chunk, into)])
        assert torch.equal(into, -box_of(tensor, chunk).to(dtype))

    check()


@settings(max_examples=60, deadline=None)
@given(boxes(), st.integers(1, 30))
def test_pieces_are_a_box_once_in_the_order_of_its_memory(box: Box, max_numel: int) -> None:
    shape, chunk = box
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    cuts = list(_file_boxes.pieces(chunk, max_numel))
    assert all(0 < cut.numel <= max_numel for cut in cuts)
    elements = [index for cut in cuts for index in box_of(tensor, cut).flatten().tolist()]
    assert elements == box_of(tensor, chunk).flatten().tolist()


def test_a_read_touches_only_the_rows_that_are_wanted(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000, 1000), "b": torch.zeros(1000, 1000)}, tmp_path / "a.safetensors")
    source = SafetensorsSource(tmp_path / "a.safetensors")
    with counted_reads() as sizes:
        read_tensor(source, "b", Chunk((10, 0), (20, 1000)))
    assert sum(sizes) == 20 * 1000 * 4


def test_a_column_of_long_rows_is_read_without_the_bytes_between(tmp_path: Path) -> None:
    tensor = torch.arange(4 * 100_000, dtype=torch.float32).reshape(4, 100_000)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    source = SafetensorsSource(tmp_path / "a.safetensors")
    with counted_reads() as sizes:
        assert torch.equal(read_tensor(source, "a", Chunk((0, 5), (4, 3))), tensor[:, 5:8])
    assert sizes == [12] * 4


@pytest.fixture
def sharded(tmp_path: Path) -> Sharded:
    """A model in two files with an index, as the hub has them."""
    tensors = {"a": torch.rand(3, 4), "b": torch.rand(2), "c": torch.rand(5)}
    homes = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    homes["c"] = homes["b"]
    for file in set(homes.values()):
        save_file({name: tensors[name] for name, home in homes.items() if home == file}, tmp_path / file)
    index = {"metadata": {"total_size": 76}, "weight_map": homes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path, tensors


def test_a_model_in_many_files_is_one_source_in_the_order_of_its_index(sharded: Sharded) -> None:
    path, tensors = sharded
    source = SafetensorsSource(path)
    assert list(source.tensors) == ["a", "b", "c"] and len(source.files) == 2
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    source.read([Wanted(name, whole_box(tensor.shape), tensor) for name, tensor in into.items()])
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())


def test_symlinked_safetensors_of_the_hubs_cache_are_read(
    sharded: Sharded, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, tensors = sharded
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in path.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert torch.equal(read_tensor(SafetensorsSource(snapshot), "c"), tensors["c"])


def refused(path: Path, file: Path, *words: str) -> None:
    with pytest.raises(CheckpointDamaged) as info:
        SafetensorsSource(path)
    assert info.value.file == str(file)
    assert all(word in info.value.problem for word in words), info.value.problem


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": GOOD}, b"1234", ["'a'", "truncated", "ends at byte"]),
        ({"a": GOOD}, b"123456789", ["1 bytes behind 'a'"]),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, b"0" * 12, ["'b'", "overlaps 'a'"]),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [12, 20]}}, b"0" * 20, ["'b'", "hole"]),
        ({"a": {**GOOD, "shape": [3]}}, b"0" * 8, ["'a'", "expected 12 bytes"]),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, b"0" * 8, ["'a'"]),
        ({"a": {**GOOD, "shape": [-2]}}, b"0" * 8, ["'a'", "counts"]),
        ({"a": {**GOOD, "shape": [True]}}, b"0" * 8, ["'a'", "counts"]),
        ({"a": {**GOOD, "dtype": "F4"}}, b"0" * 8, ["'a'", "'F4'"]),
        ({"a": {"dtype": "F32"}}, b"", ["'a'", "data_offsets"]),
        ({"a": 3}, b"", ["'a'", "3"]),
        ([1], b"", ["no JSON object"]),
        (b"{", b"", ["no JSON"]),
        (b"\xff\xff", b"", ["no JSON"]),
        (json.dumps({"a": GOOD}).encode("utf-16"), b"0" * 8, ["no JSON"]),
        (json.dumps({"a": GOOD}).encode("utf-8-sig"), b"0" * 8, ["no JSON"]),
        (b'{"a": 1, "a": 2}', b"", ["'a' appears twice"]),
        (b"[" * 100_000, b"", ["no JSON"]),
    ],
)
def test_a_file_whose_header_and_bytes_disagree_is_refused(
    tmp_path: Path, header: object, data: bytes, words: list[str]
) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, header, data)
    refused(tmp_path, file, *words)


@pytest.mark.parametrize("nbytes", [3, 1 << 40, (1 << 64) - 1, 100_000_001])
def test_a_header_longer_than_its_file_is_refused_unread(tmp_path: Path, nbytes: int) -> None:
    file = tmp_path / "a.safetensors"
    write_raw(file, b"{}", nbytes=nbytes)
    refused(file, file, "header")


@pytest.mark.parametrize("content", [b"", b"1234", b"\x02\0\0\0\0\0\0\0{"])
def test_a_stub_of_a_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    refused(tmp_path / "a.safetensors", tmp_path / "a.safetensors", "header")


@pytest.mark.parametrize("outside", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ""])
def test_an_index_never_leads_outside_its_directory(sharded: Sharded, outside: str) -> None:
    path, _ = sharded
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": outside}}))
    refused(path, index, "leads outside", repr(outside), "'a'")


NO_FILES = "expected an object with weight_map, the names of files by tensor"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "JSONDecodeError"),
        ("[]", NO_FILES),
        ('{"weight_map": [1]}', NO_FILES),
        ('{"weight_map": {"a": [1]}}', NO_FILES),
        ("{}", NO_FILES),
        ('{"weight_map": {"a": 1, "a": 2}}', "'a'"),
    ],
)
def test_an_index_that_is_none_is_refused(sharded: Sharded, content: str, expected: str) -> None:
    path, _ = sharded
    (path / "model.safetensors.index.json").write_text(content)
    refused(path, path / "model.safetensors.index.json", expected)


def test_a_shard_that_is_absent_is_named_with_a_tensor(sharded: Sharded) -> None:
    path, _ = sharded
    (path / "model-00002-of-00002.safetensors").unlink()
    refused(path, path / "model-00002-of-00002.safetensors", "absent", "'b'")


def test_a_tensor_in_the_index_alone_is_named(sharded: Sharded) -> None:
    path, _ = sharded
    save_file({"b": torch.zeros(1)}, path / "model-00002-of-00002.safetensors")
    refused(path, path / "model-00002-of-00002.safetensors", "'c' is in its index and not in the file")


def test_a_tensor_in_a_shard_alone_is_named(sharded: Sharded) -> None:
    path, _ = sharded
    save_file({"a": torch.zeros(1), "z": torch.zeros(1)}, path / "model-00001-of-00002.safetensors")
    refused(path, path / "model-00001-of-00002.safetensors", "'z' is not in its index and in the file")


def test_a_file_replaced_after_opening_is_refused(sharded: Sharded) -> None:
    path, _ = sharded
    source = SafetensorsSource(path)
    save_file({"b": torch.zeros(3), "c": torch.zeros(4)}, path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointDamaged, match="00002-of-00002.*replaced"):
        read_tensor(source, "b")


def test_a_directory_without_weights_is_refused_with_the_expected_file_names(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'model.safetensors' or 'model.safetensors.index.json'"):
        SafetensorsSource(tmp_path)


def test_small_tensors_are_handed_to_threads_by_the_thousand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{index}": torch.full((2,), float(index)) for index in range(2500)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    tasks: list[int] = []
    read = _safetensors._read

    def counting(descriptors: Any, streams: Any, group: Any) -> None:
        tasks.append(len(group))
        read(descriptors, streams, group)

    monkeypatch.setattr(_safetensors, "_read", counting)
    into = {name: torch.empty(2) for name in tensors}
    source.read([Wanted(name, whole_box((2,)), tensor) for name, tensor in into.items()])
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    assert sorted(tasks) == [452, 1024, 1024]


def test_a_failing_disk_under_neighbours_is_told_with_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({name: torch.ones(2) for name in "abc"}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)

    def failing(descriptor: int, memories: Any, position: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors.*'a': OSError: .*Input/output error"):
        source.read([Wanted(name, whole_box((2,)), torch.empty(2)) for name in "abc"])


def test_large_tensors_are_read_by_a_task_each(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    wanted = [Wanted(name, whole_box((1 << 18,)), torch.empty(1 << 18)) for name in "ab"]
    assert [len(group) for group in _safetensors._groups(source._reads(wanted))] == [1, 1]
