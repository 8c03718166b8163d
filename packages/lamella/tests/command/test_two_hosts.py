"""`lamella train` under two torchrun hosts, tried on one machine: two agents, and two working folders."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from lamella_checkpoint import CheckpointDirectory
from lamella_testing.torchrun import free_port


def torchrun(host: int, port: int, folder: Path, *argv: str) -> "subprocess.Popen[str]":
    """Start a host, with one rank, in a working folder of its own."""
    folder.mkdir()
    address = ("--nnodes", "2", "--node-rank", str(host), "--master-addr", "127.0.0.1", "--master-port", str(port))
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *address, "--nproc-per-node", "1"]
    return subprocess.Popen(
        [*command, "-m", "lamella", *argv],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_two_hosts_without_a_shared_run_folder_train_with_checkpoints_in_a_shared_one(
    options: list[str], tmp_path: Path
) -> None:
    at = options.index("--run-dir")
    argv = [*options[:at], *options[at + 2 :], "--steps", "2", "--checkpoints", str(tmp_path / "checkpoints")]
    port = free_port()
    with ExitStack() as programs:
        hosts = [programs.enter_context(torchrun(host, port, tmp_path / f"host{host}", *argv)) for host in range(2)]
        for program in hosts:
            programs.callback(program.kill)
        first, second = (program.communicate(timeout=100)[0] for program in hosts)
    assert [program.returncode for program in hosts] == [0, 0], first + second
    assert f"hosts: 2 run folders, prepared alike; checkpoints in {tmp_path / 'checkpoints'}" in first.splitlines()
    assert first.count("step: 2  loss: ") == 1
    # torchrun's agent logs a traceback of its own, behind a prefix, where the other agent and its store end first.
    assert not [line for line in (first + second).splitlines() if line.startswith("Traceback")]
    assert CheckpointDirectory(tmp_path / "checkpoints").steps() == [2]
    for host in range(2):
        assert (tmp_path / f"host{host}" / "runs" / "tiny" / "tokens" / "index.pt").exists()
