"""Requests to stop: every rank ends after the same step, which is saved; a run without a step ends at once."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from trained_runs import TrainOn

from lamella import Config, Stopped
from lamella._processes.launch import run_workers
from lamella._processes.placement import Rank, place
from lamella._processes.stop import StopRequests, interrupted
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella.cli import main
from lamella_checkpoint import CheckpointDirectory
from lamella_testing import run_ranks

DEADLINE_S = 120  # A longer process hangs, on a busy machine too.


@pytest.fixture
def config(config: Config) -> Config:
    """A run that also saves on the way: step 3, in the background."""
    return replace(config, run=replace(config.run, checkpoint_interval=3))


class AskedInStep(StopRequests):
    """The stop request to a rank in one of its steps; none by default."""

    def __init__(self, step: int | None = None) -> None:
        self._steps_to_go = step
        super().__init__()

    @property
    def signum(self) -> int:
        if self._steps_to_go is None:
            return 0
        self._steps_to_go -= 1
        return signal.SIGTERM if self._steps_to_go <= 0 else 0

    @signum.setter
    def signum(self, _: int) -> None: ...


def test_ranks_stopped_by_one_ranks_request_save_the_same_step_and_resume(
    config: Config, train: TrainOn, tmp_path: Path
) -> None:
    uninterrupted = train(
        replace(config, run=replace(config.run, directory=str(tmp_path / "whole"), checkpoint_interval=6)), 2
    )
    directory = prepare(place(config)).directory

    def on_rank() -> tuple[int, list[int]]:
        rank = Rank(rank=dist.get_rank(), num_ranks=2, device=torch.device("cpu"))
        asked = Trainer(config, directory, rank, AskedInStep(4 if rank.rank == 1 else None)).train()
        return asked, CheckpointDirectory(directory.checkpoints).steps()

    assert run_ranks(on_rank, 2) == [(signal.SIGTERM, [3, 4])] * 2
    resumed = train(config, 2)
    assert resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-7)
    assert resumed.validations == pytest.approx(uninterrupted.validations, rel=1e-7)


def test_a_request_in_the_last_step_leaves_a_run_that_is_complete(config: Config) -> None:
    directory = prepare(place(config)).directory
    requests = AskedInStep(6)

    def on_rank() -> int:
        return Trainer(config, directory, Rank(rank=0, num_ranks=1, device=torch.device("cpu")), requests).train()

    assert run_ranks(on_rank, 1) == [0]
    assert CheckpointDirectory(directory.checkpoints).steps() == [3, 6]


def test_a_stop_signal_repeated_within_a_second_is_not_a_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.9, 11.1, 12.0, 12.0])
    monkeypatch.setattr("lamella._processes.stop.time", SimpleNamespace(monotonic=lambda: next(clock)))
    requests = StopRequests()
    requests.wait_from_now_on()
    assert [requests.hear(signal.SIGTERM) for _ in range(3)] == [False, False, True]
    assert not requests.hear(signal.SIGHUP)  # again, as of a terminal whose shell took its time
    assert requests.signum == signal.SIGTERM
    assert StopRequests().hear(signal.SIGINT)


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupted() as requests:
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Stopped):
                os.kill(os.getpid(), signal.SIGINT)
        assert requests.signum == signal.SIGINT
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


# Workers with long imports. Asked to stop, they finish their work first.
WORKER = """
    import os, sys, time
    from pathlib import Path
    rank, here = int(os.environ["RANK"]), Path(sys.argv[1])
    unfinished = here / f"pid-{{rank}}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(here / f"started-{{rank}}")  # The parent reads the number as soon as it sees the name.
    {imports}
    from lamella._processes.endings import Stopped
    from lamella._processes.launch import run_as_worker
    def work(requests):
        requests.wait_from_now_on()
        (here / f"ready-{{rank}}").touch()
        while not requests.signum: time.sleep(0.01)
        {end}
        (here / f"saved-{{rank}}").touch()
        raise Stopped(requests.signum)
    run_as_worker(work)
"""


StartPython = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(start_python: StartPython, tmp_path: Path) -> StartPython:
    """Start a parent of two workers, and wait for the workers' files."""

    def start(until: str, *, imports: str = "", end: str = "") -> "subprocess.Popen[str]":
        worker = tmp_path / "worker.py"
        worker.write_text(textwrap.dedent(WORKER).format(imports=imports, end=end))
        command = [sys.executable, str(worker), str(tmp_path)]
        code = f"""
            import sys
            from lamella._processes.launch import run_workers
            from lamella._processes.stop import interrupted
            with interrupted() as requests:
                requests.wait_from_now_on()
                try:
                    run_workers({command!r}, 2, 1, requests=requests)
                except KeyboardInterrupt as stopped:
                    print(type(stopped).__name__, stopped.signum)
        """
        parent = start_python("-c", textwrap.dedent(code))
        wait_for(tmp_path, until, parent)
        return parent

    return start


def wait_for(folder: Path, name: str, parent: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(list(folder.glob(f"{name}-*"))) < 2:
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_to_the_parent_or_to_all_lets_the_slowest_worker_save(
    start: StartPython, tmp_path: Path, to_all: bool
) -> None:
    parent = start("ready", end="time.sleep(2 * rank)")
    parent.send_signal(signal.SIGTERM)
    for path in tmp_path.glob("started-*") if to_all else ():
        os.kill(int(path.read_text()), signal.SIGTERM)
    output, errors = parent.communicate(timeout=DEADLINE_S)
    assert output == f"Stopped {int(signal.SIGTERM)}\n"
    assert errors == "lamella: SIGTERM: finishing the step and saving it. Once more, and it stops at once.\n"
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_second_signal_ends_workers_that_hang(start: StartPython, tmp_path: Path) -> None:
    parent = start("ready", end="time.sleep(600)")
    parent.send_signal(signal.SIGINT)
    time.sleep(1.2)
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=DEADLINE_S)
    assert output == f"Stopped {int(signal.SIGINT)}\n"
    assert not list(tmp_path.glob("saved-*"))
    assert not any(Path(f"/proc/{path.read_text()}").exists() for path in tmp_path.glob("started-*"))


def test_workers_that_are_still_importing_end_without_a_word(start: StartPython, tmp_path: Path) -> None:
    parent = start("started", imports="time.sleep(600)")
    for path in tmp_path.glob("started-*"):
        os.kill(int(path.read_text()), signal.SIGINT)
    parent.send_signal(signal.SIGINT)
    output, errors = parent.communicate(timeout=DEADLINE_S)
    assert output == f"Stopped {int(signal.SIGINT)}\n"
    assert "Traceback" not in errors


def test_a_worker_stopped_before_its_first_step_stops_all_workers(tmp_path: Path) -> None:
    program = """
        import os, signal, time
        from lamella._processes.launch import run_as_worker
        def work(requests):
            if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        run_as_worker(work)
    """
    (tmp_path / "worker.py").write_text(textwrap.dedent(program))
    with pytest.raises(Stopped) as caught:
        run_workers([sys.executable, str(tmp_path / "worker.py")], 2, 1)
    assert caught.value.signum == signal.SIGTERM and caught.value.exit_code == 143


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


# The interval of 3 has a save in the background when the signal comes, from a process for each rank.
@pytest.mark.parametrize(
    ("launcher", "exit_code", "changes"),
    [
        (("-P",), 143, ("--ranks", "1", "--checkpoint-interval", "3")),
        pytest.param(TORCHRUN, 1, ("--checkpoint-interval", "100000"), marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_asked_to_stop_saves_its_step_and_the_same_command_goes_on(
    start_python: StartPython,
    options: list[str],
    tmp_path: Path,
    launcher: tuple[str, ...],
    exit_code: int,
    changes: tuple[str, ...],
) -> None:
    run = start_python(*launcher, "-m", "lamella", *options, "--steps", "100000", *changes)
    assert run.stdout is not None
    lines = list(takewhile(lambda line: not line.startswith("step: 4  loss"), run.stdout))
    assert len([line for line in lines if line.startswith("step: 2  loss")]) == 1  # One rank prints.
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=DEADLINE_S)
    step = CheckpointDirectory(tmp_path / "run" / "checkpoints").steps()[-1]
    where = str(tmp_path / "run")
    stopped = f"lamella: stopped by SIGTERM. Step {step} is saved in {where!r}; the same command goes on from it.\n"
    assert errors.count(stopped) == 1 and "lamella: error" not in errors
    assert run.returncode == exit_code  # torchrun has one code for all ranks.
    assert not (tmp_path / "run" / "lock").exists()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Stopped(signal.SIGTERM)])
def test_a_run_that_is_stopped_before_its_first_step_says_that_nothing_is_saved(
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    interrupt: KeyboardInterrupt,
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise interrupt

    monkeypatch.setattr("lamella._command.train.prepare", stop)
    signum = signal.SIGTERM if isinstance(interrupt, Stopped) else signal.SIGINT
    assert main(options) == 128 + signum
    assert capsys.readouterr().err == (
        f"lamella: stopped by {signum.name} before a step was saved. There is nothing to go on from: the same command "
        "starts anew.\n"
    )


def test_a_run_whose_terminal_ends_saves_its_step(options: list[str], tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    run = [sys.executable, "-P", "-m", "lamella", *options, "--steps", "100000", "--ranks", "1"]
    ours, its = os.openpty()
    command = [sys.executable, "-c", program, *run]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True) as process:
        os.close(its)
        with open(ours, encoding="utf-8", errors="replace") as terminal:
            assert any("step: 4  loss" in line for line in terminal)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGHUP
    assert CheckpointDirectory(tmp_path / "run" / "checkpoints").steps()[-1] > 3
    assert not (tmp_path / "run" / "lock").exists()
