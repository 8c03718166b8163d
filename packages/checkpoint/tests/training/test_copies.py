"""A save in the background holds the state of the call, for any training during the copy."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_async_save import filled, in_child, value_at
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_checkpoint import AsyncSaver, CheckpointDirectory, CheckpointFailed, SaveHandle, load, save
from lamella_checkpoint._training import copies as _copies
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit

NUM_FEATURES = 200  # Weights too large for one copy.


class Gate:
    """Lets no copy begin before the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        queue = _copies.StateCopies._queue

        def queue_when_open(copies: _copies.StateCopies) -> None:
            assert self._is_open.wait(timeout=60)
            queue(copies)

        monkeypatch.setattr(_copies.StateCopies, "_queue", queue_when_open)

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    def open(self) -> None:
        self._is_open.set()

    def open_soon(self) -> None:
        """Most likely once the calling thread waits for copies; the thread may not go on before."""
        threading.Timer(0.1, self.open).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture(scope="module")
def saver() -> Iterator[AsyncSaver]:
    """One saver for all tests: its process takes seconds to start."""
    with AsyncSaver() as saver:
        yield saver


def large(value: float) -> nn.Linear:
    return filled(value, NUM_FEATURES)


def value_of(path: Path) -> float:
    return value_at(path, NUM_FEATURES)


def with_gradients(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(with_gradients(model).parameters(), lr=1.0, **options)


@pytest.mark.parametrize("optimizer_name", ["the same", "none", "another"])
def test_the_step_of_any_optimizer_waits_until_the_state_has_been_copied(
    tmp_path: Path, gate: Gate, saver: AsyncSaver, optimizer_name: str
) -> None:
    model = large(1.0)
    optimizer = sgd(model)
    optimizers = {"the same": optimizer, "none": None, "another": torch.optim.AdamW(model.parameters())}
    was_open: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: was_open.append(gate.is_open))
    handle = saver.save(tmp_path / "a", model=model, optimizer=optimizers[optimizer_name])
    assert not handle.done and handle.held_seconds == 0
    gate.open_soon()
    optimizer.step()
    assert was_open == [True] and handle.held_seconds > 0
    optimizer.step()
    saver.wait()
    assert value_of(tmp_path / "a") == 1.0
    assert model.weight[0, 0] == -1.0


def test_optimizer_state_is_of_the_call_too_and_may_be_replaced_meanwhile(
    tmp_path: Path, gate: Gate, saver: AsyncSaver
) -> None:
    model = large(1.0)
    optimizer = sgd(model, momentum=0.5)
    optimizer.step()
    saver.save(tmp_path / "a", model=model, optimizer=optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[model.weight]["momentum_buffer"] = torch.zeros_like(model.weight)
    optimizer = sgd(model)
    gate.open_soon()
    optimizer.step()
    saver.wait()
    other = large(5.0)
    optimizer = sgd(other, momentum=0.5)
    load(tmp_path / "a", model=other, optimizer=optimizer)
    assert other.weight.eq(0.0).all() and optimizer.state[other.weight]["momentum_buffer"].eq(1.0).all()


def test_buffers_and_extra_are_copied_before_an_async_save_returns(
    tmp_path: Path, gate: Gate, saver: AsyncSaver
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(50_000), nn.Flatten())
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    extra = {"losses": [1.0]}
    saver.save(tmp_path / "a", model=model, extra=extra)
    model(torch.randn(4, 50_000))
    extra["losses"].append(2.0)
    gate.open()
    saver.wait()
    assert not torch.equal(model.get_buffer("0.running_mean"), expected["0.running_mean"])
    assert load(tmp_path / "a", model=model) == {"losses": [1.0]}
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)


def test_load_and_wait_staged_wait_for_the_copies_of_an_async_save(
    tmp_path: Path, gate: Gate, saver: AsyncSaver
) -> None:
    save(tmp_path / "old", model=large(7.0))
    model = large(1.0)
    saver.save(tmp_path / "a", model=model)
    gate.open_soon()
    load(tmp_path / "old", model=model)
    assert gate.is_open
    saver.save(tmp_path / "b", model=model).wait_staged()
    with torch.no_grad():
        model.weight.fill_(9.0)
    saver.wait()
    assert [value_of(tmp_path / name) for name in "ab"] == [1.0, 7.0]


def step_unseen(model: nn.Module) -> None:
    optimizer = sgd(model, foreach=True)
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def step_fused_and_unseen(model: nn.Module) -> None:
    optimizer = sgd(model, fused=True)
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


@torch.no_grad()
def change_one_element(model: nn.Linear) -> None:
    model.weight[3, 5] += 1


def write_past_version_counters(model: nn.Linear) -> None:
    model.weight.data.mul_(2)


UNSEEN: list[Callable[[nn.Linear], None]] = [
    step_unseen,
    step_fused_and_unseen,
    change_one_element,
    write_past_version_counters,
]


@pytest.mark.parametrize("change", UNSEEN)
def test_a_state_that_changed_too_early_is_not_published(
    tmp_path: Path, gate: Gate, saver: AsyncSaver, change: Callable[[nn.Linear], None]
) -> None:
    model = large(1.0)
    gate.open()
    saver.save(tmp_path / "a", model=model).wait()
    gate._is_open.clear()
    handle = saver.save(tmp_path / "a", model=model)
    change(model)
    gate.open()
    with pytest.raises(CheckpointFailed, match="RuntimeError: .*changes to . tensors, 'model.*wait_staged"):
        handle.wait()
    assert value_of(tmp_path / "a") == 1.0
    with torch.no_grad():
        model.weight.fill_(3.0)
    saver.save(tmp_path / "a", model=model)
    saver.wait()
    assert value_of(tmp_path / "a") == 3.0
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_sharded_state_that_changed_too_early_on_one_rank_fails_on_all(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_change() -> None:
        gate = Gate(monkeypatch)
        model = kit.fully_shard(large(1.0))
        with AsyncSaver() as saver:
            handle = saver.save(tmp_path / "a", model=model)
            if dist.get_rank() == 1:
                assert isinstance(model.weight, DTensor)
                versions = model.weight._version, model.weight._local_tensor._version
                step_unseen(model)
                assert versions == (model.weight._version, model.weight._local_tensor._version)
            gate.open()
            with pytest.raises(CheckpointFailed, match="rank 1: RuntimeError: .*changes to 1 tensors, 'model.weight'"):
                handle.wait()

    run_ranks(save_and_change, 2)
    assert not (tmp_path / "a").exists()


def test_forward_and_backward_change_nothing_that_is_watched(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_train() -> dict[str, torch.Tensor]:
        gate = Gate(monkeypatch)
        model, optimizer = kit.build(sharded=True)
        monkeypatch.setattr(_copies, "_AT_ONCE_NBYTES", 0)
        with AsyncSaver() as saver:
            gate.open()
            kit.train(model, optimizer)
            gate._is_open.clear()
            expected = kit.state(model, optimizer)
            saver.save(tmp_path / "a", model=model, optimizer=optimizer)
            model(torch.randn(4, 5)).square().mean().backward()
            gate.open_soon()
            kit.train(model, optimizer)
        return expected

    expected = run_ranks(save_and_train, 2)[0]
    model, optimizer = kit.build(sharded=False, seed=1)
    load(tmp_path / "a", model=model, optimizer=optimizer)
    got = kit.state(model, optimizer)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_an_exception_in_training_does_not_lose_a_running_async_save(tmp_path: Path, gate: Gate) -> None:
    def train(saver: AsyncSaver) -> None:
        with saver:
            handles.append(saver.save(tmp_path / "a", model=large(1.0)))
            raise ZeroDivisionError

    handles: list[SaveHandle] = []
    saver = AsyncSaver()
    with pytest.raises(ZeroDivisionError):
        train(saver)
    gate.open()
    handles[0].wait()
    saver.close()
    assert value_of(tmp_path / "a") == 1.0


def test_closing_while_the_state_is_copied_waits(tmp_path: Path, gate: Gate) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    checkpoints.save_async(1, model=large(1.0))
    gate.open_soon()
    checkpoints.close()
    assert value_of(checkpoints.path(1)) == 1.0


def test_a_save_that_fails_to_copy_tells_and_lets_the_step_go_on(
    tmp_path: Path, gate: Gate, saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = large(1.0)
    optimizer = sgd(model)
    monkeypatch.setattr(_copies.StateCopies, "_queue", lambda _: [][0])
    handle = saver.save(tmp_path / "a", model=model, optimizer=optimizer)
    optimizer.step()
    with pytest.raises(CheckpointFailed, match="IndexError"):
        handle.wait()
    saver.wait()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("copy", [lambda _: [][0], lambda copies: copies._versions.raised.add("model.weight")])
def test_a_save_that_failed_holds_nothing_of_the_state(
    tmp_path: Path, saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch, copy: Callable[[_copies.StateCopies], object]
) -> None:
    monkeypatch.setattr(_copies.StateCopies, "_queue", copy)
    model = large(1.0)
    storages = [weakref.ref(param.untyped_storage()) for param in model.parameters()]
    handle = saver.save(tmp_path / "a", model=model)
    with pytest.raises(CheckpointFailed):
        handle.wait()
    del model
    gc.collect()  # Errors are in cycles with the frames of their tracebacks.
    assert handle._copies is not None
    assert [storage() for storage in storages] == [None, None]


def test_saves_inside_and_outside_of_inference_mode_use_one_memory(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        with torch.inference_mode():
            saver.save(tmp_path / "a", model=large(1.0))
            saver.wait()
        saver.save(tmp_path / "b", model=large(2.0))
    assert [value_of(tmp_path / name) for name in "ab"] == [1.0, 2.0]


def test_a_process_that_is_killed_while_it_copies_leaves_the_last_checkpoint(tmp_path: Path, gate: Gate) -> None:
    def save_and_die() -> None:
        saver = AsyncSaver()
        gate.open()
        saver.save(tmp_path / "a", model=large(1.0)).wait()
        gate._is_open.clear()
        saver.save(tmp_path / "a", model=large(2.0))

    assert in_child(save_and_die) == 0
    assert value_of(tmp_path / "a") == 1.0
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_program_that_ends_at_once_has_saved_and_other_hooks_come_after_the_wait(tmp_path: Path) -> None:
    program = f"""
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from lamella_checkpoint import AsyncSaver

@torch.no_grad()
def change(optimizer, *_):
    optimizer.param_groups[0]["params"][0].mul_(2)

register_optimizer_step_pre_hook(change)
model = torch.nn.Linear({NUM_FEATURES}, {50 * NUM_FEATURES})
model.weight.grad = torch.ones_like(model.weight)
optimizer = torch.optim.SGD(model.parameters())
AsyncSaver().save({str(tmp_path / "a")!r}, model=model, optimizer=optimizer, extra={{"step": 1}})
optimizer.step()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
    for _ in range(600):
        if (tmp_path / "a").exists():
            break
        threading.Event().wait(0.1)
    assert load(tmp_path / "a", model=nn.Linear(NUM_FEATURES, 50 * NUM_FEATURES)) == {"step": 1}


def test_a_program_ends_in_order_while_a_thread_asks_the_store_and_its_exit_handlers_may_still_wait(
    tmp_path: Path,
) -> None:
    # A thread that asks for the interpreter's lock inside C++ at exit ends the process by an abort.
    program = f"""
import atexit
import threading
import time
import torch
from lamella_checkpoint import AsyncSaver
from lamella_checkpoint._training.outcomes import Outcomes

def read(outcomes, save):
    is_asking.set()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        outcomes._store.check([save])
    return requested(outcomes, save)

is_asking = threading.Event()
requested, Outcomes.read = Outcomes.read, read
atexit.register(lambda: print(handle.wait() if {{waits}} else None))
handle = AsyncSaver().save({str(tmp_path)!r} + "/{{waits}}", model=torch.nn.Linear(2, 2))
is_asking.wait()
"""
    commands = [[sys.executable, "-W", "ignore", "-c", program.format(waits=waits)] for waits in (True, False)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [f"{tmp_path / 'True'}\n", "None\n"]
