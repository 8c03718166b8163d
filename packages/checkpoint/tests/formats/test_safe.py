"""A checkpoint is foreign data: no pickled code runs, and no path leads outside."""

import argparse
import enum
import io
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from lamella_checkpoint import CheckpointDamaged, CheckpointUntrusted, check, load, save
from lamella_checkpoint.testing import forget_checksums
from lamella_files import Inert, StoredMetadata, read_pickle
from lamella_testing.hostile_pickles import NUMBERED, Runs, numbered

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not os.path.exists("ran")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "a", model=nn.Linear(2, 2))
    return tmp_path / "a"


def refused(path: Path, content: bytes, *, trust: bool = False) -> CheckpointDamaged:
    forget_checksums(path)
    (path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointDamaged) as info:
        load(path, model=nn.Linear(2, 2), trust=trust)
    assert info.value.file == str(path / ".metadata")
    return info.value


def refused_type(path: Path, content: bytes) -> str:
    error = refused(path, content)
    assert isinstance(error, CheckpointUntrusted)
    return error.type_name


def stack_global(module: str, name: str) -> bytes:
    """The opcodes that put an attribute of a module on the stack, dots in the name and all."""
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return strings + b"\x93"


def call_on_ran(function: bytes) -> bytes:
    return b"\x80\x04" + function + b"\x8c\x03ran\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("posix", "mkdir"),
        ("builtins", "eval"),
        ("builtins", "setattr"),
        ("torch", "os.mkdir"),
        ("torch", "float32.__class__"),
        ("torch", "Size.__new__"),
        ("torch", "load"),
        ("torch.serialization", "os.mkdir"),
        ("torch.serialization", "load"),
        ("collections", "OrderedDict.fromkeys"),
        ("collections", "namedtuple"),
        ("pathlib", "Path.mkdir"),
        ("pathlib", "os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("megatron.core.dist_checkpointing", "os.MCoreMetadata"),
        ("lamella_files._base.pickles", "pickle.loads"),
    ],
)
def test_only_listed_types_are_found_in_metadata(path: Path, module: str, name: str) -> None:
    error = refused(path, call_on_ran(stack_global(module, name)))
    assert isinstance(error, CheckpointUntrusted) and error.type_name == f"{module}.{name}"
    assert f"got {module}.{name}" in str(error) and "trust=True" in str(error) and "--trust" in str(error)


def test_old_opcodes_for_globals_find_no_more(path: Path) -> None:
    assert refused_type(path, b"\x80\x02cposix\nmkdir\nX\x03\x00\x00\x00ran\x85R.") == "posix.mkdir"
    assert refused_type(path, b"(S'ran'\niposix\nmkdir\n.") == "posix.mkdir"


def test_code_anywhere_in_real_metadata_does_not_run(path: Path) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    metadata.planner_data["more"] = Runs()
    assert refused_type(path, pickle.dumps(metadata)) == "posix.mkdir"


def test_hostile_pickles_set_no_attributes_of_shared_classes(path: Path) -> None:
    """BUILD on a class sets attributes of the class: in a plain unpickler, for the rest of the process."""
    attributes = b"N}\x8c\x06mkdir2\x8c\x03ran" + b"s"
    for module, name in [
        ("pathlib", "PosixPath"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "float32"),
    ]:
        refused(path, b"\x80\x04" + stack_global(module, name) + attributes + b"\x86b.")
        for kind in (pathlib.PosixPath, Metadata, torch.serialization._get_layout, torch.Size, Inert):
            assert not hasattr(kind, "mkdir2")


def test_state_that_is_given_to_an_allowed_class_stays_state(path: Path) -> None:
    """BUILD on an instance runs `__setstate__`, and a type in the instance's state does not become its type."""

    class State:
        def __reduce__(self) -> tuple[object, ...]:
            return (StorageMeta, (), {"__class__": Metadata, "__setstate__": "x", "save_id": "y"})

    stand_in = read_pickle(pickle.dumps(State()), knows=lambda module, name: name == "StorageMeta", trust=True)
    assert type(stand_in) is not StorageMeta and isinstance(stand_in, Inert) and stand_in.fields["save_id"] == "y"


@pytest.mark.parametrize("how", NUMBERED)
class TestTablesOfWhatIsRemembered:
    """A few bytes cannot make Python's unpickler hold gigabytes."""

    def test_the_metadata_is_refused(self, path: Path, how: str) -> None:
        content = numbered((path / ".metadata").read_bytes(), how)
        for trust in (False, True):
            assert "to number as many values" in str(refused(path, content, trust=trust))


def test_metadata_with_foreign_classes_loads_only_with_trust(path: Path) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    assert metadata.storage_meta is not None
    metadata.storage_meta.save_id = argparse.Namespace(of="a writer's own")  # type: ignore[assignment]
    content = pickle.dumps(metadata)
    assert refused_type(path, content) == "argparse.Namespace"
    load(path, model=nn.Linear(2, 2), trust=True)
    check(path, model=nn.Linear(2, 2), trust=True)


def write_entry(value: object, directory: str = "b") -> nn.Linear:
    """A checkpoint with any object as its only option: plain DCP writes every object."""
    model = nn.Linear(1, 1)
    dcp.save({"model": model.state_dict(), "optimizer": {"param_groups.weight.lr": value}}, checkpoint_id=directory)  # type: ignore[attr-defined]
    return model


def test_code_in_an_option_does_not_run() -> None:
    buffer = io.BytesIO()
    torch.save(Runs(), buffer)
    model = write_entry(argparse.Namespace(lr=1))
    metadata = dcp.FileSystemReader("b").read_metadata()  # type: ignore[attr-defined]
    index = MetadataIndex("optimizer.param_groups.weight.lr")
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(buffer.getvalue())
    (pathlib.Path("b") / "__9_0.distcp").write_bytes(buffer.getvalue())
    (pathlib.Path("b") / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointUntrusted) as info:
        load("b", model=model, optimizer=torch.optim.SGD([model.weight]), strict=False)
    assert info.value.entry == "optimizer.param_groups.weight.lr" and info.value.type_name == "posix.mkdir"


def test_an_object_of_another_type_is_named_and_can_be_trusted() -> None:
    model = write_entry(argparse.Namespace(lr=1))
    optimizer = torch.optim.SGD([model.weight])
    with pytest.raises(CheckpointUntrusted, match="'optimizer.param_groups.weight.lr' of .*argparse.Namespace"):
        load("b", model=model, optimizer=optimizer, strict=False)
    load("b", model=model, optimizer=optimizer, strict=False, trust=True)
    assert optimizer.param_groups[0]["lr"] == argparse.Namespace(lr=1)


def test_code_in_a_tensors_place_does_not_run(path: Path) -> None:
    forget_checksums(path)
    metadata = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    for size in (0, 1 << 15):
        buffer = io.BytesIO()
        torch.save([Runs(), bytearray(size)], buffer)
        (path / "__9_0.distcp").write_bytes(buffer.getvalue())
        for info in metadata.storage_data.values():
            info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(buffer.getvalue())
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointDamaged, match="__9_0.distcp"):
            load(path, model=nn.Linear(2, 2))


@pytest.mark.parametrize("elsewhere", ["../elsewhere.distcp", "/etc/passwd", "sub/file.distcp", "..", "."])
def test_names_of_files_do_not_lead_outside(path: Path, elsewhere: str) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    for info in metadata.storage_data.values():
        info.relative_path = elsewhere
    assert "leads outside" in str(refused(path, pickle.dumps(metadata)))


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_links_do_not_lead_outside(path: Path, tmp_path: Path, file: str) -> None:
    shutil.move(path / file, tmp_path / "elsewhere")
    (path / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match="it leads outside, to .*elsewhere") as info:
        load(path, model=nn.Linear(2, 2))
    assert info.value.file == str(path / file)


def test_a_checkpoint_may_itself_be_reached_through_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(path)
    load(tmp_path / "latest", model=nn.Linear(2, 2))


def test_a_pipe_is_no_file(path: Path) -> None:
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    with pytest.raises(CheckpointDamaged, match="not a regular file"):
        load(path, model=nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.state_dict_metadata.update({3: m.state_dict_metadata["model.bias"]}), "name to be of type str"),
        (lambda m: setattr(m.state_dict_metadata["model.bias"], "size", [2]), "sizes or offsets of 'model.bias'"),
        (lambda m: setattr(m.state_dict_metadata["model.bias"], "size", torch.Size([1])), "inside its shape"),
        (lambda m: setattr(m.state_dict_metadata["model.bias"].properties, "dtype", "x"), "dtype of 'model."),
        (lambda m: setattr(next(iter(m.storage_data.values())), "offset", -1), "a place of 'model"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", None), "file of 'model"),
        (lambda m: setattr(m, "storage_data", None), "storage_data to be of type dict"),
        (lambda m: setattr(m, "state_dict_metadata", []), "state_dict_metadata to be of type dict"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(
    path: Path, change: Callable[[Metadata], object], message: str
) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    change(metadata)
    assert message in str(refused(path, pickle.dumps(metadata)))


def test_metadata_of_a_python_that_stores_enums_by_name_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(self: enum.Enum, protocol: int) -> tuple[object, ...]:
        return getattr, (type(self), self._name_)

    expected = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    entry = next(iter(expected.state_dict_metadata.values()))
    assert isinstance(entry, TensorStorageMetadata)
    encoding = type(entry.properties.__getstate__()[3])  # type: ignore[no-untyped-call]
    monkeypatch.setattr(encoding, "__reduce_ex__", reduce)
    content = pickle.dumps(expected)
    assert b"getattr" in content
    (path / ".metadata").write_bytes(content)
    assert StoredMetadata.read(path).tensors.keys() == expected.state_dict_metadata.keys()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_of_any_protocol_is_read(path: Path, protocol: int) -> None:
    expected = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    assert expected.storage_meta is not None
    expected.storage_meta.checkpoint_id = pathlib.Path("/somewhere")
    (path / ".metadata").write_bytes(pickle.dumps(expected, protocol))
    metadata = StoredMetadata.read(path)
    assert metadata.save_id == expected.storage_meta.save_id
    for name, entry in expected.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        assert (
            metadata.tensors[name].shape == tuple(entry.size) and metadata.tensors[name].dtype is entry.properties.dtype
        )
        for chunk in entry.chunks:
            item = expected.storage_data[MetadataIndex(name, chunk.offsets)]
            assert metadata.items[name, tuple(chunk.offsets)] == (item.relative_path, item.offset, item.length)
