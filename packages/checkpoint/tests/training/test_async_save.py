"""Saves in the background hold the state of the call, complete by themselves, and tell failures at the next call."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lamella_checkpoint import AsyncSaver, CheckpointDirectory, CheckpointFailed, SaveHandle, load, save
from lamella_checkpoint._formats.checksums import Checksums
from lamella_checkpoint._formats.dcp_write import WithoutManifest
from lamella_checkpoint._training import async_process as _process
from lamella_checkpoint._training import handle as _handle
from lamella_checkpoint._training import writer as _writer
from lamella_checkpoint._training.async_process import Job, WriterAnswer, is_settled, part_name
from lamella_checkpoint._training.handle import Limits
from lamella_checkpoint._training.outcomes import Failures, Outcomes
from lamella_checkpoint._training.writer import Following
from lamella_files import StoredMetadata
from lamella_testing import run_ranks
from lamella_testing.harmed_files import no_file_larger_than
from lamella_testing.tiny import Kit

DEADLINE_S = 120


def filled(value: float, num_features: int = 4) -> nn.Linear:
    model = nn.Linear(num_features, num_features)
    nn.init.constant_(model.weight, value)
    return model


def value_at(path: Path, num_features: int = 4) -> float:
    model = filled(-1.0, num_features)
    load(path, model=model)
    assert model.weight.eq(model.weight[0, 0]).all()
    return model.weight[0, 0].item()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_child(fn: Callable[[], object]) -> int:
    """Run a function in a process that ends like a killed one: without any closing or waiting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # The child needs no threads.
        pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # A fork lacks the parent's OpenMP threads, and would wait for the threads for ever.
        try:
            fn()
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_background_saves_of_training_ranks_hold_the_state_of_the_call(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_and_save() -> tuple[list[dict[str, torch.Tensor]], list[int]]:
        model, optimizer = kit.build(sharded=True)
        states, num_collectives = [], 0
        gather_object = dist.gather_object

        def count(*args: Any, **kwargs: Any) -> None:
            nonlocal num_collectives
            num_collectives += 1
            gather_object(*args, **kwargs)

        monkeypatch.setattr(dist, "gather_object", count)
        with CheckpointDirectory(tmp_path / "runs", keep=2) as checkpoints:
            for step in range(4):
                kit.train(model, optimizer, num_steps=1)
                states.append(kit.state(model, optimizer))
                handle = checkpoints.save_async(step, model=model, optimizer=optimizer, extra={"step": step})
                assert handle.path == checkpoints.path(step) and handle.stage_seconds > 0
            assert num_collectives == 1
            assert handle.wait() == handle.path and handle.done
            assert checkpoints._saver is not None
            num_bytes = checkpoints._saver._memory.nbytes
            kit.train(model, optimizer, num_steps=1)
            checkpoints.save(4, model=model, optimizer=optimizer, extra={"step": 4})
            checkpoints.save_async(5, model=model, optimizer=optimizer, extra={"step": 5}).wait()
            assert checkpoints._saver._memory.nbytes == num_bytes
        return [*states, kit.state(model, optimizer)], checkpoints.steps()

    states, steps = run_ranks(train_and_save, 3)[0]
    assert steps == [4, 5]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"step_00000004", "step_00000005"}
    assert not list((tmp_path / "runs").glob("*/part-*"))
    for step in steps:
        model, optimizer = kit.build(sharded=False, seed=1)
        path = tmp_path / "runs" / f"step_{step:08d}"
        assert load(path, model=model, optimizer=optimizer) == {"step": step}
        got = kit.state(model, optimizer)
        assert all(torch.equal(got[name], states[4][name]) for name in states[4])
        checksums = Checksums.of(path)
        assert checksums is not None and set(checksums.files) == {
            "__0_0.distcp",
            "__1_0.distcp",
            "__2_0.distcp",
            ".metadata",
            "lamella.json",
        }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_background_save_writes_the_files_and_values_of_a_blocking_save(kit: Kit, tmp_path: Path) -> None:
    model, optimizer = kit.build(sharded=False)
    kit.train(model, optimizer)
    expected = kit.state(model, optimizer)
    save(tmp_path / "blocking", model=model, optimizer=optimizer, extra={"step": 2})
    with AsyncSaver() as saver:
        first = saver.save(tmp_path / "a", model=model, optimizer=optimizer, extra={"step": 2})
        kit.train(model, optimizer)
        second = saver.save(tmp_path / "b", model=model, optimizer=optimizer)
        assert first.done and second.waited_seconds > 0
        kit.train(model, optimizer)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("blocking", "a", "b")]
    assert files[0] == files[1] == files[2]
    for name in ("blocking", "a"):
        state = {"model": {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}}
        dcp.load(state, checkpoint_id=tmp_path / name)  # type: ignore[attr-defined]
        assert all(torch.equal(state["model"][name], expected[name]) for name in state["model"])


@pytest.mark.usefixtures("started_writers")
def test_a_checkpoint_completes_when_training_is_killed_once_the_state_was_copied(tmp_path: Path) -> None:
    def save_and_leave() -> None:
        sender = AsyncSaver().save(tmp_path / "a", model=filled(1.0, 1000))._sender
        assert sender is not None
        sender.join()

    assert in_child(save_and_leave) == 0
    until((tmp_path / "a").exists)
    assert value_at(tmp_path / "a", 1000) == 1.0


def test_a_checkpoint_completes_when_training_fails_meanwhile(tmp_path: Path) -> None:
    handles: list[SaveHandle] = []

    def train(saver: AsyncSaver) -> None:
        with saver:
            handles.append(saver.save(tmp_path / "a", model=filled(1.0)))
            raise ZeroDivisionError

    saver = AsyncSaver()
    with pytest.raises(ZeroDivisionError):
        train(saver)
    handles[0].wait()
    saver.close()
    assert value_at(tmp_path / "a") == 1.0


def test_a_save_that_is_overtaken_ends_before_the_next_begins(tmp_path: Path) -> None:
    with CheckpointDirectory(tmp_path, keep=None) as checkpoints:
        handles = [checkpoints.save_async(step, model=filled(float(step), 500)) for step in range(3)]
        assert [handle.done for handle in handles[:2]] == [True, True]
        handles[2].wait()
    assert [value_at(checkpoints.path(step), 500) for step in checkpoints.steps()] == [0.0, 1.0, 2.0]


def test_a_failure_is_told_once_at_the_next_save_and_then_saving_goes_on(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("mine")
    with AsyncSaver() as saver:
        saver.save(tmp_path / "a", model=filled(1.0))
        saver.save(tmp_path / "notes", model=filled(2.0))
        with pytest.raises(
            CheckpointFailed, match="save the checkpoint '.*/notes' in the background.*\n.*rank 0: FileExists"
        ):
            saver.save(tmp_path / "a", model=filled(3.0))
        assert value_at(tmp_path / "a") == 1.0
        handle = saver.save(tmp_path / "a", model=filled(3.0))
        handle.wait()
        handle.wait()
        assert value_at(tmp_path / "a") == 3.0
    saver.save(tmp_path / "a", model=filled(4.0)).wait()  # It may be used again.
    saver.close()
    saver.close()
    assert value_at(tmp_path / "a") == 4.0
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "mine"


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint_and_no_data(tmp_path: Path) -> None:
    with no_file_larger_than(2 << 20):
        saver = AsyncSaver()
    saver.save(tmp_path / "a", model=filled(1.0)).wait()
    handle = saver.save(tmp_path / "a", model=filled(2.0, 1000))
    with pytest.raises(CheckpointFailed, match="rank 0: OSError.*File too large"):
        handle.wait()
    assert not list(tmp_path.glob("*/__0_*")) or [path.name for path in tmp_path.glob("*.saving-*/*")] == ["failed-0"]
    assert value_at(tmp_path / "a") == 1.0
    saver.save(tmp_path / "a", model=filled(3.0)).wait()
    assert value_at(tmp_path / "a") == 3.0 and list(tmp_path.iterdir()) == [tmp_path / "a"]
    saver.close()


def test_a_failure_of_one_rank_is_told_on_every_rank(tmp_path: Path) -> None:
    def save_four() -> list[int]:
        limit = 1 << 20 if dist.get_rank() == 1 else None
        with no_file_larger_than(limit):
            saver = AsyncSaver()
        saver.save(tmp_path / "a", model=nn.ModuleDict({f"r{dist.get_rank()}": filled(1.0)})).wait()
        saver.save(tmp_path / "a", model=nn.ModuleDict({f"r{dist.get_rank()}": filled(2.0, 1000)}))
        with pytest.raises(CheckpointFailed, match="rank 1: OSError.*File too large") as info:
            saver.save(tmp_path / "a", model=filled(3.0))
        saver.save(tmp_path / "a", model=nn.ModuleDict({f"r{dist.get_rank()}": filled(4.0)})).wait()
        saver.close()
        return sorted(info.value.failures)

    assert run_ranks(save_four, 3) == [[1], [1], [1]]
    model = nn.ModuleDict({f"r{rank}": filled(0.0) for rank in range(3)})
    load(tmp_path / "a", model=model)
    assert [model.get_parameter(f"r{rank}.weight")[0, 0].item() for rank in range(3)] == [4.0] * 3


@pytest.mark.usefixtures("started_writers")
def test_a_killed_writer_is_told_on_every_rank_and_replaced(kit: Kit, tmp_path: Path) -> None:
    def save_three() -> list[dict[str, int]]:
        model, _ = kit.build(sharded=True)
        saver = AsyncSaver()
        loaded_extras = []
        for victim in range(2):
            saver.save(tmp_path / "a", model=model, extra={"n": victim}).wait()
            dist.barrier()
            if dist.get_rank() == victim:
                assert saver._process is not None
                os.kill(saver._process._popen.pid, signal.SIGKILL)
            saver.save(tmp_path / "a", model=model, extra={"n": -1})
            with pytest.raises(CheckpointFailed, match=f"rank {victim}: the process that writes checkpoints died"):
                saver.wait()
            loaded_extras.append(load(tmp_path / "a", model=model))
        saver.save(tmp_path / "a", model=model, extra={"n": 2}).wait()
        saver.close()
        return loaded_extras

    assert run_ranks(save_three, 2) == [[{"n": 0}, {"n": 1}]] * 2
    assert load(tmp_path / "a", model=kit.build(sharded=False)[0]) == {"n": 2}


@pytest.mark.usefixtures("started_writers")
def test_the_sigterm_of_a_job_leaves_the_process_that_writes_at_work(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        saver.save(tmp_path / "a", model=filled(1.0)).wait()
        assert saver._process is not None
        os.kill(saver._process._popen.pid, signal.SIGTERM)
        saver.save(tmp_path / "a", model=filled(2.0)).wait()
    assert value_at(tmp_path / "a") == 2.0


@pytest.mark.usefixtures("started_writers")
def test_a_killed_rank_leaves_the_last_checkpoint(kit: Kit, tmp_path: Path) -> None:
    def save_and_die() -> None:
        model, _ = kit.build(sharded=True)
        saver = AsyncSaver()
        saver.save(tmp_path / "a", model=model, extra={"n": 1}).wait()
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        handle = saver.save(tmp_path / "a", model=model, extra={"n": 2})
        with pytest.raises(TimeoutError, match="Expected the checkpoint '.*/a' within 0.3 s"):
            handle.wait(timeout=0.3)

    with pytest.raises(Exception, match="SIGKILL"):
        run_ranks(save_and_die, 2)
    assert load(tmp_path / "a", model=kit.build(sharded=False)[0]) == {"n": 1}


@pytest.mark.usefixtures("started_writers")
def test_the_process_that_writes_gives_way_to_training_and_outlives_its_process_group(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        saver.save(tmp_path / "a", model=filled(1.0)).wait()
        assert saver._process is not None
        pid = saver._process._popen.pid
        assert b"async_process" in Path(f"/proc/{pid}/cmdline").read_bytes(), "a fork, not the process of users' ranks"
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.getsid(pid) == os.getsid(0)  # Nice values count inside a session.
        assert os.getpgid(pid) not in (os.getpgid(0), os.getpgid(os.getppid()))


def job_of(target: Path, rank: int, num_ranks: int = 2) -> Job:
    """A save of nothing."""
    return Job(
        target=target,
        staged=target.with_name(f"{target.name}.saving-01234567"),
        rank=rank,
        num_ranks=num_ranks,
        memory_nbytes=0,
        items=(),
        digests={},
        form=WithoutManifest(path_of=lambda name: (name,)),
        retention=None,
        is_first=False,
    )


def test_rank_zeros_process_lists_the_staged_directory_and_asks_for_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path / "a", rank=0, num_ranks=16384)
    job.staged.mkdir()
    for rank in range(5):
        (job.staged / part_name(rank)).touch()
    asked: list[str] = []
    exists = Path.exists

    def noted_exists(path: Path) -> bool:
        asked.append(path.name)
        return exists(path)

    monkeypatch.setattr(Path, "exists", noted_exists)

    class Look(_process._Waiting):
        def until(self, total: int, count: Callable[[], int]) -> None:
            assert (count(), total) == (5, 16384)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        _process._publish_when_whole(job, Look(lambda: False))
    assert len(asked) < 10


def test_looks_for_an_outcome_stay_within_rank_zeros_means() -> None:
    assert _writer.longest_pause(8) == 0.25
    assert 16384 / _writer.longest_pause(16384) <= 4000


class Answers:
    """A process that writes, with prepared answers: a NamedTuple to return, or an error to raise."""

    def __init__(self, *answers: WriterAnswer | type[Exception]) -> None:
        self._answers = list(answers)
        self.is_killed = False

    def answer(self, staged: Path, timeout: float) -> Failures | None:
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, type):
            raise answer
        return answer.failures if answer is not None and answer.staged == staged else None

    def close(self) -> int:
        return -signal.SIGKILL

    def kill(self) -> None:
        self.is_killed = True


def test_an_answer_for_another_save_is_dropped(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        assert saver._process is not None
        receiver, sender = Pipe()
        connection, saver._process._connection = saver._process._connection, receiver
        sender.send(WriterAnswer(tmp_path / "a.saving-1", {0: "no room"}))
        sender.send(WriterAnswer(tmp_path / "a.saving-2", {}))
        answers = [saver._process.answer(tmp_path / "a.saving-2", timeout=0.0) for _ in range(3)]
        saver._process._connection = connection
    assert answers == [None, {}, None]


def test_a_written_part_of_a_lost_process_counts_and_the_outcome_is_that_of_rank_0(tmp_path: Path) -> None:
    job, outcomes = job_of(tmp_path / "a", rank=1), Outcomes("token")
    job.staged.mkdir()
    (job.staged / part_name(1)).touch()
    outcomes.agree(job.staged.name, {0: "no room"})
    writer: Any = Answers(EOFError)
    assert Following(writer, outcomes, job, timeout=DEADLINE_S).run() == {0: "no room"}


def test_a_silent_process_is_killed_at_the_time_limit_and_late_ranks_are_named(tmp_path: Path) -> None:
    job = job_of(tmp_path / "a", rank=0, num_ranks=4)
    job.staged.mkdir()
    for rank in (0, 2):
        (job.staged / part_name(rank)).touch()
    writer: Any = Answers()
    failures = Following(writer, Outcomes("token"), job, timeout=0.001).run()
    assert failures is not None and writer.is_killed and sorted(failures) == [1, 3]
    assert set(failures.values()) == {"nothing was written within 0.001 s"}


def test_the_thread_of_an_outcome_that_fails_ends_the_process(tmp_path: Path) -> None:
    writer: Any = Answers(KeyError)
    failures = Following(writer, Outcomes("token"), job_of(tmp_path / "a", rank=0), timeout=DEADLINE_S).run()
    assert failures is not None and failures.keys() == {0} and writer.is_killed


def test_the_first_proposal_of_an_outcome_counts() -> None:
    outcomes = Outcomes("token")
    assert outcomes.read("a") is None
    assert outcomes.agree("a", {1: "no room"}) == {1: "no room"}
    assert outcomes.agree("a", {}) == outcomes.read("a") == {1: "no room"}
    assert outcomes.agree("b", {}) == outcomes.read("b") == {}


def test_a_wait_prints_the_late_rank_and_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_handle, "_LINE_EVERY_S", 0.01)
    monkeypatch.setattr(_handle, "_PAUSE_S", 0.001)
    lines: list[str] = []
    job = job_of(tmp_path / "step_00000040", rank=0)
    job.staged.mkdir()
    (job.staged / part_name(0)).touch()
    handle = SaveHandle(job.target, job.staged, Outcomes("token"), Limits(600.0, lines.append))
    handle._num_ranks, handle._is_begun = 2, True
    handle._following = Following(Answers(), Outcomes("token"), job, timeout=600.0)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="Expected the checkpoint '.*/step_00000040' within 0.1 s"):
        handle.wait(timeout=0.1)
    assert lines[0] == "checkpoint step_00000040: waiting for rank 1's part since 0.01 s"
    (job.staged / part_name(1)).touch()
    assert handle._delay() == "rank 0 to complete it"


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_time_limit_is_above_zero(timeout: float) -> None:
    with pytest.raises(ValueError, match="Expected a timeout above 0 s, got timeout="):
        AsyncSaver(timeout=timeout)


def test_a_save_has_one_outcome_on_all_ranks_though_its_checkpoint_is_moved_away_and_seen_by_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_three() -> list[str]:
        if dist.get_rank() == 1:  # A network file system that shows nothing of the others' files.
            monkeypatch.setattr(_writer, "is_published", lambda *_: False)
            monkeypatch.setattr(_writer, "is_settled", lambda *_: False)
        outcomes = []
        with CheckpointDirectory(tmp_path / "runs") as checkpoints:
            for step in range(3):
                handle = checkpoints.save_async(step, model=filled(float(step)))
                if dist.get_rank() == 0:
                    until((handle.path / ".metadata").exists)
                    handle.path.rename(tmp_path / f"moved-{step}")
                outcomes.append(handle.wait().name)
        return outcomes

    assert run_ranks(save_three, 2) == [[f"step_0000000{step}" for step in range(3)]] * 2
    assert [value_at(tmp_path / f"moved-{step}") for step in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("started_writers")
def test_a_stopped_process_fails_the_save_on_every_rank_at_the_time_limit(tmp_path: Path) -> None:
    def save_stopped() -> list[int]:
        with AsyncSaver(timeout=1.0) as saver:
            assert saver._process is not None
            if dist.get_rank() == 1:
                os.kill(saver._process._popen.pid, signal.SIGSTOP)
            handle = saver.save(tmp_path / "a", model=filled(1.0))
            with pytest.raises(CheckpointFailed, match="rank 1: nothing was written within 1 s") as info:
                handle.wait()
            if dist.get_rank() == 1:
                assert saver._process._popen.poll() == -signal.SIGKILL and not saver._process.is_usable
        return sorted(info.value.failures)

    failures = run_ranks(save_stopped, 2)
    assert failures[0] == failures[1]
    assert not (tmp_path / "a").exists()


def test_a_failure_that_one_rank_alone_knows_is_raised_on_every_rank_before_a_collective(tmp_path: Path) -> None:
    def save_after_failure() -> None:
        checkpoints = CheckpointDirectory(tmp_path / "runs")

        def wait() -> None:
            if dist.get_rank() == 1:
                raise CheckpointFailed("save", {1: "no room"})

        checkpoints.wait = wait  # type: ignore[method-assign]
        with pytest.raises(CheckpointFailed, match="no room"):
            checkpoints.save(1, model=filled(1.0))

    run_ranks(save_after_failure, 2)


def test_a_published_save_is_settled_though_the_replaced_files_resist_removal(tmp_path: Path) -> None:
    save(tmp_path / "a", model=nn.Sequential(*(filled(1.0) for _ in range(50))))  # Its metadata is long.
    published_id = StoredMetadata.read(tmp_path / "a").save_id
    for save_id, expected in ((published_id, True), ("saving-00000002", False)):
        staged = tmp_path / f"a.{save_id}"
        staged.mkdir()
        (staged / ".nfs01").touch()
        assert is_settled(tmp_path / "a", staged) == expected


def test_an_async_saver_takes_rank_specific_tensors_only_from_its_first_save_on(tmp_path: Path) -> None:
    def save_own() -> None:
        model = nn.ModuleDict({str(dist.get_rank()): filled(float(dist.get_rank())), "shared": filled(5.0)})
        with AsyncSaver() as saver:
            saver.save(tmp_path / "a", model=model)
        with AsyncSaver() as saver:
            saver.save(tmp_path / "b", model=model["shared"])
            saver.save(tmp_path / "c", model=model)
            with pytest.raises(CheckpointFailed, match="got different ones on ranks \\[0, 1\\]"):
                saver.wait()

    run_ranks(save_own, 2)
    model = nn.ModuleDict({name: filled(-1.0) for name in ("0", "1", "shared")})
    load(tmp_path / "a", model=model)
    assert [model.get_parameter(f"{name}.weight")[0, 0].item() for name in model] == [0.0, 1.0, 5.0]
    assert not (tmp_path / "c").exists()


def test_an_unsavable_tensor_or_extra_raises_in_the_call_of_an_async_save(tmp_path: Path) -> None:
    class LabelledTensor(torch.Tensor):
        pass

    model = filled(1.0)
    model.register_buffer("tagged", torch.ones(2).as_subclass(LabelledTensor))
    with AsyncSaver() as saver:
        with (
            torch.serialization.safe_globals([LabelledTensor]),
            pytest.raises(NotImplementedError, match="got LabelledTensor for 'model.tagged'"),
        ):
            saver.save(tmp_path / "a", model=model)
        with pytest.raises(CheckpointFailed, match="LabelledTensor"):
            saver.wait()
        with pytest.raises(TypeError, match=r"extra\['a'\] to be plain data"):
            saver.save(tmp_path / "a", model=filled(1.0), extra={"a": object()})
        with pytest.raises(CheckpointFailed):
            saver.wait()
        saver.save(tmp_path / "a", model=filled(1.0))
    assert value_at(tmp_path / "a") == 1.0


def test_an_error_in_one_ranks_call_is_met_by_every_rank_in_the_next_call(tmp_path: Path) -> None:
    def save_three() -> list[int]:
        with AsyncSaver() as saver:
            saver.save(tmp_path / "a", model=filled(1.0)).wait()
            if dist.get_rank() == 1:
                with pytest.raises(TypeError, match=r"extra\['a'\] to be plain data"):
                    saver.save(tmp_path / "a", model=filled(2.0), extra={"a": object()})
            else:
                saver.save(tmp_path / "a", model=filled(2.0))
            with pytest.raises(CheckpointFailed) as info:
                saver.save(tmp_path / "a", model=filled(3.0))
            saver.save(tmp_path / "a", model=filled(4.0)).wait()
        return sorted(info.value.failures)

    assert run_ranks(save_three, 2) == [[1], [1]]
    assert value_at(tmp_path / "a") == 4.0


def test_every_kind_of_value_passes_through_the_memory(tmp_path: Path) -> None:
    model = nn.Module()
    tensors = {
        "half": torch.randn(3, 5).half(),
        "bfloat": torch.randn(7).bfloat16(),
        "float8": torch.randn(6).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "flags": torch.tensor([True, False, True]),
        "number": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "columns": torch.randn(4, 3).t(),
        "last": torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    for name, tensor in tensors.items():
        model.register_buffer(f"a_{name}", tensor.clone(memory_format=torch.preserve_format))
    with AsyncSaver() as saver:
        saver.save(tmp_path / "a", model=model)
    for buffer in model.buffers():
        buffer.zero_()
    load(tmp_path / "a", model=model)
    for name, tensor in tensors.items():
        assert torch.equal(model.get_buffer(f"a_{name}").cfloat(), tensor.cfloat()), name  # type: ignore[attr-defined]
