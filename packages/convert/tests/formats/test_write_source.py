"""Other formats written from a source piece by piece: torch and the libraries read the source's values, bit by bit."""

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from lamella_checkpoint.testing import MemorySource, dtypes_of, read_tensor
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.torch_file import TorchFile, archive_records
from lamella_convert._formats.write_source import write_safetensors, write_torch
from lamella_files import WriteOptions
from lamella_layout import Chunk
from lamella_testing.bits import all_same_bits, tensors_of_each_kind
from lamella_testing.tiny import two_groups

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = 600
"""Bytes of a buffer that cuts what the tests write into many pieces."""


@pytest.fixture
def source() -> MemorySource:
    return MemorySource({f"model.{name}": tensor for name, tensor in tensors_of_each_kind().items()})


def without_model(source: MemorySource) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in source.full_tensors.items()}


@pytest.mark.parametrize("buffer_nbytes", [SMALL, 1 << 20])
class TestEachFormat:
    def test_safetensors(self, source: MemorySource, tmp_path: Path, buffer_nbytes: int) -> None:
        options = WriteOptions(max_file_nbytes=500, buffer_nbytes=buffer_nbytes)
        write_safetensors(source, dtypes_of(source), tmp_path, options=options)
        files = list(tmp_path.glob("*.safetensors"))
        assert len(files) > 2
        assert all_same_bits(
            {name: tensor for file in files for name, tensor in load_file(file).items()}, source.full_tensors
        )
        opened = SafetensorsSource(tmp_path)
        assert all_same_bits({name: read_tensor(opened, name) for name in opened.tensors}, source.full_tensors)

    def test_torch_save(self, source: MemorySource, tmp_path: Path, buffer_nbytes: int) -> None:
        write_torch(source, dtypes_of(source), tmp_path / "a.pt", options=WriteOptions(buffer_nbytes=buffer_nbytes))
        assert all_same_bits(torch.load(tmp_path / "a.pt", weights_only=True), without_model(source))
        assert all_same_bits(torch.load(tmp_path / "a.pt", weights_only=True, mmap=True), without_model(source))


def test_write_torch_casts_tensors_to_the_given_dtypes(tmp_path: Path) -> None:
    source = MemorySource({"model.a": torch.tensor([1.0009765625]), "model.b": torch.tensor([2])})
    dtypes = {"model.a": torch.bfloat16, "model.b": torch.int64}
    write_torch(source, dtypes, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], torch.tensor([1.0], dtype=torch.bfloat16))


def test_a_torch_file_has_true_checksums_whatever_the_order_of_pieces(tmp_path: Path) -> None:
    tensor = torch.rand(40, 30)
    columns = Chunk((0, 10), (40, 20)), Chunk((0, 0), (40, 10))
    source = MemorySource({"model.a": tensor, "model.b": torch.rand(7)})
    source.tensors["model.a"] = source.tensors["model.a"]._replace(chunks=columns)
    write_torch(source, dtypes_of(source), tmp_path / "a.pt", options=WriteOptions(buffer_nbytes=SMALL))
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], tensor)
    assert read_tensor(TorchFile(tmp_path / "a.pt"), "a").equal(tensor)


def test_torch_files_beyond_zip32_limits_are_written_as_zip64(
    source: MemorySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and numbers of records beyond four and two bytes stand in fields of their own (ZIP64)."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    write_torch(source, dtypes_of(source), tmp_path / "a.pt")
    for mmap in (False, True):
        assert all_same_bits(torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap), without_model(source))
    opened = TorchFile(tmp_path / "a.pt")
    archive_records(tmp_path / "a.pt")
    assert all_same_bits({name: read_tensor(opened, name) for name in opened.tensors}, without_model(source))


def test_tensors_in_a_torch_file_start_at_aligned_offsets(source: MemorySource, tmp_path: Path) -> None:
    write_torch(source, dtypes_of(source), tmp_path / "a.pt")
    starts = [record.start for record in archive_records(tmp_path / "a.pt").values()]
    assert len(starts) > 10 and not any(start % 64 for start in starts)


def test_tensors_inside_other_values_keep_elements_and_shared_memory(tmp_path: Path) -> None:
    row = torch.arange(6.0).view(2, 3).t()
    tensors = {None: row, "view": row[1:], "count": torch.tensor(3, dtype=torch.uint16), "none": torch.empty(0)}
    source = MemorySource({"model.a": torch.ones(2), "optimizer.state.a.slot": tensors})
    write_torch(source, {"model.a": torch.float32}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"]["state"]["a"]["slot"]
    assert all(
        torch.equal(loaded[key], tensor) and loaded[key].dtype == tensor.dtype for key, tensor in tensors.items()
    )
    assert loaded["view"].untyped_storage().data_ptr() == loaded[None].untyped_storage().data_ptr()


def test_a_refused_write_names_the_file_systems_reason(source: MemorySource, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        write_torch(source, dtypes_of(source), tmp_path / "absent" / "a.pt")


def native(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemorySource:
    """A model and its optimizer as a source under native names."""
    names = {param: name for name, param in model.named_parameters()}
    values = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            slots = optimizer.state[param].items()
            values |= {f"optimizer.state.{names[param]}.{slot}": value for slot, value in slots}
            options = {option: value for option, value in group.items() if option != "params"}
            values |= {f"optimizer.param_groups.{names[param]}.{option}": value for option, value in options.items()}
    return MemorySource(values)


def test_a_torch_file_has_torchs_nesting_of_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer = two_groups()
    source = native(model, optimizer)
    write_torch(source, dtypes_of(source), tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    fresh, its_optimizer = two_groups(seed=1)
    fresh.load_state_dict(loaded["model"])
    set_optimizer_state_dict(fresh, its_optimizer, loaded["optimizer"])
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))
    assert [group["lr"] for group in its_optimizer.param_groups] == [0.5, 0.001]
    for one, other in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(its_optimizer.state[one]["exp_avg"], optimizer.state[other]["exp_avg"])


class TestTies:
    source = MemorySource({"model.embed": torch.rand(300, 2)})

    def test_and_memory_in_one_file(self, tmp_path: Path) -> None:
        write_torch(self.source, dtypes_of(self.source), tmp_path / "a.pt", aliases={"model.head": "model.embed"})
        loaded = torch.load(tmp_path / "a.pt")
        assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()
        assert torch.equal(loaded["head"], self.source.full_tensors["model.embed"])


def test_progress_of_torch_and_safetensors_writes_adds_up_to_the_bytes_written(
    source: MemorySource, tmp_path: Path
) -> None:
    total = sum(tensor.nbytes for tensor in source.full_tensors.values())
    for write, target in ((write_torch, "a.pt"), (write_safetensors, "hf")):
        if target != "a.pt":
            (tmp_path / target).mkdir()
        steps: list[int] = []
        options = WriteOptions(buffer_nbytes=SMALL, on_bytes=steps.append)
        write(source, dtypes_of(source), tmp_path / target, options=options)
        assert sum(steps) == total and len(steps) > 10
