"""Other formats written from a source piece by piece: torch and the libraries read what was in it, bit by bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from lamella_checkpoint.sources import WriteOptions
from lamella_checkpoint.testing import MemorySource, dtypes_of, read_tensor
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.write_source import write_safetensors, write_torch
from lamella_testing.bits import all_same_bits, tensors_of_each_kind
from lamella_testing.tiny import two_groups

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = 600
"""Bytes of a buffer that cuts what the tests write into many pieces."""


@pytest.fixture
def source() -> MemorySource:
    return MemorySource({f"model.{name}": tensor for name, tensor in tensors_of_each_kind().items()})


def without_model(source: MemorySource) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in source.held.items()}


@pytest.mark.parametrize("buffer_nbytes", [SMALL, 1 << 20])
class TestEachFormat:
    def test_safetensors(self, source: MemorySource, tmp_path: Path, buffer_nbytes: int) -> None:
        options = WriteOptions(max_file_nbytes=500, buffer_nbytes=buffer_nbytes)
        write_safetensors(source, dtypes_of(source), tmp_path, options=options)
        files = list(tmp_path.glob("*.safetensors"))
        assert len(files) > 2
        assert all_same_bits({name: tensor for file in files for name, tensor in load_file(file).items()}, source.held)
        opened = SafetensorsSource(tmp_path)
        assert all_same_bits({name: read_tensor(opened, name) for name in opened.tensors}, source.held)

    def test_torch_save(self, source: MemorySource, tmp_path: Path, buffer_nbytes: int) -> None:
        write_torch(source, dtypes_of(source), tmp_path / "a.pt", options=WriteOptions(buffer_nbytes=buffer_nbytes))
        assert all_same_bits(torch.load(tmp_path / "a.pt", weights_only=True), without_model(source))
        assert all_same_bits(torch.load(tmp_path / "a.pt", weights_only=True, mmap=True), without_model(source))


def test_a_dtype_is_what_is_written(tmp_path: Path) -> None:
    source = MemorySource({"model.a": torch.tensor([1.0009765625]), "model.b": torch.tensor([2])})
    dtypes = {"model.a": torch.bfloat16, "model.b": torch.int64}
    write_torch(source, dtypes, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], torch.tensor([1.0], dtype=torch.bfloat16))


def test_one_file_of_torch_puts_no_fake_gpus_in_the_process(
    source: MemorySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them, autograd would have threads from then on, and forks of the process no autograd."""
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: pytest.fail("fake GPUs"))
    write_torch(source, dtypes_of(source), tmp_path / "a.pt")
    assert all_same_bits(torch.load(tmp_path / "a.pt"), without_model(source))


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


def test_one_file_has_torchs_nesting_of_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer = two_groups()
    source = native(model, optimizer)
    write_torch(source, dtypes_of(source), tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    fresh, its_optimizer = two_groups(seed=1)
    fresh.load_state_dict(found["model"])
    set_optimizer_state_dict(fresh, its_optimizer, found["optimizer"])
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))
    assert [group["lr"] for group in its_optimizer.param_groups] == [0.5, 0.001]
    for one, other in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(its_optimizer.state[one]["exp_avg"], optimizer.state[other]["exp_avg"])


class TestTies:
    source = MemorySource({"model.embed": torch.rand(300, 2)})

    def test_and_memory_in_one_file(self, tmp_path: Path) -> None:
        write_torch(self.source, dtypes_of(self.source), tmp_path / "a.pt", aliases={"model.head": "model.embed"})
        found = torch.load(tmp_path / "a.pt")
        assert found["head"].data_ptr() == found["embed"].data_ptr()
        assert torch.equal(found["head"], self.source.held["model.embed"])


def test_progress_adds_up_to_what_was_written(source: MemorySource, tmp_path: Path) -> None:
    total = sum(tensor.nbytes for tensor in source.held.values())
    for write, target in ((write_torch, "a.pt"), (write_safetensors, "hf")):
        if target != "a.pt":
            (tmp_path / target).mkdir()
        steps: list[int] = []
        options = WriteOptions(buffer_nbytes=SMALL, on_bytes=steps.append)
        write(source, dtypes_of(source), tmp_path / target, options=options)
        assert sum(steps) == total and len(steps) > 10
