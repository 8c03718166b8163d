"""Ranks that stay, and run one function after another: with GPUs, a process group takes seconds to start."""

import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import cloudpickle  # type: ignore[import-untyped]
import torch.distributed as dist

from lamella_testing._ranks import Device, Rank, check_parent, collect, join_group, kill, outcome_of, start

Result = TypeVar("Result")


class Team:
    """The ranks of one process group, started at the first function they are to run.

    What a function leaves behind in its processes the next one finds: process groups, caches, default devices. After a
    failure the ranks are killed, and others start.

    Args:
        num_ranks: At least 1.
        device: "cpu" for gloo, "cuda" for NCCL with one GPU a rank.
    """

    def __init__(self, num_ranks: int, *, device: Device = "cpu") -> None:
        self._num_ranks = num_ranks
        self._device = device
        self._ranks: list[Rank] = []
        self._directory: TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[[], Result], *, timeout_s: float = 120.0) -> list[Result]:
        """Results of `fn` by rank. It may be a closure, as long as cloudpickle can take it along.

        Raises:
            RankFailure: A rank raised or died.
            RankTimeout: Not all of them were done in time.
            RuntimeError: Fewer GPUs than ranks are visible, or this process has used CUDA, or backward
                where torch sees GPUs.
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
