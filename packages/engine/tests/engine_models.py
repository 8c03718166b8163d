"""Common models of the engine's tests, their unsharded twins, and comparisons of the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

# torch imports both modules with the first optimizer and the first DTensor operator. Imported here, once,
# every forked rank has both.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor._random
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor

from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, FSDPModule, MixedPrecisionPolicy, fully_shard
from lamella_engine.extending import local_of
from lamella_engine.testing import CollectiveLog, assert_at_rest, record
from lamella_layout import mesh_region

if TYPE_CHECKING or hasattr(_fsdp_common, "ShardPlacementResult"):
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult as ShardPlacementResult
else:  # torch before 2.12

    class ShardPlacementResult(NamedTuple):
        """A placement function's answer for a parameter on a separate mesh."""

        placement: Any
        mesh_info: Any


# Any: torch leaves `Tensor.backward` untyped.
Forward = Callable[[nn.Module], Any]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# Stages by name: the test's mesh, and `placements`.
ONE_AXIS = {"DDP": DDP, "ZERO1": ZERO1, "ZERO2": ZERO2, "ZERO3": ZERO3}
EVERY_STAGE: dict[str, tuple[tuple[int, ...], Any]] = {
    **{name: ((2,), placement) for name, placement in ONE_AXIS.items()},
    **{f"HSDP, {name}": ((2, 2), (HSDP, ONE_AXIS[name])) for name in ("ZERO1", "ZERO2", "ZERO3")},
    "HFSDP, ZERO3": ((2, 2), (HFSDP, ZERO3)),
}
# With each change, one stage beside replicas and one on two sharded axes: test_zero_stages trains every stage.
SOME_STAGES = pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=pytest.mark.slow if stage in ("HSDP, ZERO1", "HSDP, ZERO3") else ())
        for stage in EVERY_STAGE
    ],
)


class Residual(nn.Module):
    """One block. Sizes that no world size divides, and a gain of one row: most ranks own none of it."""

    def __init__(self, dim: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.gain = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.gain * self.down(torch.tanh(self.up(x)))
        return x + update


class Net(nn.Module):
    """A stem, blocks, a head: 3 features in, 5 out."""

    def __init__(self, num_layers: int = 3, dim: int = 7) -> None:
        super().__init__()
        self.stem = nn.Linear(3, dim)
        self.layers = nn.ModuleList(self.make_layer(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, 5)

    def make_layer(self, dim: int) -> nn.Module:
        return Residual(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


class Routed(Net):
    """Runs the layers of a route, in order."""

    route: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i in self.route:
            x = self.layers[i](x)
        head: torch.Tensor = self.head(x)
        return head


class Boom(Exception):
    """Raised by a test's model or hook."""


def inputs(num_rows: int = 12, *, seed: int = 0) -> torch.Tensor:
    """(num_rows, 3). Twelve rows split evenly over one, two, three and four ranks."""
    return torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(seed))


def rows_of_this_rank(batch: torch.Tensor) -> torch.Tensor:
    rows = batch.chunk(dist.get_world_size())
    return rows[dist.get_rank()]


def shard(model: Net, **options: Any) -> Net:
    """A unit for each block, and a unit for the rest."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """All ranks, along "inner" or along "outer" and "inner"."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def shard_on(shape: tuple[int, ...] = (2,), **options: Any) -> Callable[[Net], Net]:
    """A function that shards a model over a mesh of this shape."""
    return lambda model: shard(model, mesh=mesh_of(shape), **options)


def twins(
    make: Callable[[], nn.Module] = Net, apply: Callable[..., object] = shard, *, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """The same model twice: unsharded, and sharded."""
    torch.manual_seed(seed)
    reference = make()
    torch.manual_seed(seed)
    sharded = make()
    apply(sharded)
    return reference, sharded


def mean_square(forward: Forward) -> Forward:
    return lambda model: forward(model).square().mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's global value, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def this_ranks(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor placed as `like`; maybe empty."""
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinate is not None
    owned = mesh_region(like.shape, mesh.shape, like.placements, coordinate).chunks
    if not owned:
        return tensor.detach()[:0].view(like.to_local().shape)
    (chunk,) = owned
    box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return tensor.detach()[box]


def assert_shard_equals(got: torch.Tensor, expected: torch.Tensor, name: str, *, rtol: float, atol: float) -> None:
    """This rank's rows equal the whole's. With a call on every rank all rows are compared, and none are sent."""
    if isinstance(got, DTensor):
        expected = this_ranks(expected, got)
        got = got.to_local()
    torch.testing.assert_close(
        # Offloaded shards are on the CPU, for models on any device.
        got.detach(),
        expected.detach().to(got.device),
        rtol=rtol,
        atol=atol,
        msg=lambda text: f"{name}: {text}",
    )


def assert_gradients_equal(reference: nn.Module, sharded: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Every gradient is the unsharded model's; absent with an absent one."""
    for (name, expected), (other, got) in zip(reference.named_parameters(), sharded.named_parameters(), strict=True):
        assert name == other
        if expected.grad is None:
            assert got.grad is None, f"{name}: expected no gradient"
            continue
        assert got.grad is not None, f"{name}: expected a gradient, got None"
        assert_shard_equals(got.grad, expected.grad, name, rtol=rtol, atol=atol)


def assert_weights_equal(reference: nn.Module, sharded: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, expected), (other, got) in zip(reference.named_parameters(), sharded.named_parameters(), strict=True):
        assert name == other
        assert_shard_equals(got, expected, name, rtol=rtol, atol=atol)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def step_on_shards(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A hook before steps: the step sees this rank's shards. DTensor would plan each operator anew on every rank.

    The optimizer's state is of the shards then, and not of the DTensors.
    """
    view = copy(optimizer)  # with the same state
    view.param_groups = [
        {**group, "params": [_shard_with_gradient(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return (view, *args[1:]), kwargs


def _shard_with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    shard = local_of(parameter)
    shard.grad = None if parameter.grad is None else local(parameter.grad)
    return shard


def descend(model: nn.Module) -> None:
    """One step down the gradient, and the gradient is gone. On local tensors: DTensor would plan each operator anew."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                local(parameter).sub_(local(parameter.grad), alpha=0.2)
                parameter.grad = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_trains_alike(
    reference: nn.Module, sharded: nn.Module, loss_of: Forward, *, num_steps: int = 2, rtol: float = 1e-5
) -> None:
    """Every rank sees the same data: each rank's loss is the unsharded model's."""
    for step in range(num_steps):
        losses = []
        for model in (reference, sharded):
            loss = loss_of(model)
            loss.backward()
            losses.append(loss.item())
        assert_gradients_equal(reference, sharded, rtol=10 * rtol, atol=1e-6)
        assert_at_rest(sharded)
        for model in (reference, sharded):
            descend(model)
        expected, got = losses
        assert abs(got - expected) <= rtol * abs(expected), f"step {step}: expected loss {expected}, got {got}"


# -- units and their order -------------------------------------------------------------------------------------------


def fsdp(module: nn.Module) -> FSDPModule:
    """The module, known to be a unit."""
    assert isinstance(module, FSDPModule)
    return module


def record_third_step(model: nn.Module, loss_of: Forward) -> CollectiveLog:
    """Take two steps, which teach the units' order, drop the gradients, and log from now on."""
    for _ in range(2):
        loss_of(model).backward()
    model.zero_grad()
    return record(model)


@contextmanager
def case(label: object) -> Iterator[None]:
    """Name the case in the report of a test with several cases."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"In the case {label}")
        raise


@contextmanager
def no_gradient_sync(model: nn.Module) -> Iterator[None]:
    fsdp(model).set_requires_gradient_sync(False)
    yield
    fsdp(model).set_requires_gradient_sync(True)
