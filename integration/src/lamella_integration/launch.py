"""Start and end of a program under torchrun."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lamella_testing import take_gpu

GROUP_TIMEOUT = timedelta(minutes=3)


@contextmanager
def process_group(device_type: str) -> Iterator[torch.device]:
    """Set up torchrun's process group, or without torchrun a group of one rank; yields this rank's device.

    Effects: collective over all ranks, at both ends; sets this process's CUDA device.
    """
    device = torch.device(device_type)
    if device_type == "cuda":
        device = take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    alone = "RANK" not in os.environ
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        timeout=GROUP_TIMEOUT,
        device_id=device if device_type == "cuda" else None,
        store=HashStore() if alone else None,
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def leave(exit_code: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    During the shutdown, threads of a process group may abort the process (pytorch PR 179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
