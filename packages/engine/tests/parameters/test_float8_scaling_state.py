"""Delayed scales go on from a checkpoint, follow replaced weights, and start anew where their past is gone."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from float8_models import (
    FP32,
    decoder,
    delayed_linear,
    run_forward,
    sharded,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lamella_engine import (
    MixedPrecisionPolicy,
    fully_shard,
    load_scaling_state,
    local_scaling_state,
    quantization_errors,
    scaling_state,
)
from lamella_precision import Float8Recipe, matrices_of
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")


def test_delayed_scales_go_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    recipe = Float8Recipe(num_past_amaxes=4, compute_dtype=FP32)
    sgd = partial(torch.optim.SGD, lr=1.0)

    def uninterrupted() -> list[float]:
        model = sharded(decoder(), recipe)
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
            model = sharded(model, recipe)
            missing = load_scaling_state(model, state)
            assert missing == ([] if state else list(states[0]))
            loss_histories.append(train(model, 3, sgd))
        return loss_histories

    expected = run_ranks(uninterrupted, 2)[0]
    for loaded_losses, fresh in run_ranks(resumed, 3):
        assert loaded_losses == expected
        assert fresh != expected


@pytest.mark.parametrize("block", [(None, None), (1, None)])
def test_delayed_scales_of_weights_that_start_as_zeros_serve_their_first_values_and_go_on_from_a_checkpoint(
    block: Any,
) -> None:
    recipe = Float8Recipe(block, num_past_amaxes=4, compute_dtype=FP32)

    def run(num_steps: int, *saved: Any) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        with torch.no_grad():
            model.get_parameter("0.weight")[3:5].zero_()
            model.get_parameter("1.weight").zero_()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(recipe=recipe))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        if saved:
            weights, state = saved
            model.load_state_dict(weights)
            assert load_scaling_state(model, state) == []
        losses = []
        for _ in range(num_steps):
            loss = (model(torch.eye(16)) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    def check() -> None:
        first, model = run(1)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = scaling_state(model)
        errors = quantization_errors(model)
        assert all(error.underflow < 0.01 and error.overflow == 0.0 for error in errors.values())
        resumed, resumed_model = run(3, weights, state)
        uninterrupted, uninterrupted_model = run(4)
        assert first + resumed == uninterrupted
        assert scaling_state(resumed_model) == scaling_state(uninterrupted_model)

    run_ranks(check, 2)


def test_a_state_of_ranks_with_other_parameters_is_refused_and_kept_for_each_group_of_ranks() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "shards"))
        magnitude = (1.0, 100.0)[mesh["experts"].get_local_rank()]
        model = delayed_linear(torch.full((16, 16), magnitude), mesh=mesh["shards"])
        with pytest.raises(
            ValueError, match=r"'0.weight' to have the same scales .* got others on rank 2 than on rank 0"
        ):
            scaling_state(model)
        state = scaling_state(model, group=mesh["shards"].get_group())
        assert local_scaling_state(model) == state
        assert state["0.weight"][1] == [magnitude]
        again = delayed_linear(torch.full((16, 16), magnitude), mesh=mesh["shards"])
        assert load_scaling_state(again, state) == []
        run_forward(again)
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
        model = delayed_linear(torch.randn(16, 16))
        larger = {name: value * 100 for name, value in model.state_dict().items()}
        if how == "by hand":
            with torch.no_grad():
                model[0].weight.copy_(larger["0.weight"])
            assert load_scaling_state(model, {}) == ["0.weight"]
        else:
            model.load_state_dict(larger, assign=how == "assign")
        run_forward(model)
        assert quantization_errors(model)["0.weight"].overflow == 0.0

    run_ranks(check, 2)


def test_weights_missing_from_a_state_dict_keep_their_scaling_state() -> None:
    def check() -> None:
        model = delayed_linear(torch.ones(16, 16))
        before = scaling_state(model)
        model.load_state_dict({}, strict=False)
        assert scaling_state(model) == before
        model.load_state_dict(model.state_dict())
        assert scaling_state(model)["0.weight"][1:] == [[-1.0]] * 4

    run_ranks(check, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0], [1.0, 2.0], [1.0], [1.0], [1.0]], "5 rows of 1 numbers in `state` for '0.weight', .* got others: "),
        (None, "5 rows of 1 numbers in `state` for '0.weight', .* got others: "),
        ([[float("nan")], [1.0], [1.0], [1.0], [1.0]], "positive scales in `state` for '0.weight', .* got nan"),
        ([[-1.0], [1.0], [1.0], [1.0], [1.0]], "positive scales in `state` for '0.weight'"),
        ([[1.0], [float("nan")], [1.0], [1.0], [1.0]], "past amaxes of 0 or more"),
        ([[1.0], [-2.0], [1.0], [1.0], [1.0]], "past amaxes of 0 or more"),
    ],
)
def test_a_state_that_holds_no_scales_is_refused_before_any_change(rows: Any, message: str) -> None:
    def check() -> None:
        model = delayed_linear(torch.ones(16, 16))
        before = scaling_state(model)
        with pytest.raises(ValueError, match=message):
            load_scaling_state(model, {"0.weight": rows})
        assert scaling_state(model) == before

    run_ranks(check, 1)


def test_scales_of_another_recipe_are_refused() -> None:
    def check() -> None:
        model = sharded(decoder(), Float8Recipe(num_past_amaxes=4, compute_dtype=FP32))
        name = next(iter(scaling_state(model)))
        with pytest.raises(ValueError, match=rf"5 rows of 1 numbers in `state` for '{name}', .* got \(2, 1\)"):
            load_scaling_state(model, {name: [[1.0], [1.0]]})
        assert scaling_state(sharded(decoder(), Float8Recipe(compute_dtype=FP32))) == {}

    run_ranks(check, 1)
