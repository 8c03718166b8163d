"""An optimizer that knows only local shards, and keeps plain tensors of shard elements as state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ROWS = {"hidden": (7, 3), "short": (2, 2), "bias": (5,)}


class OnShards(torch.optim.Optimizer):
    """Momentum over local shards: the optimizer knows no other rank, and keeps the slot `square` flat on request."""

    def __init__(self, params: Any, lr: float = 0.1, flat: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.flat = flat

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step each parameter's local shard by a gradient computed from the shard's values."""
        for group in self.param_groups:
            for param in group["params"]:
                shard = local(param)
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(shard)
                    state["square"] = torch.zeros(shard.numel()) if self.flat else torch.zeros_like(shard)
                state["step"] += 1
                grad = shard.cos()
                state["momentum"].mul_(0.9).add_(grad)
                state["square"].view(shard.shape).add_(grad.square())
                shard.sub_(state["momentum"] / (state["square"].view(shard.shape) + 1), alpha=group["lr"])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """0, 1, 2, ... in a shape."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def make(make_sharded: Callable[[torch.Tensor], Any], **options: Any) -> tuple[nn.ParameterDict, OnShards]:
    """The parameters of `ROWS`, laid out by `make_sharded`, and an optimizer over the parameters."""
    model = nn.ParameterDict({name: make_sharded(numbered(shape)) for name, shape in ROWS.items()})
    return model, OnShards(model.parameters(), **options)


def trained(
    make_sharded: Callable[[torch.Tensor], torch.Tensor], num_steps: int, **options: Any
) -> tuple[nn.ParameterDict, OnShards]:
    """The model and the optimizer of `make`, after some steps."""
    model, optimizer = make(make_sharded, **options)
    for _ in range(num_steps):
        optimizer.step()
    return model, optimizer


def assert_holds_what_one_rank_has(load: Callable[..., object], num_steps: int) -> None:
    """Assert that a checkpoint holds the parameters and slots of a single process, which steps whole tensors.

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
