"""One process in place of all ranks: collectives that move nothing, and tensors without memory."""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lamella._estimate.announced_kernels import announce_kernel
from lamella._settings.options import ConfigError
from lamella_buffers import FAKE_GPUS
from lamella_engine.extending import local_of


@contextmanager
def fake_ranks(num_ranks: int, rank: int = 0, device_type: str = "cuda") -> Iterator[None]:
    """Make this process a rank of a default process group without peers, in the block.

    Args:
        num_ranks: Ranks of the group.
        rank: This process's rank.
        device_type: "cuda" for the memory of NCCL's collectives, without staging; "cpu" for the memory of gloo's.

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
    gc.collect()  # The model of a former estimate is a cycle, and an optimizer's step looks at all living models.
    backend = FAKE_GPUS if device_type == "cuda" else "fake"
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=num_ranks)
    world = dist.group.WORLD
    assert world is not None
    # Without a default backend the end of the group prints a warning: several devices have none.
    world._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Operators on DTensors remember the mesh of an equal call, whose groups have ended.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


@contextmanager
def no_memory() -> Iterator[None]:
    """Give new tensors shapes and dtypes, and no memory, in the block."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        # Shards in place are known by their addresses. Without memory all are 0, and count as in place.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


_FUSED_STEPS: Final = (
    torch.ops.aten._fused_adam_,
    torch.ops.aten._fused_adamw_,
    torch.ops.aten._fused_sgd_,
    torch.ops.aten._fused_adagrad_,
)


class FusedSteps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips the kernels of fused optimizers in the block: only values would change.

    To be entered last, since torch asks the latest mode alone about a `DTensor`: torch 2.11 finds placements by
    tensors of the whole shapes, which would count as memory of the step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if func.overloadpacket in _FUSED_STEPS:
            _announce_step(func.__name__, args)
            return None
        return func(*args, **(kwargs or {}))


def _announce_step(name: str, arguments: Sequence[Any]) -> None:
    """Announce a fused kernel: a read of all lists of tensors, a write of all but the gradients."""
    lists = [tensors for tensors in arguments if isinstance(tensors, list | tuple)]
    read = [local_of(tensor) for tensors in lists for tensor in tensors]
    written = [local_of(tensor) for index, tensors in enumerate(lists) for tensor in tensors if index != 1]
    announce_kernel(name, *read, *written)
