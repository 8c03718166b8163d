"""Programs under torchrun, for tests."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack

from lamella_testing._ranks import ranks_per_gpu


def torchrun(num_ranks: int, *command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a Python program on ranks, and return the output and errors of all ranks.

    Where `LAMELLA_RANKS_PER_GPU` lets ranks share a GPU, each rank is a host of its own with one rank, as in
    Note [Ranks that share a GPU].

    Args:
        num_ranks: Ranks of the program.
        command: The program's file and its arguments.
        environment: Variables beside this process's.

    Raises:
        AssertionError: A launcher failed; with the end of what it wrote.
    """
    variables = {**os.environ, **(environment or {})}
    program = [sys.executable, "-m", "torch.distributed.run"]
    if ranks_per_gpu() == 1:
        launches = [([*program, "--standalone", "--nproc-per-node", str(num_ranks), *command], variables)]
    else:
        hosts = ["--nnodes", str(num_ranks), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        rendezvous = [*hosts, "--master-port", str(_free_port())]
        launches = [
            ([*program, *rendezvous, "--node-rank", str(rank), *command], {**variables, **_host(rank)})
            for rank in range(num_ranks)
        ]
    with ExitStack() as files:
        # Files, not pipes: a rank that waits for a full pipe to be read would hold its peers in a collective.
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in launches]
        launchers = [
            subprocess.Popen(arguments, env=launch_environment, stdout=output, stderr=subprocess.STDOUT)
            for (arguments, launch_environment), output in zip(launches, outputs, strict=True)
        ]
        codes = [launcher.wait() for launcher in launchers]
        for output in outputs:
            output.seek(0)
        texts = [output.read() for output in outputs]
    assert not any(codes), "\n".join(text[-4000:] for code, text in zip(codes, texts, strict=True) if code)
    return "".join(texts)


def _host(rank: int) -> dict[str, str]:
    """The variables of a host of one rank, whose GPU another host's rank may have too."""
    gpu = rank // ranks_per_gpu()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        "CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu),
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
