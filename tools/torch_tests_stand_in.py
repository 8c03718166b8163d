"""The first import of each of PyTorch's test files under `torch_tests.py`.

Lamella's names replace the names of `torch.distributed.fsdp`, before the test file imports from there. In tests on a
CPU, the CPU stands in for one accelerator per rank. Environment variables hold the choice, so spawned ranks apply the
same patches.
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
    """Patch torch by the environment variables. A second call changes nothing."""
    if IMPLEMENTATION == "lamella":
        _shadow_fsdp2()  # first: the test helpers imported below import FSDP2's names
    _name_what_is_newer()
    if NUM_RANKS_ON_CPU:
        _count_the_cpu_as_accelerators()
    _run_each_class_once()


def _shadow_fsdp2() -> None:
    """Replace torch's public names by lamella's of the same name; lamella's units are torch `FSDPModule`s too."""
    import lamella_engine

    for module in (sys.modules[name] for name in SHADOWED):
        for name in vars(lamella_engine).keys() & vars(module).keys() - {"FSDPModule"}:
            if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType):
                setattr(module, name, getattr(lamella_engine, name))


def _name_what_is_newer() -> None:
    """Add the later names of renamed functions."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.fsdp._fully_shard import _fsdp_common
    from torch.testing._internal import common_utils

    for later, earlier in LATER_NAMES.items():
        for module, name in ((dist, earlier), (functional, earlier.replace("all_gather_into", "all_gather"))):
            if not hasattr(module, later):
                setattr(module, later, getattr(module, name))
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        setattr(_fsdp_common, "ShardPlacementResult", object)  # noqa: B010  likewise; the one test that makes any fails
    if not hasattr(common_utils, "HardwareClassification"):
        kinds = Enum("kinds", ["ACCELERATOR", "CPU", "GENERIC"])
        setattr(common_utils, "HardwareClassification", kinds)  # noqa: B010  a name of later torch, unknown to this torch's types


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
    fork = torch.multiprocessing.get_context("fork").Process  # forked ranks inherit torch's import
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
    """Keep each test class as written, instead of a class per kind of device."""
    from torch.testing._internal import common_device_type

    common_device_type.instantiate_device_type_tests = lambda *_, **__: None


stand_in()
