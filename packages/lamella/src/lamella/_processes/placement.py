"""The placement of a run: number of workers, device, and this process's rank under a launcher."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from lamella._processes.hosts import Hosts
from lamella._processes.pulse import Board, FileBoard, Pulse, StoreBoard
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sections import ParallelConfig, RunConfig, WaitLimits

if TYPE_CHECKING:
    import torch  # The command line's help needs none.
    from torch._C._distributed_c10d import Store

_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_VARIABLE = "LAMELLA_STORE"
BOARD_VARIABLE = "LAMELLA_BOARD"

_RANKS_PER_CORE: Final = 64  # Each is a process of several hundred MB.
_MARGIN: Final = timedelta(minutes=1)  # for the watch to end the run before torch, whose error names no rank


def under_torchrun() -> bool:
    """True when the environment holds torchrun's variables: a launcher started this process as a rank."""
    return all(variable in os.environ for variable in _TORCHRUN_VARIABLES)


def place(config: Config) -> Config:
    """Decide ranks, device, precision and threads for this machine.

    Raises:
        ConfigError: GPUs are missing, `--ranks` contradicts torchrun, ranks times `--accumulation` does not divide
            `--batch-size`, or an option would count again at each restart of torchrun.
    """
    if under_torchrun() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        _check_restarts(config.run)
    config = replace(config, parallel=_decide(config.parallel))
    check_batch(config)
    return config


def check_batch(config: Config) -> None:
    """Refuse a batch without even shares of ranks.

    Raises:
        ConfigError: Ranks times `--accumulation` does not divide `--batch-size`.
    """
    parallel = config.parallel
    num_ranks = parallel.num_data_ranks
    shares = num_ranks * config.optim.accumulation
    if config.optim.batch_size % shares:
        options = {"tensor": parallel.tensor_parallel, "context": parallel.context_parallel}
        over = "".join(f" over --{name}-parallel" for name, count in options.items() if count > 1)
        raise ConfigError(
            f"Expected --batch-size to be a multiple of ranks{over} times --accumulation, {num_ranks} * "
            f"{config.optim.accumulation} = {shares}, got {config.optim.batch_size}. Pass --batch-size "
            f"{-(-config.optim.batch_size // shares) * shares}."
        )


def _check_restarts(run: RunConfig) -> None:
    """Refuse options on the checkpoint to go on from: after a restart the newest is meant, of whichever run."""
    option = "--no-resume" if run.resume is False else "--from-step" if run.from_step is not None else None
    if option is not None:
        raise ConfigError(
            f"Expected no {option} under torchrun --max-restarts, got it: it would count again at each restart. Pass "
            "torchrun --max-restarts 0, or start without the option."
        )


def _decide(asked: ParallelConfig) -> ParallelConfig:
    import torch

    num_gpus = torch.cuda.device_count()
    device = asked.device if asked.device != "auto" else "cuda" if num_gpus else "cpu"
    ranks = _num_ranks(asked.ranks, num_gpus if device == "cuda" else 2)
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if under_torchrun() else ranks
    if device == "cuda" and not num_gpus:
        raise ConfigError(
            "Expected a GPU for --device cuda, got none that torch sees. Pass --device cpu, or install torch for CUDA."
        )
    if device == "cuda" and num_local_ranks > num_gpus:
        raise ConfigError(
            f"Expected at most one rank a GPU, {num_gpus} here, got {num_local_ranks} ranks. Pass --ranks {num_gpus}."
        )
    if not under_torchrun() and ranks > _RANKS_PER_CORE * (os.cpu_count() or 1):
        raise ConfigError(
            f"Expected at most {_RANKS_PER_CORE} ranks for each of the {os.cpu_count() or 1} cores here, got {ranks}. "
            "Pass fewer --ranks."
        )
    return replace(
        asked,
        device=device,
        ranks=ranks,
        precision=asked.precision if asked.precision != "auto" else "bf16" if device == "cuda" else "fp32",
        threads=asked.threads or max(1, _num_cores() // num_local_ranks),
    )


def _num_cores() -> int:
    """Return the number of cores in this process's CPU affinity, at most the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # No such file, or "max": no quota.
        return cores


def _num_ranks(asked: int | None, default: int) -> int:
    if not under_torchrun():
        return asked or max(1, default)
    world_size = int(os.environ["WORLD_SIZE"])
    if asked not in (None, world_size):
        raise ConfigError(f"Expected --ranks {world_size}, as torchrun started, got {asked}. Leave --ranks out.")
    return world_size


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process among the workers.

    Attributes:
        rank: Number of the worker, from 0 on.
        num_ranks: Number of workers.
        device: The worker's device.
        pulse: The worker's progress.
        board: The progress of all workers; None where no process watches.
    """

    rank: int
    num_ranks: int
    device: "torch.device"
    pulse: Pulse = field(default_factory=Pulse)
    board: Board | None = None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes and prints."""
        return self.rank == 0

    def share(self, parallel: ParallelConfig) -> "DataShare":
        """Return this worker's share of the sequences, which ranks of tensor or context parallelism have together."""
        return DataShare(self.rank // parallel.num_neighbours, self.num_ranks // parallel.num_neighbours)


class DataShare(NamedTuple):
    """A share of the sequences of every step.

    Attributes:
        number: The number of the share, from 0 on.
        num_shares: The number of shares.
    """

    number: int
    num_shares: int


@contextmanager
def process_group(
    parallel: ParallelConfig, limits: WaitLimits | None = None, hosts: Hosts | None = None
) -> Iterator[Rank]:
    """Set up the default process group from the environment; destroy the group after the block, unless it raised.

    Args:
        parallel: The device, and the threads of a CPU rank.
        limits: The limits of the watch; torch's own limit on a collective lies above both. None: torch's default.
        hosts: This rank among torchrun's, after their arrival; None for workers of one parent.

    Effects: collective over all ranks, at both ends; sets this process's CUDA device or its number of CPU threads;
        starts a thread for beats of the rank, until the block ends.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = parallel.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    elif parallel.threads:
        torch.set_num_threads(parallel.threads)
    timeout = None if limits is None else timedelta(seconds=sum(limits)) + _MARGIN
    store = None if hosts is None else hosts.store_of_group()
    if store is not None:
        store.set_timeout(timeout or default_pg_timeout)
    board = _board(store, num_ranks)
    pulse = Pulse()
    with ExitStack() as beating:
        if board is not None:
            beating.enter_context(pulse.published(board, rank))
        dist.init_process_group(
            # Ranks on GPUs need gloo too: checkpoints and messages are exchanged as CPU objects.
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=os.environ.get(STORE_VARIABLE),
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        pulse.group = dist.group.WORLD
        if hosts is not None:
            hosts.forget()
        yield Rank(rank=rank, num_ranks=num_ranks, device=device, pulse=pulse, board=board)
    # Not in a `finally`: after an exception the peers do not take part, and the call would hang.
    dist.destroy_process_group()


def _board(store: "Store | None", num_ranks: int) -> Board | None:
    """Return the board of the launcher: a file of the parent's, or torchrun's store."""
    if store is not None:
        return StoreBoard(store.clone(), num_ranks)  # type: ignore[attr-defined]
    path = os.environ.get(BOARD_VARIABLE)
    return None if path is None else FileBoard(Path(path), num_ranks)
