"""torch's state dict functions return equal names, shards and values for lamella's units and for FSDP2's."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
import torch.distributed.tensor._random
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from lamella_integration.in_place import Device, run_in_both, units, unsharded_copy

ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])

OPTIONS = {
    "default": {},
    "full": {"full_state_dict": True},
    "full, on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "sharded, on the CPU": {"cpu_offload": True},
    "without what is frozen": {"ignore_frozen_params": True},
    "with prefixes": {"keep_submodule_prefixes": True},
    "flat optimizer state": {"flatten_optimizer_state_dict": True},
    "flat, full": {"flatten_optimizer_state_dict": True, "full_state_dict": True},
    "full, without what is frozen": {"full_state_dict": True, "ignore_frozen_params": True},
}
GIVEN = {
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "sharded": {},
    "sharded, flat": {"flatten_optimizer_state_dict": True},
    "from rank 0's CPU": {"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True},
    "not strict": {"full_state_dict": True, "strict": False},
}
FURTHER = ("full", "sharded, on the CPU", "full, without what is frozen", "from rank 0")
"""Options that others have together with more."""
OF_LOADING = ("broadcast_from_rank0", "strict")


class TiedNet(nn.Module):
    """Blocks of sizes indivisible by two ranks, one frozen; a buffer; a head tied to the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.stem.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        head: torch.Tensor = self.head(self.norm(x))
        return head


def trained(seed: int, *, num_steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and an optimizer, different for different seeds."""
    torch.manual_seed(seed)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    model = TiedNet().to(device)
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block)
    torch.distributed.fsdp.fully_shard(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01, weight_decay=0.1)
    for step in range(num_steps):
        train(model, optimizer, step)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    x = torch.randn(4, 5, generator=draw).to(next(model.buffers()).device)
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def shapes(state: object) -> object:
    """Number of ranks, device and dtype of every tensor."""
    match state:
        case DTensor():
            return [str(state.placements), list(state.to_local().shape), str(state.dtype), state.device.type]
        case torch.Tensor():
            return [list(state.shape), str(state.dtype), state.device.type]
        case dict():
            return {key: shapes(value) for key, value in state.items()}
        case list() | tuple():
            return [shapes(value) for value in state]
    return state


def saved_states(folder: Path, *, options: dict[str, Any]) -> object:
    model, optimizer = trained(0)
    chosen = StateDictOptions(**options)
    states = [
        get_model_state_dict(model, options=chosen),
        get_optimizer_state_dict(model, optimizer, options=chosen),
        *get_state_dict(model, optimizer, options=chosen),
    ]
    return [units(model), shapes(states), unsharded_copy(states)]


def loaded_state(folder: Path, *, options: dict[str, Any]) -> object:
    """Load the state of a model into another, and train both on."""
    chosen = StateDictOptions(**options)
    source, optimizer = trained(0)
    get = StateDictOptions(**{name: value for name, value in options.items() if name not in OF_LOADING})
    states = copy.deepcopy(get_state_dict(source, optimizer, options=get))  # torch does not copy step counts
    target, other = trained(1, num_steps=1)
    if options.get("broadcast_from_rank0") and dist.get_rank() != 0:
        states = ({}, {})
    keys = set_model_state_dict(target, states[0], options=chosen)
    set_optimizer_state_dict(target, other, states[1], options=chosen)
    losses = [[train(model, steps, 5) for _ in range(2)] for model, steps in ((source, optimizer), (target, other))]
    assert torch.equal(*(torch.stack(step_losses) for step_losses in losses)), losses
    return [
        units(target),
        list(keys.missing_keys),
        list(keys.unexpected_keys),
        unsharded_copy(losses),
        unsharded_copy(target.state_dict()),
    ]


def resumed(folder: Path) -> object:
    """A checkpoint of shards on a disk, loaded into another model in place."""
    source, optimizer = trained(0)
    model_state, optimizer_state = get_state_dict(source, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)  # type: ignore[attr-defined]
    target, other = trained(1, num_steps=1)
    model_state, optimizer_state = get_state_dict(target, other)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(target, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    losses = [[train(model, steps, 5) for _ in range(2)] for model, steps in ((source, optimizer), (target, other))]
    assert torch.equal(*(torch.stack(step_losses) for step_losses in losses)), losses
    return [units(target), unsharded_copy(losses)]


def refused(folder: Path) -> object:
    """The error of strict loading for unknown names."""
    model, _ = trained(0)
    state = get_model_state_dict(model)
    del state["stem.weight"]
    state["other.weight"] = torch.zeros(1)
    lenient = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key") as strict:
        set_model_state_dict(model, state)
    return [list(lenient.missing_keys), list(lenient.unexpected_keys), str(strict.value)]


def cases_of(options: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(arguments, marks=pytest.mark.slow if name in FURTHER else (), id=name)
        for name, arguments in options.items()
    ]


@ON_BOTH
@pytest.mark.parametrize("options", cases_of(OPTIONS))
def test_a_state_dict_is_fsdp2s(options: dict[str, Any], device: Device) -> None:
    # Shards of a state dict on the CPU are gathered on the CPU, without NCCL.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else None
    run_in_both(partial(saved_states, options=options), device=device, backend=backend)


@ON_BOTH
@pytest.mark.parametrize("options", cases_of(GIVEN))
def test_a_model_trains_on_from_a_loaded_state_dict(options: dict[str, Any], device: Device) -> None:
    run_in_both(partial(loaded_state, options=options), device=device)


@ON_BOTH
def test_a_model_goes_on_from_a_checkpoint_of_shards(device: Device) -> None:
    run_in_both(resumed, device=device)


@ON_BOTH
def test_names_that_do_not_fit_are_told_alike(device: Device) -> None:
    run_in_both(refused, device=device)
