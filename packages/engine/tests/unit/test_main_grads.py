"""Layers that add weight gradients to a given buffer, beside layers that return gradients to autograd."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import (
    assert_gradients_equal,
    case,
    fsdp,
    inputs,
    mesh_of,
    no_gradient_sync,
    rows_of_this_rank,
    sgd,
    twins,
)
from fused_models import DIM, FusedBlock, FusedLinear, FusedNet, fuse
from torch import nn

from lamella_buffers import CachingAllocator, UnshardedBuffer
from lamella_engine import (
    DDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    MixedPrecisionPolicy,
    ShardingOptions,
    allocate_main_grads,
    delay_gradient,
    fully_shard,
    set_main_grads,
)
from lamella_engine._unit.main_grads import MainGrads
from lamella_engine.testing import assert_at_rest, fake_streams, named_units, record
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

X = inputs()
Options = dict[str, Any]


def _shard(model: nn.Module, *, asks: bool = True, **options: Any) -> None:
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, **options)
        fuse(layer, asks=asks)
    fully_shard(model, **options)


def _pair(make: Callable[[], nn.Module] = FusedNet, **options: Any) -> tuple[nn.Module, nn.Module]:
    return twins(make, lambda model: _shard(model, **options))


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()


def _assert_no_buffers(model: nn.Module) -> None:
    """No written memory is alive, or has a view."""
    for name, unit in named_units(model):
        for grads in unit.parameters.main_grads:
            assert grads._buffer is None, f"{name} kept its buffer"
            assert all(b.flat.untyped_storage().nbytes() == 0 for b in grads._spare), f"{name} kept its buffer's bytes"
        for parameter in (p for group in unit.parameters.groups for p in group.parameters):
            assert "main_grad" not in vars(parameter.unsharded), parameter.name
            assert not {"main_grad", "get_main_grad"} & vars(parameter.sharded).keys(), parameter.name


STAGES: dict[str, tuple[tuple[int, ...], Any]] = {
    "DDP": ((2,), DDP),
    "ZERO1": ((2,), ZERO1),
    "ZERO2": ((2,), ZERO2),
    "ZERO3": ((2,), ZERO3),
    "HSDP, ZERO3": ((2, 1), (HSDP, ZERO3)),
}


@pytest.mark.parametrize("stage", STAGES)
def test_layers_with_main_grads_train_as_unsharded_with_several_microbatches(stage: str) -> None:
    shape, placements = STAGES[stage]

    def train(*, asks: bool) -> None:
        mesh = mesh_of(shape)
        reference, model = _pair(mesh=mesh, options=ShardingOptions(placements=placements), asks=asks)
        optimizers = [sgd(list(twin.parameters())) for twin in (reference, model)]
        for _ in range(2):
            for i in range(3):
                batch = X * (i + 1)
                fsdp(model).set_is_last_backward(i == 2)
                _backward(reference, batch)
                _backward(model, rows_of_this_rank(batch))
            assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
            assert_at_rest(model)
            _assert_no_buffers(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def on_each_rank() -> None:
        for asks in (True, False):
            with case(f"asks={asks}"):
                train(asks=asks)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_main_grads_of_earlier_microbatches_outlive_a_conversion(dtype: torch.dtype) -> None:
    def on_each_rank() -> None:
        for asks in (True, False):
            with case(f"asks={asks}"):
                reference, model = _pair(asks=asks)
                for i in range(3):
                    if i > 0:
                        reference.to(dtype)
                        model.to(dtype)
                    batch = (X * (i + 1)).to(reference.get_parameter("stem.weight").dtype)
                    fsdp(model).set_requires_gradient_sync(i == 2)
                    for net, rows in ((reference, batch), (model, rows_of_this_rank(batch))):
                        net(rows).square().mean().backward()
                assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
                assert_at_rest(model)
                _assert_no_buffers(model)

    run_ranks(on_each_rank, 2)


def test_main_grads_are_summed_in_the_reduce_dtype_and_reduced_in_place() -> None:
    def on_each_rank() -> None:
        # 14 rows divide over two ranks; undivided rows are staged, like autograd's gradients.
        model = nn.Sequential(FusedLinear(4, 14), nn.Linear(14, 13))
        fuse(fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))
        ((_, unit),) = named_units(model)
        (group,), (grads,) = unit.parameters.groups, unit.parameters.main_grads
        group.transports.shard = watching = _Watching(group.transports.shard, grads)  # type: ignore[assignment]
        for _ in range(2):
            _backward(model, torch.ones(3, 4))
        assert watching.num_in_place == 2

    run_ranks(on_each_rank, 2)


class _Watching:
    """A transport that counts reductions straight from the layers' buffers."""

    def __init__(self, inner: Any, grads: MainGrads) -> None:
        self._inner, self._grads = inner, grads
        self.rank, self.num_ranks, self.all_gather = inner.rank, inner.num_ranks, inner.all_gather
        self.num_in_place = 0

    def reduce_scatter(self, payloads: Any, op: Any) -> Any:
        assert self._grads._buffer is not None
        assert self._grads._buffer.dtype == torch.float32
        written = self._grads.view(0).data_ptr()
        self.num_in_place += [full.data_ptr() for _, full in payloads].count(written)
        return self._inner.reduce_scatter(payloads, op)


def _buffer_of(grads: MainGrads) -> object:
    """A call each time: to mypy an attribute keeps the value of an earlier assertion."""
    return grads._buffer


def test_microbatches_without_sync_add_to_one_main_grad_buffer_until_the_reduction() -> None:
    def on_each_rank() -> None:
        reference, model = _pair()
        block = model.get_submodule("layers.0")
        (grads,) = dict(named_units(model))["layers.0"].parameters.main_grads
        with no_gradient_sync(model):
            _backward(model, rows_of_this_rank(X))
            buffer = _buffer_of(grads)
            assert buffer is not None
            _backward(model, rows_of_this_rank(2 * X))
            assert _buffer_of(grads) is buffer
        assert not block.get_parameter("up.weight").grad
        _backward(model, rows_of_this_rank(3 * X))
        assert _buffer_of(grads) is None
        for scale in (1, 2, 3):
            _backward(reference, scale * X)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        _assert_no_buffers(model)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=str)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
def test_a_layer_may_use_its_buffer_in_one_microbatch_and_not_in_another(
    order: tuple[bool, bool], reduce_dtype: torch.dtype
) -> None:
    def on_each_rank() -> None:
        reference, model = _pair(mp_policy=MixedPrecisionPolicy(torch.float32, reduce_dtype))
        for i, fuses in enumerate(order):
            for layer in model.modules():
                if isinstance(layer, FusedLinear):
                    layer.fuses = fuses
            fsdp(model).set_requires_gradient_sync(i == 1)
            _backward(model, rows_of_this_rank((i + 1) * X))
            _backward(reference, (i + 1) * X)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        _assert_no_buffers(model)

    run_ranks(on_each_rank, 2)


class _TwiceBlock(FusedBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class _TwiceNet(FusedNet):
    def make_layer(self, dim: int) -> nn.Module:
        return _TwiceBlock()


def test_a_weight_that_is_used_twice_adds_twice_and_its_dummies_count_for_nothing() -> None:
    def on_each_rank() -> None:
        reference, model = _pair(_TwiceNet)
        for _ in range(2):
            for twin, rows in ((reference, X), (model, rows_of_this_rank(X))):
                twin.zero_grad()
                _backward(twin, rows)
            assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


class _TiedLinears(nn.Module):
    """One weight in two layers: the first adds to a buffer, the second does not."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = FusedLinear(DIM, DIM)
        self.plain = nn.Linear(DIM, DIM)
        self.plain.weight = self.fused.weight
        self.fused.weight.zero_out_wgrad = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.plain(torch.tanh(self.fused(x)))
        return output


def test_a_tied_weights_other_gradient_is_added_where_the_dummy_is_zeros() -> None:
    def on_each_rank() -> None:
        reference, model = twins(_TiedLinears, lambda model: fuse(fully_shard(model)))
        x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(0))
        _backward(reference, x)
        _backward(model, rows_of_this_rank(x))
        assert_gradients_equal(reference, model)

    run_ranks(on_each_rank, 2)


def test_a_buffer_lives_from_its_units_backward_until_the_next_units_reduction_and_is_made_once() -> None:
    def on_each_rank() -> None:
        model = FusedNet()
        _shard(model)
        layers = {
            name: unit.parameters.main_grads[0] for name, unit in named_units(model) if unit.parameters.main_grads
        }
        buffers_by_layer = {name: _keep_what_is_made(grads) for name, grads in layers.items()}
        alive: dict[str, list[str]] = {}

        def alive_now() -> list[str]:
            return [
                name
                for name, buffers in buffers_by_layer.items()
                if any(b.flat.untyped_storage().nbytes() for b in buffers)
            ]

        for name in layers:
            plain = model.get_submodule(name).get_submodule("plain")
            plain.register_full_backward_hook(lambda *_, name=name: alive.update({name: alive_now()}))
        for _ in range(2):
            _backward(model, X)
            assert not alive_now()
        assert alive["layers.1"] == ["layers.1"]
        assert alive["layers.0"] == ["layers.0", "layers.1"], "one is written, one is reduced"
        assert all(len({id(buffer) for buffer in buffers}) == 1 for buffers in buffers_by_layer.values())

    run_ranks(on_each_rank, 2)


def _keep_what_is_made(grads: MainGrads) -> list[UnshardedBuffer]:
    buffers: list[UnshardedBuffer] = []
    new_buffer = grads._new_buffer

    def keep() -> UnshardedBuffer:
        buffers.append(new_buffer())
        return buffers[-1]

    grads._new_buffer = keep  # type: ignore[method-assign]
    return buffers


def test_bytes_come_from_the_units_allocator() -> None:
    def on_each_rank() -> None:
        model = FusedNet()
        _shard(model)
        calls: list[str] = []

        class Counting(CachingAllocator):
            def allocate(self, buffer: torch.Tensor) -> None:
                calls.append("allocate")
                super().allocate(buffer)

            def free(self, buffer: torch.Tensor) -> None:
                calls.append("free")
                super().free(buffer)

        for _, unit in named_units(model):
            for grads in unit.parameters.main_grads:
                grads.group.allocator = Counting()
        _backward(model, X)
        assert calls.count("allocate") == 2
        assert calls.count("free") == 2 + 2, "once when it is made"

    run_ranks(on_each_rank, 2)


def test_a_reset_after_an_exception_and_zero_grad_drop_main_grad_buffers() -> None:
    def on_each_rank() -> None:
        reference, model = _pair()

        def fail(_: torch.Tensor) -> None:
            raise ZeroDivisionError

        with no_gradient_sync(model):
            _backward(model, X)
        model.zero_grad()
        _assert_no_buffers(model)
        handle = model.get_submodule("layers.0.up").register_forward_hook(
            lambda _, __, out: out.register_hook(fail) and None
        )
        with pytest.raises(ZeroDivisionError):
            _backward(model, X)
        handle.remove()
        fsdp(model).reset_iter_state()
        _assert_no_buffers(model)
        for twin, rows in ((reference, X), (model, rows_of_this_rank(X))):
            twin.zero_grad()
            _backward(twin, rows)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_a_frozen_weight_and_a_backward_without_the_unit_leave_nothing_behind() -> None:
    def on_each_rank() -> None:
        reference, model = _pair()
        for twin in (reference, model):
            twin.get_parameter("layers.0.up.weight").requires_grad_(False)
            twin.get_submodule("layers")[1].down.fuses = False  # type: ignore[index]
            _backward(twin, X)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        _assert_no_buffers(model)

    run_ranks(on_each_rank, 2)


def test_main_grads_of_a_unit_driven_by_hand_are_allocated_on_request() -> None:
    def on_each_rank() -> None:
        for asks in (True, False):
            reference, model = twins(FusedBlock, lambda model, asks=asks: fuse(fully_shard(model), asks=asks))
            x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(0))
            log = record(model)
            for scale in (1, 2):
                _backward(reference, scale * x)
                with fsdp(model).hold():
                    out = FusedBlock.forward(model, scale * rows_of_this_rank(x))  # type: ignore[arg-type]
                    if not asks:
                        allocate_main_grads(model)
                    out.square().mean().backward()  # type: ignore[no-untyped-call]
                    fsdp(model).reduce_gradients()
            fsdp(model).wait_for_gradients()
            assert log.units_of("reduce") == ["root", "root"]
            assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
            _assert_no_buffers(model)

    run_ranks(on_each_rank, 2)


def test_a_late_weight_gradient_may_be_added_to_the_buffer() -> None:
    class LateFused(FusedLinear):
        """Puts the addition off until `backward_dw`."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = nn.functional.linear(x, self.weight.detach(), self.bias)
            out.register_hook(lambda gradient: setattr(self, "inputs", (x.detach(), gradient)))  # type: ignore[no-untyped-call]
            return out

        def backward_dw(self, done: Callable[[], None] | None) -> None:
            x, gradient = self.inputs  # type: ignore[misc]
            weight_gradient, weight = gradient.T @ x, self.weight
            if done is None:
                weight.grad = weight_gradient if weight.grad is None else weight.grad + weight_gradient
                return
            weight.get_main_grad().add_(weight_gradient)  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            done()

    def on_each_rank() -> None:
        reference, model = twins(lambda: nn.Sequential(LateFused(DIM, DIM), nn.Linear(DIM, 3)), fully_shard)
        fuse(model)
        done = delay_gradient(model, model[0].weight)  # type: ignore[index]
        x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(0))
        for scale in (1, 2):
            for twin, rows in ((reference, x), (model, rows_of_this_rank(x))):
                _backward(twin, scale * rows)
                twin[0].backward_dw(done if twin is model else None)  # type: ignore[index]
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        _assert_no_buffers(model)

    run_ranks(on_each_rank, 2)


def test_late_gradients_of_other_streams_are_waited_for_before_they_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_each_rank() -> None:
        model = fully_shard(nn.Linear(DIM, 3))
        streams, seen = fake_streams(model), []
        set_main_grads(model, [model.get_parameter("weight")])
        weight_came, bias_came = (delay_gradient(model, model.get_parameter(name)) for name in ("weight", "bias"))
        _backward(model, torch.ones(6, DIM))
        with streams.stream(streams.Stream(0)):
            work = streams.work()
            weight_came()
        monkeypatch.setattr(MainGrads, "settle", lambda _: seen.append(work.is_before(streams.current.seen)))
        bias_came()
        assert seen == [True]

    run_ranks(on_each_rank, 1)


def test_main_grads_may_be_unset_again() -> None:
    def on_each_rank() -> None:
        reference, model = _pair()
        for layer in model.get_submodule("layers").children():
            set_main_grads(layer, [])
            with fsdp(layer).hold():
                assert not hasattr(layer.get_parameter("up.weight"), "get_main_grad")
        for layer in model.modules():
            if isinstance(layer, FusedLinear):
                layer.fuses = False
        _backward(reference, X)
        _backward(model, rows_of_this_rank(X))
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_a_deleted_model_goes_at_once() -> None:
    def on_each_rank() -> None:
        model = FusedNet()
        _shard(model)
        _backward(model, X)
        refs: list[weakref.ref[Any]] = [weakref.ref(model.get_submodule("layers.0"))]
        refs.append(weakref.ref(dict(named_units(model))["layers.0"]))
        gc.collect()
        gc.disable()
        del model
        assert [ref() for ref in refs] == [None, None]

    run_ranks(on_each_rank, 1)


@pytest.mark.parametrize(
    "call", [allocate_main_grads, lambda it: set_main_grads(it, []), lambda it: delay_gradient(it, it.weight)]
)
def test_a_module_that_is_no_unit_is_refused(call: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"Expected `module` to be a unit, got Linear\. Call fully_shard on it"):
        call(nn.Linear(2, 2))


def test_set_main_grads_refuses_foreign_parameters_and_calls_within_a_step() -> None:
    def on_each_rank() -> None:
        model = FusedNet()
        _shard(model)
        layer = model.layers[0]
        with pytest.raises(ValueError, match=r"Expected a parameter of 'layers\.0', got one of shape \(8, 3\)"):
            set_main_grads(layer, [model.stem.get_parameter("weight")])
        with no_gradient_sync(model):
            _backward(model, X)
        with pytest.raises(RuntimeError, match=r"Expected 'layers\.0' between steps"):
            set_main_grads(layer, [])

    run_ranks(on_each_rank, 2)


def test_a_layer_that_writes_over_the_buffer_is_refused_by_name() -> None:
    """megatron-core's own linears do: sums of earlier microbatches would be lost without an error."""

    class ColumnParallelLinear(nn.Linear):
        gradient_accumulation_fusion = True

    def check() -> None:
        model = nn.Sequential(ColumnParallelLinear(4, 4), nn.Linear(4, 4))
        fully_shard(model)
        with pytest.raises(NotImplementedError, match=r"main_grad of '0\.weight', got ColumnParallelLinear"):
            set_main_grads(model, [model.get_parameter("0.weight")])
        set_main_grads(model, [model.get_parameter("1.weight")])
        fused: Any = model[0]
        fused.gradient_accumulation_fusion = False
        set_main_grads(model, [model.get_parameter("0.weight")])

    run_ranks(check, 1)
