"""The first import of each of PyTorch's test files that `torch_tests.py` runs.

Lamella's names stand in for those of `torch.distributed.fsdp`, before the test file imports them; and where tests run
on a CPU, the CPU stands in for as many accelerators as there are ranks. The environment says which, so that the ranks
that a test spawns do alike.
"""

import os
import sys
import unittest
from collections.abc import Callable
from enum import Enum
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp.fully_shard
import torch.distributed.fsdp

IMPLEMENTATION = os.environ.get("TORCH_TESTS_IMPLEMENTATION", "torch")
NUM_RANKS_ON_CPU = int(os.environ.get("TORCH_TESTS_RANKS_ON_CPU", "0"))  # 0: the accelerators themselves

SHADOWED = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
LATER_NAMES = {"reduce_scatter_single": "reduce_scatter_tensor", "all_gather_single": "all_gather_into_tensor"}


def stand_in() -> None:
    """Patch torch as the environment says. A second call changes nothing."""
    if IMPLEMENTATION == "lamella":
        _shadow_fsdp2()  # first: the test helpers below import names of FSDP2's themselves
    _name_what_is_newer()
    if NUM_RANKS_ON_CPU:
        _count_the_cpu_as_accelerators()
    _run_each_class_once()


def _shadow_fsdp2() -> None:
    """Put each public name of lamella's where torch has one of that name; units are of torch's `FSDPModule` too."""
    import lamella_engine

    for module in (sys.modules[name] for name in SHADOWED):
        for name in vars(lamella_engine).keys() & vars(module).keys() - {"FSDPModule"}:
            if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType):
                setattr(module, name, getattr(lamella_engine, name))


def _name_what_is_newer() -> None:
    """Give functions that were renamed their later names too."""
    import torch.distributed._functional_collectives as functional
    from torch.testing._internal import common_utils

    for later, earlier in LATER_NAMES.items():
        for module, name in ((dist, earlier), (functional, earlier.replace("all_gather_into", "all_gather"))):
            if not hasattr(module, later):
                setattr(module, later, getattr(module, name))
    if not hasattr(common_utils, "HardwareClassification"):
        kinds = Enum("kinds", ["ACCELERATOR", "CPU", "GENERIC"])
        setattr(common_utils, "HardwareClassification", kinds)  # noqa: B010  A later torch's, which this one is not typed with.


def _count_the_cpu_as_accelerators() -> None:
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    modules: tuple[Any, ...] = (common_distributed, common_fsdp, common_utils, torch.cpu)
    distributed, fsdp, utils, cpu = modules
    torch.accelerator.device_count = cpu.device_count = lambda: NUM_RANKS_ON_CPU
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    cpu._sleep = lambda _: None
    utils.get_cycles_per_ms = fsdp.get_cycles_per_ms = lambda *_: 1.0
    fsdp.DEVICE_COUNT = NUM_RANKS_ON_CPU
    distributed.skip_if_lt_x_gpu = _skip_if_fewer_ranks
    fork = torch.multiprocessing.get_context("fork").Process  # ranks that need not import torch
    distributed.MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(fork)


def _skip_if_fewer_ranks(num_ranks: int, **_: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def decorator(test: Callable[..., object]) -> Callable[..., object]:
        @wraps(test)
        def wrapper(*args: object, **kwargs: object) -> object:
            if num_ranks > NUM_RANKS_ON_CPU:
                raise unittest.SkipTest(f"needs {num_ranks} ranks")
            return test(*args, **kwargs)

        return wrapper

    return decorator


def _run_each_class_once() -> None:
    """Leave test classes as they are written, in place of a class for each kind of device."""
    from torch.testing._internal import common_device_type

    common_device_type.instantiate_device_type_tests = lambda *_, **__: None


stand_in()
