"""A source written as torch DCP: torch and this package read the source's values, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lamella_checkpoint import load, save
from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._formats.checksums import Checksums
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint.extending import write_dcp
from lamella_checkpoint.testing import MemorySource, dtypes_of, read_tensor
from lamella_files import WriteOptions
from lamella_testing.bits import all_same_bits, tensors_of_each_kind
from lamella_testing.tiny import two_groups

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = 600
"""Bytes of a buffer that cuts what the tests write into many pieces."""


@pytest.fixture
def source() -> MemorySource:
    return MemorySource({f"model.{name}": tensor for name, tensor in tensors_of_each_kind().items()})


@pytest.mark.parametrize("buffer_nbytes", [SMALL, 1 << 20])
class TestEachFormat:
    def test_dcp(self, source: MemorySource, tmp_path: Path, buffer_nbytes: int) -> None:
        options = WriteOptions(max_file_nbytes=2000, buffer_nbytes=buffer_nbytes)
        write_dcp(source, dtypes_of(source), tmp_path, options=options)
        assert len(list(tmp_path.glob("*.distcp"))) > 1
        into = {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
        dcp.load(into, checkpoint_id=tmp_path)  # type: ignore[attr-defined]
        assert all_same_bits(into, source.full_tensors)
        opened = StoredCheckpoint(tmp_path)
        assert all_same_bits({name: read_tensor(opened, name) for name in opened.tensors}, source.full_tensors)


def test_a_converted_checkpoint_loads_as_if_it_had_been_saved(tmp_path: Path) -> None:
    model, optimizer = two_groups()
    source = StoredCheckpoint(save(tmp_path / "saved", model=model, optimizer=optimizer))
    manifest = Manifest(extra={"step": 7}, num_ranks=1, optimizer=None)
    (tmp_path / "written").mkdir()
    options = WriteOptions(buffer_nbytes=100)
    write_dcp(source, dtypes_of(source), tmp_path / "written", manifest=manifest, options=options)
    fresh, its_optimizer = two_groups(seed=1)
    assert load(tmp_path / "written", model=fresh, optimizer=its_optimizer) == {"step": 7}
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))
    loaded_state, expected = its_optimizer.state_dict(), optimizer.state_dict()
    assert loaded_state["param_groups"] == expected["param_groups"]
    for index, slots in expected["state"].items():
        assert all(torch.equal(loaded_state["state"][index][slot], value) for slot, value in slots.items())


def test_a_converted_checkpoint_has_checksums_of_every_byte(tmp_path: Path) -> None:
    source = MemorySource({"model.weight": torch.zeros(100, 100), "model.bias": torch.zeros(3)})
    manifest = Manifest(extra={}, num_ranks=1, optimizer=None)
    write_dcp(source, dtypes_of(source), tmp_path, manifest=manifest, options=WriteOptions(buffer_nbytes=1000))
    checksums = Checksums.of(tmp_path)
    assert checksums is not None
    content = (tmp_path / "__0_0.distcp").read_bytes()
    spans = sorted(checksums.files["__0_0.distcp"])
    assert sum(span.length for span in spans) == len(content) and len(spans) > 10
    for span in spans:
        checksums.check(tmp_path / "__0_0.distcp", span.offset, content[span.offset :][: span.length])


def test_the_metadata_hold_equal_sizes_and_properties_once(tmp_path: Path) -> None:
    shapes = {f"model.{index}": (index % 2 + 1, 4) for index in range(1000)}
    source = MemorySource({name: torch.zeros(shape) for name, shape in shapes.items()})
    write_dcp(source, dtypes_of(source), tmp_path)
    entries: dict[str, Any] = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata  # type: ignore[attr-defined]
    assert {name: tuple(entry.size) for name, entry in entries.items()} == shapes
    assert all(entry.properties.dtype == torch.float32 for entry in entries.values())
    assert [[tuple(chunk.sizes) for chunk in entry.chunks] for entry in entries.values()] == [
        [shape] for shape in shapes.values()
    ]
    assert len({id(entry.properties) for entry in entries.values()}) == 1
    assert len({id(entry.size) for entry in entries.values()}) == 2


class TestTies:
    source = MemorySource({"model.embed": torch.rand(300, 2)})

    def test_names_of_one_tensor_share_a_place_in_dcp(self, tmp_path: Path) -> None:
        write_dcp(self.source, dtypes_of(self.source), tmp_path, aliases={"model.head": "model.embed"})
        assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 2 * 2400
        into = {name: torch.zeros(300, 2) for name in ("model.embed", "model.head")}
        dcp.load(into, checkpoint_id=tmp_path)  # type: ignore[attr-defined]
        assert all(torch.equal(tensor, self.source.full_tensors["model.embed"]) for tensor in into.values())


def test_dcp_names_are_nested_by_the_given_path_function(tmp_path: Path) -> None:
    source = MemorySource({"model.module.a.weight": torch.ones(2), "iteration": 3})
    write_dcp(source, dtypes_of(source), tmp_path, path_of=lambda name: tuple(name.split(".", 1)))
    assert not (tmp_path / "lamella.json").exists()
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()  # type: ignore[attr-defined]
    assert metadata.planner_data == {"model.module.a.weight": ("model", "module.a.weight"), "iteration": ("iteration",)}
    request: dict[str, Any] = {"model": {"module.a.weight": torch.zeros(2)}, "iteration": 0}
    dcp.load(request, checkpoint_id=tmp_path)  # type: ignore[attr-defined]
    assert request["iteration"] == 3 and request["model"]["module.a.weight"].sum() == 2


def test_progress_of_a_dcp_write_adds_up_to_the_bytes_written(source: MemorySource, tmp_path: Path) -> None:
    total = sum(tensor.nbytes for tensor in source.full_tensors.values())
    steps: list[int] = []
    write_dcp(source, dtypes_of(source), tmp_path, options=WriteOptions(buffer_nbytes=SMALL, on_bytes=steps.append))
    assert sum(steps) == total and len(steps) > 10
