"""The ranks that take real steps of rows: processes of `estimate_peer` or `plan_peer`, and their records."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final, TextIO

_NUM_ERROR_LINES: Final = 6
_START_S: Final = 60.0


@dataclass(kw_only=True)
class MeasuredSteps:
    """The steps of a row.

    Attributes:
        records: The program's record of every rank; empty if the steps failed.
        errors: Lines on the failure.
        seconds: Duration of the steps, with the making of the model.
    """

    records: Sequence[Mapping[str, Any]] = ()
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


class RankProcesses:
    """The processes of the ranks, for steps of the rows in turn; fresh processes after a failure.

    Args:
        options: The command line's: ranks, device, steps, tiny, row_timeout.
        folder: The folder for files of the rows, and for the ranks' errors.
        gpus: `CUDA_VISIBLE_DEVICES` of the ranks.
        flags: Further options of the program.
        program: The module run by a rank: reads a request a line, and prints a record of all ranks for each.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        gpus: str | None,
        flags: Sequence[str] = (),
        program: str = "lamella_integration.estimate_peer",
    ) -> None:
        self._options, self._folder, self._gpus = options, folder, gpus
        self._program, self._flags = program, flags
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: Queue[str | None] = Queue()
        self._is_fresh = True

    def measure(self, row: str, limit_nbytes: int | None = None) -> MeasuredSteps:
        """Wait for the record of a row.

        Args:
            row: The model and the options.
            limit_nbytes: The most memory for the caching allocator of a rank; None for all of the GPU's.
        """
        if not self._processes:
            self._start()
        start = time.monotonic()
        timeout_s = self._options.row_timeout + (_START_S if self._is_fresh else 0.0)
        self._send({"row": row, "limit_nbytes": limit_nbytes})
        measurement = MeasuredSteps(records=self._records(row, start + timeout_s))
        measurement.seconds = time.monotonic() - start
        self._is_fresh = False
        if not measurement.records:
            is_late = measurement.seconds >= timeout_s
            measurement.errors += [f"no record after {timeout_s:.0f} s"] if is_late else []
            measurement.errors += self._errors()
            self.stop()
        return measurement

    def stop(self) -> None:
        """End the processes, if any."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes = []

    def _send(self, request: Mapping[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # The process has failed; the errors are in a file.
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()

    def _records(self, row: str, end: float) -> Sequence[Mapping[str, Any]]:
        while time.monotonic() < end:
            try:
                line = self._lines.get(timeout=0.5)
            except Empty:
                if any(process.poll() not in (None, 0) for process in self._processes):
                    break
                continue
            if line is None:
                break
            if line.startswith("{") and (record := json.loads(line))["row"] == row:
                records: Sequence[Mapping[str, Any]] = record["ranks"]
                return records
        return ()

    def _start(self) -> None:
        options = self._options
        self._lines, self._is_fresh = Queue(), True
        command = [sys.executable, "-m", self._program, *self._flags]
        command += ["--device", options.device, "--steps", str(options.steps)] + ["--tiny"] * options.tiny
        port = _free_port()
        for rank in range(options.ranks):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "MASTER_PORT": port}
            environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in variables.items()}}
            if self._gpus is None:
                del environment["CUDA_VISIBLE_DEVICES"]
            else:
                environment["CUDA_VISIBLE_DEVICES"] = self._gpus
            environment.setdefault("OMP_NUM_THREADS", "4")
            with self._error_file(rank).open("w") as errors:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            self._processes.append(process)
            assert process.stdout is not None
            lines = self._lines if rank == 0 else Queue[str | None]()
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()

    def _errors(self) -> list[str]:
        return [text for rank in range(len(self._processes)) for text in _last_lines(self._error_file(rank), rank)]

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"errors-{rank}.txt"


def _read(stream: TextIO, lines: "Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_lines(path: Path, rank: int) -> Iterator[str]:
    if lines := path.read_text().strip().splitlines()[-_NUM_ERROR_LINES:]:
        yield f"rank {rank}: " + "\n".join(line[:300] for line in lines)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
