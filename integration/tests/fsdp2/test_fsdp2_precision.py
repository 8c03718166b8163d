"""Mixed precision: dtypes of compute, communication and storage, and casts at a unit's edges."""

import dataclasses
import inspect
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from fsdp2_models import (
    DIM,
    Api,
    Stack,
    Where,
    assert_close,
    average,
    gradient_of,
    inputs,
    on_ranks,
    shard,
    twins,
    units,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamella_engine
from lamella_integration.collectives import CollectiveCounter

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The dtype of gradient sums without an explicit dtype: the compute dtype before torch 2.15.
KEEPS_MAIN_DTYPE = torch.__version__ >= "2.15"
LOW = ((BF16, None), (BF16, FP32), (BF16, BF16), (FP16, FP32), (None, BF16))


def test_gradients_equal_a_cast_models_reduced_in_the_reduce_dtype(api: Api) -> None:
    """The twin computes on a cast copy, and the test sums the twin's gradients in the reduce dtype."""

    def scenario(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
        expected, model = twins()
        shard(api, model, mp_policy=api.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
        compute = param_dtype or FP32
        expected.to(compute)
        out = model(inputs())
        assert out.dtype == compute
        out.sum().backward()
        expected(inputs().to(compute)).sum().backward()
        summed = _summed(compute, reduce_dtype)
        expected.to(summed)
        for parameter in expected.parameters():
            parameter.grad = parameter.grad.to(summed)
        average(expected)
        for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert b.dtype == b.grad.dtype == b.grad.to_local().dtype == FP32
            assert_close(b.grad, a.grad.float(), name, rtol=2e-2, atol=2e-2)

    on_ranks(scenario, cases=LOW)


def _summed(gradient_dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    return reduce_dtype or (FP32 if KEEPS_MAIN_DTYPE else gradient_dtype)


def _wire(api: Api, gradient_dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The wire dtype: FSDP2 sends the dtype of sums, lamella the gradients' dtype if sums hold all its values."""
    summed = _summed(gradient_dtype, reduce_dtype)
    return gradient_dtype if api is lamella_engine and torch.promote_types(gradient_dtype, summed) == summed else summed


def test_collectives_carry_the_dtypes_of_the_policy(api: Api) -> None:
    def scenario(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
        _, model = twins()
        shard(api, model, mp_policy=api.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
        with CollectiveCounter() as counter:
            model(inputs()).sum().backward()
        gathered = sum(call.nbytes for call in counter.calls if call.kind == "all_gather")
        assert {call.dtype for call in counter.reductions} == {_wire(api, param_dtype or FP32, reduce_dtype)}
        assert len(counter.reductions) == len(units(api, model)) or Where.device == "cuda"
        shard(api, again := Stack())
        with CollectiveCounter() as fp32_counter:
            again(inputs()).sum().backward()
        # Bytes, not dtypes: a gather may receive tensors viewed as bytes.
        assert gathered * 4 == fp32_counter.nbytes("all_gather") * (param_dtype or FP32).itemsize

    on_ranks(scenario, cases=LOW)


def test_kept_gradients_add_up_in_the_reduce_dtype(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
        expected, model = twins()
        shard(api, model, mp_policy=policy, reshard_after_forward=reshard)
        expected.to(BF16)
        sums = {name: torch.zeros_like(parameter, dtype=FP32) for name, parameter in expected.named_parameters()}
        for microbatch in range(4):
            model.set_requires_gradient_sync(microbatch == 3)
            model.set_reshard_after_backward(microbatch == 3 or reshard)
            x = inputs(seed=microbatch).to(BF16)
            model(x).sum().backward()
            expected(x).sum().backward()
            for name, parameter in expected.named_parameters():
                sums[name] += parameter.grad
                parameter.grad = None
        for name, parameter in expected.to(FP32).named_parameters():
            parameter.grad = sums[name]
        average(expected)
        for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert_close(b.grad, a.grad, name)  # fp32's tolerance, too small for bf16 sums

    on_ranks(scenario, cases=(True, False))


# -- parameters with a constant dtype ---------------------------------------------------------------------------------


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        assert (x.dtype, self.linear.weight.dtype, self.norm.weight.dtype) == (BF16, BF16, FP32)
        out: torch.Tensor = self.norm(x.float())
        return out


@pytest.fixture
def overriding(api: Api) -> Api:
    if "param_dtype_override_fn" not in inspect.signature(api.MixedPrecisionPolicy).parameters:
        pytest.skip("FSDP2 of this torch has one dtype a unit")
    return api


def test_some_parameters_of_a_unit_may_stay_in_their_dtype(overriding: Api) -> None:
    api = overriding

    def scenario(reduce_dtype: torch.dtype | None, num_microbatches: int) -> None:
        expected, model = twins(_Normed)
        seen = []

        def keep_norms(parameter: nn.Parameter) -> torch.dtype | None:
            seen.append(tuple(parameter.shape))
            return {0: BF16, 1: None}.get(len(seen) - 1, parameter.dtype)  # weight and bias of the layer, then the norm

        policy = api.MixedPrecisionPolicy(BF16, reduce_dtype, param_dtype_override_fn=keep_norms)
        api.fully_shard(model, mp_policy=policy)
        assert seen == [(DIM, DIM), (DIM,), (DIM,), (DIM,)]
        for microbatch in range(num_microbatches):
            model.set_requires_gradient_sync(microbatch == num_microbatches - 1)
            out = model(inputs(seed=microbatch))
            assert out.dtype == FP32
            out.square().sum().backward()
        assert len(seen) == 4, "each is asked once"
        expected.linear.to(BF16)
        for microbatch in range(num_microbatches):
            expected(inputs(seed=microbatch).to(BF16)).square().sum().backward()
        expected.float()
        average(expected)
        for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert b.dtype == b.grad.dtype == FP32
            assert_close(b.grad, a.grad, name, rtol=2e-2, atol=2e-2)

    on_ranks(scenario, cases=((FP32, 1), (FP32, 2), (BF16, 1), (None, 1)))


@pytest.mark.parametrize("answer", [FP16, "bf16"])
def test_a_parameter_computes_in_its_own_dtype_or_in_the_policys(overriding: Api, answer: object) -> None:
    def scenario() -> None:
        policy = overriding.MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: answer)
        with pytest.raises(ValueError, match="param_dtype_override_fn must return"):
            overriding.fully_shard(nn.Linear(DIM, DIM), mp_policy=policy)

    on_ranks(scenario)


# -- edges ------------------------------------------------------------------------------------------------------------


class _Recording(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return super().forward(x.to(self.weight.dtype))


def test_inputs_and_outputs_are_cast_where_the_policy_says(api: Api) -> None:
    def scenario() -> None:
        def run(**options: object) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
            first, second = _Recording(), _Recording()
            model = nn.Sequential(first, second)
            api.fully_shard(model[0], mp_policy=api.MixedPrecisionPolicy(**options))
            api.fully_shard(model)
            out = model(inputs())
            out.sum().backward()
            return first.seen[0], second.seen[0], out.dtype

        assert run(param_dtype=FP16) == (FP16, FP16, FP32)
        assert run(param_dtype=FP16, cast_forward_inputs=False) == (FP32, FP16, FP32)
        assert run(param_dtype=FP16, output_dtype=FP32) == (FP16, FP32, FP32)
        assert run(output_dtype=FP16) == (FP32, FP16, FP32)

    on_ranks(scenario)


def test_only_floating_point_inputs_are_cast_and_other_objects_pass(api: Api) -> None:
    class InputCheckingModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor, index: torch.Tensor, *, scale: float, mask: torch.Tensor) -> torch.Tensor:
            assert (x.dtype, index.dtype, mask.dtype) == (BF16, torch.int64, torch.bool)
            out: torch.Tensor = self.linear(x)[index] * scale * mask[:, None]
            return out

    def scenario() -> None:
        model = api.fully_shard(InputCheckingModel(), mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
        out = model(inputs(), torch.tensor([0, 1]), scale=2.0, mask=torch.tensor([True, False]))
        assert out.dtype == BF16
        out.sum().backward()

    on_ranks(scenario)


@dataclasses.dataclass
class _Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class _Nested:
    pair: _Pair
    z: torch.Tensor


class _NamedPair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


KINDS = {
    "dataclass": (lambda a, b: _Pair(a, b), lambda value: (value.x, value.y)),
    "nested": (lambda a, b: _Nested(_Pair(a, b), a + b), lambda value: (value.pair.x, value.pair.y + value.z)),
    "namedtuple": (lambda a, b: _NamedPair(a, b), lambda value: (value.x, value.y)),
    "dict": (lambda a, b: {"x": a, "y": [b]}, lambda value: (value["x"], value["y"][0])),
}


class _Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, value: object) -> object:
        make, parts = KINDS[self.kind]
        x, y = parts(value) if not isinstance(value, torch.Tensor) else (value, 2 * value)  # type: ignore[no-untyped-call]
        return make(self.one(x), self.two(y))  # type: ignore[no-untyped-call]


def test_tensors_in_structures_are_cast_and_their_gradients_arrive(api: Api) -> None:
    def scenario(kind: str, dtype: torch.dtype | None) -> None:
        expected, model = twins(lambda: nn.Sequential(_Structured(kind), _Structured(kind)))
        policy = api.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
        for module in (*model, model):
            api.fully_shard(module, mp_policy=policy)
        parts = KINDS[kind][1]
        for network in (expected, model):
            x, y = parts(network(inputs()))  # type: ignore[no-untyped-call]
            assert x.dtype == ((dtype or FP32) if network is model else FP32)
            (x.square().sum() + 3 * y.sum()).backward()
        average(expected)
        for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert_close(b.grad, a.grad, name, rtol=5e-2 if dtype else 1e-4, atol=0.5 if dtype else 1e-5)

    on_ranks(scenario, cases=itertools.product(KINDS, (None, BF16)))


def test_a_recomputed_forward_casts_as_the_first_did(api: Api) -> None:
    class RecomputingModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = _Recording()
            self.seen: list[torch.dtype] = []

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            self.seen.append(x.dtype)
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.inner, x.float(), use_reentrant=False, early_stop=False)
            return out.float().sum()

    def scenario() -> None:
        model = RecomputingModel()
        policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, output_dtype=FP32)
        api.fully_shard(model.linear, mp_policy=policy)
        api.fully_shard(model, mp_policy=policy)
        model(inputs()).backward()
        assert model.linear.seen == [BF16, BF16]
        assert model.seen == [FP32, FP32]

    on_ranks(scenario)


def test_norms_run_in_low_precision(api: Api) -> None:
    def scenario(dtype: torch.dtype) -> None:
        policy = api.MixedPrecisionPolicy(param_dtype=dtype)
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))
        for module in (*model, model):
            api.fully_shard(module, mp_policy=policy)
        out = model(inputs())
        assert out.dtype == dtype
        out.sum().backward()
        model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3))
        api.fully_shard(model[1], mp_policy=api.MixedPrecisionPolicy(output_dtype=dtype))
        for module in (model[0], model[2], model):
            api.fully_shard(module, mp_policy=policy)
        out = model(inputs(3, 1, 9, 9))
        assert out.dtype == dtype
        assert model[1].running_mean.dtype == FP32
        out.sum().backward()

    on_ranks(scenario, cases=(BF16, FP16))


def test_a_policy_means_the_same_on_every_module_of_a_list(api: Api) -> None:
    class TwoLinears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(self.a(x).float())
            return out

    def scenario() -> None:
        model = TwoLinears()
        policy = api.MixedPrecisionPolicy(param_dtype=BF16)
        api.fully_shard([model.a, model.b], mp_policy=policy)
        api.fully_shard(model, mp_policy=policy)
        out = model(inputs())
        assert out.dtype == BF16
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    on_ranks(scenario)


# -- parameters of several dtypes -------------------------------------------------------------------------------------


def test_the_reduce_dtype_stays_when_the_model_is_cast(api: Api) -> None:
    def scenario() -> None:
        model = Stack().to(BF16)
        shard(api, model, mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
        model.to(FP32)
        with CollectiveCounter() as counter:
            model(inputs()).sum().backward()
        assert {call.dtype for call in counter.reductions} == {BF16}
        assert {gradient_of(parameter).dtype for parameter in model.parameters()} == {FP32}

    on_ranks(scenario)


class _WithIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.packed = nn.Parameter(torch.ones(4, 4, dtype=torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def test_frozen_parameters_of_another_dtype_may_share_a_unit_with_trained_parameters(api: Api) -> None:
    def scenario(policy: dict[str, torch.dtype], frozen_at_first: bool) -> None:
        model: Any = _WithIntegers()
        api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(**policy))
        if frozen_at_first:
            model.requires_grad_(False)
            with torch.no_grad():
                model(inputs())
            model.reshard()
            model.layers.requires_grad_(True)
        with CollectiveCounter() as counter:
            model(inputs()).sum().backward()
        assert {call.dtype for call in counter.reductions} == {_wire(api, policy.get("param_dtype", FP32), FP32)}
        assert {gradient_of(parameter).dtype for parameter in model.layers.parameters()} == {FP32}
        assert model.table.grad is None

    # torch 2.13 itself fails for bf16 with a frozen first forward.
    on_ranks(scenario, cases=(({}, True), ({}, False), ({"param_dtype": BF16, "reduce_dtype": FP32}, False)))


def test_trained_parameters_of_two_dtypes_need_two_units(api: Api) -> None:
    """FSDP2 refuses a unit of both dtypes at the first forward; units of a single dtype train side by side."""

    def scenario() -> None:
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM).to(BF16))
        for module in (*model, model):
            api.fully_shard(module, mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
        model(inputs()).sum().backward()
        assert [gradient_of(parameter).dtype for parameter in model.parameters()] == [FP32, FP32, BF16, BF16]

    on_ranks(scenario)
