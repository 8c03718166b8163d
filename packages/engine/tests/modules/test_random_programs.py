"""Random models, cut into units at random on random meshes, driven at random: gradients stay the unsharded model's.

Everything random follows from the seed, and is equal on all ranks. A failure names its seed and the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from engine_models import Boom, assert_gradients_equal, assert_shard_equals, case, fsdp, rows_of_this_rank, twins
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from lamella_buffers import Allocator, PoolAllocator
from lamella_engine import (
    DDP,
    HFSDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    Rows,
    ShardingOptions,
    Whole,
    fully_shard,
)
from lamella_engine.testing import assert_at_rest, flat_alignment, named_units
from lamella_layout import Keep
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

NUM_PROGRAMS, NUM_STEPS, NUM_RANKS = 10, 4, 4
DIM = 6
WIDE_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.float64)


class _Leaf(nn.Module):
    def __init__(self, choose: Random) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=choose.random() < 0.5)
        self.gain = nn.Parameter(torch.ones(choose.choice([1, DIM])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x.to(self.linear.weight.dtype))) * self.gain


class _Tree(nn.Module):
    """Runs its children along a route with omissions and repetitions."""

    def __init__(self, choose: Random, depth: int) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(
            _Tree(choose, depth - 1) if depth and choose.random() < 0.6 else _Leaf(choose)
            for _ in range(choose.randint(1, 3))
        )
        self.linear = nn.Linear(DIM, DIM) if choose.random() < 0.6 else nn.Identity()
        leaves = [child for child in self.children_ if isinstance(child, _Leaf)]
        if len(leaves) > 1 and choose.random() < 0.4:
            leaves[0].linear.weight = leaves[1].linear.weight
        self.route = list(range(len(self.children_)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.route:
            x = self.children_[i](x)
        return torch.tanh(self.linear(x))


@cache
def _batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, DIM, generator=generator, dtype=torch.float64, device="cpu").to(torch.get_default_device())


def _make(seed: int) -> nn.Module:
    choose = Random(seed)
    model = _Tree(choose, depth=2).double()
    if choose.random() < 0.25:
        for leaf in (module for module in model.modules() if isinstance(module, _Leaf)):
            if not _is_tied_outside(leaf, model) and choose.random() < 0.5:
                leaf.float()
    return model


def _is_tied_outside(module: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter has holders outside the module: a tied parameter has neither a unit nor a dtype alone."""
    counts, everywhere = (Counter(map(id, _held_by(root))) for root in (module, model))
    return any(everywhere[key] > count for key, count in counts.items())


def _held_by(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]


def _is_double(model: nn.Module) -> bool:
    return all(parameter.dtype == torch.float64 for parameter in model.parameters())


def _tolerance(model: nn.Module) -> dict[str, Any]:
    """Tolerance for sums in another order, with some sums in fp32 or none."""
    return {"rtol": 1e-6, "atol": 1e-9} if _is_double(model) else {"rtol": 1e-3, "atol": 1e-5}


def _cut(choose: Random, model: nn.Module) -> None:
    inner = [module for module in model.modules() if module is not model and not isinstance(module, nn.ModuleList)]
    allocator = choose.choice([None, PoolAllocator()])
    for module in reversed(inner):
        if choose.random() < 0.4 and not _is_tied_outside(module, model):
            fully_shard(module, **_rests(choose), **_asked(choose, allocator))
    fully_shard(model, **_rests(choose), **_asked(choose, allocator))


def _rests(choose: Random) -> dict[str, Any]:
    """A unit's place of rest, and the dtype of its gradients' sums: the parameter's, or wider than fp32."""
    return {"offload_policy": _home(choose), "mp_policy": choose.choice([None, WIDE_SUMS])}


def _home(choose: Random) -> CPUOffloadPolicy | None:
    return CPUOffloadPolicy() if choose.random() < 0.3 else None


@cache
def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _asked(choose: Random, allocator: Allocator | None) -> dict[str, Any]:
    """The place of a unit's parameters, rows to keep together, and the time of resharding."""
    asked = _placed(choose)
    keep = choose.choice([None, None, Rows(1), Rows(2), Whole(), _matrices_by_rows])
    options = ShardingOptions(
        placements=asked.pop("placements", None),
        allocator=allocator,
        keep_together=None if "shard_placement_fn" in asked else keep,
    )
    return {**asked, "options": options}


def _matrices_by_rows(parameter: nn.Parameter) -> Keep | None:
    return Rows(1) if parameter.ndim == 2 else None


def _placed(choose: Random) -> dict[str, Any]:
    match choose.randrange(6):
        case 0:
            return {"mesh": _mesh(4), "placements": choose.choice([DDP, ZERO1, ZERO2])}
        case 1:
            return {"mesh": _mesh(2, 2), "placements": (HSDP, choose.choice([ZERO1, ZERO2, ZERO3]))}
        case 2:
            return {"mesh": _mesh(2, 2), "placements": (HFSDP, ZERO3)}
        case 3:
            return {"mesh": _mesh(2, 2), "shard_placement_fn": _along_the_last_dim}
    return {
        "mesh": choose.choice([_mesh(4), _mesh(2, 2)]),
        "reshard_after_forward": choose.choice([None, None, True, False, 2]),
    }


def _along_the_last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.ndim - 1) if parameter.shape[-1] % 2 == 0 else None


# -- acts before a step, equal on both models -------------------------------------------------------------------------

Pair = tuple[nn.Module, nn.Module]


def _reroute(choose: Random, pair: Pair) -> None:
    for trees in zip(*([m for m in model.modules() if isinstance(m, _Tree)] for model in pair), strict=True):
        route = choose.choices(range(len(trees[0].children_)), k=choose.randint(0, 4))
        for tree in trees:
            tree.route = route


def _freeze(choose: Random, pair: Pair) -> None:
    for _, unit in named_units(pair[1]):
        unit.weights.reshard()  # whose flags are set must be the shards
    trains = {name: choose.random() < 0.8 for name, _ in pair[0].named_parameters()}
    for model in pair:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains[name])


def _validate(_: Random, pair: Pair) -> None:
    with torch.no_grad():
        _look(_, pair)


def _look(_: Random, pair: Pair) -> None:
    torch.testing.assert_close(pair[1](_batch()), pair[0](_batch()), **_tolerance(pair[0]))


def _keep(choose: Random, pair: Pair) -> None:
    fsdp(pair[1]).set_reshard_after_forward(choose.random() < 0.5)


def _look_ahead(choose: Random, pair: Pair) -> None:
    fsdp(pair[1]).set_options(prefetch_budget=choose.choice([None, 0, 1000, 10**9]))
    fsdp(pair[1]).set_options(keep_budget=choose.choice([0, 1000, 10**9]))


def _read_state(_: Random, pair: Pair) -> None:
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if _is_double(pair[0]) else _tolerance(pair[0])
    for (name, expected), got in zip(pair[0].state_dict().items(), pair[1].state_dict().values(), strict=True):
        assert_shard_equals(got, expected, name, **tolerance)


def _train_one_alone(choose: Random, pair: Pair) -> None:
    names = [name for name, module in pair[1].named_modules() if isinstance(module, FSDPModule)]
    name = choose.choice(names)
    for model, x in zip(pair, (_batch(), rows_of_this_rank(_batch())), strict=True):
        module = model.get_submodule(name)
        _backward(module, x.to(module.weight.dtype) if isinstance(module, nn.Linear) else x)


def _unshard_by_hand(choose: Random, pair: Pair) -> None:
    unit = choose.choice(_units(pair[1]))
    handle = unit.unshard(async_op=choose.random() < 0.5)
    if handle is not None and choose.random() < 0.7:
        handle.wait()
    if choose.random() < 0.6:
        unit.reshard()


def _scale_a_weight(choose: Random, pair: Pair) -> None:
    for unit in _units(pair[1]):
        unit.reshard()  # whose weight is scaled must be the shard
    name = choose.choice([name for name, _ in pair[0].named_parameters()])
    with torch.no_grad():
        for model in pair:
            model.get_parameter(name).mul_(0.9)


def _load_scaled_state(_: Random, pair: Pair) -> None:
    for model in pair:
        # Not assigned: the tests' steps find an optimizer's state by the shards, which an assignment replaces.
        model.load_state_dict({name: value.detach() * 0.97 for name, value in model.state_dict().items()})


def _name_prefetched_units(choose: Random, pair: Pair) -> None:
    units = _units(pair[1])
    for unit in units:
        unit.set_modules_to_forward_prefetch(choose.sample(units, min(choose.choice([0, 0, 1, 2]), len(units))))
        unit.set_modules_to_backward_prefetch(choose.sample(units, min(choose.choice([0, 0, 1, 2]), len(units))))


def _fail(choose: Random, pair: Pair) -> None:
    """A forward or backward of the sharded model that an exception ends."""
    name = choose.choice([name for name, _ in pair[1].named_modules()])
    hook = choose.choice([_boom_in_forward, _boom_in_backward])
    handle = pair[1].get_submodule(name).register_forward_hook(hook)
    with suppress(Boom):
        _backward(pair[1], rows_of_this_rank(_batch()))
    handle.remove()
    fsdp(pair[1]).reset_iter_state()
    for model in pair:  # gradients from before are lost with the failed pass
        model.zero_grad()


def _boom(*_: object) -> None:
    raise Boom


def _boom_in_forward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    _boom()


def _boom_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_boom)  # type: ignore[no-untyped-call]


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


EVENTS = [
    _reroute,
    _freeze,
    _validate,
    _look,
    _keep,
    _look_ahead,
    _read_state,
    _train_one_alone,
    _unshard_by_hand,
    _scale_a_weight,
    _load_scaled_state,
    _name_prefetched_units,
    _fail,
]


def _backward(module: nn.Module, x: torch.Tensor, *, recomputed: bool = False) -> None:
    out = checkpoint(module, x, use_reentrant=False) if recomputed else module(x)
    if out.requires_grad:  # all frozen, or a route past every trained module
        out.square().mean().backward()


def _step(choose: Random, pair: Pair) -> None:
    num_microbatches, reduces_each, recomputed = choose.randint(1, 3), choose.random() < 0.5, choose.random() < 0.3
    for i in range(num_microbatches):
        fsdp(pair[1]).set_requires_gradient_sync(reduces_each or i == num_microbatches - 1)
        for model, x in zip(pair, (_batch(), rows_of_this_rank(_batch())), strict=True):
            _backward(model, x + i, recomputed=recomputed)
    for _, unit in named_units(pair[1]):
        unit.weights.reshard()  # without a trained module no backward ran
    assert_at_rest(pair[1])
    assert_gradients_equal(*pair, **_tolerance(pair[0]))


def _run(seed: int) -> None:
    choose = Random(seed)
    pair = twins(partial(_make, seed), partial(_cut, choose), seed=seed)
    # Not foreach: one model's parameters lie on several meshes.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False) for model in pair]
    done: list[str] = []
    for _ in range(NUM_STEPS):
        events: list[Callable[[Random, Pair], None]] = choose.choices(EVENTS, k=choose.randint(0, 2))
        for event in (*events, _step):
            done.append(event.__name__)
            with case(f"seed {seed}, after {', '.join(done)}"):
                event(choose, pair)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _run_all(seeds: range, device: str | None = None) -> None:
    if device is not None:  # a default device, the CPU too, is looked up in every call of torch
        torch.set_default_device(device)
    with flat_alignment(2):  # at the engine's own alignment no parameter here would be cut
        for seed in seeds:
            _run(seed)


def test_random_programs_give_the_unsharded_gradients() -> None:
    run_ranks(_run_all, NUM_RANKS, range(NUM_PROGRAMS))


@pytest.mark.gpu4
def test_random_programs_give_the_unsharded_gradients_on_gpus() -> None:
    run_ranks(_run_all, NUM_RANKS, range(NUM_PROGRAMS), "cuda", device="cuda")


@pytest.mark.slow
def test_many_random_programs_give_the_unsharded_gradients() -> None:
    for first in range(1000, 3000, 50):
        run_ranks(_run_all, NUM_RANKS, range(first, first + 50))
