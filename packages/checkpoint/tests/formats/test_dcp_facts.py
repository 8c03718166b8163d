"""Facts of torch's DCP that this package relies on, or protects from: each fact beside this package's behaviour.

The first of each pair of assertions is about torch. A failing first assertion shows a change in torch.
"""

import argparse
import io
import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lamella_checkpoint import CheckpointDamaged, CheckpointMismatch, CheckpointUntrusted, load
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint._state.fill import fill
from lamella_files import StoredMetadata, records
from lamella_files._archives.torch_zip import find_tensor
from lamella_testing import run_ranks
from lamella_testing.hostile_pickles import Runs
from lamella_testing.plain_dcp import dcp_save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def partial_load(entries: dict[str, Any], path: Path) -> None:
    dcp.load(entries, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))  # type: ignore[attr-defined]


# -- contents of files ------------------------------------------------------------------------------------------------


def test_a_model_is_tensors_and_two_files(tmp_path: Path) -> None:
    path = dcp_save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "a")
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp"]
    assert all(
        isinstance(tensor_metadata, TensorStorageMetadata)
        for tensor_metadata in metadata(path).state_dict_metadata.values()
    )
    assert StoredCheckpoint(path).objects == ()


def metadata(path: Path) -> Metadata:
    read: Metadata = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    return read


def test_values_that_are_no_tensors_are_one_object_a_leaf(tmp_path: Path) -> None:
    entries = {
        "int": 3,
        "none": None,
        "text": "x",
        "tuple": (1, 2),
        "args": argparse.Namespace(a=1),
        "rng_state": {"(0, 0)": [{"py": "state"}]},
        "lst": [1, torch.ones(2)],
    }
    path = dcp_save(entries, tmp_path / "a")
    kinds = {name: type(entry) for name, entry in metadata(path).state_dict_metadata.items()}
    tensors = {name for name, kind in kinds.items() if kind is TensorStorageMetadata}
    objects = {name for name, kind in kinds.items() if kind is BytesStorageMetadata}
    assert tensors == {"lst.1"}
    assert objects == {"int", "none", "text", "tuple", "args", "rng_state.(0, 0).0.py", "lst.0"}
    stored = StoredCheckpoint(path)
    assert set(stored.tensors) == tensors and set(stored.objects) == objects
    assert stored.read_object("tuple") == (1, 2) and stored.read_object("rng_state.(0, 0).0.py") == "state"
    assert stored.metadata.paths["rng_state.(0, 0).0.py"] == ("rng_state", "(0, 0)", 0, "py")
    with pytest.raises(CheckpointUntrusted, match="'args' of .* got argparse.Namespace"):
        stored.read_object("args")


def test_dcp_stores_params_and_options_of_an_optimizer_group_as_objects(tmp_path: Path) -> None:
    """Note [Optimizers by group] of `_translation.sections`."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    stored = StoredCheckpoint(dcp_save({"optimizer": optimizer.state_dict()}, tmp_path / "a"))
    assert stored.read_object("optimizer.param_groups.0.params") == [0, 1]
    assert stored.read_object("optimizer.param_groups.0.lr") == 1e-3


def test_pickled_types_in_dcp_metadata_are_on_the_allow_list(tmp_path: Path) -> None:
    """The allow-list covers this torch's files; a new type needs a review before its addition."""

    def save_sharded() -> None:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        tensor = torch.distributed.tensor.distribute_tensor(torch.ones(4), mesh, [torch.distributed.tensor.Shard(0)])
        dcp.save({"x": tensor, "y": torch.ones(1), "z": 3}, checkpoint_id=tmp_path / "a")  # type: ignore[attr-defined]

    run_ranks(save_sharded, 2)
    content = (tmp_path / "a" / ".metadata").read_bytes()
    assert b"TensorStorageMetadata" in content and b"_StorageInfo" in content
    metadata = StoredMetadata.read(tmp_path / "a")
    assert set(metadata.tensors) == {"x", "y"} and metadata.objects == ("z",)
    assert len(metadata.tensors["x"].chunks) == 2


def test_a_dcp_item_is_an_archive_with_its_tensor_uncompressed_and_aligned(tmp_path: Path) -> None:
    tensor = torch.arange(600.0).reshape(20, 30)
    path = dcp_save({"x": tensor}, tmp_path / "a")
    [info] = metadata(path).storage_data.values()
    content = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}
    stored_tensor = find_tensor(io.BytesIO(content))
    assert stored_tensor is not None
    _, start, length, crc = stored_tensor.record
    assert content[start : start + length] == tensor.numpy().tobytes()
    assert crc == zlib.crc32(tensor.numpy().tobytes())
    assert start % 64 == 0


def test_records_of_an_archive_without_checksums_have_no_crc() -> None:
    buffer = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.ones(3), buffer)
    finally:
        torch.serialization.set_crc32_options(before)
    assert {record.crc for record in records(buffer).values()} == {None}


# -- unnoticed by torch -----------------------------------------------------------------------------------------------


def test_torch_loads_flipped_bits(tmp_path: Path) -> None:
    path = dcp_save({"model": {"weight": torch.zeros(40, 40), "bias": torch.zeros(40)}}, tmp_path / "a")
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[content.rfind(b"\0" * 1000)] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    state = {"model": {"weight": torch.ones(40, 40), "bias": torch.ones(40)}}
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    assert any(tensor.any() for tensor in state["model"].values())
    with pytest.raises(CheckpointDamaged, match="with the checksum"):
        load(path, model=nn.Linear(40, 40))


def test_dcp_leaves_missing_chunks_unfilled_and_lamella_refuses_the_checkpoint(tmp_path: Path) -> None:
    path = dcp_save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "a")
    content = metadata(path)
    entry = content.state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.clear()
    (path / ".metadata").write_bytes(pickle.dumps(content))
    state = {"model": {"weight": torch.full((2, 2), 7.0)}}
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    assert bool((state["model"]["weight"] == 7).all())
    with pytest.raises(CheckpointDamaged, match="0 of the 4 elements of 'model.weight'"):
        load(path, model=nn.Linear(2, 2))


def test_dcp_runs_pickled_code_in_metadata_that_lamella_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = dcp_save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "a")
    content = metadata(path)
    content.planner_data["x"] = Runs()
    (path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointUntrusted, match="posix.mkdir"):
        load(path, model=nn.Linear(2, 2))
    assert not os.path.exists("ran")
    metadata(path)
    assert os.path.exists("ran")


def test_dcp_keeps_one_ranks_values_where_two_ranks_write_one_box(tmp_path: Path) -> None:
    """Parts of tensor-parallel ranks saved as if whole: the file keeps the first rank's."""

    def save_alike() -> None:
        rank = torch.distributed.get_rank()
        dcp.save({"x": torch.full((2,), float(rank))}, checkpoint_id=tmp_path / "a")  # type: ignore[attr-defined]

    run_ranks(save_alike, 2)
    state = {"x": torch.full((2,), 9.0)}
    dcp.load(state, checkpoint_id=tmp_path / "a")  # type: ignore[attr-defined]
    assert state["x"].tolist() in ([0.0, 0.0], [1.0, 1.0])


# -- loads with missing entries -------------------------------------------------------------------------------------


def test_dcps_error_for_a_missing_key_escapes_except_exception(tmp_path: Path) -> None:
    path = dcp_save({"model": nn.Linear(2, 2, bias=False).state_dict()}, tmp_path / "a")
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: args") as torchs:
        dcp.load({"args": argparse.Namespace()}, checkpoint_id=path)  # type: ignore[attr-defined]
    assert not isinstance(torchs.value, Exception)
    with pytest.raises(CheckpointMismatch) as info:
        load(path, model=nn.Linear(2, 2))
    assert isinstance(info.value, Exception) and info.value.missing == ("model.bias",)  # type: ignore[redundant-expr]


def test_a_partial_load_puts_none_where_objects_were(tmp_path: Path) -> None:
    """The reason for `fill`: missing entries at the top, and inside present sections too."""
    path = dcp_save({"model": {"x": torch.ones(2)}, "d": {"known": 1}}, tmp_path / "a")

    def request() -> dict[str, Any]:
        return {
            "model": {"x": torch.zeros(2)},
            "args": argparse.Namespace(a=1),
            "d": {"known": 0, "k": argparse.Namespace(b=2)},
            "int": 5,
            "float": 0.5,
            "text": "x",
            "tuple": (1,),
            "list": [1],
            "tensor": torch.full((1,), 3.0),
        }

    torchs, ours = request(), request()
    partial_load(torchs, path)
    assert torchs["args"] is None and torchs["d"]["k"] is None
    object_names = ("int", "float", "text", "tuple", "list")
    assert {name: torchs[name] for name in object_names} == {name: ours[name] for name in object_names}
    filled = fill(ours, StoredCheckpoint(path))
    assert ours["args"] == argparse.Namespace(a=1) and ours["d"] == {"known": 1, "k": argparse.Namespace(b=2)}
    assert ours["model"]["x"].tolist() == [1, 1]
    assert set(filled.loaded) == {"model.x", "d.known"}
    assert {"args", "d.k", "int", "tensor"} <= set(filled.kept)


def test_the_model_section_is_not_filled_from_model_ema(tmp_path: Path) -> None:
    path = dcp_save({"model_ema": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}, tmp_path / "a")
    request = {"model": {"weight": torch.zeros(2, 2)}}
    assert fill(request, StoredCheckpoint(path)).kept == ("model.weight",)
    sections_path = dcp_save(
        {"model": {"weight": torch.zeros(2, 2)}, "model_ema": {"bias": torch.ones(2)}}, tmp_path / "b"
    )
    with pytest.raises(CheckpointMismatch) as info:
        load(sections_path, model=nn.Linear(2, 2))
    assert info.value.missing == ("model.bias",)


def test_options_that_the_checkpoint_lacks_are_kept_and_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    entries = {
        "model": model.state_dict(),
        "optimizer": {f"param_groups.{name}.lr": 0.5 for name in ("weight", "bias")},
    }
    path = dcp_save(entries, tmp_path / "a")
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.25)
    result = load(path, model=model, optimizer=optimizer, strict=False)
    assert optimizer.param_groups[0]["momentum"] == 0.25 and optimizer.param_groups[0]["lr"] == 0.5
    assert "optimizer.param_groups.weight.momentum" in result.kept and not result.left
    assert "optimizer.param_groups.weight.lr" not in result.kept


# -- loads of present entries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("allow_partial_load", [True, False])
def test_a_tensor_of_another_size_is_refused_with_and_without_partial_load(
    tmp_path: Path, allow_partial_load: bool
) -> None:
    path = dcp_save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "a")
    planner = DefaultLoadPlanner(allow_partial_load=allow_partial_load)
    with pytest.raises((ValueError, CheckpointException), match="Size mismatch"):
        dcp.load({"model": nn.Linear(3, 3).state_dict()}, checkpoint_id=path, planner=planner)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointMismatch) as info:
        load(path, model=nn.Linear(3, 3))
    assert [difference.name for difference in info.value.shapes] == ["model.weight", "model.bias"]


def test_a_tensor_is_replaced_by_an_object_of_its_name(tmp_path: Path) -> None:
    path = dcp_save({"model": {"weight": "text", "bias": torch.ones(2)}}, tmp_path / "a")
    state = {"model": {"weight": torch.zeros(2, 2)}}
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    assert state["model"]["weight"] == "text"
    with pytest.raises(CheckpointMismatch, match=r"model.weight: an object in the checkpoint, \(2, 2\) here"):
        load(path, model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Expected a tensor for 'model.weight'"):
        fill({"model": {"weight": torch.zeros(2, 2)}}, StoredCheckpoint(path))


def test_an_object_is_not_replaced_by_a_tensor(tmp_path: Path) -> None:
    path = dcp_save({"model": {"weight": torch.ones(2, 2)}}, tmp_path / "a")
    with pytest.raises((ValueError, CheckpointException)):
        dcp.load({"model": {"weight": "text"}}, checkpoint_id=path)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="got a tensor in the checkpoint"):
        fill({"model": {"weight": "text"}}, StoredCheckpoint(path))


def test_loads_are_in_place_and_cast_and_take_leaves(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0009765625 + 2**-20]])
    path = dcp_save({"model": {"weight": weight}}, tmp_path / "a")
    for read in (
        lambda leaf: dcp.load({"model": {"weight": leaf}}, checkpoint_id=path),  # type: ignore[attr-defined]
        lambda leaf: fill({"model": {"weight": leaf}}, StoredCheckpoint(path)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            leaf = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
            place = leaf.data_ptr()
            read(leaf)
            assert leaf.data_ptr() == place and torch.equal(leaf, weight.to(dtype)) and leaf.is_leaf


def test_names_may_share_a_place(tmp_path: Path) -> None:
    """Note [Names that share data] of `_formats.dcp_write`."""
    path = dcp_save({"model": {"weight": torch.ones(2, 2)}}, tmp_path / "a")
    content = metadata(path)
    content.state_dict_metadata["model.alias"] = content.state_dict_metadata["model.weight"]
    content.storage_data[MetadataIndex("model.alias", (0, 0))] = content.storage_data[
        MetadataIndex("model.weight", (0, 0))
    ]
    content.planner_data["model.alias"] = ("model", "alias")
    (path / ".metadata").write_bytes(pickle.dumps(content))
    state = {"model": {"alias": torch.zeros(2, 2)}}
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    assert bool((state["model"]["alias"] == 1).all())


def test_a_dtensor_takes_its_chunk_list_from_its_local_tensor() -> None:
    """Megatron-FSDP's functions for the places of uneven shards; `local_boxes` calls them."""

    def ask() -> list[str]:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        tensor = torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, [torch.distributed.tensor.Shard(0)])
        tensor._local_tensor.__create_chunk_list__ = lambda: ["mine"]  # type: ignore[attr-defined]
        answer: list[str] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return answer

    assert run_ranks(ask, 2) == [["mine"], ["mine"]]
