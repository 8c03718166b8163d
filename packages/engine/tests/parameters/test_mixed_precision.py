"""The dtypes in which a unit stores, computes, reduces and returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from engine_models import (
    Net,
    assert_weights_equal,
    inputs,
    mesh_of,
    no_gradient_sync,
    rows_of_this_rank,
    twins,
    whole,
)
from torch import nn

from lamella_engine import DDP, HFSDP, ZERO1, ZERO3, MixedPrecisionPolicy, ShardingOptions, fully_shard, plan_units
from lamella_engine.testing import CollectiveLog, assert_at_rest, named_units, record
from lamella_testing import run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNSAID = MixedPrecisionPolicy(param_dtype=BF16).reduce_dtype_of(FP32)  # as in this torch's FSDP2


def _shard(model: Net, policy: MixedPrecisionPolicy) -> Net:
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _sharded(policy: MixedPrecisionPolicy) -> tuple[Net, Net]:
    reference, sharded = twins(Net, lambda model: _shard(model, policy))
    assert isinstance(reference, Net)
    assert isinstance(sharded, Net)
    return reference, sharded


def _gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch).float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _reduced_by_hand(reference: Net, reduce_dtype: torch.dtype) -> list[torch.Tensor]:
    """A bf16 copy of the model makes each rank's gradients; their mean is taken in the reduce dtype."""
    compute = Net().bfloat16()
    compute.load_state_dict(reference.state_dict())
    by_rank = [_gradients(compute, rows.bfloat16()) for rows in inputs().chunk(dist.get_world_size())]
    sums = [torch.stack([g.to(reduce_dtype) for g in gradients]).sum(0) for gradients in zip(*by_rank, strict=True)]
    return [(total / dist.get_world_size()).float() for total in sums]


@pytest.mark.parametrize("reduce_dtype", [FP32, BF16, None])
def test_gradients_are_made_in_the_param_dtype_and_averaged_in_the_reduce_dtype(
    reduce_dtype: torch.dtype | None,
) -> None:
    def check() -> None:
        reference, sharded = _sharded(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (reference, sharded)]
        for _ in range(3):
            sharded(rows_of_this_rank(inputs())).float().square().mean().backward()
            by_hand = _reduced_by_hand(reference, reduce_dtype or UNSAID)
            for (name, parameter), expected in zip(sharded.named_parameters(), by_hand, strict=True):
                assert parameter.grad is not None
                assert parameter.grad.dtype == parameter.dtype == FP32
                # Two ranks: one addition and one halving leave no choice of summation order.
                assert torch.equal(whole(parameter.grad), expected), name
            for parameter, expected in zip(reference.parameters(), by_hand, strict=True):
                parameter.grad = expected
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for expected, parameter in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(whole(parameter), expected)
        assert_at_rest(sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("policy", "gathered", "sent", "summed"),
    [
        (MixedPrecisionPolicy(), FP32, FP32, FP32),
        (MixedPrecisionPolicy(param_dtype=BF16), BF16, BF16, UNSAID),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16), BF16, BF16, BF16),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), BF16, BF16, FP32),
        (MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32), FP16, FP16, FP32),
        (MixedPrecisionPolicy(reduce_dtype=torch.float64), FP32, FP32, torch.float64),
        (MixedPrecisionPolicy(reduce_dtype=BF16), FP32, BF16, BF16),
        (
            MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=BF16),
            FP16,
            BF16,
            BF16,
        ),  # neither holds all of the second
    ],
)
def test_the_wire_carries_the_param_dtype_forth_and_the_narrower_dtype_back(
    policy: MixedPrecisionPolicy, gathered: torch.dtype, sent: torch.dtype, summed: torch.dtype
) -> None:
    def check() -> None:
        _, model = _sharded(policy)
        log: CollectiveLog = record(model)
        model(inputs()).mean().backward()
        dtypes = {event.kind: event.dtypes for event in log.events}
        assert dtypes["gather"] == {gathered}
        assert dtypes["reduce"] == {sent}
        assert {event.sum_dtypes for event in log.events if event.kind == "reduce"} == {frozenset({summed})}

    run_ranks(check, 2)


HALF = fsdp2.MixedPrecisionPolicy(param_dtype=FP16)


def _float16_gradients(
    apply: Callable[..., Any], mesh: tuple[int, ...], choose: Callable[[Any], None], reduces_once: bool, **options: Any
) -> list[torch.Tensor]:
    """Gradients of two microbatches, whose mean is near the largest number and near the smallest."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3)
    apply(model, mesh=mesh_of(mesh), mp_policy=HALF, **options)
    choose(model)
    largest = 40000 if len(mesh) == 1 else 20000  # of two to four ranks FSDP2 sums halves
    x = inputs()[dist.get_rank()].clamp(0.3, 0.9)[:1].repeat(1, 4).half()
    for is_last, size in ((False, 1.0), (True, 0.3)):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or not reduces_once)
        model.set_requires_all_reduce(is_last)
        (model(x) * torch.tensor([size * largest, 3e-3, 2e-6]).half()).sum().backward()
    return [whole(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), None), ((3,), None), ((2,), ZERO1), ((2,), DDP), ((2, 2), None), ((2, 2), (HFSDP, ZERO3))],
    ids=["ZeRO-3", "ZeRO-3 of three", "ZeRO-1", "DDP", "HSDP", "HFSDP"],
)
@pytest.mark.parametrize(
    "choose",
    [
        lambda model: None,
        lambda model: model.set_gradient_divide_factor(12.0),
        lambda model: model.set_force_sum_reduction_for_comms(True),
    ],
    ids=["mean", "divisor", "sum"],
)
def test_means_in_float16_are_those_of_fsdp2_also_where_their_sums_overflow(
    mesh: tuple[int, ...], placements: Any, choose: Callable[[Any], None]
) -> None:
    def check() -> None:
        once = placements in (ZERO1, DDP)
        options = {} if placements is None else {"options": ShardingOptions(placements=placements)}
        expected = _float16_gradients(fsdp2.fully_shard, mesh, choose, once)
        gradients = _float16_gradients(fully_shard, mesh, choose, once, **options)
        for gradient, other in zip(gradients, expected, strict=True):
            assert gradient.isfinite().all()
            assert torch.equal(gradient, other)

    run_ranks(check, math.prod(mesh))


class _NormedLinears(nn.Sequential):
    """A linear layer in the compute dtype, and a norm in fp32."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, norm = self
        out: torch.Tensor = norm(linear(x).float())
        return out


def _keep_norms(model: _NormedLinears) -> Callable[[nn.Parameter], torch.dtype | None]:
    norm_ids = {id(parameter) for parameter in model[1].parameters()}
    return lambda parameter: parameter.dtype if id(parameter) in norm_ids else None


def test_norms_kept_in_fp32_travel_in_fp32_beside_bf16_weights() -> None:
    def check() -> None:
        model = _NormedLinears()
        policy = MixedPrecisionPolicy(BF16, FP32, param_dtype_override_fn=_keep_norms(model))
        planned = plan_units(model, units=nn.Linear, mp_policy=policy)
        assert [p.compute_dtype for planned_unit in planned.units for p in planned_unit.parameters] == [
            BF16,
            BF16,
            FP32,
            FP32,
        ]
        fully_shard(model, mp_policy=policy)
        ((_, unit),) = named_units(model)
        dtypes = {
            parameter.name: parameter.unsharded.dtype
            for group in unit.parameters.groups
            for parameter in group.parameters
        }
        assert dtypes == {"0.weight": BF16, "0.bias": BF16, "1.weight": FP32, "1.bias": FP32}
        log = record(model)
        model(inputs().repeat(1, 2)[:, :4]).sum().backward()
        assert [event.dtypes for event in log.events if event.kind != "compute"] == 2 * [{BF16, FP32}]
        assert [event.sum_dtypes for event in log.events if event.kind == "reduce"] == [{FP32}]

    run_ranks(check, 2)


@pytest.mark.skipif(not hasattr(fsdp2.MixedPrecisionPolicy, "_resolve_for_param"), reason="torch before 2.15")
def test_torchs_policy_may_say_so_too() -> None:
    def check() -> None:
        model = _NormedLinears()
        keep: Any = {"param_dtype_override_fn": _keep_norms(model)}
        fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=BF16, **keep))
        model.unshard()  # type: ignore[operator]
        assert [parameter.dtype for parameter in model.parameters()] == [BF16, BF16, FP32, FP32]
        model.reshard()  # type: ignore[operator]

    run_ranks(check, 1)


def test_a_param_dtype_override_to_a_third_dtype_is_refused_before_sharding() -> None:
    def check() -> None:
        model = _NormedLinears()
        with pytest.raises(ValueError, match=r"Expected None, torch.bfloat16 or torch.float32 .* got torch.float16"):
            fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: FP16))
        assert type(model) is _NormedLinears
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())

    run_ranks(check, 1)


class _Spy(nn.Module):
    """Notes the dtypes in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, extras: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
        self.seen = [x.dtype, self.linear.weight.dtype, *(other.dtype for other in extras.values())]
        return self.linear(x.to(self.linear.weight.dtype)), extras["index"], 3


@pytest.mark.parametrize("cast_inputs", [True, False])
@pytest.mark.parametrize("output_dtype", [None, torch.float64])
def test_floating_point_inputs_and_outputs_are_cast_as_asked_and_nothing_else(
    cast_inputs: bool, output_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output_dtype, cast_forward_inputs=cast_inputs)

    def check() -> None:
        model = fully_shard(_Spy(), mp_policy=policy)
        x = torch.ones(2, 3, requires_grad=True)
        extras = {"index": torch.arange(2), "mask": torch.ones(2, dtype=torch.bool), "scale": torch.ones(1).double()}
        out, index, number = model(x, extras=extras)
        cast = [BF16 if cast_inputs else FP32, BF16, torch.int64, torch.bool, BF16 if cast_inputs else torch.float64]
        assert model.seen == cast
        assert out.dtype == (output_dtype or BF16)
        assert index is extras["index"] and number == 3
        out.sum().backward()
        assert x.grad is not None and x.grad.dtype == FP32
        assert_at_rest(model)

    run_ranks(check, 2)


def test_tensors_in_dataclasses_are_cast_too() -> None:
    @dataclass(frozen=True)
    class MixedRecord:
        x: torch.Tensor
        tables: dict[str, torch.Tensor]

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, record: MixedRecord) -> MixedRecord:
            assert [record.x.dtype, record.tables["a"].dtype, record.tables["b"].dtype] == [BF16, BF16, torch.int64]
            return MixedRecord(self.linear(record.x), record.tables)

    def check() -> None:
        model = fully_shard(Reader(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32))
        batch = MixedRecord(torch.ones(2, 3), {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)})
        out = model(batch)
        assert isinstance(out, MixedRecord)
        assert [out.x.dtype, out.tables["a"].dtype, out.tables["b"].dtype] == [FP32, FP32, torch.int64]
        assert batch.x.dtype == FP32, "what the caller holds is left alone"

    run_ranks(check, 1)


class _Batch(dict[str, torch.Tensor]):
    """A dict unknown to pytree."""


class _Stack(list[torch.Tensor]):
    """A list unknown to pytree."""


@pytest.mark.parametrize(
    "make", [lambda x: _Batch(x=x), lambda x: _Stack([x]), lambda x: {x}], ids=["dict", "list", "set"]
)
def test_tensors_in_containers_unknown_to_pytree_are_cast_too(make: Callable[[torch.Tensor], Any]) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, batch: Any) -> Any:
            return make(self.linear(_only(batch)))

    def _only(batch: Any) -> torch.Tensor:
        [x] = batch.values() if isinstance(batch, dict) else batch
        assert isinstance(x, torch.Tensor)
        return x

    def check() -> None:
        model = fully_shard(Reader(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32))
        batch = make(torch.ones(2, 3))
        output = model(batch)
        assert type(output) is type(batch) and _only(output).dtype == FP32
        assert _only(batch).dtype == FP32, "the caller's container is left alone"
        _only(output).sum().backward()  # type: ignore[no-untyped-call]
        assert_at_rest(model)

    run_ranks(check, 1)


def test_units_under_one_root_may_have_policies_of_their_own() -> None:
    def check() -> None:
        model = Net()
        fully_shard(model.layers[1], mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32))
        fully_shard(model)
        seen = []
        for layer in model.layers:
            linear = layer.get_submodule("up")
            linear.register_forward_pre_hook(lambda module, args: seen.append((module.weight.dtype, args[0].dtype)))
        model(inputs()).mean().backward()
        assert seen == [(FP32, FP32), (BF16, BF16), (FP32, FP32)]
        assert all(parameter.grad is not None and parameter.grad.dtype == FP32 for parameter in model.parameters())

    run_ranks(check, 2)


def test_main_weights_of_a_model_built_in_bf16_take_updates_that_bf16_cannot_hold() -> None:
    def check() -> None:
        model = nn.Linear(3, 3, bias=False, dtype=BF16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, main_dtype=FP32))
        assert model.weight.dtype == FP32
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-12)  # bf16 next to 1: 1 - 2**-8
        seen = []
        for _ in range(17):
            model.register_forward_pre_hook(lambda module, _: seen.append(module.weight.flatten()[0].item()))
            model(torch.ones(1, 3, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(whole(model.weight), torch.full((3, 3), 1 - 17 * 2**-12))
        assert seen[0] == 1.0 and seen[-1] == 1 - 2**-8, "compute sees the sum of sixteen invisible updates"

    run_ranks(check, 2)


def _gradient(model: nn.Linear) -> torch.Tensor | None:
    return model.weight.grad


def test_unreduced_gradients_are_summed_in_the_reduce_dtype() -> None:
    def check(policy: MixedPrecisionPolicy, expected: float) -> None:
        model = fully_shard(nn.Linear(2, 2, bias=False), mp_policy=policy)

        def microbatch(size: float) -> None:
            model(torch.full((1, 2), size)).sum().backward()

        with no_gradient_sync(model):
            microbatch(1.0)
            for _ in range(7):
                microbatch(2**-9)  # lost beside 1 in bf16
            assert _gradient(model) is None
        microbatch(2**-9)
        reduced = _gradient(model)
        assert reduced is not None
        assert torch.equal(whole(reduced), torch.full((2, 2), expected))

    options: dict[str, Any] = {"param_dtype": BF16}
    run_ranks(check, 2, MixedPrecisionPolicy(**options, reduce_dtype=FP32), 1 + 8 * 2**-9)
    run_ranks(check, 2, MixedPrecisionPolicy(**options, reduce_dtype=BF16), 1.0)


def test_torchs_own_mixed_precision_works_around_units() -> None:
    def loss_of(model: nn.Module) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            with torch.no_grad():
                model(inputs())  # autocast's casts are cached, and units' storages come and go
            return model(inputs()).float().square().mean()

    def check() -> None:
        for model in (pair := twins()):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for _ in range(2):
                scaler.scale(loss_of(model)).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert_weights_equal(*pair)

    run_ranks(check, 2)


def test_buffers_keep_their_dtype() -> None:
    def check() -> None:
        model = Net()
        model.register_buffer("scale", torch.full((3,), 1 + 2**-20))
        model.register_buffer("count", torch.tensor(2**20 + 1))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        model(inputs()).sum().backward()
        buffers = dict(model.named_buffers())
        assert buffers["scale"].tolist() == [1 + 2**-20] * 3
        assert buffers["count"].item() == 2**20 + 1

    run_ranks(check, 2)


def test_one_unit_may_hold_parameters_of_several_dtypes() -> None:
    class MixedDtypes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head.to(BF16)
            self.steps = nn.Parameter(torch.arange(5), requires_grad=False)
            self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.steps.tolist() == [0, 1, 2, 3, 4]
            assert self.flags.tolist() == [True, False, True]
            x = self.layers[0](self.stem(x))
            head: torch.Tensor = self.head(x.bfloat16())
            return head

    def check() -> None:
        reference, sharded = twins(MixedDtypes, fully_shard)
        log = record(sharded)
        for model in (reference, sharded):
            model(inputs()).float().square().mean().backward()
        for (name, expected), got in zip(reference.named_parameters(), sharded.parameters(), strict=True):
            if expected.grad is None:
                assert got.grad is None, name
                continue
            assert got.grad is not None
            assert got.grad.dtype == got.dtype == expected.dtype
            torch.testing.assert_close(whole(got.grad), expected.grad, rtol=1e-5, atol=1e-6)
        assert log.units_of("gather") == ["root"], "one grouped call for all dtypes"
        assert log.units_of("reduce") == ["root"]

    run_ranks(check, 2)
