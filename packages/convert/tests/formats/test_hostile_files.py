"""Hostile checkpoints: each is refused by the file's name, and messages are printable text."""

import argparse
import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from lamella_checkpoint import CheckpointMismatch, CheckpointUntrusted, load, save
from lamella_checkpoint.testing import assert_damaged, change_manifest, forget_checksums
from lamella_convert import convert, diff, inspect, open_checkpoint, verify
from lamella_convert._formats.megatron_files import iteration_directory, plain_contents, train_state
from lamella_files._archives.objects import unpickle
from lamella_testing.harmed_files import make_deep, make_huge, make_link, make_pipe
from lamella_testing.plain_dcp import change_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_TERABYTES = 1 << 42
_ESCAPES = "a\n\x1b[2J\u202eb"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "a", model=nn.Linear(2, 2), extra={"step": 1})
    return tmp_path / "a"


@pytest.mark.parametrize("harm", [make_pipe, make_huge, make_link, make_deep])
@pytest.mark.parametrize("name", ["common.pt", "metadata.json", "latest_checkpointed_iteration.txt", "train_state.pt"])
def test_so_are_megatrons(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    path = tmp_path / "a"
    dcp.save({"decoder.layers.mlp.weight": torch.ones(2, 2)}, checkpoint_id=path)  # type: ignore[attr-defined]
    (path / "run_config.yaml").touch()
    harm(path / name)
    assert_damaged(path / name, lambda: inspect(path) if name != "train_state.pt" else train_state(path))


@pytest.mark.parametrize("harm", [make_huge, make_deep])
def test_so_is_an_index(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    harm(tmp_path / "model.safetensors.index.json")
    assert_damaged(tmp_path / "model.safetensors.index.json", lambda: inspect(tmp_path))


@pytest.mark.parametrize("harm", [make_pipe, make_huge, make_deep])
def test_so_is_a_configuration(path: Path, harm: Callable[[Path], None]) -> None:
    (path / "hf").mkdir()
    harm(path / "hf" / "config.json")
    assert_damaged(path / "hf" / "config.json", lambda: convert(path, path.parent / "b", to="hf"))


@pytest.mark.parametrize(
    "kind",
    [
        {"class": {}, "options": []},
        {"class": "a", "options": [1, "lr"]},
        {"class": "a", "options": [], "local_slots": [1, "b"]},
    ],
)
def test_an_optimizers_names_are_text(path: Path, kind: dict[str, Any]) -> None:
    change_manifest(path, optimizer=kind)
    forget_checksums(path)
    assert_damaged(path / "lamella.json", lambda: convert(path, path.parent / "b", to="dcp"), "expected names")


def write_safetensors(file: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": [], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 1 << 200], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
    ],
)
def test_headers_that_make_no_sense_are_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    file = tmp_path / "a.safetensors"
    write_safetensors(file, {"a": entry}, b"1234" if entry["data_offsets"][1] else b"")
    assert_damaged(file, lambda: inspect(file), "'a'")


def test_a_name_that_comes_twice_is_found_among_many(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_safetensors(file, b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b',"0":1}')
    assert_damaged(file, lambda: inspect(file), "'0' appears twice")


def test_a_name_that_is_no_unicode_is_not_written(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1")
    with pytest.raises(ValueError, match="UTF-8, got .*ud800"):
        convert(tmp_path / "a.safetensors", tmp_path / "b", to="hf")


def test_an_object_of_terabytes_is_not_held(tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(1, 1).state_dict(), "epoch": 3}, checkpoint_id=tmp_path)  # type: ignore[attr-defined]
    make_huge(tmp_path / "__9_0.distcp")

    def grow(metadata: Metadata) -> None:
        for index, place in metadata.storage_data.items():
            if index.fqn == "epoch":
                place.relative_path, place.offset, place.length = "__9_0.distcp", 0, _TERABYTES

    change_metadata(tmp_path, grow)
    assert_damaged(tmp_path / "__9_0.distcp", lambda: inspect(tmp_path), "'epoch'")


def archive(
    value: object, *, compressed: bool = False, change: Callable[[str, bytes], bytes] = lambda name, content: content
) -> bytes:
    """What torch.save writes of a value, packed again."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, plain)
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", kind) as target:
        for info in source.infolist():
            target.writestr(info.filename, change(info.filename.partition("/")[2], source.read(info)))
    return packed.getvalue()


def test_compressed_torch_archives_are_refused_in_every_file(tmp_path: Path) -> None:
    bomb = archive({"step": torch.zeros(1 << 20)}, compressed=True)
    assert len(bomb) < 1 << 14
    for name in ("a.pt", "common.pt", "train_state.pt"):
        (tmp_path / name).write_bytes(bomb)
    assert_damaged(tmp_path / "a.pt", lambda: inspect(tmp_path / "a.pt"), "compressed")
    assert_damaged(tmp_path / "common.pt", lambda: plain_contents(tmp_path / "common.pt"), "compressed")
    assert_damaged(tmp_path / "train_state.pt", lambda: train_state(tmp_path), "compressed")
    for trust in (False, True):
        assert_damaged(tmp_path / "a", partial(unpickle, io.BytesIO(bomb), tmp_path / "a", "x", trust=trust))


def test_records_that_are_longer_than_the_archive_are_refused(tmp_path: Path) -> None:
    content = bytearray(archive({"a": torch.ones(4)}))
    at = content.find(b"PK\1\2")  # The first entry of the directory: data.pkl's sizes.
    content[at + 20 : at + 28] = b"\xf0\xff\xff\xff" * 2
    (tmp_path / "a.pt").write_bytes(content)
    assert_damaged(tmp_path / "a.pt", lambda: inspect(tmp_path / "a.pt"), "ends behind the archive")


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    content = io.BytesIO(archive({"a": torch.ones(4)}))
    with zipfile.ZipFile(content, "a") as more:
        more.writestr("other/data.pkl", b"N.")
    (tmp_path / "a.pt").write_bytes(content.getvalue())
    assert_damaged(tmp_path / "a.pt", lambda: inspect(tmp_path / "a.pt"), "'data.pkl' is there twice")


class Called:
    """Is unpickled by a call."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


class _Storage:
    pass


def tensor_file(file: Path, *args: object) -> Path:
    """A file with one tensor of four floats, rebuilt with any arguments."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> tuple[object, ...] | None:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if value is _Storage else None

    content = io.BytesIO()
    Pickler(content, 2).dump({"w": Called(torch._utils._rebuild_tensor_v2, _Storage, *args, False, OrderedDict())})
    file.write_bytes(
        archive({"w": torch.ones(4)}, change=lambda name, old: content.getvalue() if name == "data.pkl" else old)
    )
    return file


@pytest.mark.parametrize(
    "args",
    [
        (0, ("x",), (1,)),
        (0, ([],), (1,)),
        (0, (1.5,), (1,)),
        (0, (True,), (1,)),
        (0, (5,), (1,)),
        (0, (4,), (2,)),
        (1, (4,), (1,)),
        (-1, (4,), (1,)),
        (0, (4,), (-1,)),
        (1 << 70, (0,), (1,)),
        (0, (1 << 70, 0), (1, 1)),
        (0, (1 << 62,), (0,)),
        (0, (1 << 60, 1 << 60), (0, 0)),
    ],
)
def test_a_tensor_that_leaves_its_storage_is_refused(tmp_path: Path, args: tuple[object, ...]) -> None:
    file = tensor_file(tmp_path / "a.pt", *args)
    assert_damaged(file, lambda: inspect(file))
    assert not verify(file)


def test_a_conversion_that_no_disk_has_room_for_does_not_begin(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 30, 1 << 20)}, tmp_path / "a.pt")
    for to in ("dcp", "hf", "torch"):
        with pytest.raises(OSError, match="room for .* bytes of tensors") as info:
            convert(tmp_path / "a.pt", tmp_path / "b" / "c", to=to)
        assert info.value.filename == str(tmp_path)
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize(
    "groups",
    [
        [1],
        "abc",
        [{"params": 5}],
        [{"params": [0, 1], "param_names": ["w"]}],
        [{"params": [0], "param_names": [None]}],
    ],
)
def test_param_groups_that_make_no_sense_are_refused(tmp_path: Path, groups: object) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "a.pt")
    assert_damaged(tmp_path / "a.pt", lambda: inspect(tmp_path / "a.pt"), "groups")


def test_values_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    cycle: dict[object, object] = {}
    cycle[1, 2] = cycle
    torch.save({"w": torch.ones(1), "x": cycle}, tmp_path / "a.pt")
    assert_damaged(tmp_path / "a.pt", lambda: inspect(tmp_path / "a.pt"), "PickleTooLarge")
    cycle = {}
    cycle["x"] = cycle
    torch.save(cycle, tmp_path / "common.pt")
    assert_damaged(tmp_path / "common.pt", lambda: plain_contents(tmp_path / "common.pt"), "PickleTooLarge")


@pytest.mark.parametrize("iteration_bytes", [b"9" * 5000, b"\xff\xfe", "\u0663".encode(), b"../3", b"-3"])
def test_an_iteration_that_is_none_is_refused(tmp_path: Path, iteration_bytes: bytes) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(iteration_bytes)
    assert_damaged(tmp_path / "latest_checkpointed_iteration.txt", lambda: iteration_directory(tmp_path))


@pytest.mark.parametrize("state", [{"step": "abc"}, {"step": float("inf")}, {"step": -1}, [1]])
def test_a_train_state_that_is_none_is_refused(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "latest_train_state.pt")
    assert_damaged(tmp_path / "latest_train_state.pt", lambda: iteration_directory(tmp_path))


def test_an_iteration_does_not_lead_outside(path: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    (root / "iter_0000003").symlink_to(path)
    assert_damaged(root / "iter_0000003", lambda: inspect(root), "leads outside", repr(str(path)))


def test_a_flipped_bit_is_found_in_a_file_that_was_converted(tmp_path: Path) -> None:
    save(tmp_path / "a", model=nn.Linear(30, 30))
    convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "b.pt") as written:
        assert written.testzip() is None
    assert verify(tmp_path / "b.pt").num_unverified_bytes == 0
    content = bytearray((tmp_path / "b.pt").read_bytes())
    weight = torch.load(tmp_path / "b.pt", weights_only=True)["weight"]
    content[content.find(weight.numpy().tobytes()) + 5] ^= 1
    (tmp_path / "b.pt").write_bytes(content)
    assert_damaged(
        tmp_path / "b.pt", lambda: load(open_checkpoint(tmp_path / "b.pt"), model=nn.Linear(30, 30)), "'weight'"
    )
    assert not verify(tmp_path / "b.pt")


def test_a_flipped_bit_of_a_plain_value_is_found(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(1, 1).state_dict(), "epoch": 777}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content.replace(b"M\x09\x03", b"M\x09\x02", 1))
    assert_damaged(tmp_path / "a.pt", lambda: inspect(tmp_path / "a.pt"), "checksum")


# -- what is trusted --------------------------------------------------------------------------------------------------


def dcp_with_a_writers_own_metadata(path: Path) -> None:
    def change(metadata: Metadata) -> None:
        assert metadata.storage_meta is not None
        metadata.storage_meta.save_id = argparse.Namespace()  # type: ignore[assignment]

    save(path, model=nn.Linear(2, 2))
    forget_checksums(path)
    change_metadata(path, change)


TRUSTED: dict[str, Callable[[Path], None]] = {
    "lamella": dcp_with_a_writers_own_metadata,
    "module": lambda path: torch.save(nn.Linear(2, 2), path),
    "module before torch 1.6": lambda path: torch.save(nn.Linear(2, 2), path, _use_new_zipfile_serialization=False),
    "object before torch 1.6": lambda path: torch.save(
        {"model": nn.Linear(2, 2).state_dict(), "args": argparse.Namespace()},
        path,
        _use_new_zipfile_serialization=False,
    ),
}


@pytest.mark.filterwarnings("ignore::torch.serialization.SourceChangeWarning")
@pytest.mark.parametrize("make", TRUSTED.values(), ids=TRUSTED)
@pytest.mark.parametrize(
    "act",
    [
        lambda path, **trust: inspect(path, **trust),
        lambda path, **trust: verify(path, **trust),
        lambda path, **trust: diff(path, path, **trust),
        lambda path, **trust: convert(path, f"{path}.out", to="dcp", **trust),
        lambda path, **trust: load(open_checkpoint(path, **trust), model=nn.Linear(2, 2)),
    ],
    ids=["inspect", "verify", "diff", "convert", "load"],
)
def test_untrusted_objects_in_torch_files_are_read_only_with_trust(
    tmp_path: Path, make: Callable[[Path], None], act: Callable[..., object]
) -> None:
    make(tmp_path / "a.pt")
    with pytest.raises(CheckpointUntrusted, match="--trust"):
        act(tmp_path / "a.pt")
    act(tmp_path / "a.pt", trust=True)


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_an_object_is_converted_with_trust(tmp_path: Path, kind: str) -> None:
    state = {
        "model": nn.Linear(2, 2).state_dict(),
        "optimizer": {"state": {}, "param_groups": {"w": argparse.Namespace()}},
    }
    if kind == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "a.pt")  # type: ignore[attr-defined]
    else:
        torch.save(state, tmp_path / "a.pt")
    inspect(tmp_path / "a.pt")
    with pytest.raises(CheckpointUntrusted, match="argparse.Namespace"):
        convert(tmp_path / "a.pt", tmp_path / "b", to="dcp")
    assert os.listdir(tmp_path) == ["a.pt"]
    convert(tmp_path / "a.pt", tmp_path / "b", to="dcp", trust=True)
    assert not diff(tmp_path / "a.pt", tmp_path / "b", trust=True)


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_reports_show_hostile_names_as_printable_lines(tmp_path: Path) -> None:
    torch.save({_ESCAPES: torch.ones(2), "x" + _ESCAPES: _ESCAPES}, tmp_path / "a.pt")
    torch.save({"y" + _ESCAPES: torch.ones(2)}, tmp_path / "b.pt")
    dcp.save({"model": {_ESCAPES: torch.ones(2)}}, checkpoint_id=tmp_path / "c")  # type: ignore[attr-defined]
    (tmp_path / "c" / f"{_ESCAPES}.distcp").touch()
    data = next((tmp_path / "c").glob("__*.distcp"))
    data.write_bytes(b"\x13" * data.stat().st_size)
    shown = [
        *inspect(tmp_path / "a.pt").lines(),
        *inspect(tmp_path / "a.pt").lines(depth=1),
        *diff(tmp_path / "a.pt", tmp_path / "b.pt").lines(),
        *verify(tmp_path / "c").lines(),
    ]
    assert len(shown) > 8 and all(line.isprintable() for line in shown)
    assert any(r"a\n\x1b[2J\u202eb" in line for line in shown)


def test_a_refused_load_shows_text_too(path: Path) -> None:
    torch.save({_ESCAPES: torch.ones(2)}, path.parent / "a.pt")
    change_manifest(path, optimizer={"class": _ESCAPES, "options": [_ESCAPES]})
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for checkpoint_path in (path, path.parent / "a.pt"):
        with pytest.raises(CheckpointMismatch) as info:
            load(open_checkpoint(checkpoint_path, verify=False), model=model, optimizer=optimizer)
        assert all(line.isprintable() for line in str(info.value).split("\n"))
        assert r"a\n\x1b[2J\u202eb" in str(info.value)


def test_a_number_that_python_does_not_write_out_is_shown_as_one(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": 1 << 100_000}, tmp_path / "a.pt")
    listing = inspect(tmp_path / "a.pt")
    assert any("x = <int>" in line for line in listing.lines())
    json.dumps(listing.as_json())
    done = convert(tmp_path / "a.pt", tmp_path / "b", to="dcp")
    assert done.left == ("x",)


def test_names_of_very_many_parts_are_listed(tmp_path: Path) -> None:
    names = [".".join(["a"] * (count + 1)) for count in range(1500)]
    write_safetensors(
        tmp_path / "a.safetensors", {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    )
    assert len(list(inspect(tmp_path / "a.safetensors").lines())) == 1 + len(names)


def test_objects_with_tensors_inside_are_compared(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        torch.save({"w": torch.ones(1), "x": {(0, 1): [torch.full((3,), value)]}}, tmp_path / f"{name}.pt")
    assert not diff(tmp_path / "a.pt", tmp_path / "b.pt")
    [difference] = diff(tmp_path / "a.pt", tmp_path / "c.pt").differences
    assert difference.name == "x"
