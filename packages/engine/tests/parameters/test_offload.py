"""Shards at rest on the CPU: compute uses a copy, gradients come to the shards' device, the host waits once.

On a CPU mesh both sides are in one memory, and copies cannot be late. For tests of late copies `late_copies` makes
copies to the host as late as a stream may: no bytes arrive before the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from counted_collectives import Gather, Reduce
from engine_models import (
    BF16,
    Net,
    adamw,
    assert_gradients_equal,
    assert_weights_equal,
    case,
    fsdp,
    inputs,
    rows_of_this_rank,
    sgd,
    shard_on,
    twins,
)
from extended_models import Halves
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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
    describe,
    fully_shard,
)
from lamella_engine._parameters.offload import Offload
from lamella_engine._parameters.sharded_parameter import dtensor_for
from lamella_engine._parameters.sharding import DataAxes, Sharding
from lamella_engine._streams import streams as engine_streams
from lamella_engine.testing import FakeStreams, FakeWork, assert_at_rest, fake_streams, named_units, record
from lamella_testing import run_ranks

X = inputs(24)
OFFLOAD = CPUOffloadPolicy()
WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one rank": ((1,), {}),
    "as FSDP2": ((2,), {}),
    "kept after forward": ((2,), {"reshard_after_forward": False}),
    "along another dim": ((2,), {"shard_placement_fn": lambda p: Shard(p.ndim - 1) if p.shape[-1] % 2 == 0 else None}),
    "blocks of rows": ((2,), {"options": ShardingOptions(keep_together=Rows(2))}),
    "DDP": ((2,), {"options": ShardingOptions(placements=DDP)}),
    "ZERO1": ((2,), {"options": ShardingOptions(placements=ZERO1)}),
    "ZERO2": ((2,), {"options": ShardingOptions(placements=ZERO2)}),
    "pairs keep the whole": ((4,), {"reshard_after_forward": 2}),
    "HSDP as FSDP2": ((2, 2), {}),
    "HSDP, ZERO1": ((2, 2), {"options": ShardingOptions(placements=(HSDP, ZERO1))}),
    "HSDP, ZERO3": ((2, 2), {"options": ShardingOptions(placements=(HSDP, ZERO3))}),
    "HFSDP, ZERO3": ((2, 2), {"options": ShardingOptions(placements=(HFSDP, ZERO3))}),
}


def _offloaded(shape: tuple[int, ...] = (2,), **options: Any) -> Callable[[Net], Net]:
    return shard_on(shape, offload_policy=OFFLOAD, **options)


def _net() -> Net:
    return Net(dim=8)


def _pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    return twins(_net, _offloaded(**options))


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).float().square().mean().backward()


def _backward_of_both(pair: tuple[nn.Module, nn.Module], scale: float = 1.0) -> None:
    _backward(pair[0], X * scale)
    _backward(pair[1], rows_of_this_rank(X * scale))


@dataclass
class LateCopies:
    """Copies to the host in flight, and the number of waits."""

    copies: list[Callable[[], object]] = field(default_factory=list)
    num_waits: int = 0

    def arrive(self, _: object) -> None:
        self.num_waits += 1
        for copy in self.copies:
            copy()
        self.copies.clear()


@contextmanager
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    """Let copies to the host arrive at the host's wait, and be NaN before."""
    late = LateCopies()

    def to_host(self: Offload, tensor: torch.Tensor) -> torch.Tensor:
        landed = self.empty(tensor.numel(), tensor.dtype).fill_(torch.nan)
        values = tensor.clone().view(-1)
        late.copies.append(partial(landed.copy_, values))
        return landed

    def add_(self: Offload, totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        late.copies.append(partial(torch._foreach_add_, list(totals), [part.clone() for part in parts]))

    monkeypatch.setattr(Offload, "to_host", to_host)
    monkeypatch.setattr(Offload, "add_", add_)
    monkeypatch.setattr(engine_streams, "_wait_on_host", late.arrive)
    yield late
    monkeypatch.undo()


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steps_on_shards")
@pytest.mark.parametrize("way", WAYS)
def test_an_offloaded_model_trains_as_unsharded_at_every_stage_and_layout(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, options = WAYS[way]

    def on_each_rank() -> None:
        reference, sharded = _pair(shape=shape, **options)
        optimizers = [adamw(list(model.parameters())) for model in (reference, sharded)]
        with late_copies(monkeypatch) as late:
            for step in range(4):
                for microbatch in range(2):
                    is_last = microbatch == 1
                    fsdp(sharded).set_requires_gradient_sync(is_last or step % 2 == 0)
                    fsdp(sharded).set_is_last_backward(is_last)
                    _backward_of_both((reference, sharded), microbatch + 1)
                assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)
                assert_at_rest(sharded)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step < 2)
            assert late.num_waits == 4
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-5)

    run_ranks(on_each_rank, torch.Size(shape).numel())


def test_bf16_computes_over_fp32_that_rests() -> None:
    """Bit by bit the results with shards at rest on the device."""

    def on_each_rank() -> None:
        _, resting_there = twins(_net, lambda model: [fully_shard(m, mp_policy=BF16) for m in (*model.layers, model)])
        _, offloaded = _pair(mp_policy=BF16)
        for _ in range(2):
            for model in (resting_there, offloaded):
                for _ in range(2):
                    _backward(model, rows_of_this_rank(X))
                optimizer = sgd(list(model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(resting_there.parameters(), offloaded.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())  # type: ignore[attr-defined]

    run_ranks(on_each_rank, 2)


def test_some_units_may_rest_on_the_cpu_and_others_not() -> None:
    def apply(model: nn.Module) -> None:
        assert isinstance(model, Net)
        fully_shard(model.layers[0], offload_policy=OFFLOAD)
        fully_shard(model.layers[1])
        fully_shard(model)

    def on_each_rank() -> None:
        reference, sharded = twins(_net, apply)
        for model in (reference, sharded):
            optimizer = sgd(list(model.parameters()))
            for _ in range(2):
                _backward(model, X)
                optimizer.step()
                optimizer.zero_grad()
        assert_weights_equal(reference, sharded)

    run_ranks(on_each_rank, 2)


def test_a_unit_that_runs_twice_adds_to_gradients_still_in_copy_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoForwards(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first: torch.Tensor = super().forward(x)
            return first + super().forward(x * 2)

    def on_each_rank() -> None:
        pair = twins(lambda: TwoForwards(dim=8), _offloaded())
        with late_copies(monkeypatch) as late:
            _backward_of_both(pair)
            assert late.num_waits == 1
        assert_gradients_equal(*pair, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_extended_parameters_and_custom_collectives_work_on_the_copy() -> None:
    """Integers and bf16 travel; the sending method runs on the device."""

    def apply(model: nn.Module) -> None:
        assert isinstance(model, Net)
        for layer in model.layers:
            assert isinstance(layer.up, nn.Linear)
            layer.up.weight = nn.Parameter(Halves.encode(layer.up.weight.detach()))
        _offloaded()(model)
        for _, unit in named_units(model):
            assert all(group.offload is not None for group in unit.parameters.groups)
        fsdp(model).set_custom_all_gather(Gather())
        fsdp(model).set_custom_reduce_scatter(Reduce())

    def on_each_rank() -> None:
        pair = twins(_net, apply)
        _backward_of_both(pair)
        assert_gradients_equal(*pair, rtol=1e-2, atol=1e-3)

    run_ranks(on_each_rank, 2)


# -- places of tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["one rank", "as FSDP2", "DDP", "ZERO1", "HFSDP, ZERO3"])
def test_unsharded_parameters_share_no_memory_with_offloaded_shards(way: str) -> None:
    shape, options = WAYS[way]

    def check(policy: MixedPrecisionPolicy | None) -> None:
        _, model = _pair(shape=shape, mp_policy=policy, **options)
        _backward(model, rows_of_this_rank(X))
        for _, unit in named_units(model):
            unit.weights.unshard()
            unit.weights.wait_for_unshard()
            for group in unit.parameters.groups:
                main, unsharded = (
                    group.main_weight.flat.untyped_storage(),
                    group.unsharded_weight.flat.untyped_storage(),
                )
                assert unsharded.nbytes() and main.data_ptr() != unsharded.data_ptr()
                for parameter in group.parameters:
                    gradient = parameter.sharded.grad
                    assert isinstance(parameter.sharded, DTensor) and isinstance(gradient, DTensor)
                    assert {parameter.sharded.device.type, parameter.shard.device.type, gradient.device.type} == {"cpu"}
                    assert gradient.to_local().dtype == parameter.shard.dtype == torch.float32

    def on_each_rank() -> None:
        for policy in (None, BF16):
            with case(policy):
                check(policy)

    run_ranks(on_each_rank, torch.Size(shape).numel())


@pytest.mark.parametrize("way", ["one rank", "as FSDP2", "blocks of rows", "ZERO2", "HFSDP, ZERO3"])
def test_shards_are_copied_once_for_each_gather(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, options = WAYS[way]

    def on_each_rank() -> None:
        _, model = _pair(shape=shape, mp_policy=BF16, **options)
        copied: list[int] = []
        real = Offload.to_device

        def to_device(self: Offload, shard: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
            copied.append(shard.data_ptr())
            return real(self, shard, into)

        monkeypatch.setattr(Offload, "to_device", to_device)
        log = record(model)
        for _ in range(2):
            _backward(model, rows_of_this_rank(X))
        for name, unit in named_units(model):
            num_axes = len({group.axes for group in unit.parameters.groups})
            for group in unit.parameters.groups:
                # A shard cut by an outer axis stays for the step after its gather over the axis.
                num_gathers = (
                    2 if group.transports.outer is not None else log.units_of("gather").count(name) // num_axes
                )
                assert copied.count(group.main_weight.flat.data_ptr()) == num_gathers

    run_ranks(on_each_rank, torch.Size(shape).numel())


def test_a_dtensor_of_a_cpu_shard_stays_on_the_cpu_under_a_cuda_mesh() -> None:
    mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)
    shard = torch.ones(2, 3)
    dtensor = dtensor_for(shard, torch.empty(2, 3), Sharding(DataAxes(mesh, 0), 0, mesh, (Shard(0),)))
    assert dtensor.device_mesh.device_type == "cuda"
    assert dtensor.device.type == dtensor.to_local().device.type == "cpu"
    assert dtensor._local_tensor is shard


def test_memory_is_pinned_for_a_device_and_not_on_a_cpu_mesh() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert Offload.of(None, cuda) is None
    assert Offload.of(CPUOffloadPolicy(), cuda) == Offload(cuda, pins=True)
    assert Offload.of(CPUOffloadPolicy(pin_memory=False), cuda) == Offload(cuda, pins=False)
    assert Offload.of(CPUOffloadPolicy(), cpu) == Offload(cpu, pins=False)


def test_offloaded_gradients_are_added_in_place() -> None:
    offload = Offload(torch.device("cpu"), pins=False)
    totals = [torch.ones(2, 2), torch.zeros(0, 3)]
    before = [total.data_ptr() for total in totals]
    offload.add_(totals, [torch.full((2, 2), 2.0), torch.zeros(0, 3)])
    assert totals[0].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert [total.data_ptr() for total in totals] == before


# -- when the host waits ---------------------------------------------------------------------------------------------


def test_the_host_waits_once_a_step_and_not_for_microbatches_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_rank() -> None:
        _, model = _pair()
        with late_copies(monkeypatch) as late:
            for is_last, num_waits in ((False, 0), (True, 1), (True, 2)):
                fsdp(model).set_is_last_backward(is_last)
                loss = model(rows_of_this_rank(X)).square().mean()
                assert late.num_waits == num_waits - is_last
                loss.backward()
                assert late.num_waits == num_waits
                assert not is_last or not late.copies

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("is_last", [True, False])
def test_an_optimizer_in_backward_steps_after_the_gradients_copy_to_the_cpu(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_in_backward(model: nn.Module) -> list[nn.Parameter]:
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.2) for parameter in model.parameters()}
        stepped: list[nn.Parameter] = []

        def step(parameter: nn.Parameter) -> None:
            assert not torch.is_grad_enabled()
            stepped.append(parameter)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        return stepped

    def on_each_rank() -> None:
        pair = _pair()
        fsdp(pair[1]).set_is_last_backward(is_last)
        stepped = [step_in_backward(model) for model in pair]
        with late_copies(monkeypatch) as late:
            for _ in range(3):
                _backward_of_both(pair)
                assert_weights_equal(*pair, rtol=1e-4)
                assert all(parameter.grad is None for parameter in pair[1].parameters())
            assert late.num_waits == 3
        assert len(stepped[1]) == len(stepped[0]) == 3 * len(list(pair[1].parameters()))

    run_ranks(on_each_rank, 2)


def test_the_host_waits_once_for_gradients_that_are_reduced_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_rank() -> None:
        pair = _pair()
        fsdp(pair[1]).set_requires_gradient_sync(False)
        with late_copies(monkeypatch) as late:
            _backward_of_both(pair)
            assert late.num_waits == 0
            fsdp(pair[1]).set_requires_gradient_sync(True)
            for module in pair[1].modules():
                if isinstance(module, FSDPModule):
                    module.reduce_gradients()
            assert late.num_waits == 0
            fsdp(pair[1]).wait_for_gradients()
            assert late.num_waits == 1
            assert_gradients_equal(*pair, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_state_dicts_and_casts_of_offloaded_shards_wait_for_running_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_rank() -> None:
        _, model = _pair()
        with late_copies(monkeypatch) as late:
            with torch.no_grad():
                model(rows_of_this_rank(X))
            assert late.num_waits == 0
            acts: tuple[Callable[[], object], ...] = model.state_dict, lambda: model.to(torch.float32)
            for num_waits, act in enumerate(acts, start=1):
                act()
                act()
                assert late.num_waits == num_waits
                with torch.no_grad():
                    model(rows_of_this_rank(X))

    run_ranks(on_each_rank, 2)


def test_the_host_waits_for_a_forward_between_backward_and_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_rank() -> None:
        _, model = _pair()
        optimizer = sgd(list(model.parameters()))
        with late_copies(monkeypatch) as late:
            for num_steps in (1, 2):
                model(rows_of_this_rank(X)).square().mean().backward()
                assert late.num_waits == 2 * num_steps - 1
                with torch.no_grad():
                    model(rows_of_this_rank(X))
                optimizer.step()
                optimizer.step()
                assert late.num_waits == 2 * num_steps

    run_ranks(on_each_rank, 2)


def test_after_an_exception_no_hook_is_called_for_a_step_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            x.register_hook(_fail)  # type: ignore[no-untyped-call]
            for layer in self.layers:
                x = layer(x)
            return x

    def _fail(_: torch.Tensor) -> None:
        raise ValueError("backward fails")

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model = Fails(dim=8)
        _offloaded()(model)
        called: list[torch.Tensor] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
        with late_copies(monkeypatch), pytest.raises(ValueError, match="backward fails"):
            _backward(model, rows_of_this_rank(X))
        fsdp(model).reset_iter_state()
        assert called == []
        assert_at_rest(model)

    run_ranks(on_each_rank, 2)


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["one rank", "as FSDP2", "blocks of rows", "DDP", "ZERO2", "HSDP as FSDP2", "HFSDP, ZERO3"]
)
def test_compute_and_host_wait_for_copies_of_offloaded_shards_and_gradients(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, options = WAYS[way]

    def on_each_rank() -> None:
        _, model = _pair(shape=shape, **options)
        streams = fake_streams(model)
        up, down = _note_copies(monkeypatch, streams)

        def before_compute(*_: object) -> None:
            assert up[0].is_before(streams.compute.seen)

        model.register_forward_pre_hook(before_compute)  # after the unit's own
        for num_steps in range(1, 4):
            for is_last in (False, True):
                fsdp(model).set_is_last_backward(is_last)
                _backward(model, rows_of_this_rank(X))
            assert streams.num_host_waits == num_steps
            assert up and down
            assert all(work.is_before(streams.seen_by_host) for work in up + down)

    run_ranks(on_each_rank, torch.Size(shape).numel())


def _note_copies(monkeypatch: pytest.MonkeyPatch, streams: FakeStreams) -> tuple[list[FakeWork], list[FakeWork]]:
    """Copies to the device and to the host, as work on the current streams."""
    up: list[FakeWork] = []
    down: list[FakeWork] = []
    for name, works in (("to_device", up), ("to_host", down), ("add_", down)):
        monkeypatch.setattr(Offload, name, _noting(getattr(Offload, name), works, streams))
    return up, down


def _noting(real: Callable[..., Any], works: list[FakeWork], streams: FakeStreams) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        works.append(streams.work())
        return real(*args)

    return noted


# -- further ways in and out -----------------------------------------------------------------------------------------


def test_a_model_on_meta_is_materialised_on_the_cpu() -> None:
    def on_each_rank() -> None:
        with torch.device("meta"):
            model = _net()
        _offloaded()(model)
        with pytest.raises(RuntimeError, match=r'materialized from meta.*to_empty\(device="cpu"\)'):
            model(X)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        reference = _net()
        model.load_state_dict(_sharded_like(model, reference))
        _backward_of_both((reference, model))
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def _sharded_like(model: nn.Module, reference: nn.Module) -> dict[str, torch.Tensor]:
    values = dict(reference.named_parameters())
    return {
        name: distribute_tensor(values[name].detach(), shard.device_mesh, shard.placements)
        for name, shard in model.state_dict().items()
    }


@pytest.mark.parametrize("assign", [True, False])
def test_weights_loaded_into_an_offloaded_model_are_used_by_the_next_forward(assign: bool) -> None:
    def on_each_rank() -> None:
        reference, model = _pair(options=ShardingOptions(placements=ZERO2))
        model(X)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.5)
        model.load_state_dict(_sharded_like(model, reference), assign=assign)
        torch.testing.assert_close(model(X), reference(X))
        _backward_of_both((reference, model))
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def _move_shards(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    for _, unit in named_units(model):
        for group in unit.parameters.groups:
            patch.setattr(group.main_weight, "device", torch.device("cuda", 0))


def test_shards_that_were_moved_off_the_cpu_are_refused_with_fsdp2s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_rank() -> None:
        _, model = _pair()
        with monkeypatch.context() as patch:
            _move_shards(patch, model)
            with pytest.raises(
                RuntimeError, match="FSDP parameters should be materialized on CPU when enabling CPU off"
            ):
                model(X)
        model(X)

    run_ranks(on_each_rank, 2)


def test_a_hold_that_was_refused_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_rank() -> None:
        _, model = _pair()
        with monkeypatch.context() as patch:
            _move_shards(patch, model)
            with pytest.raises(RuntimeError, match="materialized on CPU"):
                fsdp(model).hold()
        model.state_dict()

    run_ranks(on_each_rank, 2)


def test_the_description_says_where_shards_rest() -> None:
    def on_each_rank() -> None:
        _, model = _pair(shape=(1,))
        assert describe(model).count("a rank with padding, on the CPU") == 2

    run_ranks(on_each_rank, 1)
