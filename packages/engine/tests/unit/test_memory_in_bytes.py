"""Memory, counted: every storage read or written by an operator of the step, at every operator.

Widths are multiples of 256, divisible by four: layouts hold no padding, and gradients are reduced in
place. With one row of input, activations weigh next to nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_models import BF16, Net, Residual, fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_buffers import Done, Payload, Pending, ReduceOp
from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import assert_at_rest, named_units, require_unit
from lamella_testing import run_ranks

DIM, HIDDEN = 64, 256


class _WideBlock(Residual):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.gain = 1.0  # type: ignore[assignment]


class _Wide(Net):
    def __init__(self, num_layers: int) -> None:
        nn.Module.__init__(self)
        self.stem = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList(_WideBlock() for _ in range(num_layers))
        self.head = nn.Linear(DIM, HIDDEN, bias=False)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows every storage touched by an operator; weighs the living storages after each operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak: int = 0

    def watch_units(self, model: nn.Module) -> None:
        groups = [group for _, unit in named_units(model) for group in unit.parameters.groups]
        self.watch([group.main_weight.flat for group in groups])
        self.watch([group.unsharded_weight.flat for group in groups])

    def watch(self, tensors: Iterable[object]) -> None:
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and not local.is_meta:
                storage = local.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)

    @property
    def now(self) -> int:
        alive = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        self._storages = {storage._cdata: weakref.ref(storage) for storage in alive}
        return _union_nbytes((storage.data_ptr(), storage.nbytes()) for storage in alive if storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.watch(pytree.tree_leaves((args, kwargs, out)))
        self.peak = max(self.peak, self.now)
        return out


def _union_nbytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes in any of the ranges: a storage may be a slice of another."""
    total = stop = 0
    for start, nbytes in sorted(ranges):
        total += max(0, start + nbytes - max(start, stop))
        stop = max(stop, start + nbytes)
    return total


class _StillTransport:
    """A transport of two ranks without any moves."""

    rank = 0
    num_ranks = 2

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        return Done()

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        arrived = [torch.zeros_like(full) for shard, full in payloads if shard.dtype != full.dtype]  # as in a real one
        for shard, _ in payloads:
            shard.zero_()  # a write, for the memory count
        del arrived
        return Done()

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        return Done()


@dataclass(frozen=True)
class _Cost:
    """Bytes of one unit, from layout and policy."""

    shards: int
    unsharded: int
    gradients: int  # as backward makes them
    arrived: int  # as many of all ranks', for sums in another dtype than the wire's
    reduced: int  # this rank's part, in the reduce dtype


def _cost(module: nn.Module, policy: MixedPrecisionPolicy) -> _Cost:
    (layout,) = (group.layout for group in require_unit(module).parameters.groups)
    compute = policy.compute_dtype_of(torch.float32)
    reduce = policy.reduce_dtype_of(torch.float32)
    numel = sum(torch.Size(shape).numel() for shape in layout.shapes)
    return _Cost(
        shards=layout.shard_numel * 4,
        unsharded=layout.full_numel * compute.itemsize,
        gradients=numel * compute.itemsize,
        arrived=0 if reduce == compute else numel * compute.itemsize,
        reduced=layout.shard_numel * reduce.itemsize,
    )


def _build(num_layers: int, policy: MixedPrecisionPolicy, **options: Any) -> _Wide:
    model = _Wide(num_layers)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, mesh=options.get("mesh"))
    for _, unit in named_units(model):
        for group in unit.parameters.groups:
            group.transports.shard = _StillTransport()
    return model


def _train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def _infer(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def _peak(model: _Wide, run: Callable[[nn.Module, torch.Tensor], None]) -> int:
    """The third pass's: the order is learned by then."""
    x = torch.ones(1, DIM)
    for _ in range(2):
        run(model, x)
        model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveBytes() as live:
        live.watch_units(model)
        run(model, x)
    peak: int = live.peak
    return peak


# A row of every activation, and its gradient: a few times HIDDEN elements a layer.
def _activations(num_layers: int) -> int:
    return 16 * 4 * HIDDEN * (num_layers + 2)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_fully_shard_peaks_at_one_unsharded_copy_and_the_shards_of_a_unit(policy: MixedPrecisionPolicy) -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (4,))
        with LiveBytes() as live:
            block = _WideBlock()
            nbytes = sum(parameter.nbytes for parameter in block.parameters())
            live.peak = 0
            fully_shard(block, mesh=mesh, mp_policy=policy)
        assert live.peak == nbytes + nbytes // 4
        assert live.now == nbytes // 4

    run_ranks(check, 4)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_at_rest_only_shards_hold_memory(policy: MixedPrecisionPolicy) -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2,))  # a mesh is a tensor of ranks
        with LiveBytes() as live:
            model = _build(3, policy, mesh=mesh)
        shards = sum(_cost(module, policy).shards for module in (model, *model.layers))
        assert live.now == shards
        x = torch.ones(1, DIM)
        for step in range(2):
            with live:
                live.watch([x])
                _train(model, x)
            assert live.now == 2 * shards + x.nbytes, f"step {step}: shards, their gradients and the input"
            model.zero_grad(set_to_none=True)
            assert live.now == shards + x.nbytes
        assert_at_rest(model)

    run_ranks(check, 2)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_a_forward_holds_the_root_and_two_blocks_whatever_the_number_of_layers(policy: MixedPrecisionPolicy) -> None:
    def check() -> None:
        for num_layers in (3, 6):
            model = _build(num_layers, policy)
            root, block = _cost(model, policy), _cost(model.layers[0], policy)
            expected = root.shards + num_layers * block.shards + root.unsharded + 2 * block.unsharded
            _assert_just_below(_peak(model, _infer), expected, num_layers)

    run_ranks(check, 2)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_a_step_holds_two_unsharded_blocks_and_two_blocks_gradients_whatever_the_number_of_layers(
    policy: MixedPrecisionPolicy,
) -> None:
    def check() -> None:
        for num_layers in (3, 6):
            model = _build(num_layers, policy)
            root, block = _cost(model, policy), _cost(model.layers[0], policy)
            # The root is present all along, and its gradients wait for the stem's.
            resident = 2 * (root.shards + num_layers * block.shards) + root.unsharded + root.gradients
            # Between two reductions one block computes and the next is gathered; the first's gradients come, and the
            # last block's are reduced. A reduction starts when its block and the last block's gradients are freed.
            between = 2 * block.unsharded + 2 * block.gradients
            reducing = block.unsharded + block.gradients + block.arrived
            # Missing at the meeting near the end of backward: the gradients of the stem and of three shards.
            to_come = 4 * DIM * DIM + root.shards + 2 * block.shards
            _assert_just_below(_peak(model, _train), resident + max(between, reducing), num_layers, slack=to_come)

    run_ranks(check, 2)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("budget", "num_ahead"), [(0.0, 1), (1.9, 1), (2.0, 2), (3.5, 3)])
def test_a_prefetch_budget_bounds_unsharded_bytes_beside_the_running_units(
    budget: float, num_ahead: int, policy: MixedPrecisionPolicy
) -> None:
    def check() -> None:
        num_layers = 6
        model = _build(num_layers, policy)
        root, block = _cost(model, policy), _cost(model.layers[0], policy)
        fsdp(model).set_options(prefetch_budget=int(budget * block.unsharded))
        shards = root.shards + num_layers * block.shards
        expected = shards + root.unsharded + (1 + num_ahead) * block.unsharded
        _assert_just_below(_peak(model, _infer), expected, num_layers)
        # In backward: the shards' gradients, and the living part of two units' unreduced gradients.
        bound = expected + shards + root.gradients + 2 * block.gradients + block.arrived
        assert _peak(model, _train) <= bound + _activations(num_layers)

    run_ranks(check, 2)


def _assert_just_below(peak: int, expected: int, num_layers: int, slack: int = 0) -> None:
    assert peak <= expected + _activations(num_layers)
    assert peak >= expected - slack  # otherwise the bound is not measured


def test_units_that_are_kept_cost_their_unsharded_bytes_until_backward_and_no_longer() -> None:
    def check() -> None:
        policy = MixedPrecisionPolicy()
        model = _build(3, policy, reshard_after_forward=False)
        root, block = _cost(model, policy), _cost(model.layers[0], policy)
        with LiveBytes() as live:
            live.watch_units(model)
            out = model(torch.ones(1, DIM))
        unsharded = root.unsharded + 3 * block.unsharded
        shards = root.shards + 3 * block.shards
        assert shards + unsharded <= live.now <= shards + unsharded + _activations(3)
        out.mean().backward()
        assert_at_rest(model)

    run_ranks(check, 2)


@pytest.mark.parametrize(("budget", "num_kept"), [(0.5, 0), (2.5, 2), (9.0, 4)])
def test_a_keep_budget_bounds_unsharded_bytes_between_forward_and_backward(budget: float, num_kept: int) -> None:
    def check() -> None:
        model = _build(4, MixedPrecisionPolicy())
        root, block = _cost(model, MixedPrecisionPolicy()), _cost(model.layers[0], MixedPrecisionPolicy())
        fsdp(model).set_options(keep_budget=int(budget * block.unsharded))
        _train(model, torch.ones(1, DIM))
        model.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            live.watch_units(model)
            out = model(torch.ones(1, DIM))
        expected = root.shards + 4 * block.shards + root.unsharded + num_kept * block.unsharded
        assert expected <= live.now <= expected + _activations(4)
        out.mean().backward()
        assert_at_rest(model)

    run_ranks(check, 2)


def test_gradients_that_wait_for_a_later_microbatch_are_held_once() -> None:
    def check() -> None:
        model = _build(3, MixedPrecisionPolicy())
        costs = [_cost(module, MixedPrecisionPolicy()) for module in (model, *model.layers)]
        fsdp(model).set_requires_gradient_sync(False)
        x = torch.ones(1, DIM)
        with LiveBytes() as live:
            live.watch_units(model)
            live.watch([x])
            for _ in range(3):
                _train(model, x)
        assert live.now == x.nbytes + sum(cost.shards + cost.gradients for cost in costs)

    run_ranks(check, 2)
