"""Scales of whole weights: measured by units together, of now or of the steps before."""

from __future__ import annotations

import math
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from engine_models import descend
from float8_models import (
    FP32,
    RECIPES,
    Layer,
    as_oracle,
    decoder,
    delayed_linear,
    loss_of,
    run_forward,
    sharded,
    train,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    ZERO1,
    ZERO2,
    ZERO3,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
    quantization_errors,
    scaling_state,
)
from lamella_engine._scaling.scales import Scales, rescale
from lamella_engine._scaling.scaling import scales_of
from lamella_engine.extending import forget_measured, note_step
from lamella_engine.testing import named_units, record, require_unit
from lamella_precision import Float8Recipe, QuantizedWeight, matrices_of
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")


def test_units_are_measured_together_in_growing_numbers_and_after_writes_without_an_event() -> None:
    def check() -> None:
        recipe = RECIPES["tensor"]
        model, oracle = sharded(decoder(num_layers=7), recipe), as_oracle(decoder(num_layers=7), recipe)
        train(model, 1)
        train(oracle, 1)
        log = record(model)
        with torch.no_grad():
            for twin in (model, oracle):
                for parameter in twin.parameters():
                    parameter.mul_(3.0)  # no optimizer, and no gradient
                loss_of(twin)
            assert loss_of(model).item() == loss_of(oracle).item()
        last_units = ["layers.1", "layers.3", "layers.6"]  # of each measurement
        assert [event.unit for event in log.events if event.kind == "all-reduce"] == 2 * last_units
        log.clear()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        assert [event.unit for event in log.events if event.kind == "all-reduce"] == last_units

    run_ranks(check, 2)


def test_a_recipe_computes_the_scales_of_units_measured_together_at_once() -> None:
    def check() -> None:
        row, delayed = Float8Recipe((1, None), compute_dtype=FP32), Float8Recipe(num_past_amaxes=2, compute_dtype=FP32)
        model = decoder(num_layers=4)
        for layer, recipe in zip(model.layers, (row, row, delayed, row), strict=True):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(recipe=matrices_of(layer, recipe)))
        fully_shard(model)
        with patch.object(Float8Recipe, "rescale", autospec=True, side_effect=Float8Recipe.rescale) as rescale:
            train(model, 2)
        assert [call.args[0] for call in rescale.call_args_list] == 2 * [row, delayed, row]

    run_ranks(check, 2)


@pytest.mark.parametrize("num_past", [0, 2])
def test_scales_computed_together_equal_scales_computed_one_by_one(num_past: int) -> None:
    recipe, shapes = Float8Recipe((1, None), num_past_amaxes=num_past), [(3, 5), (2, 7)]
    together, alone, untouched = (
        [Scales(recipe, shapes[i:], torch.device("cpu")) for i in (0, 1, 0)] for _ in range(3)
    )
    for step in range(4):
        for i, pair in enumerate(zip(together, alone, strict=True)):
            for scales in pair:
                scales.amaxes.copy_(
                    torch.rand(len(scales.amaxes), generator=torch.Generator().manual_seed(3 * step + i))
                )
        rescale(together, torch.cat([scales.amaxes for scales in together]))
        for scales in alone:
            rescale([scales], scales.amaxes)
        for i in range(3):
            assert together[i].state_of(0) == alone[i].state_of(0)
            assert together[i].state_of(0)[0] != untouched[i].state_of(0)[0]  # computed


def test_delayed_scaling_reads_weights_once_and_reduces_the_amaxes_of_all_units_once_an_update() -> None:
    def check() -> None:
        recipe = Float8Recipe(num_past_amaxes=4, compute_dtype=FP32)
        model: Any = sharded(decoder(num_layers=7), recipe)
        log = record(model)

        def reductions() -> list[str]:
            unit_names = [event.unit for event in log.events if event.kind == "all-reduce"]
            log.clear()
            return unit_names

        with patch.object(Float8Recipe, "measure", autospec=True, side_effect=Float8Recipe.measure) as measure:
            train(model, 1)
            assert measure.call_count == 7
            assert reductions() == ["layers.1", "layers.3", "layers.6"]
            with torch.no_grad():
                loss_of(model)
            assert reductions() == ["layers.6"]
            for _ in range(2):  # microbatches that the engine takes for steps
                loss_of(model).backward()  # type: ignore[no-untyped-call]
            assert reductions() == []
            descend(model)
            model.mark_updated()
            scaling_state(model)
            assert reductions() == ["layers.6"]
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            assert reductions() == []
            assert measure.call_count == 7

    run_ranks(check, 2)


@pytest.mark.parametrize("placements", [ZERO1, ZERO2, ZERO3])
@pytest.mark.parametrize("says_last", [True, False])
def test_delayed_scales_are_of_the_steps_before(placements: Any, says_last: bool) -> None:
    """Of two microbatches a step: the same scales for both."""

    def check() -> None:
        recipe = Float8Recipe(num_past_amaxes=2, compute_dtype=FP32)
        model: Any = sharded(decoder(), recipe, options=ShardingOptions(placements=placements))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        name, amaxes = "layers.0.qkv.weight", list[float]()
        [(scales, place)] = [
            (cast(Scales, group.scales), i)
            for group in require_unit(model.layers[0]).parameters.groups
            for i, parameter in enumerate(group.parameters)
            if parameter.name == "qkv.weight"
        ]
        for step in range(5):
            amaxes.append(cast(DTensor, model.get_parameter(name)).full_tensor().abs().max().item())
            used = []
            for is_last in (False, True):
                if says_last:
                    model.set_is_last_backward(is_last)
                loss_of(model).backward()  # type: ignore[no-untyped-call]
                used.append(scales.parameter_scales[place].item())
            # The first scale is of the weight itself.
            assert used == pytest.approx(2 * [max(amaxes[max(0, step - 2) : max(1, step)]) / 448])
            optimizer.step()
            optimizer.zero_grad()
            scale, *past = scaling_state(model)[name]
            assert past == [[amax] for amax in (amaxes[-2:] if step else [-1.0, *amaxes])[::-1]]
            assert scale == pytest.approx([max(amaxes[-2:]) / 448])
        assert len(amaxes) == len(set(amaxes)), "each step must change the largest magnitude"

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["tensor", "column", "cut-block"])
@pytest.mark.parametrize("row", [0, 63])
def test_a_nan_on_any_rank_encodes_as_on_one_rank(name: str, row: int) -> None:
    """A MAX over gloo keeps the first of two numbers where one is NaN, and vectorised kernels give NaN a sign."""
    recipe = Float8Recipe((None, 1), compute_dtype=FP32) if name == "column" else RECIPES[name]

    def scales() -> list[float]:
        weights = torch.linspace(1.0, 8.0, 4096).view(64, 64)
        weights[row, 0] = float("nan")
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        model.load_state_dict({"0.weight": weights})
        fully_shard(model, mp_policy=MixedPrecisionPolicy(recipe=matrices_of(model, recipe)))
        model(torch.eye(64))
        [group] = require_unit(model).parameters.groups
        return cast(list[float], cast(Scales, group.scales).parameter_scales[0].flatten().tolist())

    [expected] = run_ranks(scales, 1)
    assert not all(map(math.isfinite, expected))
    assert str(run_ranks(scales, 2)) == str([expected, expected])


@pytest.mark.parametrize("num_past", [0, 2])
def test_scales_stay_during_a_backward_that_gathers_a_unit_twice(num_past: int) -> None:
    class GatheredTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.a(self.b(self.a(x)))
            return output

    def check() -> None:
        torch.manual_seed(0)
        model = GatheredTwice()
        for unit in (model.a, model.b):
            recipe = matrices_of(model, Float8Recipe(num_past_amaxes=num_past, compute_dtype=FP32))
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(recipe=recipe))
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        log = record(model)
        for _ in range(3):
            loss = model(torch.ones(4, 16)).square().mean()
            log.clear()
            loss.backward()
            assert not [event for event in log.events if event.kind == "all-reduce"]
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(check, 2)


def test_delayed_scales_follow_weights_that_are_written_by_hand_before_each_pass() -> None:
    def check() -> None:
        torch.manual_seed(0)
        model = delayed_linear(torch.randn(16, 16))
        overflows = []
        for _ in range(5):
            with torch.no_grad():
                model[0].weight.mul_(1.5)
            run_forward(model)
            overflows.append(quantization_errors(model)["0.weight"].overflow)
        assert max(overflows) < 0.1, "scales must be one write old, not five"

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["evaluates", "saves", "both"])
def test_replays_of_a_captured_step_have_the_scales_of_eager_steps(name: str) -> None:
    """A replay repeats the captured step's work on the device, and no line of Python: host flags are put back here."""

    def check() -> None:
        recipe = Float8Recipe(num_past_amaxes=2, compute_dtype=FP32)
        histories = []
        for replays in (False, True):
            model = sharded(decoder(), recipe)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            every = [scales for _, unit in named_units(model) for scales in scales_of(unit.parameters)]

            def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
                loss = loss_of(model)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                return loss.item()

            seen: list[object] = [step() for _ in range(2)]
            for turn in range(4):
                if name in ("evaluates", "both"):
                    with torch.no_grad():
                        seen.append(loss_of(model).item())
                if name in ("saves", "both") and turn % 2:
                    seen.append(scaling_state(model))
                if not replays:
                    seen.append(step())
                    continue
                forget_measured(optimizer)
                flags = [scales.are_due for scales in every]
                for scales in every:
                    scales.are_due = True  # as at the capture
                seen.append(step())
                for scales, is_due in zip(every, flags, strict=True):
                    scales.are_due = is_due
                note_step(optimizer)
            histories.append(seen)
        assert histories[0] == histories[1]

    run_ranks(check, 2)


def test_verbs_at_rest_measure_their_unit_alone() -> None:
    def check() -> None:
        recipe = RECIPES["row"]
        model, oracle = sharded(decoder(), recipe), as_oracle(decoder(), recipe)
        log = record(model)
        layer = cast(Any, model.layers[0])
        with torch.no_grad():
            layer.mlp.up.weight.mul_(3.0)
            cast(Layer, oracle.layers[0]).mlp.up.weight.mul_(3.0)  # type: ignore[operator,union-attr]
        layer.unshard()
        weight = layer.mlp.up.weight
        assert isinstance(weight, QuantizedWeight)
        assert len([event for event in log.events if event.kind == "all-reduce"]) == 1
        x = torch.randn(4, 20)
        assert torch.equal(torch.nn.functional.linear(x, weight), oracle.layers[0].mlp.up(x))  # type: ignore[operator,union-attr]
        layer.reshard()
        assert train(model, 1) == train(oracle, 1)

    run_ranks(check, 2)


def test_recomputed_layers_and_delayed_scaling_train() -> None:
    def check() -> None:
        recipe = Float8Recipe(num_past_amaxes=4, compute_dtype=FP32)
        model = sharded(decoder(), recipe)
        plain = sharded(decoder(), recipe)
        for layer in plain.layers:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        losses = train(model, 5)
        assert losses == train(plain, 5)
        assert losses == pytest.approx(train(as_oracle(decoder(), Float8Recipe(compute_dtype=FP32)), 5), rel=0.02)

    run_ranks(check, 2)
