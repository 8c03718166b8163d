"""Programs written for torch's FSDP2, run with FSDP2 and with lamella in place of FSDP2."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lamella_engine
import lamella_optim
from lamella_testing import run_ranks

Result = TypeVar("Result")
Device = Literal["cpu", "cuda"]


def run_in_both(
    program: Callable[[Path], Result],
    *,
    num_ranks: int = 2,
    device: Device = "cpu",
    backend: str | None = None,
    timeout_s: float = 120.0,
) -> list[Result]:
    """Run a program on ranks with FSDP2 and with lamella, and assert bitwise equal results.

    Args:
        program: Shards with torch's names; returns tensors, numbers, texts and containers of tensors, numbers and
            texts. The argument is an empty folder, shared by all ranks of a run. Torchrun's variables are set.
        num_ranks: Number of ranks.
        device: "cpu", or "cuda" with one GPU per rank.
        backend: Backend of the process group; None for the device's default.
        timeout_s: Limit in seconds for one run.

    Returns:
        The results with lamella, by rank.

    Raises:
        AssertionError: Results differ. Names the differing entry.

    Effects: forks ranks, twice.
    """
    results = []
    for is_lamellas in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (program, Path(folder), is_lamellas)
            results.append(run_ranks(_run, num_ranks, *arguments, device=device, backend=backend, timeout_s=timeout_s))
    for rank, (expected, got) in enumerate(zip(*results, strict=True)):
        assert_same(expected, got, f"rank {rank}")
    return results[1]


def _run(program: Callable[[Path], Result], folder: Path, is_lamellas: bool) -> Result:
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Read by libraries; the process group exists.
    torch.manual_seed(0)
    lamella_optim.install()  # for programs that build their optimizer before they shard
    with lamella_engine.install() if is_lamellas else nullcontext():
        return program(folder)


def units(model: nn.Module) -> list[str]:
    """Return the names of a model's units, all of the implementation in use.

    Raises:
        AssertionError: The model has no units, or units of the other implementation.
    """
    units_by_name = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    is_lamellas = torch.distributed.fsdp.fully_shard.__module__.startswith("lamella")
    foreign = [
        name for name, unit in units_by_name.items() if isinstance(unit, lamella_engine.FSDPModule) != is_lamellas
    ]
    assert units_by_name and not foreign, f"{list(units_by_name)}, of which {foreign} are not lamella's, or not torch's"
    return list(units_by_name)


def unsharded_copy(values: object) -> object:
    """Copy containers, with every tensor unsharded and on the CPU.

    Effects: collective on the meshes of all DTensors; host sync.
    """
    match values:
        case DTensor():
            return values.full_tensor().detach().cpu()
        case torch.Tensor():
            return values.detach().cpu().clone()
        case Mapping():
            return {key: unsharded_copy(value) for key, value in values.items()}
        case list() | tuple():
            return [unsharded_copy(value) for value in values]
    return values


def assert_same(expected: object, got: object, where: str) -> None:
    """Assert equal results: types, keys in order, and bitwise equal numbers. `where` names the entry in errors."""
    assert type(expected) is type(got), f"{where}: expected {expected!r}, got {got!r}"
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, Mapping):
        assert isinstance(got, Mapping)
        assert list(expected) == list(got), f"{where}: expected the keys {list(expected)}, got {list(got)}"
        for key, value in expected.items():
            assert_same(value, got[key], f"{where}, {key!r}")
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        assert isinstance(got, Sequence)
        assert len(expected) == len(got), f"{where}: expected {len(expected)} values, got {len(got)}"
        for place, pair in enumerate(zip(expected, got, strict=True)):
            assert_same(*pair, f"{where}, {place}")
    else:
        assert expected == got, f"{where}: expected {expected!r}, got {got!r}"
