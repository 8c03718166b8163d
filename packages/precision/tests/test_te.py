"""Transformer Engine's weights: replaced by plain weights, and encoded to the bytes of the library."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lamella_precision import CachingRecipe, Recipe, WeightRows, refuse_quantized
from lamella_precision.te import ScaledWeights, replace_quantized_weights
from lamella_precision.testing import check_recipe, encode_into, measured
from lamella_testing import te_weights as te

CURRENT = te.Float8CurrentScalingQuantizer()
QUANTIZERS: dict[str, Any] = {
    "current": CURRENT,
    "power-of-two": te.Float8CurrentScalingQuantizer(power_of_two=True),
    "e5m2": te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2),
    "delayed": te.Float8Quantizer(),
    "squares": te.Float8BlockQuantizer(power_of_two=True),
}


def _layer(quantizer: Any, rows: int = 12, columns: int = 20, **options: Any) -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(columns, rows, quantizer, delayed=te.delayed_scaling(3), **options)


def _recipe(layer: te.Linear, **options: Any) -> ScaledWeights:
    return cast(ScaledWeights, replace_quantized_weights(layer, **options)(layer.weight))


def _scales(recipe: ScaledWeights, shards: tuple[torch.Tensor, ...], shape: torch.Size) -> torch.Tensor:
    amaxes = measured(recipe, shards, shape)
    scales = torch.empty_like(amaxes)
    recipe.rescale(amaxes, scales, torch.full((recipe.num_past, len(amaxes)), -1.0))
    return scales.view(recipe.scale_shape(shape))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_recipes_conform(name: str) -> None:
    recipe = _recipe(_layer(QUANTIZERS[name]))
    assert isinstance(recipe, CachingRecipe)
    check_recipe(recipe, relative_error=1.0)
    check_recipe(recipe, main_dtype=torch.bfloat16, relative_error=1.0)


@pytest.mark.parametrize("name", QUANTIZERS)
@given(
    rows=st.integers(1, 300), columns=st.integers(1, 300), num_ranks=st.integers(1, 4), exponent=st.integers(-40, 40)
)
@settings(max_examples=15, deadline=None)
def test_encoded_shards_are_the_bytes_of_the_layers_own_quantisation(
    name: str, rows: int, columns: int, num_ranks: int, exponent: int
) -> None:
    layer = _layer(QUANTIZERS[name], rows, columns)
    original: Any = layer.weight
    weight = original.get_high_precision_init_val() * 2.0**exponent
    weight[:, : columns // 3] = 0.0  # squares of zeros alone
    expected: Any = QUANTIZERS[name](weight)
    recipe = _recipe(layer, compute_dtype=torch.float32)
    shards = weight.tensor_split(num_ranks)
    scales = _scales(recipe, shards, weight.shape)
    data = torch.empty(weight.shape, dtype=recipe.dtype)
    first_row = 0
    for shard, into in zip(shards, data.tensor_split(num_ranks), strict=True):
        if shard.numel():
            encode_into(recipe, shard, [into], WeightRows(weight.shape, first_row, scales))
        first_row += len(shard)
    decoded: Any = recipe.decode([data], weight.shape, scales)
    assert type(decoded) is type(expected)
    assert torch.equal(decoded.dequantize(), expected.dequantize())
    assert torch.equal(
        data.view(torch.uint8), expected.get_metadata().get("data", expected.get_metadata().get("rowwise_data"))
    )


def test_a_gathered_weight_asks_for_no_copy_in_forward_and_drops_the_copy_of_backward() -> None:
    for name in ("current", "squares"):
        recipe = _recipe(_layer(QUANTIZERS[name]))
        scales = torch.ones(recipe.scale_shape((12, 20)))
        weight: Any = nn.Parameter(recipe.decode([torch.ones(12, 20).to(recipe.dtype)], torch.Size((12, 20)), scales))
        assert weight._quantizer.rowwise_usage and not weight._quantizer.columnwise_usage
        weight.update_usage(columnwise_usage=True)
        assert weight.transposed().shape == (20, 12)
        recipe.drop_caches([weight])
        held_tensors = [tensor for tensor in vars(weight).values() if isinstance(tensor, torch.Tensor)]
        assert (
            sum(tensor.numel() for tensor in held_tensors)
            == 12 * 20 + weight.get_metadata().get("rowwise_scale_inv", scales[:1]).numel()
        )
        assert recipe.cached_nbytes((12, 20)) == 12 * 20 + (16 if name == "squares" else 0)
        weight.update_usage(columnwise_usage=True)  # made anew, from the data now
        assert weight.transposed().shape == (20, 12)


@pytest.mark.parametrize("preserves", [True, False])
def test_a_replaced_weight_has_the_values_and_marks_of_before_and_keeps_nothing_else(preserves: bool) -> None:
    layer = _layer(CURRENT, preserves=preserves)
    original: Any = layer.weight
    original.partition_dim = 1
    original.requires_grad_(False)
    expected = original.get_high_precision_init_val() if preserves else original.dequantize()
    gone = weakref.ref(original._data)
    choose = replace_quantized_weights(layer)
    assert type(layer.weight) is nn.Parameter and not layer.weight.requires_grad
    assert torch.equal(layer.weight, expected)
    assert vars(layer.weight) == {"partition_dim": 1}
    recipe: Any = choose(layer.weight)
    assert (recipe.kind, recipe.compute_dtype) == (te.Float8Tensor, torch.bfloat16)
    del original
    gc.collect()
    assert gone() is None
    assert choose(nn.Parameter(torch.zeros(2, 2))) is None


def test_tied_weights_stay_tied_and_equal_formats_share_a_recipe() -> None:
    model = nn.Sequential(
        _layer(CURRENT), _layer(CURRENT), _layer(CURRENT), nn.Linear(3, 3), _layer(QUANTIZERS["delayed"])
    )
    model[1].weight = model[0].weight
    choose = replace_quantized_weights(model)
    first, second, third, plain, delayed = (choose(cast(nn.Parameter, layer.weight)) for layer in model)
    assert model[0].weight is model[1].weight and model[0].weight is not model[2].weight
    assert first == second == third and hash(first) == hash(third)
    assert plain is None and delayed != first


def test_delayed_scales_come_from_the_latest_weights_with_the_recipes_margin() -> None:
    layer = _layer(te.Float8Quantizer())
    layer.fp8_meta["recipe"] = te.delayed_scaling(2, margin=1)
    recipe = _recipe(layer)
    assert recipe.num_past == 2
    scales, past = torch.zeros(4), torch.full((2, 4), -1.0)
    factors = []
    for amax in (1.0, 4.0, 4.0, 2.0, 8.0, 1.0):
        recipe.rescale(torch.tensor([amax, 0.0, 8.0, 0.0]), scales, past)
        factors.append(scales[1].item())
    # Of the latest two, and an unchanged weight is no new measurement.
    assert factors == [448 / amax / 2 for amax in (1.0, 4.0, 4.0, 4.0, 8.0, 8.0)]
    assert scales[0].item() == torch.tensor(1 / factors[-1]).item()
    assert scales[3].item() == 448 / 8 / 2


def test_the_most_recent_amax_is_a_history_of_one() -> None:
    layer = _layer(te.Float8Quantizer())
    layer.fp8_meta["recipe"] = te.delayed_scaling(1024, algorithm="most_recent")
    assert _recipe(layer).num_past == 1


MXFP8 = te.MXFP8Quantizer()


def test_mxfp8_conforms() -> None:
    recipe: Recipe = replace_quantized_weights(layer := _layer(MXFP8, 128, 128))(layer.weight)  # type: ignore[assignment]
    assert not isinstance(recipe, CachingRecipe)
    check_recipe(recipe, relative_error=1.0)
    check_recipe(recipe, main_dtype=torch.bfloat16, relative_error=1.0)


@given(num_ranks=st.integers(1, 4), exponent=st.integers(-126, 120), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_mxfp8_shards_are_the_bytes_of_the_layers_own_quantisation(num_ranks: int, exponent: int, seed: int) -> None:
    layer = _layer(MXFP8, 256, 128)
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[:64, :64] = 0.0  # blocks of zeros alone
    weight[64, :32] = 448 * 2.0 ** (exponent // 2)  # a scale already a power of two, and neighbouring numbers
    weight[65, :32] = weight[64, 0].nextafter(torch.tensor(0.0))
    weight[66, :32] = weight[64, 0].nextafter(torch.tensor(torch.inf))
    expected: Any = MXFP8(weight)
    recipe: Recipe = replace_quantized_weights(layer, compute_dtype=torch.float32)(layer.weight)  # type: ignore[assignment]
    payloads = [
        torch.empty(payload_format.shape, dtype=payload_format.dtype)
        for payload_format in recipe.payloads(weight.shape, weight.dtype)
    ]
    for blocks in torch.arange(8).tensor_split(num_ranks):
        first, last = blocks[0].item(), blocks[-1].item() + 1
        shard_payloads = [
            payload[first:last] if len(payload) == 8 else payload[32 * first : 32 * last] for payload in payloads
        ]
        encode_into(
            recipe, weight[32 * first : 32 * last], shard_payloads, WeightRows(weight.shape, 32 * int(first), None)
        )
    decoded: Any = recipe.decode(payloads, weight.shape, None)
    assert type(decoded) is type(expected)
    for name, tensor in expected.get_metadata().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(decoded.get_metadata()[name], tensor), name
    assert torch.equal(decoded.dequantize(), expected.dequantize())
    assert torch.equal(decoded.transposed(), expected.transposed())


def _with_function() -> nn.Module:
    layer = _layer(te.Float8Quantizer())
    layer.fp8_meta["recipe"] = te.delayed_scaling(4, algorithm=max)
    return layer


def _with_vectors() -> nn.Module:
    quantizer = te.Float8BlockQuantizer()
    quantizer.block_scaling_dim = 1
    return _layer(quantizer)


@pytest.mark.parametrize(
    ("build", "error", "complaint"),
    [
        (lambda: _layer(te.NVFP4Quantizer(), preserves=False), NotImplementedError, r"'1\.weight'.* NVFP4Tensor"),
        (lambda: _layer(MXFP8, 96, 128), NotImplementedError, r"'1\.weight'.* multiples of 128.*\(96, 128\)"),
        (_with_vectors, NotImplementedError, r"'1\.weight'.* Float8BlockwiseQTensor"),
        (_with_function, NotImplementedError, r"'1\.weight'.*Use Float8CurrentScaling"),
        (lambda: _layer(CURRENT).to_empty(device="meta"), ValueError, r"'1\.weight' on a device"),
    ],
)
def test_a_model_with_unsupported_te_weights_is_refused_and_left_unchanged(
    build: Callable[[], nn.Module], error: type[Exception], complaint: str
) -> None:
    model = nn.Sequential(_layer(CURRENT), build())
    before = list(model.parameters())
    with pytest.raises(error, match=complaint):
        replace_quantized_weights(model)
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in before]


def test_a_model_without_quantised_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="quantised weights of Transformer Engine, got none"):
        replace_quantized_weights(nn.Linear(3, 3))


def test_a_weight_of_another_shape_than_a_matrix_is_refused() -> None:
    recipe: Recipe = _recipe(_layer(CURRENT))
    with pytest.raises(ValueError, match=r"matrix for Float8Tensor, got shape \(3,\)"):
        recipe.payloads((3,), torch.float32)


def test_a_quantised_tensor_is_refused_by_its_name_and_class() -> None:
    refuse_quantized("weight", torch.zeros(2))
    with pytest.raises(TypeError, match=r"'mlp.weight'.*Float8Tensor of transformer_engine.*replace_quantized_weights"):
        refuse_quantized("mlp.weight", _layer(CURRENT).weight)
