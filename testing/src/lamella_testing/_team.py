"""Persistent ranks for many functions in turn: on GPUs, a process group takes seconds to start."""

import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import cloudpickle  # type: ignore[import-untyped]
import torch.distributed as dist

from lamella_testing._ranks import Device, RankProcess, check_parent, collect, join_group, kill, outcome_of, start

Result = TypeVar("Result")


class Team:
    """The ranks of a process group, started by the first `run`.

    Process groups, caches and default devices persist from one function to the next. After a failure all ranks are
    killed, and the next `run` starts new ranks.

    Args:
        num_ranks: At least 1.
        device: "cpu" for gloo, "cuda" for NCCL.
    """

    def __init__(self, num_ranks: int, *, device: Device = "cpu") -> None:
        self._num_ranks = num_ranks
        self._device = device
        self._ranks: list[RankProcess] = []
        self._directory: TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[[], Result], *, timeout_s: float = 120.0) -> list[Result]:
        """Run `fn` on every rank; return the results by rank.

        Args:
            fn: May be a closure that cloudpickle can pickle. The result must pickle, with tensors on the CPU.
            timeout_s: Limit in seconds for all ranks together.

        Raises:
            RankFailure: A rank raised or died.
            RankTimeout: Ranks were still running at the limit.
            RuntimeError: Fewer GPUs than ranks are visible; or the calling process has used CUDA, or run backward with
                GPUs visible.

        Effects: the first call forks the ranks; on any exception all ranks are killed.
        """
        message = cloudpickle.dumps(fn)
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                rank.connection.send_bytes(message)
            payloads = collect(self._ranks, timeout_s)
        except BaseException:
            self.close()
            raise
        return [pickle.loads(payload) for payload in payloads]

    def close(self) -> None:
        """Kill the ranks."""
        kill(self._ranks)
        self._ranks = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        check_parent(self._num_ranks, self._device)
        self._directory = TemporaryDirectory(prefix="lamella-team-")
        directory = Path(self._directory.name)

        def run_one(rank: int, message: bytes) -> object:
            if not dist.is_initialized():
                join_group(rank, self._num_ranks, directory, self._device)
            return pickle.loads(message)()

        def serve(rank: int, connection: Connection) -> None:
            while True:
                connection.send_bytes(outcome_of(partial(run_one, rank, connection.recv_bytes())))

        for rank in range(self._num_ranks):
            self._ranks.append(start(rank, directory, serve))
