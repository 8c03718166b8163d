"""Ranks of several hosts find out by a probe which folders they share, and agree before they have a process group."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lamella import ConfigError
from lamella._processes.hosts import Hosts, Probe
from lamella_testing import run_ranks


def hosts(run: str = "run") -> Hosts:
    """This rank, on a host of its own."""
    store = PrefixStore(run, dist.distributed_c10d._get_default_store())
    return Hosts(store, dist.get_rank(), dist.get_world_size(), is_leader=True)


def test_hosts_find_a_probe_only_in_shared_folders_and_the_probe_is_removed(tmp_path: Path) -> None:
    shared, other = tmp_path / "runs" / "shared", tmp_path / "other"
    other.mkdir()

    def on_rank() -> list[bool]:
        ranks = hosts()
        with ExitStack() as probes:
            seen: list[bool] = []
            if ranks.rank == 0:
                probes.enter_context(ranks.probed([shared, shared / "checkpoints"]))
            elif (probe := ranks.probe()) is not None:
                seen = [probe.is_in(folder) for folder in (shared, shared / "checkpoints", other)]
            assert ranks.agree("look")
        return seen

    assert run_ranks(on_rank, 3) == [[], [True, True, False], [True, True, False]]
    assert list(tmp_path.iterdir()) == [other]


def test_a_refusal_of_any_rank_is_known_to_all_and_a_second_run_of_the_processes_begins_anew() -> None:
    def on_rank() -> list[bool]:
        answers: list[bool] = []
        for refusing in (2, None):
            ranks = hosts()
            answers.append(ranks.agree("look", refuses=ranks.rank == refusing))
            answers.append(ranks.agree("preparation"))
            dist.barrier()
            ranks.forget()
            dist.barrier()
        return answers

    assert run_ranks(on_rank, 3) == [[False, True, True, True]] * 3


def test_a_process_group_sees_no_key_of_ranks_that_were_killed() -> None:
    def on_rank() -> list[bytes]:
        read: list[bytes] = []
        for address in ("former", "present"):
            ranks = hosts()  # of a store that outlives both starts
            ranks.agree("look")
            ranks.agree("preparation")
            store = ranks.store_of_group()
            if ranks.rank == 0:
                time.sleep(0.2)  # A rank that reads at once would read the former address.
                store.set("address", address)
            read.append(store.get("address"))
            dist.barrier()
            ranks.forget()
            dist.barrier()
        return read

    assert run_ranks(on_rank, 2) == [[b"former", b"present"]] * 2


def test_ranks_do_not_wait_for_the_probe_of_a_refused_run() -> None:
    def on_rank() -> Probe | None:
        ranks = hosts()
        probe = ranks.probe() if ranks.rank else None
        ranks.agree("look", refuses=ranks.rank == 0)
        return probe

    assert run_ranks(on_rank, 2) == [None, None]


def test_a_folder_that_cannot_be_written_to_is_refused_and_leaves_no_probe(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def on_rank() -> str:
        with pytest.raises(ConfigError) as caught, hosts().probed([tmp_path / "run", tmp_path / "file" / "run"]):
            raise AssertionError("unreachable")
        return str(caught.value)

    [message] = run_ranks(on_rank, 1)
    assert message.startswith(f"Expected to write to {str(tmp_path / 'file' / 'run')!r}, got ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
