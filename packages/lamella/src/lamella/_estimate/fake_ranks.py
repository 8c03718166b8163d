"""One process in place of all ranks: collectives that move nothing, and tensors without memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lamella._settings.options import ConfigError
from lamella_buffers import FAKE_GPUS


@contextmanager
def fake_ranks(num_ranks: int, rank: int = 0, device_type: str = "cuda") -> Iterator[None]:
    """Make this process one rank of a default process group whose other ranks do not exist, in the block.

    Args:
        num_ranks: Ranks of the group.
        rank: This process's rank.
        device_type: "cuda" for the memory of NCCL's collectives, which need no staging; "cpu" for that of gloo's.

    Raises:
        ConfigError: The process has a process group already, or the rank is outside.

    Effects: none on other processes.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"Expected a process without a process group for an estimate of {num_ranks} ranks, got a group of "
            f"{dist.get_world_size()}. Call estimate before init_process_group."
        )
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"Expected rank from 0 to {num_ranks - 1}, got {rank}.")
    backend = FAKE_GPUS if device_type == "cuda" else "fake"
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def no_memory() -> FakeTensorMode:
    """Return a mode in which new tensors have shapes and dtypes, and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)
