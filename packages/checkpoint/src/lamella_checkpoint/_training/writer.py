"""A rank's side of a save in the background: the writing process, and the way of a save to the outcome.

Note [Answers name their save]
    The process reads a rank's memory until the answer, so the memory may be used again only after the answer for the
    save with the last use, or once the process is gone. Each answer carries the save's directory, and an answer for
    another save is dropped. Answers are read by a thread, where no keyboard interrupt is raised. A thread that
    fails ends the process: an unread answer would be taken for a later save's, or never read.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Final

from lamella_checkpoint._training.async_process import (
    Job,
    WriterAnswer,
    describe,
    discard_files,
    is_published,
    is_settled,
    mark_failed,
    outcome_on_disk,
    part_name,
)
from lamella_checkpoint._training.outcomes import Failures, Outcomes
from lamella_checkpoint._training.staging import Memory

_PAUSES_S: Final = (0.01, 0.25)
_MOST_REQUESTS_A_SECOND: Final = 4000  # To rank 0's store, of all ranks together.
_PATIENCE_S: Final = 30.0  # Between a save's time limit, when rank 0 names the late ranks, and giving rank 0 up.
_ENDING_S: Final = 10.0


class Writer:
    """A process with `async_process.serve`: started by exec, since a fork is unsafe beside CUDA.

    Attributes:
        is_usable: Whether the process takes jobs; False after the end, or shortly before.
        is_stuck: Whether the process outlived a kill, in a call of the file system, and may still read the memory.
    """

    def __init__(self, memory: Memory) -> None:
        self.is_usable = True
        self.is_stuck = False
        self._closing = threading.Lock()
        self._connection, connection_of_process = Pipe()
        self._popen = start_process((connection_of_process.fileno(), memory.descriptor))
        # Kept open here, the connection would never show the process's death as end of file.
        connection_of_process.close()

    def send(self, job: Job) -> None:
        """Send a job."""
        with suppress(BrokenPipeError, ConnectionResetError):  # A dead process shows when its answer is awaited.
            self._connection.send(job)

    def answer(self, staged: Path, timeout: float) -> Failures | None:
        """Return the process's answer for a save; None without an answer in time.

        Raises:
            EOFError: The process has died.
            OSError: The process has died.
        """
        if not self._connection.poll(timeout):
            return None
        answer: WriterAnswer = self._connection.recv()
        return answer.failures if answer.staged == staged else None

    def close(self) -> int | None:
        """Let the idle process end; return its exit code, None if it is stuck."""
        self.is_usable = False
        with self._closing:  # The thread of an overdue save closes too: a second close could hit another file.
            self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(_ENDING_S)
        return self.kill()

    def kill(self) -> int | None:
        """End the process, even a stopped one, at any point; return the exit code, None for a stuck process."""
        self.is_usable = False
        self._popen.send_signal(signal.SIGKILL)
        try:
            return self._popen.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self.is_stuck = True
            return None


def start_process(descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Start a process with `async_process.main` that has the descriptors of a connection and a memory."""
    # A scheduler sends SIGTERM to every process of a job, and may leave training time to end in order: without
    # SIG_IGN, the checkpoint in flight would be lost. Note [Training comes first]: low priority after the imports,
    # seconds of compute, which would take minutes beside busy ranks, before any save.
    code = (
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "from lamella_checkpoint._training.async_process import main; os.nice(19); main()"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,  # Without a session of its own, by the same note.
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",  # A CUDA context would take device memory from training.
            "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip


class Following:
    """A save from its job to its outcome, on this rank.

    Attributes:
        deadline: The end of the time limit, on the monotonic clock.
    """

    def __init__(self, writer: Writer, outcomes: Outcomes, job: Job, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout
        self._writer, self._outcomes, self._job, self._timeout = writer, outcomes, job, timeout
        self._part: Failures | None = None  # The answer of this rank's process.
        self._outcome: Failures | None = None
        self._departure = threading.Event()

    def send(self) -> None:
        """Begin and send the job; an error ends the process."""
        try:
            self._writer.send(self._job.begun())
        except BaseException:
            self._writer.kill()
            raise

    def run(self) -> Failures | None:
        """Return the outcome, once known and with the memory free; None after `leave`. Raises nothing."""
        try:
            return self._follow()
        except BaseException as error:  # noqa: BLE001  In a thread: no caller would receive the error.
            self._writer.kill()
            return self._agree({self._job.rank: describe(error)})

    @property
    def is_left(self) -> bool:
        """Whether `leave` was called last, not `rejoin`."""
        return self._departure.is_set()

    def leave(self) -> None:
        """Let `run` return at once, while the save goes on."""
        self._departure.set()

    def rejoin(self) -> None:
        """Let another `run` follow the save from where the last was left."""
        self._departure.clear()

    def stop(self) -> None:
        """End the process and its reads of the memory."""
        self._writer.kill()

    def _follow(self) -> Failures | None:
        pause, longest = _PAUSES_S[0], longest_pause(self._job.num_ranks)
        while self._part is None or self._outcome is None:
            if self._departure.is_set():
                return None
            if self._part is None:
                self._accept(self._answer(pause))
            else:
                self._departure.wait(pause)
            if self._outcome is None:
                self._read()
            self._check_time()
            pause = min(1.2 * pause, longest)
        if self._outcome:
            discard_files(self._job)
        else:
            with suppress(RuntimeError):  # Rank 0 has ended, and with it the store.
                self._outcomes.acknowledge(self._name, self._departure)
        return self._outcome

    @property
    def _name(self) -> str:
        return self._job.staged.name

    def _answer(self, timeout: float) -> Failures | None:
        try:
            return self._writer.answer(self._job.staged, timeout)
        except (EOFError, OSError):
            return self._answer_of_dead(f"the process that writes checkpoints died (exit code {self._writer.close()})")

    def _answer_of_dead(self, reason: str) -> Failures:
        """The answer in place of a dead process's."""
        job = self._job
        # In this order: publication moves the part, so a part absent here and from the published checkpoint never was.
        has_part = (job.staged / part_name(job.rank)).exists()
        if is_published(job.target, job.staged) or (has_part and job.rank != 0):
            return {}
        mark_failed(job.staged, job.rank, reason)
        return {job.rank: reason}

    def _accept(self, answer: Failures | None) -> None:
        self._part = answer
        if answer is not None and (answer or self._job.rank == 0):
            self._agree(answer)

    def _agree(self, proposal: Failures) -> Failures:
        try:
            self._outcome = self._outcomes.agree(self._name, proposal)
        except RuntimeError:
            self._outcome = proposal  # Rank 0 has ended, and with it the store.
        return self._outcome

    def _read(self) -> None:
        """Read the outcome, if a rank has proposed one."""
        try:
            self._outcome = self._outcomes.read(self._name)
        except RuntimeError:
            if is_settled(self._job.target, self._job.staged):
                self._outcome = outcome_on_disk(self._job.target, self._job.staged)
        if self._outcome and self._job.rank == 0:
            for index, reason in self._outcome.items():  # Rank 0's process waits for the listed ranks' parts.
                mark_failed(self._job.staged, index, reason)

    def _check_time(self) -> None:
        now = time.monotonic()
        if self._part is None and now > self.deadline:
            self._writer.kill()
            this_rank = {self._job.rank}
            late = late_ranks(self._job.staged, self._job.num_ranks) or this_rank if self._job.rank == 0 else this_rank
            reason = f"nothing was written within {self._timeout:g} s"
            self._accept(self._answer_of_dead(reason) and dict.fromkeys(late, reason))
        elif self._outcome is None and now > self.deadline + _PATIENCE_S:
            self._agree({0: f"no outcome was known within {self._timeout:g} s"})


def longest_pause(num_ranks: int) -> float:
    """Seconds between a rank's looks for an outcome: longer from a thousand ranks on, for rank 0's store."""
    return max(_PAUSES_S[1], num_ranks / _MOST_REQUESTS_A_SECOND)


def late_ranks(staged: Path, num_ranks: int) -> set[int]:
    """The ranks without a part in a staged directory, as seen by this rank."""
    return {rank for rank in range(num_ranks) if not (staged / part_name(rank)).exists()}
