"""`quantization_errors` says of each quantised parameter what an oracle says of the whole weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float8_models import decoder, fake_quantised, train
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard, quantization_errors
from lamella_engine.testing import named_units
from lamella_precision import Direction, Float8Recipe, MXFP8Recipe, matrices_of
from lamella_precision.te import replace_quantized_weights
from lamella_precision.torchao import replace_quantized_weights as replace_torchao_weights
from lamella_testing import run_ranks
from lamella_testing import te_weights as te
from lamella_testing import torchao_weights as torchao

pytestmark = pytest.mark.usefixtures("steps_on_shards")

RECIPES: dict[str, Float8Recipe | MXFP8Recipe] = {
    "tensor": Float8Recipe(),
    "e5m2": Float8Recipe(dtype=torch.float8_e5m2),
    "row": Float8Recipe((1, None)),
    "mxfp8": MXFP8Recipe(),
}


def _policy(model: nn.Module, recipe: Float8Recipe | MXFP8Recipe) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(torch.bfloat16, recipe=matrices_of(model, recipe))


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_quantization_errors_equal_the_errors_of_the_unsharded_weight(kind: str, num_ranks: int) -> None:
    recipe = RECIPES[kind]

    def check() -> None:
        model: Any = decoder(32, 64)
        with torch.no_grad():
            model.layers[0].qkv.weight[:3] *= 1e-6  # zeros, but with a scale a row
            model.layers[0].out.weight[:, 0] = 0.0  # no underflow
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for layer in model.layers:
            fully_shard(layer, mp_policy=_policy(model.layers, recipe))
        fully_shard(model)
        errors = quantization_errors(model)
        assert set(errors) == {name for name in weights if name.startswith("layers") and "norm" not in name}
        for name, error in errors.items():
            weight = weights[name]
            values = fake_quantised(weight, recipe, Direction.FORWARD).float()
            became_zero = ((values == 0) & (weight != 0)).double().mean().item()
            assert (error.underflow, error.overflow) == (became_zero, 0.0)
            assert error.relative == pytest.approx(((values - weight).norm() / weight.norm()).item(), rel=1e-5)
            assert 0.001 < error.relative < 0.1
        is_lossy = errors["layers.0.qkv.weight"].underflow > 0.01
        assert is_lossy == (kind == "tensor")  # e5m2 has the range for it
        assert not any(unit.weights.is_unsharded for _, unit in named_units(model)), "units must be left as they were"

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("library", ["te current", "te squares", "torchao"])
def test_quantization_errors_of_te_and_torchao_weights_match_the_gathered_values(library: str) -> None:
    def check() -> None:
        torch.manual_seed(0)
        layers: dict[str, Any] = {
            "te current": te.Linear(140, 150, te.Float8CurrentScalingQuantizer()),
            "te squares": te.Linear(140, 150, te.Float8BlockQuantizer(power_of_two=True)),
            "torchao": torchao.Float8Linear(140, 150),
        }
        layer = layers[library]
        model = nn.Sequential(layer)
        replace = replace_torchao_weights if library == "torchao" else replace_quantized_weights
        recipe = replace(model, compute_dtype=torch.float32)
        main = layer.weight.detach().clone()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(recipe=recipe))
        (error,) = quantization_errors(model).values()
        model.unshard()  # type: ignore[operator]
        values = layer.weight.detach() + 0.0
        assert error.relative == pytest.approx(((values - main).norm() / main.norm()).item(), rel=1e-5)
        assert 0.001 < error.relative < 0.1
        assert error.underflow == ((values == 0) & (main != 0)).double().mean().item()
        assert error.overflow == 0.0

    run_ranks(check, 3)


def test_a_delayed_scale_that_is_too_small_overflows() -> None:
    def check() -> None:
        model = nn.Sequential(nn.Linear(16, 16, bias=False))
        fully_shard(model, mp_policy=_policy(model, Float8Recipe(num_past_amaxes=4)))
        assert quantization_errors(model)["0.weight"].overflow == 0.0
        weight = next(model.parameters())
        with torch.no_grad():
            weight.mul_(100.0)  # the next scale is of the weights before
        error = quantization_errors(model)["0.weight"]
        assert error.overflow > 0.9
        assert error.relative > 0.9

    run_ranks(check, 2)


def test_a_model_without_recipes_has_none_and_training_goes_on_as_without_the_question() -> None:
    def losses(asks: bool) -> list[float]:
        model = decoder()
        assert quantization_errors(model) == {}
        for layer in model.layers:
            fully_shard(layer, mp_policy=_policy(model.layers, Float8Recipe(num_past_amaxes=4)))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        all_losses = []
        for _ in range(3):
            all_losses += train(model, 1)
            if asks:
                quantization_errors(model)
        return all_losses

    assert run_ranks(losses, 2, True) == run_ranks(losses, 2, False)
