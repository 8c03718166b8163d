"""Hosts with run folders of their own prepare the same run, or are refused in one line; checkpoints are shared."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._export.trained_run import open_run
from lamella._processes.hosts import Hosts
from lamella._processes.lock import locked
from lamella._processes.placement import Rank, place
from lamella._record.metrics import StepRecord, read
from lamella._record.run_directory import RunDirectory
from lamella._training.checks import run_directory
from lamella._training.host_preparation import agreed_preparation, num_preparations, prepare_on_hosts
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella_testing import run_ranks

NUM_HOSTS = 2
RANKS_PER_HOST = 2
NUM_RANKS = 3  # The second host has one.


@pytest.fixture
def configs(config: Config, tmp_path: Path) -> list[Config]:
    """The configuration on each of two hosts: a run folder of its own, and a shared folder of checkpoints."""
    parallel, optim = replace(config.parallel, ranks=NUM_RANKS), replace(config.optim, batch_size=2 * NUM_RANKS)
    config = replace(config, parallel=parallel, optim=optim)
    return [configured(config, tmp_path, host) for host in range(NUM_HOSTS)]


def configured(config: Config, folder: Path, host: int) -> Config:
    run = replace(config.run, directory=str(folder / f"host{host}" / "run"), checkpoints=str(folder / "checkpoints"))
    text = shutil.copytree(config.data.paths[0], folder / f"host{host}" / "text")
    return replace(config, data=replace(config.data, paths=(str(text),)), run=run)


def prepared(configs: list[Config]) -> tuple[int, Config]:
    """Prepare as the ranks of several hosts; return the number of folders, and this rank's settings."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()  # Ranks prepare before they have a group.
    hosts = Hosts(PrefixStore("hosts", store), rank, NUM_RANKS, is_leader=rank % RANKS_PER_HOST == 0)
    config = place(configs[rank // RANKS_PER_HOST])
    with ExitStack() as locks:
        outcome = prepare_on_hosts(config, hosts, locks, prepare)
        dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=NUM_RANKS)
        agreed_preparation(outcome)
        return num_preparations(outcome), config


def refusals(configs: list[Config]) -> list[str]:
    def on_rank() -> str:
        with pytest.raises(ConfigError) as caught:
            prepared(configs)
        return str(caught.value)

    return run_ranks(on_rank, NUM_RANKS)


def trained(configs: list[Config]) -> tuple[list[int], dict[int, float]]:
    """Train as the ranks of several hosts; return the number of folders by rank, and the losses."""

    def on_rank() -> int:
        num_folders, config = prepared(configs)
        rank = Rank(rank=dist.get_rank(), num_ranks=NUM_RANKS, device=torch.device("cpu"))
        Trainer(config, run_directory(config), rank).train()
        return num_folders

    nums_folders = run_ranks(on_rank, NUM_RANKS)
    records = read(run_directory(configs[0]).metrics)
    return nums_folders, {record.step: record.loss for record in records if isinstance(record, StepRecord)}


def test_hosts_without_a_shared_run_folder_train_as_one_host_and_a_host_that_is_replaced_goes_on(
    configs: list[Config], train: TrainOn, tmp_path: Path
) -> None:
    configs = [replace(config, optim=replace(config.optim, schedule="constant")) for config in configs]
    on_one = replace(configs[0], run=replace(configs[0].run, directory=str(tmp_path / "one"), checkpoints=None))
    unbroken = train(on_one, NUM_RANKS).losses

    nums_folders, losses = trained([replace(config, optim=replace(config.optim, steps=3)) for config in configs])
    assert nums_folders == [2] * NUM_RANKS
    assert losses == {step: unbroken[step] for step in (1, 2, 3)}
    tokens = [(run_directory(config).tokens / "train.bin").read_bytes() for config in configs]
    assert tokens[0] == tokens[1]
    assert not run_directory(configs[1]).metrics.exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]

    shutil.rmtree(run_directory(configs[1]).root)
    assert trained(configs) == ([2] * NUM_RANKS, unbroken)
    run = open_run(run_directory(configs[0]).root)
    assert run.step == 6 and run.checkpoint.parent == tmp_path / "checkpoints"


def test_a_shared_run_folder_is_prepared_once(configs: list[Config]) -> None:
    shared = [replace(config, run=configs[0].run) for config in configs]
    assert run_ranks(lambda: prepared(shared)[0], NUM_RANKS) == [1] * NUM_RANKS
    assert not run_directory(configs[1]).root.exists()


def test_checkpoints_that_a_host_does_not_see_are_refused_at_the_start_and_leave_nothing(
    configs: list[Config], tmp_path: Path
) -> None:
    apart = [replace(config, run=replace(config.run, checkpoints=None)) for config in configs]
    [message] = set(refusals(apart))
    folder = RunDirectory(run_directory(apart[1]).root).checkpoints
    assert message.startswith(f"Expected a folder for checkpoints that all hosts share, got {str(folder)!r}, in which")
    assert "rank 2 on " in message and message.endswith("Pass a shared folder as --checkpoints, or as --run-dir.")
    assert sorted(path.name for path in tmp_path.glob("host*/*")) == ["text", "text"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda folder: (folder / "textwrap.py").write_text("another"), "the text 'textwrap.py'"),
        (lambda folder: (folder / "textwrap.py").unlink(), "the text 'textwrap.py' absent"),
        (lambda folder: (folder / "a.py").write_text("one more"), "the text 'a.py'"),
    ],
)
def test_a_host_with_another_text_is_named_with_the_file(configs: list[Config], change: object, name: str) -> None:
    change(Path(configs[1].data.paths[0]))  # type: ignore[operator]
    [message] = set(refusals(configs))
    assert "\n" not in message
    assert message.startswith(f"Expected every host to prepare the same run, got {name}")
    assert " for rank 2 on " in message and " for rank 0 on " in message


def test_a_host_with_another_setting_of_the_data_stream_is_named_with_the_setting(configs: list[Config]) -> None:
    configs[1] = replace(configs[1], run=replace(configs[1].run, seed=7))
    [message] = set(refusals(configs))
    assert "got run.seed 7 for rank 2 on " in message and "and 0 for rank 0 on " in message


@pytest.mark.parametrize("folder", ["host0/run", "host1/run", "checkpoints"])
def test_a_folder_that_another_run_locks_refuses_the_run_on_every_rank(
    configs: list[Config], tmp_path: Path, folder: str
) -> None:
    with locked(tmp_path / folder):
        [message] = set(refusals(configs))
    assert message.startswith(f"Expected no other run in {str(tmp_path / folder)!r}, got one of process ")
    assert ("--checkpoints." if folder == "checkpoints" else "--run-dir.") in message
