"""The same on GPUs, where NCCL alone carries the verdicts. Run by `gpu(1)` and `gpu(2)`."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from lamella_checkpoint import CheckpointFailed, convert, load, save, save_safetensors
from lamella_checkpoint._safetensors import SafetensorsSource
from lamella_checkpoint._source import Wanted
from lamella_layout import Chunk
from lamella_testing import run_ranks


def build(kit, *, seed=0, **options):
    model, _ = kit.build(sharded=False, seed=seed)
    model.cuda()
    kit.shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def train(model, optimizer):
    inputs = torch.linspace(-1, 1, 20, device="cuda").reshape(4, 5)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def cpu_state(kit, model, optimizer):
    return {name: tensor.cpu() for name, tensor in kit.state(model, optimizer).items()}


def train_and_save(kit, path, **options):
    model, optimizer = build(kit, **options)
    train(model, optimizer)
    save(path, model=model, optimizer=optimizer, extra={"step": 2})
    saved = cpu_state(kit, model, optimizer)
    train(model, optimizer)
    return saved, cpu_state(kit, model, optimizer)


def load_and_train(kit, path, **options):
    model, optimizer = build(kit, seed=1, **options)
    assert load(path, model=model, optimizer=optimizer) == {"step": 2}
    loaded = cpu_state(kit, model, optimizer)
    devices = {state["step"].device.type for state in optimizer.state.values()}
    train(model, optimizer)
    return loaded, cpu_state(kit, model, optimizer), devices


def assert_equal(expected, got):
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"capturable": True}, "cuda"), ({"fused": True}, "cuda")]
)
def test_training_resumes_bit_equal_and_counts_steps_where_the_step_runs(kit, tmp_path, options, device):
    [(saved, after)] = run_ranks(lambda: train_and_save(kit, tmp_path / "a", **options), 1, device="cuda")
    [(loaded, resumed, devices)] = run_ranks(lambda: load_and_train(kit, tmp_path / "a", **options), 1, device="cuda")
    assert_equal(saved, loaded)
    assert_equal(after, resumed)
    assert devices == {device}


@pytest.mark.gpu1
def test_a_host_checkpoint_loads_on_a_gpu_and_back(kit, tmp_path):
    # In ranks of their own: an optimizer's step makes even a process that trains on the host use CUDA.
    def save_on_the_host():
        model, optimizer = kit.build(sharded=False)
        kit.train(model, optimizer)
        save(tmp_path / "host", model=model, optimizer=optimizer, extra={"step": 2})
        return kit.state(model, optimizer)

    def load_on_the_host():
        model, optimizer = kit.build(sharded=False)
        load(tmp_path / "gpu", model=model, optimizer=optimizer)
        return {state["step"].device.type for state in optimizer.state.values()}

    [saved] = run_ranks(save_on_the_host, 1)
    [(loaded, *_)] = run_ranks(lambda: load_and_train(kit, tmp_path / "host"), 1, device="cuda")
    assert_equal(saved, loaded)
    run_ranks(lambda: train_and_save(kit, tmp_path / "gpu", fused=True), 1, device="cuda")
    assert run_ranks(load_on_the_host, 1) == [{"cpu"}]


@pytest.mark.gpu2
def test_two_gpus_save_and_one_resumes(kit, tmp_path):
    saved, _ = run_ranks(lambda: train_and_save(kit, tmp_path / "a"), 2, device="cuda")[0]
    [(loaded, *_)] = run_ranks(lambda: load_and_train(kit, tmp_path / "a"), 1, device="cuda")
    assert_equal(saved, loaded)


@pytest.mark.gpu2
def test_the_current_device_need_not_be_set(kit, tmp_path):
    def save_from_a_wrong_current_device():
        model, optimizer = build(kit)
        train(model, optimizer)
        torch.cuda.set_device(0)  # What every process starts with.
        save(tmp_path / "a", model=model, optimizer=optimizer)
        load(tmp_path / "a", model=model, optimizer=optimizer)
        return torch.cuda.current_device()

    assert run_ranks(save_from_a_wrong_current_device, 2, device="cuda") == [0, 0]


@pytest.mark.gpu2
def test_a_failing_rank_makes_every_rank_raise_over_nccl(kit, tmp_path, monkeypatch):
    def save_and_fail():
        model, optimizer = build(kit)
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["owner"] = model  # Cannot be stored.
        with pytest.raises((TypeError, CheckpointFailed), match="owner") as info:
            save(tmp_path / "a", model=model, optimizer=optimizer)
        return info.type

    assert run_ranks(save_and_fail, 2, device="cuda") == [CheckpointFailed, TypeError]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu1
def test_safetensors_are_written_from_a_gpu_and_read_into_one(kit, tmp_path):
    def write():
        model, optimizer = build(kit)
        train(model, optimizer)  # Still running when the weights are asked for.
        save_safetensors(tmp_path / "a", model=model)
        return {name: tensor.cpu() for name, tensor in kit.weights(model).items()}

    def read():
        model, _ = build(kit, seed=1)
        load(tmp_path / "b", model=model)
        return {name: tensor.cpu() for name, tensor in kit.weights(model).items()}

    [saved] = run_ranks(write, 1, device="cuda")
    convert(tmp_path / "a", tmp_path / "b", to="dcp")
    [loaded] = run_ranks(read, 1, device="cuda")
    assert_equal(saved, loaded)


@pytest.mark.gpu1
def test_boxes_arrive_on_the_callers_stream(tmp_path):
    """Threads read; what they copy must wait for the stream that is current where `read` was called."""

    def read():
        save_file({"a": torch.arange(4_000_000.0)}, tmp_path / "a.safetensors")
        source = SafetensorsSource(tmp_path / "a.safetensors")
        into = torch.empty(4_000_000, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            into.fill_(-1)  # Late: a copy that does not wait for this stream comes before it.
            source.read([Wanted("a", Chunk((0,), (4_000_000,)), into)])
            late = into.cpu()
        return torch.equal(late, torch.arange(4_000_000.0)), torch.cuda.current_stream() == torch.cuda.default_stream()

    assert run_ranks(read, 1, device="cuda") == [(True, True)]


@pytest.mark.gpu2
def test_two_gpus_write_one_model(kit, tmp_path):
    def write():
        model, optimizer = build(kit)
        train(model, optimizer)
        save_safetensors(tmp_path / "a", model=model, max_shard_nbytes=100)
        return {name: tensor.cpu() for name, tensor in kit.weights(model).items()}

    saved, _ = run_ranks(write, 2, device="cuda")
    source = SafetensorsSource(tmp_path / "a")
    found = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, source.tensors[name].chunks[0], tensor) for name, tensor in found.items()])
    assert_equal(saved, found)
