"""A rank that does not go on is named and ends the run after a limit, and a stop request is heard meanwhile."""

import os
import signal
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lamella import Config, ParallelConfig, RunConfig, Stopped, WorkerTimeoutError
from lamella._data.tokens import load_tokens
from lamella._processes.launch import run_workers
from lamella._processes.placement import BOARD_VARIABLE, STORE_VARIABLE, Rank, place, process_group
from lamella._processes.pulse import Beat, FileBoard, Pulse, RunPhase, StoreBoard
from lamella._processes.stop import StopRequests
from lamella._processes.watch import Watch, watched
from lamella._settings.sections import WaitLimits
from lamella._training.preparation import prepare
from lamella._training.validation import Validation
from lamella_testing import run_ranks

LIMITS = WaitLimits(600.0, 3600.0)


def beats(moment: int, *progress: tuple[int, int, int] | None) -> list[Beat | None]:
    """The beats of all ranks at a moment: None for a rank that has published none."""
    return [None if fields is None else Beat(moment, *fields) for fields in progress]


class Ranks:
    """Two ranks that are watched once a second."""

    def __init__(self, limits: WaitLimits = LIMITS) -> None:
        self.watch, self.now, self.lines = Watch(2, limits, 0.0), 0, list[str]()
        self.silent: Beat | None = None

    def wait(
        self, seconds: int, *progress: tuple[int, int, int] | None, stopped: int | None = None, asked: bool = False
    ) -> None:
        for _ in range(seconds):
            self.now += 1
            board = beats(self.now, *progress)
            if stopped is not None:  # The last beat of a stopped process stays on the board.
                board[stopped] = self.silent = self.silent or board[stopped]
            self.lines += self.watch.look(float(self.now), board, is_asked_to_stop=asked)


def test_the_rank_with_fewer_collectives_is_waited_for_and_named_every_minute_until_the_limit() -> None:
    ranks = Ranks()
    ranks.wait(10, (RunPhase.STEPPING, 7, 41), (RunPhase.STEPPING, 7, 41))
    ranks.wait(125, (RunPhase.STEPPING, 7, 42), (RunPhase.STEPPING, 7, 41))
    assert ranks.lines == [
        f"step 7: waiting for rank 1 since {seconds} s; missing in collective 42" for seconds in (60, 120)
    ]
    assert ranks.watch.timeout() is None
    ranks.wait(476, (RunPhase.STEPPING, 7, 42), (RunPhase.STEPPING, 7, 41))
    assert ranks.watch.timeout() == (
        "Expected every rank to go on in step 7 within 600 s (--timeout), got none from rank 1; missing in collective "
        "42. All ranks have been stopped."
    )


def test_a_collectives_kind_is_named_in_the_wait_line_and_is_no_progress() -> None:
    watch, moment = Watch(2, LIMITS, 0.0), 0
    lines: list[str] = []
    for moment in range(1, 70):
        kind = "all-gather" if moment > 10 else ""
        board = [Beat(moment, RunPhase.STEPPING, 7, 42, kind), Beat(moment, RunPhase.STEPPING, 7, 40)]
        lines += watch.look(float(moment), board, is_asked_to_stop=False)
    assert lines == ["step 7: waiting for rank 1 since 60 s; joined collective 40 last, others 42 (all-gather)"]


def test_a_validation_longer_than_the_timeout_goes_on() -> None:
    watch, stepping = Watch(2, LIMITS, 0.0), (RunPhase.STEPPING, 7, 42)
    lines: list[str] = []
    for moment in range(1, 1000):  # The faster rank waits for the sum of the losses.
        board = [Beat(moment, RunPhase.STEPPING, 7, 43), Beat(moment, *stepping, num_batches=moment // 50)]
        lines += watch.look(float(moment), board, is_asked_to_stop=moment > 500)
    assert not lines and watch.absent() == [1]
    assert watch.timeout() is None and watch.abandons_step() is None


def test_each_batch_of_a_validation_is_progress(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda sums: None)
    monkeypatch.setattr("lamella._training.validation.target_losses", lambda model, inputs, *_: (inputs.float(),))
    config = replace(config, optim=replace(config.optim, batch_size=2))
    rank = Rank(rank=0, num_ranks=1, device=torch.device("cpu"))
    Validation(config, load_tokens(prepare(place(config)).directory.tokens), rank).records(torch.nn.Identity(), 3)
    assert rank.pulse.progress() == (RunPhase.STARTING, 0, 0, 4)  # 7 sequences in twos


def test_the_wait_line_of_a_silent_rank_claims_no_missed_collective() -> None:
    ranks = Ranks()
    ranks.wait(65, (RunPhase.STEPPING, 7, 41), (RunPhase.STEPPING, 7, 40), stopped=1)
    assert ranks.lines == ["step 7: waiting for rank 1 since 60 s; last collective entered: 41"]


@pytest.mark.parametrize("kind", ["", "all-gather", "a-kind-longer-than-twenty-four-letters"])
def test_a_beat_survives_its_board_with_its_kind_cut_to_24_letters(tmp_path: Path, kind: str) -> None:
    board, beat = FileBoard(tmp_path / "board", 2), Beat(3, RunPhase.SAVING, 7, 42, kind, num_batches=9)
    board.publish(1, beat)
    assert board.read() == [None, beat._replace(kind=kind[:24])]


def test_a_rank_that_stands_still_says_in_which_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella._processes.pulse._STANDSTILL_S", 0.2)

    def on_rank() -> tuple[int, str]:
        pulse, rank = Pulse(), dist.get_rank()
        pulse.group = dist.group.WORLD
        dist.barrier()
        gathered = [torch.zeros(2)] * 2
        work = None if rank else dist.all_gather(gathered, torch.zeros(2), async_op=True)
        wait_until(lambda: pulse.beat().kind)
        beat = pulse.beat()
        dist.all_gather(gathered, torch.zeros(2)) if work is None else work.wait()
        return beat.num_collectives, beat.kind

    assert run_ranks(on_rank, 2) == [(2, "all-gather"), (1, "barrier")]


@pytest.mark.gpu2
def test_a_rank_that_stands_still_on_a_gpu_says_in_which_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella._processes.pulse._STANDSTILL_S", 0.2)

    def on_rank() -> tuple[int, str]:
        pulse, gathered, part = Pulse(), torch.zeros(4, device="cuda"), torch.zeros(2, device="cuda")
        pulse.group = dist.group.WORLD
        dist.all_reduce(part)
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            dist.all_gather_into_tensor(gathered, part)
        wait_until(lambda: pulse.beat().kind)
        beat = pulse.beat()
        if dist.get_rank() == 1:
            dist.all_gather_into_tensor(gathered, part)
        torch.cuda.synchronize()
        return beat.num_collectives, beat.kind

    (first, kind), (second, kind_before) = run_ranks(on_rank, 2, device="cuda", backend="cpu:gloo,cuda:nccl")
    assert first == second + 1
    assert (kind, kind_before) == ("all-gather", "all-reduce")


def test_a_stopped_process_is_named_though_its_peer_has_entered_no_more_collectives() -> None:
    ranks = Ranks()
    ranks.wait(601, (RunPhase.STEPPING, 7, 41), (RunPhase.STEPPING, 7, 41), stopped=0)
    assert ranks.watch.absent() == [0] and ranks.watch.first_present() == 1
    assert "got no sign of life from rank 0" in str(ranks.watch.timeout())


def test_the_first_step_has_a_limit_of_its_own_and_progress_begins_the_wait_anew() -> None:
    ranks = Ranks()
    ranks.wait(3000, None, (RunPhase.STARTING, 0, 3))
    assert ranks.lines[0] == "start-up: waiting for rank 0 since 60 s; last collective entered: 3"
    assert ranks.watch.timeout() is None
    ranks.wait(3590, (RunPhase.STARTING, 1, 9), (RunPhase.STARTING, 1, 9))
    assert ranks.watch.timeout() is None
    ranks.wait(20, (RunPhase.STARTING, 1, 9), (RunPhase.STARTING, 1, 9))
    assert "in step 1 within 3600 s (--startup-timeout), got no progress of any rank; last" in str(
        ranks.watch.timeout()
    )


def test_a_save_has_its_own_limit_unless_its_process_is_stopped_or_another_rank_is_behind() -> None:
    saving, behind = (RunPhase.SAVING, 7, 42), (RunPhase.STEPPING, 7, 41)
    ranks = Ranks()
    ranks.wait(5000, saving, saving)
    assert ranks.watch.timeout() is None and not ranks.lines
    ranks.wait(615, saving, saving, stopped=1)  # seconds without a beat come first, which may be of a busy process
    assert "rank 1" in str(ranks.watch.timeout())
    ranks = Ranks()
    ranks.wait(601, saving, behind)
    assert "rank 1" in str(ranks.watch.timeout())


def test_ranks_that_are_done_are_not_waited_for() -> None:
    ranks = Ranks()
    ranks.wait(601, (RunPhase.DONE, 7, 0), (RunPhase.STEPPING, 7, 41), stopped=0)
    assert ranks.watch.absent() == []


def test_unwatched_time_does_not_count_towards_the_wait_timeout() -> None:
    ranks = Ranks()
    ranks.wait(10, (RunPhase.STEPPING, 7, 41), (RunPhase.STEPPING, 7, 41))
    ranks.now += 100_000
    ranks.wait(2, (RunPhase.STEPPING, 7, 41), (RunPhase.STEPPING, 7, 41))
    assert ranks.watch.timeout() is None


def test_after_a_stop_request_a_step_is_abandoned_when_a_process_is_stopped_and_a_slow_step_is_waited_for() -> None:
    one, two = (RunPhase.STEPPING, 7, 41), (RunPhase.STEPPING, 7, 42)
    ranks = Ranks()
    ranks.wait(1, one, one)
    ranks.wait(20, one, one, stopped=1)
    assert ranks.watch.abandons_step() is None
    ranks.wait(1, one, one, stopped=1, asked=True)
    assert ranks.watch.abandons_step() == "step 7: waiting for rank 1 since 21 s; the step is not saved"

    ranks = Ranks()
    ranks.wait(1, one, one)
    ranks.wait(50, one, one)
    ranks.wait(60, two, two, asked=True)  # The wait before was of 50 s: this may be such a step as well.
    assert ranks.watch.abandons_step() is None
    ranks.wait(45, two, two, asked=True)
    assert ranks.watch.abandons_step() is not None


def test_a_rank_publishes_the_collectives_that_it_has_entered(tmp_path: Path) -> None:
    dist_file = tmp_path / "store"

    def on_rank() -> tuple[bool, bool]:
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        os.environ.update({STORE_VARIABLE: f"file://{dist_file}", BOARD_VARIABLE: str(tmp_path / "board")})
        with process_group(ParallelConfig(device="cpu"), LIMITS) as place:
            dist.barrier()
            if rank == 1:
                wait_until(lambda: behind(place) == [1])
            dist.all_reduce(torch.zeros(1))
            is_behind = True
            dist.barrier()
        board = FileBoard(tmp_path / "board", 2)
        wait_until(lambda: all(beat is not None and beat.phase == RunPhase.DONE for beat in board.read()))
        return is_behind, dist.is_initialized()

    assert run_ranks(on_rank, 2) == [(True, False)] * 2


def behind(rank: Rank) -> list[int]:
    assert rank.board is not None
    board = [beat for beat in rank.board.read() if beat is not None]
    most = max(beat.num_collectives for beat in board)
    return [index for index, beat in enumerate(board) if beat.num_collectives < most]


def wait_until(condition: "object") -> None:
    deadline = time.monotonic() + 120  # A process that takes longer hangs, on a busy machine too.
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Rank 1 stops as SIGSTOP stops it; rank 0 waits as in a collective, and handles no signal.
PROGRAM = """
    import os, signal, sys, time
    from pathlib import Path
    from lamella._processes.launch import run_as_worker
    from lamella._processes.pulse import FileBoard, Pulse
    rank = int(os.environ["RANK"])
    def work(requests):
        pulse = Pulse()
        with pulse.published(FileBoard(Path(os.environ["LAMELLA_BOARD"]), 2), rank):
            requests.wait_from_now_on()
            for step in (1, 2, 3): pulse.begin_step(step)
            time.sleep(1)
            if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
    run_as_worker(work)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    return [sys.executable, str(path)]


def test_a_stopped_worker_ends_the_run_within_the_limit_and_is_named(command: list[str]) -> None:
    with pytest.raises(WorkerTimeoutError) as caught:
        run_workers(command, 2, 1, limits=WaitLimits(3.0, 120.0))
    assert caught.value.rank == 1
    assert str(caught.value) == (
        "Expected every rank to go on in step 3 within 3 s (--timeout), got no sign of life from rank 1. "
        "All ranks have been stopped."
    )


def test_a_stop_request_ends_workers_that_wait_for_a_stopped_one(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    class Late(StopRequests):
        """The request of somebody who sees that nothing goes on."""

        started_at = time.monotonic()

        @property
        def signum(self) -> int:
            return signal.SIGTERM if time.monotonic() > self.started_at + 4 else 0

        @signum.setter
        def signum(self, _: int) -> None: ...

    with pytest.raises(Stopped) as caught:
        run_workers(command, 2, 1, requests=Late(), limits=WaitLimits(6.0, 120.0))
    assert caught.value.signum == signal.SIGTERM
    assert "waiting for rank 1 since " in capfd.readouterr().out


def test_a_rank_of_torchrun_watches_its_peers_through_the_store() -> None:
    board, pulse = StoreBoard(HashStore(), 2), Pulse()
    rank = Rank(rank=0, num_ranks=2, device=torch.device("cpu"), pulse=pulse, board=board)
    ends: list[tuple[str, bool]] = []

    def end_wait(watch: Watch, _: int, prints: bool) -> None:
        if (error := watch.timeout()) is not None:
            ends.append((error, prints))

    board.publish(1, Beat(1, RunPhase.STEPPING, 2, 0))  # and not once more
    with pulse.published(board, 0), watched(rank, WaitLimits(4.0, 120.0), StopRequests(), end_wait):
        for step in (1, 2):
            pulse.begin_step(step)
        wait_until(lambda: ends)
    error, prints = ends[0]
    assert prints and "in step 2 within 4 s (--timeout), got no sign of life from rank 1." in error


def test_the_options_are_the_limits() -> None:
    assert RunConfig(timeout=5.0, startup_timeout=9.0).wait_limits == WaitLimits(5.0, 9.0)
    assert RunConfig().wait_limits.step_s == 600.0
