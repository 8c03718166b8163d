"""Saves and loads on GPUs, with verdicts over NCCL alone. Run by `gpu(1)` and `gpu(2)`."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamella_checkpoint import AsyncSaver, CheckpointDirectory, CheckpointFailed, load, save
from lamella_checkpoint._training import copies as _copies
from lamella_files._archives import items as _items
from lamella_testing import run_ranks
from lamella_testing.gpu_training import assert_equal, build, train
from lamella_testing.tiny import Kit

State = dict[str, torch.Tensor]


def cpu_state(kit: Kit, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {name: tensor.cpu() for name, tensor in kit.state(model, optimizer).items()}


def train_and_save(kit: Kit, path: Path, **options: bool) -> tuple[State, State]:
    model, optimizer = build(kit, **options)
    train(model, optimizer)
    save(path, model=model, optimizer=optimizer, extra={"step": 2})
    saved = cpu_state(kit, model, optimizer)
    train(model, optimizer)
    return saved, cpu_state(kit, model, optimizer)


def load_and_train(kit: Kit, path: Path, **options: bool) -> tuple[State, State, set[str]]:
    model, optimizer = build(kit, seed=1, **options)
    assert load(path, model=model, optimizer=optimizer) == {"step": 2}
    loaded = cpu_state(kit, model, optimizer)
    devices = {state["step"].device.type for state in optimizer.state.values()}
    train(model, optimizer)
    return loaded, cpu_state(kit, model, optimizer), devices


def read_after_what_its_stream_was_given(path: Path) -> list[bool]:
    """Zeros that wait on a stream, then a load on the stream: copies on a second stream would come first."""
    model = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(16)).cuda()
    save(path, model=model)
    expected = [param.detach().cpu() for param in model.parameters()]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # cycles: about half a second
        for param in model.parameters():
            param.zero_()
        load(path, model=model)
        copies = [param.clone() for param in model.parameters()]
    side.synchronize()
    return [torch.equal(copy.cpu(), original) for copy, original in zip(copies, expected, strict=True)]


@pytest.mark.gpu1
@pytest.mark.parametrize("num_threads", [1, 4])
def test_reads_of_several_threads_run_on_the_callers_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(_items, "num_threads", lambda: num_threads)
    [equal] = run_ranks(lambda: read_after_what_its_stream_was_given(tmp_path / "a"), 1, device="cuda")
    assert all(equal)


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"capturable": True}, "cuda"), ({"fused": True}, "cuda")]
)
def test_training_resumes_bit_equal_and_counts_steps_where_the_step_runs(
    kit: Kit, tmp_path: Path, options: dict[str, bool], device: str
) -> None:
    [(saved, after)] = run_ranks(lambda: train_and_save(kit, tmp_path / "a", **options), 1, device="cuda")
    [(loaded, resumed, devices)] = run_ranks(lambda: load_and_train(kit, tmp_path / "a", **options), 1, device="cuda")
    assert_equal(saved, loaded)
    assert_equal(after, resumed)
    assert devices == {device}


@pytest.mark.gpu1
def test_a_host_checkpoint_loads_on_a_gpu_and_back(kit: Kit, tmp_path: Path) -> None:
    # In separate ranks: an optimizer's step makes even a process with training on the host use CUDA.
    def save_on_the_host() -> State:
        model, optimizer = kit.build(sharded=False)
        kit.train(model, optimizer)
        save(tmp_path / "host", model=model, optimizer=optimizer, extra={"step": 2})
        return kit.state(model, optimizer)

    def load_on_the_host() -> set[str]:
        model, optimizer = kit.build(sharded=False)
        load(tmp_path / "gpu", model=model, optimizer=optimizer)
        return {state["step"].device.type for state in optimizer.state.values()}

    [saved] = run_ranks(save_on_the_host, 1)
    [(loaded, *_)] = run_ranks(lambda: load_and_train(kit, tmp_path / "host"), 1, device="cuda")
    assert_equal(saved, loaded)
    run_ranks(lambda: train_and_save(kit, tmp_path / "gpu", fused=True), 1, device="cuda")
    assert run_ranks(load_on_the_host, 1) == [{"cpu"}]


@pytest.mark.gpu2
def test_two_gpus_save_and_one_resumes(kit: Kit, tmp_path: Path) -> None:
    saved, _ = run_ranks(lambda: train_and_save(kit, tmp_path / "a"), 2, device="cuda")[0]
    [(loaded, *_)] = run_ranks(lambda: load_and_train(kit, tmp_path / "a"), 1, device="cuda")
    assert_equal(saved, loaded)


@pytest.mark.gpu2
def test_the_current_device_need_not_be_set(kit: Kit, tmp_path: Path) -> None:
    def save_from_a_wrong_current_device() -> int:
        model, optimizer = build(kit)
        train(model, optimizer)
        torch.cuda.set_device(0)  # The start of every process.
        save(tmp_path / "a", model=model, optimizer=optimizer)
        load(tmp_path / "a", model=model, optimizer=optimizer)
        return torch.cuda.current_device()

    assert run_ranks(save_from_a_wrong_current_device, 2, device="cuda") == [0, 0]


@pytest.mark.gpu2
def test_a_failing_rank_makes_every_rank_raise_over_nccl(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_fail() -> type[BaseException]:
        model, optimizer = build(kit)
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["owner"] = model  # Cannot be stored.
        with pytest.raises((TypeError, CheckpointFailed), match="owner") as info:
            save(tmp_path / "a", model=model, optimizer=optimizer)
        return info.type

    assert run_ranks(save_and_fail, 2, device="cuda") == [CheckpointFailed, TypeError]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu1
def test_samples_taken_by_an_async_save_keep_their_memory_until_copied(tmp_path: Path) -> None:
    def save_and_reuse_memory() -> int:
        model = torch.nn.Linear(16384, 16384, device="cuda")  # 1 GiB, copied before the samples.
        with AsyncSaver() as saver:
            saver.save(tmp_path / "a", model=model).wait()
            torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # About a quarter of a second.
            handle = saver.save(tmp_path / "a", model=model)
            assert handle._copies is not None
            handle._copies._are_queued.wait()
            small = [torch.full((128,), -1, dtype=torch.int32, device="cuda") for _ in range(4096)]
            handle.wait()
        return len(small)

    assert run_ranks(save_and_reuse_memory, 1, device="cuda") == [4096]


@pytest.mark.gpu1
def test_a_save_in_the_background_holds_the_state_of_the_call_while_the_host_goes_on(kit: Kit, tmp_path: Path) -> None:
    def save_while_the_gpu_is_busy() -> tuple[bool, State, State]:
        model, optimizer = build(kit, fused=True)
        train(model, optimizer)
        with AsyncSaver() as saver:
            saver.save(tmp_path / "first", model=model, optimizer=optimizer).wait()
            expected = cpu_state(kit, model, optimizer)
            torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # About a second.
            handle = saver.save(tmp_path / "a", model=model, optimizer=optimizer, extra={"step": 2})
            train(model, optimizer)
            is_busy = not torch.cuda.current_stream().query()
            handle.wait()
            assert saver._memory._bytes.is_pinned()
        return is_busy, expected, cpu_state(kit, model, optimizer)

    [(is_busy, expected, later)] = run_ranks(save_while_the_gpu_is_busy, 1, device="cuda")
    [(loaded, *_)] = run_ranks(lambda: load_and_train(kit, tmp_path / "a", fused=True), 1, device="cuda")
    assert is_busy
    assert_equal(expected, loaded)
    assert not torch.equal(expected["head.weight"], later["head.weight"])


def large(value: float) -> nn.Linear:
    """A gibibyte of weights: tens of milliseconds on a bus. With gradients, for SGD's step."""
    model = torch.nn.Linear(1 << 14, 1 << 14, bias=False, device="cuda")
    torch.nn.init.constant_(model.weight, value)
    model.weight.grad = torch.ones_like(model.weight)
    return model


def value_of(path: Path) -> float:
    model = torch.nn.Linear(1 << 14, 1 << 14, bias=False)
    load(path, model=model)
    assert model.weight.eq(model.weight[0, 0]).all()
    return model.weight[0, 0].item()


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", [False, True])
def test_compute_overlaps_copies_of_an_async_save_and_the_step_follows_the_copies(tmp_path: Path, fused: bool) -> None:
    def save_and_compute() -> tuple[bool, bool, float]:
        model = large(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        small = torch.nn.Linear(4, 4, device="cuda")
        small(a[:1, :4].float()).sum().backward()
        with AsyncSaver() as saver:
            saver.save(tmp_path / "first", model=model, optimizer=optimizer).wait()
            a @ a
            torch.optim.SGD(small.parameters(), fused=fused).step()  # Loads its kernels.
            torch.cuda.synchronize()
            handle = saver.save(tmp_path / "a", model=model, optimizer=optimizer)
            computed = torch.Event("cuda")
            for _ in range(20):  # A few milliseconds.
                a @ a
            computed.record()
            computed.synchronize()
            assert handle._copies is not None
            handle._copies._are_queued.wait()
            [copied] = handle._copies._copied
            is_overlapped = not copied.query()
            optimizer.step()
            is_host_ahead = not copied.query()
            handle.wait()
        return is_overlapped, is_host_ahead, model.weight[0, 0].item()

    assert run_ranks(save_and_compute, 1, device="cuda") == [(True, True, 0.0)]
    assert value_of(tmp_path / "a") == 1.0


@pytest.mark.gpu1
def test_freed_memory_is_not_reused_before_an_async_save_has_copied_the_state(tmp_path: Path) -> None:
    def save_and_replace() -> int:
        with AsyncSaver() as saver:
            saver.save(tmp_path / "a", model=large(0.0)).wait()
            model = large(1.0)
            handle = saver.save(tmp_path / "a", model=model)
            del model
            allocations = [torch.full((1 << 14, 1 << 14), 7.0, device="cuda") for _ in range(3)]
            handle.wait()
        return len(allocations)

    run_ranks(save_and_replace, 1, device="cuda")
    assert value_of(tmp_path / "a") == 1.0


@pytest.mark.gpu1
@pytest.mark.parametrize("way", ["unseen step", "by hand", "graph"])
def test_a_state_that_changed_before_it_was_copied_is_not_published(tmp_path: Path, way: str) -> None:
    def save_and_change() -> None:
        model = large(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.weight.data.add_(1.0)

        @torch.no_grad()
        def change() -> None:
            if way == "unseen step":
                type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
            elif way == "by hand":
                model.weight[5, 7] = 3.0
            else:
                graph.replay()

        change()  # Loads the kernels: a load of kernels may wait for all work of the GPU, and for the copies too.
        torch.nn.init.constant_(model.weight, 1.0)
        with AsyncSaver() as saver:
            saver.save(tmp_path / "a", model=model).wait()
            busy_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(busy_stream):
                torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # About half a second, in which the bus is not used.
            _copies._stream_beside(model.weight.device).wait_stream(busy_stream)
            handle = saver.save(tmp_path / "a", model=model)
            change()
            with pytest.raises(CheckpointFailed, match="changes to 1 tensors, 'model.weight'"):
                handle.wait()
            saver.save(tmp_path / "b", model=model).wait_staged()
            graph.replay()

    run_ranks(save_and_change, 1, device="cuda")
    assert value_of(tmp_path / "a") == 1.0
    assert (tmp_path / "b").exists()


@pytest.mark.gpu2
def test_two_gpus_save_in_the_background_step_after_step_and_one_resumes(kit: Kit, tmp_path: Path) -> None:
    def save_three() -> list[State]:
        model, optimizer = build(kit)
        states = []
        with CheckpointDirectory(tmp_path, keep=2) as checkpoints:
            for step in (2, 4, 6):
                train(model, optimizer)
                states.append(cpu_state(kit, model, optimizer))
                checkpoints.save_async(step, model=model, optimizer=optimizer, extra={"step": 2})
        return states

    _, second, third = run_ranks(save_three, 2, device="cuda")[0]
    for step, expected in ((4, second), (6, third)):
        path = CheckpointDirectory(tmp_path).path(step)
        [(loaded, *_)] = run_ranks(load_and_train, 1, kit, path, device="cuda")
        assert_equal(expected, loaded)
