"""Set-ups of the conformance tests: small models, unsharded twins, and comparisons between model and twin."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch

# torch imports torch._dynamo for the first optimizer and the first operator on a DTensor. Imported here, once, for all
# forked ranks.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.tensor._random
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lamella_integration.collectives import CollectiveCounter
from lamella_testing import Team, run_ranks

Result = TypeVar("Result")
Api = ModuleType

DIM = 6


class Where:
    """The device and the ranks of the running test: set by the `api` fixture, inherited by forked ranks."""

    device: Literal["cpu", "cuda"] = "cpu"
    most_ranks: int = 2


def on_ranks(scenario: Callable[..., object], num_ranks: int = 2, *, cases: Iterable[Any] | None = None) -> None:
    """Run a scenario on forked ranks, with each case in turn.

    On GPUs the ranks stay from test to test, and a scenario's tensors without a device are made on the GPU.
    """
    assert num_ranks <= Where.most_ranks, "a test of more than two ranks is marked four_ranks"
    device = Where.device
    argument_tuples = [()] if cases is None else list(cases)

    def go_through() -> None:
        Where.device = device
        torch.set_default_device(device)
        for case in argument_tuples:
            try:
                scenario(*(case if isinstance(case, tuple) else (case,)))
            except BaseException as error:
                error.add_note(f"In the case {case}")
                raise

    if device == "cpu":
        run_ranks(go_through, num_ranks)
    else:
        _team(num_ranks).run(go_through)


@cache
def _team(num_ranks: int) -> Team:
    team = Team(num_ranks, device="cuda")
    atexit.register(team.close)
    return team


# -- models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block whose sizes two and four ranks do not divide."""

    def __init__(self, dim: int = DIM, hidden: int = 9) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + update


class Stack(nn.Module):
    """A stem, blocks, a head. The root of the unit tree has parameters too."""

    def __init__(self, num_blocks: int = 3, dim: int = DIM, hidden: int = 9) -> None:
        super().__init__()
        self.stem = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(num_blocks))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        head: torch.Tensor = self.head(x)
        return head


def shard(api: Api, model: Stack, **kwargs: Any) -> Any:
    """A unit a block, and a root unit for the remaining parameters."""
    for block in model.blocks:
        api.fully_shard(block, **kwargs)
    return api.fully_shard(model, **kwargs)


def units(api: Api, model: nn.Module) -> list[Any]:
    """The modules passed to `fully_shard`."""
    return [module for module in model.modules() if isinstance(module, api.FSDPModule)]


def twins(make: Callable[[], nn.Module] = Stack, *, seed: int = 0) -> tuple[Any, Any]:
    """The same model twice, equal on every rank."""
    torch.manual_seed(seed)
    model = make()
    return model, copy.deepcopy(model)


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, different for ranks and for seeds."""
    return draw(*(shape or (4, DIM)), seed=1000 * seed + dist.get_rank())


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers from the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(Where.device)


@cache  # DTensor caches by equality and would hand back parameters on an equal mesh made before
def grid(*names: str) -> DeviceMesh:
    """Four ranks as two by two."""
    return init_device_mesh(Where.device, (2, 2), mesh_dim_names=names)


# -- comparisons ------------------------------------------------------------------------------------------------------


def average(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Average an unsharded twin's gradients over ranks, as data parallelism does."""
    groups = [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for parameter in model.parameters():
        for group in groups:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's global value, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor, which must not be None."""
    assert tensor.grad is not None
    return tensor.grad


def assert_close(got: torch.Tensor, expected: torch.Tensor, name: str = "", **tolerance: Any) -> None:
    """Assert that a tensor, sharded or not, has the value of an unsharded tensor."""
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    if isinstance(got, DTensor):
        got, expected = _comparable(got, expected)
    # An offloaded shard is on the CPU, the expected tensor on a GPU.
    torch.testing.assert_close(got, expected.detach().to(got.device), msg=lambda text: f"{name}: {text}", **tolerance)


def _comparable(got: DTensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of both tensors, for no cost; both tensors in full if two axes shard one dim."""
    placements: Any = got.placements  # a `Placement` alone has no dim
    dims = [placement.dim for placement in placements if placement.is_shard()]
    if len(dims) != len(set(dims)) or not all(type(p) in (Shard, Replicate) for p in got.placements):
        return full_value(got), expected
    for axis, placement in enumerate(got.placements):
        if isinstance(placement, Shard):
            expected = _chunk(expected, got.device_mesh.size(axis), got.device_mesh.get_local_rank(axis), placement.dim)
    return got.to_local().detach(), expected


def _chunk(tensor: torch.Tensor, num_chunks: int, index: int, dim: int) -> torch.Tensor:
    chunks = tensor.detach().chunk(num_chunks, dim)
    return chunks[index] if index < len(chunks) else tensor.detach().narrow(dim, 0, 0)


def assert_equal_models(expected: nn.Module, got: nn.Module, **tolerance: float) -> None:
    """Assert equal names, weights and gradients of a sharded model and the unsharded twin."""
    for (name, a), (other, b) in zip(expected.named_parameters(), got.named_parameters(), strict=True):
        assert name == other
        assert_close(b, a, name, **tolerance)
        assert (a.grad is None) == (b.grad is None), f"{name}: expected gradient {a.grad}, got {b.grad}"
        if a.grad is not None:
            assert_close(gradient_of(b), a.grad, f"{name}.grad", **tolerance)


def assert_all_sharded(parameters: Iterable[torch.Tensor]) -> None:
    kinds = [type(parameter) for parameter in parameters]
    assert kinds and all(issubclass(kind, DTensor) for kind in kinds), kinds


def assert_none_sharded(parameters: Iterable[torch.Tensor]) -> None:
    kinds = [type(parameter) for parameter in parameters]
    assert kinds and not any(issubclass(kind, DTensor) for kind in kinds), kinds


def assert_trains_as(
    expected: nn.Module,
    got: nn.Module,
    *,
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x).square().mean(),
    make_input: Callable[[int], torch.Tensor] = lambda step: inputs(seed=step),
    num_steps: int = 3,
    mesh: DeviceMesh | None = None,
) -> None:
    """Steps down the gradient on a sharded model and its twin: equal losses, gradients and weights."""
    for step in range(num_steps):
        x = make_input(step)
        losses = []
        for model in (expected, got):
            losses.append(loss_of(model, x))
            losses[-1].backward()  # type: ignore[no-untyped-call]
        average(expected, mesh)
        assert_close(losses[1], losses[0], f"loss of step {step}")
        assert_equal_models(expected, got)
        for model in (expected, got):
            descend(model, set_to_none=step % 2 == 0)
    assert_equal_models(expected, got)


def descend(model: nn.Module, *, set_to_none: bool = True) -> None:
    """One step down the gradient. On local tensors: DTensor would plan each operator anew, in every forked rank."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                local(parameter).sub_(local(parameter.grad), alpha=0.1)
    model.zero_grad(set_to_none=set_to_none)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def count(action: Callable[[], Result]) -> tuple[dict[str, int], Result]:
    """The collectives of an action by kind, and its result."""
    with CollectiveCounter() as counter:
        result = action()
    return counter.counts(), result
