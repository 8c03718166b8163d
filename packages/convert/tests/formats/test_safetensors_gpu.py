"""Safetensors and GPUs: written from one GPU or two, read into one GPU. Run by `gpu(1)` and `gpu(2)`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lamella_checkpoint import Wanted, load
from lamella_convert import convert, save_safetensors
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_layout import Chunk
from lamella_testing import run_ranks
from lamella_testing.gpu_training import assert_equal, build, train
from lamella_testing.tiny import Kit

State = dict[str, torch.Tensor]


@pytest.mark.gpu1
def test_safetensors_are_written_from_a_gpu_and_read_into_one(kit: Kit, tmp_path: Path) -> None:
    def write() -> State:
        model, optimizer = build(kit)
        train(model, optimizer)  # Still running when the weights are asked for.
        save_safetensors(tmp_path / "a", model=model)
        return {name: tensor.cpu() for name, tensor in kit.weights(model).items()}

    def read() -> State:
        model, _ = build(kit, seed=1)
        load(tmp_path / "b", model=model)
        return {name: tensor.cpu() for name, tensor in kit.weights(model).items()}

    [saved] = run_ranks(write, 1, device="cuda")
    convert(tmp_path / "a", tmp_path / "b", to="dcp")
    [loaded] = run_ranks(read, 1, device="cuda")
    assert_equal(saved, loaded)


@pytest.mark.gpu1
def test_boxes_arrive_on_the_callers_stream(tmp_path: Path) -> None:
    """Threads read; the threads' copies must wait for the current stream of the call of `read`."""

    def read() -> tuple[bool, bool]:
        save_file({"a": torch.arange(4_000_000.0)}, tmp_path / "a.safetensors")
        source = SafetensorsSource(tmp_path / "a.safetensors")
        into = torch.empty(4_000_000, device="cuda")
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            into.fill_(-1)  # Late: a copy without a wait for this stream comes before the write.
            source.read([Wanted("a", Chunk((0,), (4_000_000,)), into)])
            late = into.cpu()
        return torch.equal(late, torch.arange(4_000_000.0)), torch.cuda.current_stream() == torch.cuda.default_stream()

    assert run_ranks(read, 1, device="cuda") == [(True, True)]


@pytest.mark.gpu2
def test_two_gpus_write_one_model(kit: Kit, tmp_path: Path) -> None:
    def write() -> State:
        model, optimizer = build(kit)
        train(model, optimizer)
        save_safetensors(tmp_path / "a", model=model, max_shard_nbytes=100)
        return {name: tensor.cpu() for name, tensor in kit.weights(model).items()}

    saved, _ = run_ranks(write, 2, device="cuda")
    source = SafetensorsSource(tmp_path / "a")
    loaded = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, source.tensors[name].chunks[0], tensor) for name, tensor in loaded.items()])
    assert_equal(saved, loaded)
