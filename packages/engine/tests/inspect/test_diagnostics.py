"""Norms, non-finite values and spikes: against the unsharded model, on any mesh."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from engine_models import Net, fsdp, inputs, mesh_of, rows_of_this_rank, twins
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from lamella_engine import (
    MixedPrecisionPolicy,
    NonFinite,
    Spike,
    SpikeWatch,
    find_nonfinite,
    fully_shard,
    parameter_norms,
)
from lamella_testing import run_ranks

X = inputs()


def _backward(model: nn.Module, x: torch.Tensor = X) -> None:
    model(x).square().mean().backward()


def _expected_norms(reference: nn.Module) -> dict[str, float]:
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return {name: grad.double().norm().item() for name, grad in grads.items() if grad is not None}


# -- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradient_norms_are_the_unsharded_models(num_ranks: int) -> None:
    def check() -> None:
        reference, sharded = twins()
        _backward(reference)
        _backward(sharded, rows_of_this_rank(X))
        assert parameter_norms(sharded) == pytest.approx(_expected_norms(reference), rel=1e-5)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_weight_norms_are_the_unsharded_models_even_while_units_are_unsharded(num_ranks: int) -> None:
    def check() -> None:
        reference, sharded = twins()
        expected = {name: p.detach().double().norm().item() for name, p in reference.named_parameters()}
        assert parameter_norms(sharded, of="weight") == pytest.approx(expected, rel=1e-6)
        fsdp(sharded).unshard()
        assert parameter_norms(sharded, of="weight") == pytest.approx(expected, rel=1e-6)

    run_ranks(check, num_ranks)


def test_gradients_are_found_while_units_stay_unsharded() -> None:
    def check() -> None:
        reference, sharded = twins()
        fsdp(sharded).set_reshard_after_backward(False)
        _backward(reference)
        _backward(sharded)
        assert parameter_norms(sharded) == pytest.approx(_expected_norms(reference), rel=1e-5)

    run_ranks(check, 2)


def test_a_model_without_units_has_norms_too() -> None:
    reference, _ = twins(apply=lambda _: None)
    _backward(reference)
    assert parameter_norms(reference) == pytest.approx(_expected_norms(reference))
    assert parameter_norms(nn.ReLU()) == {}


def test_parameter_norms_of_all_units_take_one_all_reduce() -> None:
    def check() -> None:
        _, sharded = twins()
        _backward(sharded)
        with CommDebugMode() as log:  # type: ignore[no-untyped-call]
            parameter_norms(sharded)
        assert log.get_total_counts() == 1

    run_ranks(check, 2)


class _Bag(nn.Module):
    """Parameters under names."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def test_several_meshes_and_placements_take_one_all_reduce_an_axis() -> None:
    matrix = torch.arange(1.0, 36.0).view(5, 7)

    def check() -> None:
        mesh = mesh_of((2, 2))
        placements: dict[str, list[Placement]] = {
            "both": [Shard(0), Shard(1)],
            "same_dim": [Shard(0), Shard(0)],
            "inner": [Replicate(), Shard(0)],
            "outer": [Shard(1), Replicate()],
            "nowhere": [Replicate(), Replicate()],
        }
        model = _Bag(
            **{name: distribute_tensor(matrix, mesh, cut) for name, cut in placements.items()},
            one_axis=distribute_tensor(matrix, mesh["inner"], [Shard(0)]),
            few_rows=distribute_tensor(matrix[:1], mesh, [Shard(0), Shard(0)]),
            plain=matrix.bfloat16(),
            integers=torch.arange(3),
            nothing=torch.zeros(0, 3),
        )
        expected = dict.fromkeys([*placements, "one_axis", "plain"], matrix.double().norm().item())
        expected |= {"few_rows": math.sqrt(140), "integers": math.sqrt(5), "nothing": 0.0}
        with CommDebugMode() as log:  # type: ignore[no-untyped-call]
            norms = parameter_norms(model, of="weight")
        assert norms == pytest.approx(expected)
        assert log.get_total_counts() == 2

    run_ranks(check, 4)


def test_a_missing_gradient_is_left_out_and_one_of_another_rank_is_not() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2,))
        gradient = torch.full((4, 2), 3.0)
        model = _Bag(**{name: distribute_tensor(gradient, mesh, [Shard(0)]) for name in ("all", "none", "one")})
        for name in ("all", "one") if dist.get_rank() else ("all",):
            parameter = model.get_parameter(name)
            parameter.grad = parameter.detach().clone()
        norms = parameter_norms(model)
        assert norms == pytest.approx({"all": math.sqrt(72), "one": math.sqrt(36)})

    run_ranks(check, 2)


def test_squares_that_fp32_and_bf16_cannot_hold_are_summed() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2,))
        large = torch.full((4,), 1e30)
        model = _Bag(fp32=distribute_tensor(large, mesh, [Shard(0)]), bf16=large.bfloat16())
        assert parameter_norms(model, of="weight") == pytest.approx({"fp32": 2e30, "bf16": 2e30}, rel=1e-2)

    run_ranks(check, 2)


def test_a_sum_that_was_not_made_is_refused() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"'weight' to be sharded or replicated.*Partial"):
            parameter_norms(_Bag(weight=partial), of="weight")
        model = _Bag(weight=distribute_tensor(torch.ones(2), mesh, [Replicate()]))
        model.weight.grad = partial
        with pytest.raises(ValueError, match=r"gradient of 'weight' to lie as the parameter does.*Replicate.*Partial"):
            parameter_norms(model)

    run_ranks(check, 2)


def test_names_are_the_models_own() -> None:
    def check() -> None:
        model = Net()
        names = [name for name, _ in model.named_parameters()]
        model.layers[1] = checkpoint_wrapper(model.layers[1])
        model.head = torch.compile(model.head, backend="eager")  # type: ignore[assignment]
        fully_shard(model.layers[1])
        fully_shard(model)
        assert [name for name, _ in model.named_parameters()] != names
        assert list(parameter_norms(model, of="weight")) == names

    run_ranks(check, 1)


def test_parameter_norms_and_find_nonfinite_refuse_an_unknown_of() -> None:
    with pytest.raises(ValueError, match="Expected `of` to be 'gradient' or 'weight', got 'grad'"):
        parameter_norms(Net(), of="grad")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="or 'unreduced', got 'grad'"):
        find_nonfinite(Net(), of="grad")  # type: ignore[arg-type]


# -- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_learns_which_parameter_of_which_rank_is_not_finite(num_ranks: int) -> None:
    def check() -> list[NonFinite]:
        _, sharded = twins()
        _backward(sharded)
        assert find_nonfinite(sharded) == []
        last = num_ranks - 1
        if dist.get_rank() == last:
            weight = sharded.get_parameter("layers.1.up.weight")
            assert isinstance(weight.grad, DTensor)
            weight.grad.to_local()[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
        if dist.get_rank() == 0:
            bias = sharded.get_parameter("head.bias").detach()
            assert isinstance(bias, DTensor)
            bias.to_local().fill_(math.nan)
        rows = math.ceil(5 / num_ranks)
        assert find_nonfinite(sharded, of="weight") == [NonFinite("head.bias", 0, rows, "nan")]
        return find_nonfinite(sharded)

    reports = run_ranks(check, num_ranks)
    name, last = "layers.1.up.weight", num_ranks - 1
    assert reports == [[NonFinite(name, last, 1, "nan"), NonFinite(name, last, 2, "inf")]] * num_ranks


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_unreduced_gradients_tell_which_rank_made_a_nan(reduce_dtype: torch.dtype | None) -> None:
    def check() -> tuple[set[int], set[int]]:
        model = Net()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        x = inputs()
        if dist.get_rank() == 1:
            x[3, 0] = math.nan
        fsdp(model).set_requires_gradient_sync(False)
        _backward(model, x)
        reports = find_nonfinite(model, of="unreduced")
        assert "stem.weight" in [report.name for report in reports]
        assert find_nonfinite(model) == []
        fsdp(model).set_requires_gradient_sync(True)
        _backward(model, inputs())
        assert find_nonfinite(model, of="unreduced") == []
        return {report.rank for report in reports}, {report.rank for report in find_nonfinite(model)}

    assert run_ranks(check, 2) == [({1}, {0, 1})] * 2


def test_ranks_may_hold_different_models() -> None:
    def check() -> list[NonFinite]:
        name = f"stage{dist.get_rank()}"
        return find_nonfinite(_Bag(**{name: torch.full((2,), math.inf)}), of="weight")

    reports = [NonFinite("stage0", 0, 2, "inf"), NonFinite("stage1", 1, 2, "inf")]
    assert run_ranks(check, 2) == [reports] * 2


def test_find_nonfinite_without_a_process_group_reports_rank_0() -> None:
    model = _Bag(weight=torch.tensor([1.0, math.nan]))
    assert find_nonfinite(model, of="weight") == [NonFinite("weight", 0, 1, "nan")]


# -- what jumps ------------------------------------------------------------------------------------------------------


def test_a_norm_above_the_factor_times_the_median_is_a_spike() -> None:
    watch = SpikeWatch(factor=4.0, window=3)
    for value in (1.0, 3.0, 2.0):
        assert watch.check({"a": value, "b": 1.0}) == []
    assert watch.check({"a": 8.0, "b": 4.1}) == [Spike("b", 4.1, 1.0)]
    assert watch.check({"a": 12.1}) == [Spike("a", 12.1, 3.0)], "8 has pushed 1 out"


def test_no_parameter_is_judged_before_its_window_is_full() -> None:
    watch = SpikeWatch(factor=2.0, window=3)
    assert [watch.check({"a": value}) for value in (1.0, 100.0, 1.0)] == [[], [], []]
    assert watch.check({"a": 3.0, "new": 1e9}) == [Spike("a", 3.0, 1.0)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_value_is_a_spike_at_once_and_stays_out_of_the_window(value: float) -> None:
    watch = SpikeWatch(window=1)
    [spike] = watch.check({"a": value})
    assert (spike.name, math.isnan(spike.usual)) == ("a", True)
    watch.check({"a": 1.0})
    [spike] = watch.check({"a": value})
    assert spike.usual == 1.0
    assert watch.check({"a": 2.0}) == []


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"factor": math.nan}, {"window": 0}])
def test_a_watch_that_could_not_work_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SpikeWatch(**options)  # type: ignore[arg-type]
