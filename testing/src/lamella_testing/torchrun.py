"""Programs under torchrun, for tests."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from lamella_testing._ranks import host_variables, ranks_per_gpu


def torchrun(num_ranks: int, *command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a Python program on ranks, and return the output and the errors of all ranks.

    With `LAMELLA_RANKS_PER_GPU` in the environment, ranks share GPUs: every rank has a launcher, and is a host of its
    own, as in Note [Ranks that share a GPU].

    Args:
        num_ranks: Ranks of the program.
        command: The program's file and its arguments.
        environment: Variables beside this process's.

    Raises:
        AssertionError: A launcher failed. The message is the end of the launcher's output.
    """
    program = [sys.executable, "-m", "torch.distributed.run"]
    if ranks_per_gpu() == 1:
        launches: list[tuple[list[str], dict[str, str]]] = [
            ([*program, "--standalone", "--nproc-per-node", str(num_ranks), *command], {})
        ]
    else:
        program += ["--nnodes", str(num_ranks), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        program += ["--master-port", str(free_port())]
        launches = [
            ([*program, "--node-rank", str(rank), *command], {**host_variables(rank), **_gpu_variable(rank)})
            for rank in range(num_ranks)
        ]

    def run(launch: tuple[list[str], dict[str, str]]) -> "subprocess.CompletedProcess[str]":
        arguments, variables = launch
        return subprocess.run(
            arguments,
            env={**os.environ, **(environment or {}), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(len(launches)) as threads:
        runs = list(threads.map(run, launches))
    failures = [run.stdout[-4000:] for run in runs if run.returncode]
    assert not failures, "\n".join(failures)
    return "".join(run.stdout for run in runs)


def free_port() -> int:
    """Return a port of this machine that no socket listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _gpu_variable(rank: int) -> dict[str, str]:
    """Return the variable by which a rank's process sees the rank's GPU alone."""
    gpu = rank // ranks_per_gpu()
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible_gpus.split(",")[gpu] if visible_gpus else str(gpu)}
