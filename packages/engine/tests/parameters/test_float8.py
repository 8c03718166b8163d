"""Layers whose matrices travel in 8 bits train as one rank that quantises whole weights at each use."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_models import assert_weights_equal, descend, mesh_of, record, units
from float8_models import (
    RECIPES,
    AnyRecipe,
    Decoder,
    Layer,
    as_oracle,
    decoder,
    fake_quantised,
    loss_of,
    quantised_straight,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    HFSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
    load_scaling_state,
    quantization_errors,
    scaling_state,
)
from lamella_engine._modules.attached import state_of
from lamella_engine._scaling.scales import Scales, rescale
from lamella_engine._scaling.scaling import scales_of
from lamella_engine.extending import forget_measured, note_step
from lamella_layout import Rows
from lamella_precision import Direction, Float8Recipe, MXFP8Recipe, QuantizedWeight, matrices_of
from lamella_testing import load_compiler, run_ranks

FP32 = torch.float32


def _sharded(model: Decoder, recipe: AnyRecipe, **options: Any) -> Decoder:
    policy = MixedPrecisionPolicy(
        None if recipe.compute_dtype == FP32 else recipe.compute_dtype, recipe=matrices_of(model.layers, recipe)
    )
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(model, mp_policy=replace(policy, recipe=None), **options)
    for _, unit in units(model):
        for group in unit.parameters.groups:
            group.divisor = 1.0  # a sum: `train` gives all ranks but the first gradients of zero
    return model


def _assert_trains_as_oracle(model: Decoder, oracle: Decoder, recipe: AnyRecipe, **options: Any) -> Decoder:
    model = _sharded(model, recipe, **options)
    assert train(model) == train(as_oracle(oracle, recipe))
    assert_weights_equal(oracle, model, rtol=0.0, atol=0.0)
    return model


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_llama_trains_to_the_bit_as_one_rank_that_quantises_whole_weights(name: str, num_ranks: int) -> None:
    # MXFP8 needs blocks of 32 rows on one rank: sizes that the flat layout can pack. All others: rows that no rank
    # count divides, and blocks cut by every rank.
    sizes = (32, 64) if name == "mxfp8" else (20, 37)

    def check() -> None:
        _assert_trains_as_oracle(decoder(*sizes), decoder(*sizes), RECIPES[name])

    run_ranks(check, num_ranks)


class _Tied(nn.Module):
    """An embedding that is the head's weight too; with a `recipe`, an oracle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(23, 16)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.recipe: AnyRecipe | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.recipe is None:
            return cast(torch.Tensor, self.head(torch.tanh(self.embedding(tokens))))
        weight = quantised_straight(self.embedding.weight, self.recipe)
        return F.linear(torch.tanh(F.embedding(tokens, weight)), weight)


@pytest.mark.parametrize("name", ["tensor", "row", "cut-block"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_tied_weight_is_quantised_for_the_embedding_and_the_head(name: str, num_ranks: int) -> None:
    def check() -> None:
        model, oracle = _Tied(), _Tied()
        oracle.recipe = RECIPES[name]
        fully_shard(model, mp_policy=MixedPrecisionPolicy(recipe=RECIPES[name]))  # `matrices_of` leaves tables out
        for _, unit in units(model):
            for group in unit.parameters.groups:
                group.divisor = 1.0
        assert train(model) == pytest.approx(train(oracle), rel=1e-6)
        assert_weights_equal(oracle, model, rtol=1e-6, atol=1e-7)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("name", ["tensor", "row", "cut-block"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_mixture_of_experts_trains_to_the_bit_with_a_stack_of_matrices(name: str, num_ranks: int) -> None:
    def check() -> None:
        model, oracle = decoder(is_moe=True), decoder(is_moe=True)
        _assert_trains_as_oracle(model, oracle, RECIPES[name])

    run_ranks(check, num_ranks)


@pytest.mark.parametrize(
    "options",
    [
        {"options": ShardingOptions(placements=ZERO1)},
        {"options": ShardingOptions(placements=ZERO2)},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["zero1", "zero2", "stay", "offload"],
)
@pytest.mark.parametrize("name", ["tensor", "cut-block"])
def test_stages_and_residence_change_no_bit(name: str, options: dict[str, Any]) -> None:
    def check() -> None:
        _assert_trains_as_oracle(decoder(), decoder(), RECIPES[name], **options)

    run_ranks(check, 2)


@pytest.mark.parametrize("placements", [(HFSDP, ZERO3), None], ids=["hfsdp", "hsdp"])
def test_two_axes_measure_whole_weights(placements: Any) -> None:
    def check() -> None:
        options = {"mesh": mesh_of((2, 2)), "options": ShardingOptions(placements=placements)}
        _assert_trains_as_oracle(decoder(), decoder(), RECIPES["cut-block"], **options)

    run_ranks(check, 4)


@pytest.mark.parametrize("name", ["tensor", "mxfp8"])
def test_neighbours_gather_bytes_again_in_backward(name: str) -> None:
    def check() -> None:
        sizes = (32, 64) if name == "mxfp8" else (20, 36)
        _assert_trains_as_oracle(decoder(*sizes), decoder(*sizes), RECIPES[name], reshard_after_forward=2)

    run_ranks(check, 4)


OPERATORS: dict[str, Any] = {
    "matmul": lambda x, w: x @ w,
    "addmm": lambda x, w: torch.addmm(torch.zeros(64), x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
}


class _Product(nn.Module):
    """A weight under another operator than `linear`."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        magnitudes = torch.exp2(torch.randint(-12, 12, (64, 64)))  # values that differ between the directions
        self.weight = nn.Parameter(torch.randn(64, 64) * magnitudes)
        self.operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, OPERATORS[self.operator](x, self.weight))


def test_every_operator_reads_the_direction_that_is_gathered() -> None:
    def check() -> None:
        recipe = MXFP8Recipe(compute_dtype=FP32)
        for operator, is_recomputed in product(OPERATORS, (False, True)):
            module = _Product(operator)
            forward_weight, backward_weight = (
                fake_quantised(module.weight, recipe, direction)
                for direction in (Direction.FORWARD, Direction.BACKWARD)
            )
            assert not torch.equal(forward_weight, backward_weight)
            model = nn.Sequential(module)
            fully_shard(module, mp_policy=MixedPrecisionPolicy(recipe=recipe))
            fully_shard(model)
            x = torch.randn(8, 64, requires_grad=True)
            output = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
            assert torch.equal(output, OPERATORS[operator](x, forward_weight))
            output.sum().backward()
            # A stack of one is another view, of forward's values; backward with recomputation has both directions.
            used = forward_weight if operator == "bmm" or is_recomputed else backward_weight
            assert torch.equal(cast(torch.Tensor, x.grad), torch.ones(8, 64) @ used.t())

    run_ranks(check, 2)


def test_a_model_that_first_runs_in_inference_mode_trains() -> None:
    def check() -> None:
        model = _sharded(decoder(), RECIPES["cut-block"])
        with torch.inference_mode():
            loss_of(model)
        oracle = as_oracle(decoder(), RECIPES["cut-block"])
        assert train(model) == train(oracle)

    run_ranks(check, 2)


def test_a_unit_gathered_inside_the_optimizers_step_is_measured_alone() -> None:
    def check() -> None:
        recipe = RECIPES["row"]
        model, oracle = _sharded(decoder(), recipe), as_oracle(decoder(), recipe)
        log = record(model)
        for _ in range(2):
            for twin in (model, oracle):
                share = 0.0 if twin is model and dist.get_rank() else 1.0
                (share * loss_of(twin)).backward()  # type: ignore[no-untyped-call]
            for layer, other in zip(model.layers, oracle.layers, strict=True):
                descend(layer)
                descend(other)
                log.clear()
                state_of(layer).unit.gather_early()
                assert [event.kind for event in log.events] == ["all-reduce", "gather"]
            for twin in (model, oracle):
                twin.zero_grad()
            log.clear()
            with torch.no_grad():
                assert loss_of(model).item() == loss_of(oracle).item()
            assert "all-reduce" not in [event.kind for event in log.events]  # the layers' scales are in use

    run_ranks(check, 2)


def test_ranks_without_rows_of_a_weight_find_its_scales() -> None:
    def check() -> None:
        model = _assert_trains_as_oracle(decoder(2, 2), decoder(2, 2), RECIPES["cut-block"])
        up = cast(DTensor, model.get_parameter("layers.0.mlp.up.weight"))
        assert up.to_local().shape[0] == (1 if up.device_mesh.get_rank() < 2 else 0)

    run_ranks(check, 4)


def test_bf16_compute_with_fp32_main_weights_trains_as_the_oracle() -> None:
    """Gradients are of bf16 values on both sides; the oracle's norms and head compute in fp32."""

    def check() -> None:
        recipe = Float8Recipe((1, None))
        model, oracle = _sharded(decoder(), recipe), as_oracle(decoder(), replace(recipe, compute_dtype=FP32))
        losses, expected = train(model), train(oracle)
        assert losses == pytest.approx(expected, rel=0.02)  # three digits of bf16
        assert losses[-1] < losses[0]
        weight = model.get_parameter("layers.0.qkv.weight")
        assert weight.dtype == FP32

    run_ranks(check, 2)


@pytest.mark.parametrize(("name", "share"), [("tensor", 0.51), ("row", 0.51), ("block", 0.51), ("mxfp8", 0.52)])
def test_half_of_the_bytes_of_bf16_travel(name: str, share: float) -> None:
    """Counted: gathers and the reduction of amaxes, of whole units with their norms. MXFP8's scales alone are 1/32."""

    def check() -> None:
        nbytes = []
        for recipe in (replace(RECIPES[name], compute_dtype=torch.bfloat16), None):
            model = decoder(256, 512, num_layers=1)
            policy = MixedPrecisionPolicy(torch.bfloat16, recipe=recipe and matrices_of(model.layers, recipe))
            fully_shard(model.layers[0], mp_policy=policy)
            fully_shard(model, mp_policy=replace(policy, recipe=None))
            for _ in range(2):
                loss_of(model).backward()  # type: ignore[no-untyped-call]
                descend(model)
            log = record(model)
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            counted = [e for e in log.events if e.unit.startswith("layers") and e.kind in ("gather", "all-reduce")]
            nbytes.append(sum(event.nbytes for event in counted))
            is_scaled = isinstance(recipe, Float8Recipe)
            assert [event.kind for event in counted] == is_scaled * ["all-reduce"] + ["gather", "gather"]
        assert 0.5 < nbytes[0] / nbytes[1] <= share

    run_ranks(check, 2)


def test_units_are_measured_together_in_growing_numbers_and_after_writes_without_an_event() -> None:
    def check() -> None:
        recipe = RECIPES["tensor"]
        model, oracle = _sharded(decoder(num_layers=7), recipe), as_oracle(decoder(num_layers=7), recipe)
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
def test_scales_computed_together_are_those_of_each_alone(num_past: int) -> None:
    recipe, shapes = Float8Recipe((1, None), num_past_amaxes=num_past), [(3, 5), (2, 7)]
    together, alone = ([Scales(recipe, shapes[i:], torch.device("cpu")) for i in (0, 1, 0)] for _ in range(2))
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
            assert max(together[i].state_of(0)[0]) < 1.0  # computed: scales begin at 1


def test_delayed_scaling_reads_weights_once_and_reduces_the_amaxes_of_all_units_once_an_update() -> None:
    def check() -> None:
        recipe = Float8Recipe(num_past_amaxes=4, compute_dtype=FP32)
        model: Any = _sharded(decoder(num_layers=7), recipe)
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
        model: Any = _sharded(decoder(), recipe, options=ShardingOptions(placements=placements))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        name, amaxes = "layers.0.qkv.weight", list[float]()
        [(scales, place)] = [
            (cast(Scales, group.scales), i)
            for group in state_of(model.layers[0]).unit.parameters.groups
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


@pytest.mark.parametrize("num_past", [0, 2])
def test_scales_stay_during_a_backward_that_gathers_a_unit_twice(num_past: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.a(self.b(self.a(x)))
            return output

    def check() -> None:
        torch.manual_seed(0)
        model = Twice()
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
        model = _delayed(torch.randn(16, 16))
        overflows = []
        for _ in range(5):
            with torch.no_grad():
                model[0].weight.mul_(1.5)
            _pass(model)
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
            model = _sharded(decoder(), recipe)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            every = [scales for _, unit in units(model) for scales in scales_of(unit.parameters)]

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
        model, oracle = _sharded(decoder(), recipe), as_oracle(decoder(), recipe)
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
        model = _sharded(decoder(), recipe)
        plain = _sharded(decoder(), recipe)
        for layer in plain.layers:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        losses = train(model, 5)
        assert losses == train(plain, 5)
        assert losses == pytest.approx(train(as_oracle(decoder(), Float8Recipe(compute_dtype=FP32)), 5), rel=0.02)

    run_ranks(check, 2)


def test_delayed_scales_go_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    recipe = Float8Recipe(num_past_amaxes=4, compute_dtype=FP32)
    sgd = partial(torch.optim.SGD, lr=1.0)

    def uninterrupted() -> list[float]:
        model = _sharded(decoder(), recipe)
        train(model, 3, sgd)
        weights = {name: cast(DTensor, value).full_tensor() for name, value in model.state_dict().items()}
        state = scaling_state(model)
        assert all(len(rows) == 5 and rows[4] == [-1.0] for rows in state.values())  # measured three times
        if dist.get_rank() == 0:
            torch.save((json.dumps(state), weights), tmp_path / "saved")
        return train(model, 3, sgd)

    def resumed() -> list[list[float]]:
        text, weights = torch.load(tmp_path / "saved")
        loss_histories = []
        states: list[dict[str, list[list[float]]]] = [json.loads(text), {}]
        for state in states:
            model = decoder()
            model.load_state_dict(weights)
            model = _sharded(model, recipe)
            missing = load_scaling_state(model, state)
            assert missing == ([] if state else list(states[0]))
            loss_histories.append(train(model, 3, sgd))
        return loss_histories

    expected = run_ranks(uninterrupted, 2)[0]
    for loaded_losses, fresh in run_ranks(resumed, 3):
        assert loaded_losses == expected
        assert fresh != expected


def _delayed(weights: torch.Tensor, **options: Any) -> Any:
    """A layer with delayed scales, after a pass."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(weights)
    recipe = matrices_of(model, Float8Recipe(num_past_amaxes=4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, recipe=recipe), **options)
    _pass(model)
    return model


@torch.no_grad()
def _pass(model: nn.Module) -> None:
    model(torch.ones(3, 16))


def test_a_state_of_ranks_with_other_parameters_is_refused_and_kept_for_each_group_of_ranks() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "shards"))
        magnitude = (1.0, 100.0)[mesh["experts"].get_local_rank()]
        model = _delayed(torch.full((16, 16), magnitude), mesh=mesh["shards"])
        with pytest.raises(
            ValueError, match=r"'0.weight' to have the same scales .* got others on rank 2 than on rank 0"
        ):
            scaling_state(model)
        state = scaling_state(model, group=mesh["shards"].get_group())
        assert state["0.weight"][1] == [magnitude]
        again = _delayed(torch.full((16, 16), magnitude), mesh=mesh["shards"])
        assert load_scaling_state(again, state) == []
        _pass(again)
        assert quantization_errors(again)["0.weight"].overflow == 0.0

    run_ranks(check, 4)


def test_every_rank_gets_the_scales_of_all_pipeline_stages() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
        stage = mesh["stages"].get_local_rank()
        layers = {"shared": nn.Linear(4, 4, bias=False), f"stage{stage}": nn.Linear(4, 4, bias=False)}
        model = nn.Sequential(OrderedDict(layers))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(7.0 if name.startswith("shared") else stage + 1.0)
        recipe = Float8Recipe(num_past_amaxes=2)
        policy = MixedPrecisionPolicy(torch.bfloat16, recipe=matrices_of(model, recipe))
        cast(Any, fully_shard(model, mesh=mesh["shards"], mp_policy=policy)).unshard()
        state = scaling_state(model)
        assert list(state) == ["shared.weight", "stage0.weight", "stage1.weight"]
        assert [rows[1] for rows in state.values()] == [[7.0], [1.0], [2.0]]
        assert load_scaling_state(model, state) == []

    run_ranks(check, 4)


@pytest.mark.parametrize("how", ["load_state_dict", "assign", "by hand"])
def test_scales_of_replaced_weights_start_anew(how: str) -> None:
    """Else they saturate in every pass: an unchanged weight is not measured twice."""

    def check() -> None:
        torch.manual_seed(0)
        model = _delayed(torch.randn(16, 16))
        larger = {name: value * 100 for name, value in model.state_dict().items()}
        if how == "by hand":
            with torch.no_grad():
                model[0].weight.copy_(larger["0.weight"])
            assert load_scaling_state(model, {}) == ["0.weight"]
        else:
            model.load_state_dict(larger, assign=how == "assign")
        _pass(model)
        assert quantization_errors(model)["0.weight"].overflow == 0.0

    run_ranks(check, 2)


def test_what_a_state_dict_lacks_keeps_its_past() -> None:
    def check() -> None:
        model = _delayed(torch.ones(16, 16))
        before = scaling_state(model)
        model.load_state_dict({}, strict=False)
        assert scaling_state(model) == before
        model.load_state_dict(model.state_dict())
        assert scaling_state(model)["0.weight"][1:] == [[-1.0]] * 4

    run_ranks(check, 1)


def test_scales_of_another_recipe_are_refused() -> None:
    def check() -> None:
        model = _sharded(decoder(), Float8Recipe(num_past_amaxes=4, compute_dtype=FP32))
        name = next(iter(scaling_state(model)))
        with pytest.raises(ValueError, match=rf"5 rows of 1 numbers in `state` for '{name}', .* got \(2, 1\)"):
            load_scaling_state(model, {name: [[1.0], [1.0]]})
        assert scaling_state(_sharded(decoder(), Float8Recipe(compute_dtype=FP32))) == {}

    run_ranks(check, 1)


def test_optimizer_state_and_state_dict_are_of_fp32_main_weights() -> None:
    def check() -> None:
        recipe = Float8Recipe()
        model = _sharded(decoder(), recipe)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        names = {name for name, _ in decoder().named_parameters()}
        state = model.state_dict()
        assert set(state) == names
        assert all(type(value) is DTensor and value.dtype == FP32 for value in state.values())
        assert all(value["exp_avg"].dtype == FP32 for value in optimizer.state.values())
        # Loaded into another recipe, and into none, the weights are the same.
        full_weights = {name: value.full_tensor() for name, value in state.items()}
        for other in (Float8Recipe((1, None), dtype=torch.float8_e5m2), None):
            fresh = decoder() if other is None else _sharded(decoder(), other)
            if other is None:
                fresh.load_state_dict(full_weights)
            else:
                fresh.load_state_dict(state)
            for name, parameter in fresh.named_parameters():
                got = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                assert torch.equal(got, full_weights[name])

    run_ranks(check, 2)


def test_only_the_matrices_of_the_layers_are_quantised() -> None:
    def check() -> None:
        model = decoder()
        policy = MixedPrecisionPolicy(
            recipe=matrices_of(model.layers, Float8Recipe(compute_dtype=FP32), names=["mlp.*"])
        )
        fully_shard(model, mp_policy=policy)
        cast(Any, model).unshard()
        quantized_names = {
            name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedWeight)
        }
        assert quantized_names == {f"layers.{i}.mlp.{name}.weight" for i in range(2) for name in ("gate", "up", "down")}
        plain_model = decoder()
        matrices = matrices_of(plain_model, Float8Recipe())
        chosen = {name for name, parameter in plain_model.named_parameters() if matrices(parameter) is not None}
        assert "embedding.weight" not in chosen
        assert "head.weight" in chosen
        assert not any("norm" in name for name in chosen)

    run_ranks(check, 1)


def test_recipes_that_cannot_serve_a_weight_are_refused_at_the_call() -> None:
    def check() -> None:
        model = decoder()
        with pytest.raises(ValueError, match=r"got none for \['attention"):
            matrices_of(model.layers, Float8Recipe(), names="attention.*")
        policy = MixedPrecisionPolicy(recipe=matrices_of(model.layers, Float8Recipe()))
        with pytest.raises(ValueError, match=r"Expected `param_dtype` torch.bfloat16 .* got torch.float32"):
            fully_shard(model, mp_policy=policy)
        with pytest.raises(ValueError, match=r"(?s)'bias'.*Give it no recipe"):
            fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(recipe=Float8Recipe(compute_dtype=FP32)))
        mxfp8 = MixedPrecisionPolicy(recipe=lambda p: RECIPES["mxfp8"] if p.ndim == 2 else None)
        with pytest.raises(ValueError, match=r"'weight' to divide into blocks of 32 rows"):
            fully_shard(nn.Linear(33, 100), mp_policy=mxfp8)  # neither the even layout nor the flat one keeps blocks
        by_columns = MixedPrecisionPolicy(recipe=lambda p: RECIPES["row"] if p.ndim == 2 else None)
        with pytest.raises(NotImplementedError, match=r"'weight' at dim 0"):
            fully_shard(nn.Linear(4, 4), mp_policy=by_columns, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        halves = ShardingOptions(keep_together=lambda p: Rows(16))
        with pytest.raises(ValueError, match=r"`keep_together` to keep blocks of a multiple of 32 rows of 'weight'"):
            fully_shard(nn.Linear(64, 64), mp_policy=mxfp8, options=halves)

    run_ranks(check, 2)


def test_the_engine_reads_no_attribute_of_a_wrapped_weight_through_python() -> None:
    """A wrapper's function takes microseconds a call, Transformer Engine's 29, on the path of every unit."""

    def on_each_rank() -> tuple[list[str], bool]:
        model = _sharded(decoder(), RECIPES["tensor"])
        train(model, 2)
        callers: list[str] = []
        torch_function = QuantizedWeight.__dict__["__torch_function__"].__func__

        def noted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            callers.append(sys._getframe(1).f_globals["__name__"])
            return torch_function(cls, func, types, args, kwargs)

        with patch.object(QuantizedWeight, "__torch_function__", classmethod(noted)):
            model.set_requires_gradient_sync(False)  # type: ignore[operator]  # a microbatch whose gradients are kept
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            train(model, 1)
            model.zero_grad()  # drops unreduced gradients too
        return [
            name for name in callers if name.startswith("lamella_engine")
        ], "float8_models" in callers  # whose layers call `linear`

    assert run_ranks(on_each_rank, 2) == [([], True)] * 2


def test_gathered_payloads_have_no_bytes_at_rest() -> None:
    def check() -> None:
        model = _sharded(decoder(), RECIPES["tensor"])
        train(model, 2)
        for _, unit in units(model):
            assert not any(buffer.has_bytes for group in unit.parameters.groups for buffer in group.buffers)

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks wrappers for gradients
@pytest.mark.parametrize("recipe", [Float8Recipe(), Float8Recipe((8, 8)), MXFP8Recipe(gathers_both=True)], ids=repr)
def test_compiled_layers_train_in_one_graph_as_eager_layers(recipe: AnyRecipe) -> None:
    load_compiler()

    def check() -> None:
        losses = []
        for is_compiled in (False, True):
            model = decoder(32, 64)
            for layer in model.layers if is_compiled else ():
                layer.compile(backend="aot_eager", fullgraph=True)
            losses.append(train(_sharded(model, recipe)))
        assert losses[0] == losses[1]

    run_ranks(check, 2)


def test_frozen_matrices_train_around_and_offloaded_shards_leave_no_copy() -> None:
    def check() -> None:
        recipe = RECIPES["row"]
        models = decoder(), decoder()
        for twin in models:
            for layer in twin.layers:
                layer.get_parameter("qkv.weight").requires_grad_(False)
        model = _assert_trains_as_oracle(*models, recipe, offload_policy=CPUOffloadPolicy(pin_memory=False))
        for _, unit in units(model):
            for group in unit.parameters.groups:
                assert group.scales is None or group.scales._columns is None

    run_ranks(check, 2)
