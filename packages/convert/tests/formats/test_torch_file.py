"""Files of `torch.save`: read box by box, verified, beside any further contents."""

import argparse
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamella_checkpoint import CheckpointDamaged, CheckpointUntrusted, Wanted, load
from lamella_checkpoint.testing import read_tensor
from lamella_convert import convert, open_checkpoint, verify
from lamella_convert._formats.megatron_files import plain_contents
from lamella_convert._formats.torch_file import TorchFile
from lamella_files import Expected, ItemRead, read_tensors, whole_box
from lamella_layout import Chunk
from lamella_testing.hostile_pickles import Runs
from lamella_testing.reads import counted_reads


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not os.path.exists("ran")


def saved(tmp_path: Path, value: object, **options: bool) -> Path:
    torch.save(value, tmp_path / "a.pt", **options)
    return tmp_path / "a.pt"


base = torch.arange(60.0).reshape(6, 10)
TENSORS = {
    "plain": base.clone(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "bfloat16": base.bfloat16(),
    "float8": base.to(torch.float8_e4m3fn),
    "transposed": base.t(),
    "rows": base[2:4],
    "columns": base[:, 3:5],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "parameter": nn.Parameter(base.clone()),
    "negated": torch._neg_view(base.clone()),
    "negated columns": torch.complex(base, base + 1).conj().imag,
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before torch 1.6"])
def test_every_tensor_comes_back_bit_by_bit(tmp_path: Path, verify: bool, is_archive: bool) -> None:
    tensors = {name: tensor for name, tensor in TENSORS.items() if is_archive or name != "float8"}
    file = saved(tmp_path, {"model": tensors}, _use_new_zipfile_serialization=is_archive)
    source = TorchFile(file, verify=verify)
    assert [name.removeprefix("model.") for name in source.tensors] == list(tensors)
    for name, tensor in tensors.items():
        got = read_tensor(source, f"model.{name}")
        assert got.shape == tensor.shape and got.dtype == tensor.dtype
        assert torch.equal(got.float(), tensor.detach().float()), name


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of sparse and quantised tensors
@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before torch 1.6"])
def test_tensors_without_boxes_are_values(tmp_path: Path, is_archive: bool) -> None:
    kinds = {
        "csr": torch.eye(3).to_sparse_csr(),
        "coo": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
    }
    file = saved(tmp_path, {"model": {**kinds, "a": torch.ones(2)}}, _use_new_zipfile_serialization=is_archive)
    source = TorchFile(file)
    assert list(source.tensors) == ["model.a"]
    assert list(source.objects) == [f"model.{kind}" for kind in kinds]


def test_a_box_costs_its_own_bytes(tmp_path: Path) -> None:
    source = TorchFile(saved(tmp_path, {"x": torch.arange(1_000_000.0).reshape(1000, 1000)}), verify=False)
    into = torch.empty(2, 1000)
    with counted_reads() as sizes:
        source.read([Wanted("x", Chunk((10, 0), (2, 1000)), into)])
    assert into[0, 0] == 10_000 and sum(sizes) == into.nbytes


@pytest.mark.parametrize("verify", [True, False])
def test_a_box_of_a_tensor_in_a_shared_storage_costs_its_own_bytes_once_verified(tmp_path: Path, verify: bool) -> None:
    flat = torch.arange(1_000_000.0)
    views = {
        "x": flat[:400_000].view(400, 1000),
        "y": flat[400_000:].view(600, 1000),
        "t": flat[:400_000].view(400, 1000).t(),
    }
    source = TorchFile(saved(tmp_path, views), verify=verify)
    into, other, turned = torch.empty(2, 1000), torch.empty(3, 1000), torch.empty(1000, 400)
    with counted_reads() as sizes:
        for name, first, rows in (("x", 10, into), ("y", 20, other), ("x", 20, into)):
            source.read([Wanted(name, Chunk((first, 0), tuple(rows.shape)), rows)])
    assert into[0, 0] == 20_000 and other[0, 0] == 420_000
    assert sum(sizes) == 7 * 4000 + verify * flat.nbytes
    with counted_reads() as sizes:
        source.read([Wanted("t", whole_box((1000, 400)), turned)])
    assert torch.equal(turned, views["t"]) and sum(sizes) == turned.nbytes


def test_a_tied_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000.0)
    source = TorchFile(saved(tmp_path, {"a": tensor, "b": tensor}))
    reads: list[ItemRead] = []

    def read(directory: Path, item_reads: Sequence[ItemRead], expected: Expected | None) -> None:
        reads.extend(item_reads)
        read_tensors(directory, item_reads, expected)

    monkeypatch.setattr("lamella_convert._formats.torch_file.read_tensors", read)
    one, other = torch.empty(1000), torch.empty(1000)
    source.read([Wanted("a", whole_box((1000,)), one), Wanted("b", whole_box((1000,)), other)])
    assert torch.equal(one, tensor) and torch.equal(other, tensor) and len(reads) == 1


@pytest.mark.parametrize("name", ["plain", "transposed", "rows", "negated"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    file = saved(tmp_path, {"x": TENSORS[name]})
    content = bytearray(file.read_bytes())
    content[content.find(TENSORS["plain"][2:4].numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="with the checksum .* for 'x'") as info:
        read_tensor(TorchFile(file), "x")
    assert info.value.file == str(file)
    read_tensor(TorchFile(file, verify=False), "x")


def test_names_are_the_keys_and_lists_of_plain_data_are_values(tmp_path: Path) -> None:
    value = {
        "model": OrderedDict(w=torch.ones(1)),
        "list": [torch.zeros(1), {"a": 1}],
        "sizes": [1, 2],
        "state": {0: {"step": torch.tensor(1.0)}},
        "pair": {(0, 1): "by tuple"},
        "none": None,
        "nothing": {},
    }
    source = TorchFile(saved(tmp_path, value))
    assert list(source.tensors) == ["model.w", "list.0", "state.0.step"]
    assert source.paths["state.0.step"] == ("state", 0, "step")
    assert {name: source.read_object(name) for name in source.objects} == {
        "list.1.a": 1,
        "sizes": [1, 2],
        "pair": {(0, 1): "by tuple"},
        "none": None,
        "nothing": {},
    }


def test_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match=r"two values have the name 'a\.b'"):
        TorchFile(saved(tmp_path, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}))


def test_parameters_and_buffers_with_attributes_are_tensors(tmp_path: Path) -> None:
    parameter, buffer = nn.Parameter(base.clone()), nn.Buffer(base + 1)
    parameter.sequence_parallel = True  # type: ignore[attr-defined]  # as Megatron marks parameters
    source = TorchFile(saved(tmp_path, {"parameter": parameter, "buffer": buffer}))
    for name, tensor in (("parameter", parameter), ("buffer", buffer)):
        assert torch.equal(read_tensor(source, name), tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("dtype", "is_archive"), [(torch.complex32, True), (torch.complex64, True), (torch.complex64, False)]
)
def test_a_tensor_and_its_conjugate_are_two_tensors_of_one_storage(
    tmp_path: Path, dtype: torch.dtype, is_archive: bool
) -> None:
    tensor = torch.view_as_complex(torch.randn(4, 3, 2, dtype=dtype.to_real()))
    conjugate = tensor.conj()
    tensors = {"a": tensor, "b": conjugate, "c": conjugate[1:3], "d": conjugate.t(), "e": torch._neg_view(tensor)}
    source = TorchFile(saved(tmp_path, tensors, _use_new_zipfile_serialization=is_archive))
    assert len({source.place(name) for name in tensors}) == len(tensors)
    for name, saved_tensor in tensors.items():
        assert torch.equal(
            *map(torch.view_as_real, (read_tensor(source, name), saved_tensor.resolve_conj().resolve_neg()))
        )
    row = torch.empty(1, 3, dtype=dtype)
    source.read([Wanted("b", Chunk((2, 0), (1, 3)), row)])
    assert torch.equal(torch.view_as_real(row), torch.view_as_real(conjugate[2:3].resolve_conj()))


def test_negated_tensors_are_loaded_and_converted(tmp_path: Path) -> None:
    weight = torch.complex(torch.randn(2, 2), torch.randn(2, 2)).conj().imag
    file = saved(tmp_path, {"weight": weight, "bias": torch.zeros(2), "step": torch._neg_view(torch.tensor([-5.0]))})
    assert convert(file, tmp_path / "b", to="dcp").num_tensors == 3
    for path in (file, tmp_path / "b"):
        model = nn.Linear(2, 2)
        load(open_checkpoint(path), model=model, strict=False)
        assert torch.equal(model.weight, weight)
    assert verify(file)
    assert plain_contents(file)["step"] == 5.0


class _WithMetadata:
    """A tensor as torch saves it, with metadata that torch writes for no tensor of the dtype."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata

    def __reduce__(self) -> Any:
        storage = torch.ones(2)._typed_storage()  # type: ignore[no-untyped-call]
        return torch._utils._rebuild_tensor_v2, (storage, 0, (2,), (1,), False, OrderedDict(), self._metadata)


@pytest.mark.parametrize("metadata", [{"conj": True}, {"neg": 1}, {"backend": True}])
def test_a_tensor_with_metadata_that_is_unknown_is_a_value(tmp_path: Path, metadata: dict[str, Any]) -> None:
    source = TorchFile(saved(tmp_path, {"a": torch.ones(1), "b": _WithMetadata(metadata)}))
    assert list(source.tensors) == ["a"] and source.objects == ("b",)


def test_tensors_are_read_beside_objects_that_are_not(tmp_path: Path) -> None:
    file = saved(tmp_path, {"model": {"weight": base}, "args": argparse.Namespace(lr=1), "bad": Runs()})
    source = TorchFile(file)
    assert torch.equal(read_tensor(source, "model.weight"), base)
    for name in ("args", "bad"):
        with pytest.raises(CheckpointUntrusted) as info:
            source.read_object(name)
        assert {"argparse.Namespace", "posix.mkdir"} <= set(info.value.type_name.split(", "))


def test_trust_makes_objects(tmp_path: Path) -> None:
    source = TorchFile(saved(tmp_path, {"args": argparse.Namespace(lr=1), "w": base}), trust=True)
    assert source.read_object("args") == argparse.Namespace(lr=1)
    assert torch.equal(read_tensor(source, "w"), base)


def test_a_pickled_module_is_refused_by_name_and_can_be_trusted(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    file = saved(tmp_path, model)
    with pytest.raises(CheckpointUntrusted, match="torch.nn.modules.linear.Linear"):
        TorchFile(file)
    live = nn.Linear(2, 3)
    load(open_checkpoint(file, trust=True), model=live)
    assert torch.equal(live.weight, model.weight)


@pytest.mark.parametrize("is_archive", [True, False])
def test_code_does_not_run(tmp_path: Path, is_archive: bool) -> None:
    file = saved(tmp_path, Runs(), _use_new_zipfile_serialization=is_archive)
    with pytest.raises(CheckpointUntrusted, match="posix.mkdir"):
        TorchFile(file)


@pytest.mark.parametrize("content", [b"", b"\x80\x02garbage", b"PK\x03\x04 truncated"])
def test_garbage_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointDamaged) as info:
        open_checkpoint(tmp_path / "a.pt")
    assert info.value.file == str(tmp_path / "a.pt")
    assert "weights_only" not in str(info.value)  # torch's advice: to run the code of what it could not read


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = saved(tmp_path, {"x": torch.ones(10_000)})
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointDamaged):
        open_checkpoint(file)


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], 3])
def test_torch_files_without_a_dict_of_tensors_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointDamaged, match="Expected a dict of named tensors"):
        TorchFile(saved(tmp_path, value))


def test_a_dict_that_holds_itself_is_refused(tmp_path: Path) -> None:
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    with pytest.raises(CheckpointDamaged, match="PickleTooLarge"):
        TorchFile(saved(tmp_path, cycle))


def test_views_outside_their_storage_are_refused(tmp_path: Path) -> None:
    """torch checks the places at the view's creation; no view is made here."""
    import io
    import zipfile

    buffer = io.BytesIO()
    torch.save({"x": torch.arange(16, dtype=torch.uint8)}, buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(tmp_path / "a.pt", "w") as forged:
        for info in archive.infolist():
            content = archive.read(info)
            if info.filename.endswith("data.pkl"):
                assert content.count(b"K\x10\x85") == 1
                content = content.replace(b"K\x10\x85", b"K\x7f\x85")
            forged.writestr(info.filename, content)
    with pytest.raises(CheckpointDamaged, match="inside the 16 bytes of '0', got torch.uint8 of shape .127,."):
        TorchFile(tmp_path / "a.pt")
