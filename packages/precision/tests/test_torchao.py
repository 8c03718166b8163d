"""torchao's float8 weights: replaced by plain weights, and encoded to the bytes of torchao's all-gather."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lamella_precision import WeightRows
from lamella_precision.testing import check_recipe, encode_into, measured
from lamella_precision.torchao import CastWeights, replace_quantized_weights
from lamella_testing import torchao_weights as torchao

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def _recipe(layer: torchao.Float8Linear, **options: Any) -> CastWeights:
    return cast(CastWeights, replace_quantized_weights(layer, **options)(cast(nn.Parameter, layer.weight)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_recipe_conforms(dtype: torch.dtype) -> None:
    recipe = _recipe(torchao.Float8Linear(20, 12, dtype=dtype))
    check_recipe(recipe, relative_error=1.0)
    check_recipe(recipe, main_dtype=torch.bfloat16, relative_error=1.0)
    assert not any(recipe.divides_at((4, 20, 12), row) for row in range(4))


@pytest.mark.parametrize("dtype", FORMATS)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 60),
    num_ranks=st.integers(1, 4),
    exponent=st.integers(-60, 60),
    main_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_encoded_shards_are_the_bytes_and_the_scale_of_the_weights_own_method(
    dtype: torch.dtype, rows: int, columns: int, num_ranks: int, exponent: int, main_dtype: torch.dtype
) -> None:
    weight = (torch.randn(rows, columns) * 2.0**exponent).to(main_dtype)
    weight *= exponent != 0  # zeros alone
    cast_weight = torchao.WeightWithDynamicFloat8CastTensor(weight, (), dtype)
    (expected,), (expected_scale,) = cast_weight.fsdp_pre_all_gather(None)
    recipe = _recipe(torchao.Float8Linear(columns, rows, dtype=dtype))
    shards = weight.tensor_split(num_ranks)
    amaxes = measured(recipe, shards, weight.shape)
    scales = torch.empty_like(amaxes)
    recipe.rescale(amaxes, scales, torch.empty(0, len(amaxes)))
    scales = scales.view(recipe.scale_shape(weight.shape))
    data = torch.empty(weight.shape, dtype=dtype)
    first_row = 0
    for shard, into in zip(shards, data.tensor_split(num_ranks), strict=True):
        if shard.numel():
            encode_into(recipe, shard, [into], WeightRows(weight.shape, first_row, scales))
        first_row += len(shard)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    decoded: Any = recipe.decode([data], weight.shape, scales)
    assert type(decoded) is torchao.Float8TrainingTensor
    assert torch.equal(decoded._scale, expected_scale) and decoded._scale.shape == ()
    assert decoded._linear_mm_config == ("fast",)
    assert decoded.dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_replaced_weight_shares_memory_and_has_the_marks_of_before(device: str) -> None:
    layer = torchao.Float8Linear(20, 12, device=device)
    original: Any = layer.weight
    original.partition_dim = 1
    original.requires_grad_(False)
    choose = replace_quantized_weights(layer)
    assert type(layer.weight) is nn.Parameter and not layer.weight.requires_grad and layer.weight.device.type == device
    assert layer.weight.untyped_storage()._cdata == original._tensor.untyped_storage()._cdata
    assert vars(layer.weight) == {"partition_dim": 1}
    assert choose(nn.Parameter(torch.zeros(2, 2))) is None


def test_tied_weights_stay_tied_and_equal_formats_share_a_recipe() -> None:
    model = nn.Sequential(*[torchao.Float8Linear(4, 4) for _ in range(3)], nn.Linear(4, 4))
    model[1].weight = model[0].weight
    choose = replace_quantized_weights(model)
    first, second, third, plain = (choose(cast(nn.Parameter, layer.weight)) for layer in model)
    assert model[0].weight is model[1].weight and model[0].weight is not model[2].weight
    assert first is not None and first == second == third and hash(first) == hash(third)
    assert plain is None


def test_a_model_with_unsupported_torchao_weights_is_refused_and_left_unchanged() -> None:
    model = nn.Sequential(torchao.Float8Linear(4, 4), torchao.Float8Linear(4, 4, dtype=torch.float8_e4m3fnuz))
    before = list(model.parameters())
    with pytest.raises(NotImplementedError, match=r"'1\.weight'.*float8_e4m3fnuz.*torchao's own methods"):
        replace_quantized_weights(model)
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in before]


def test_a_model_without_such_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="float8 weights of torchao, got none"):
        replace_quantized_weights(nn.Linear(3, 3))
