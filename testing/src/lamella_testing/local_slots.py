"""An optimizer that knows only its rank's shards, and keeps plain tensors of their elements as state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ROWS = {"hidden": (7, 3), "short": (2, 2), "bias": (5,)}


class OnShards(torch.optim.Optimizer):
    """Momentum over the shards alone: knows of no other rank, and keeps one of its slots flat on request."""

    def __init__(self, params: Any, lr: float = 0.1, flat: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.flat = flat

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step each parameter's local shard by a gradient that the shard's values give."""
        for group in self.param_groups:
            for param in group["params"]:
                held = local(param)
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(held)
                    state["square"] = torch.zeros(held.numel()) if self.flat else torch.zeros_like(held)
                state["step"] += 1
                grad = held.cos()
                state["momentum"].mul_(0.9).add_(grad)
                state["square"].view(held.shape).add_(grad.square())
                held.sub_(state["momentum"] / (state["square"].view(held.shape) + 1), alpha=group["lr"])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """0, 1, 2, ... in a shape."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def make(make_sharded: Callable[[torch.Tensor], Any], **options: Any) -> tuple[nn.ParameterDict, OnShards]:
    """The parameters of `ROWS`, each as `make_sharded` lays it out, and their optimizer."""
    model = nn.ParameterDict({name: make_sharded(numbered(shape)) for name, shape in ROWS.items()})
    return model, OnShards(model.parameters(), **options)


def trained(
    make_sharded: Callable[[torch.Tensor], torch.Tensor], num_steps: int, **options: Any
) -> tuple[nn.ParameterDict, OnShards]:
    """As `make`, after some steps."""
    model, optimizer = make(make_sharded, **options)
    for _ in range(num_steps):
        optimizer.step()
    return model, optimizer


def assert_holds_what_one_rank_has(load: Callable[..., object], num_steps: int) -> None:
    """A checkpoint holds the parameters and the slots of one process, which steps whole tensors.

    Args:
        load: Reads the checkpoint into a `model` and its `optimizer`.
        num_steps: Number of steps before the save.
    """
    model, optimizer = make(lambda values: values)
    load(model=model, optimizer=optimizer)
    expected, its_optimizer = trained(lambda values: values, num_steps)
    for name, param in model.items():
        assert torch.equal(param, expected[name])
        state, its_state = optimizer.state[param], its_optimizer.state[expected[name]]
        assert sorted(state) == sorted(its_state)
        for slot, value in its_state.items():
            assert torch.equal(state[slot], value), (name, slot)


def over_all(values: torch.Tensor) -> torch.Tensor:
    """Values cut along dim 0 over all ranks; whole for a single process.

    Effects: with several ranks, a collective on all of them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    return distribute_tensor(values, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
