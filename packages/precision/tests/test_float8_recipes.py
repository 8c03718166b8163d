"""Recipes in 8 bits: every rank's encoding of its rows is the encoding of the whole, computed in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from float64_oracle import in_float8
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella_precision import DivisibleRecipe, Float8Recipe, MXFP8Recipe, Recipe, ScaledRecipe, WeightRows
from lamella_precision.testing import check_recipe, encode_into, measured

FLOAT8 = [
    Float8Recipe(),
    Float8Recipe(dtype=torch.float8_e5m2),
    Float8Recipe((1, None)),
    Float8Recipe((128, 128)),
    Float8Recipe((8, 8), power_of_two=True),
]


@pytest.mark.parametrize("recipe", [*FLOAT8, Float8Recipe(num_past_amaxes=2), MXFP8Recipe()])
def test_the_recipes_conform(recipe: Recipe) -> None:
    assert isinstance(recipe, Recipe)
    assert isinstance(recipe, ScaledRecipe) is not isinstance(recipe, MXFP8Recipe)
    check_recipe(recipe, relative_error=1.0)  # the smallest numbers are left with no bits
    check_recipe(recipe, main_dtype=torch.bfloat16, relative_error=1.0)


def test_parts_are_weights_between_matrices_of_a_stack_and_between_blocks_of_a_matrix() -> None:
    rows = range(1, 16)
    for recipe in FLOAT8:
        assert all(recipe.divides_at((16, 4, 4), row) for row in rows)
        length = recipe.block[0] or 16
        assert [row for row in rows if recipe.divides_at((16, 4), row)] == [row for row in rows if row % length == 0]
        assert recipe.divides_at((16, 4), 0)
    assert not isinstance(MXFP8Recipe(), DivisibleRecipe)


def _shards(weight: torch.Tensor, num_ranks: int, block_rows: int = 1) -> list[tuple[int, torch.Tensor]]:
    """Every rank's first row and rows, by torch's rule of chunks, over blocks of rows: some ranks may own nothing."""
    num_blocks = -(-len(weight) // block_rows)
    length = -(-num_blocks // num_ranks) * block_rows
    starts = [min(rank * length, len(weight)) for rank in range(num_ranks)]
    return [(start, weight[start : start + length]) for start in starts]


def _weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Magnitudes over many powers of two, some zeros, and some ties of the format."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-12, 12, weight.shape, generator=generator))
    weight[torch.rand(weight.shape, generator=generator) < 0.2] = 0.0
    ties = torch.rand(weight.shape, generator=generator) < 0.2
    weight[ties] = torch.round(weight[ties] * 4) / 4
    return weight


def _scales_of(recipe: ScaledRecipe, shards: list[tuple[int, torch.Tensor]], shape: torch.Size) -> torch.Tensor:
    amaxes = measured(recipe, [shard for _, shard in shards], shape)
    scales = torch.empty_like(amaxes)
    recipe.rescale(amaxes, scales, torch.full((recipe.num_past, len(amaxes)), -1.0, device=amaxes.device))
    return scales.view(recipe.scale_shape(shape))


def _encoded(recipe: Recipe, weight: torch.Tensor, num_ranks: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The whole payloads, each rank's rows encoded apart, and the scales."""
    shards = _shards(weight, num_ranks, recipe.block_rows)
    scales = _scales_of(recipe, shards, weight.shape) if isinstance(recipe, ScaledRecipe) else None
    formats = recipe.payloads(weight.shape, weight.dtype)
    payloads = [
        torch.empty(payload_format.shape, dtype=payload_format.dtype, device=weight.device)
        for payload_format in formats
    ]
    for first, shard in shards:
        if shard.numel():
            per_row = [len(weight) if len(payload) == len(weight) else 0 for payload in payloads]
            shard_payloads = [
                payload[first : first + len(shard)]
                if per
                else payload[first // recipe.block_rows : -(-(first + len(shard)) // recipe.block_rows)]
                for payload, per in zip(payloads, per_row, strict=True)
            ]
            encode_into(recipe, shard.clone(), shard_payloads, WeightRows(tuple(weight.shape), first, scales))
    return payloads, scales


@pytest.mark.parametrize("recipe", FLOAT8, ids=repr)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 7), st.integers(0, 999))
def test_shards_of_any_shape_encode_as_the_whole_in_float64(
    recipe: Float8Recipe, rows: int, columns: int, num_ranks: int, seed: int
) -> None:
    weight = _weight(rows, columns, seed)
    recipe = replace(recipe, block=(8, 8)) if recipe.block == (128, 128) else recipe  # cut blocks in small matrices
    (data,), scales = _encoded(recipe, weight, num_ranks)
    expected, expected_scales = in_float8(weight, recipe.block, recipe.dtype, power_of_two=recipe.power_of_two)
    assert scales is not None
    assert torch.equal(scales, expected_scales)
    assert torch.equal(data.view(torch.uint8), expected)


@pytest.mark.parametrize(("rows", "columns", "num_ranks"), [(300, 200, 3), (129, 257, 2), (2, 130, 4)])
def test_squares_of_128_that_cuts_divide_encode_as_the_whole(rows: int, columns: int, num_ranks: int) -> None:
    weight = _weight(rows, columns, 0)
    (data,), scales = _encoded(Float8Recipe((128, 128)), weight, num_ranks)
    expected, expected_scales = in_float8(weight, (128, 128), torch.float8_e4m3fn)
    assert scales is not None
    assert torch.equal(scales, expected_scales)
    assert torch.equal(data.view(torch.uint8), expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 150), st.integers(1, 70), st.integers(1, 7), st.integers(0, 999))
def test_mxfp8_shards_of_whole_blocks_encode_as_the_whole_in_float64(
    rows: int, columns: int, num_ranks: int, seed: int
) -> None:
    weight = _weight(rows, columns, seed)
    by_rows, row_scales, by_columns, column_scales = _encoded(MXFP8Recipe(), weight, num_ranks)[0]
    for data, exponents, block in ((by_rows, row_scales, (1, 32)), (by_columns, column_scales, (32, 1))):
        expected, scales = in_float8(weight, block, torch.float8_e4m3fn, power_of_two=True)
        assert torch.equal(data.view(torch.uint8), expected)
        assert torch.equal(exponents.view(torch.float8_e8m0fnu).float(), scales)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 7), st.integers(0, 99))
def test_a_stack_of_matrices_encodes_as_its_matrices(
    matrices: int, rows: int, columns: int, num_ranks: int, seed: int
) -> None:
    stack = _weight(matrices * rows, columns, seed).view(matrices, rows, columns)
    for block in ((None, None), (1, None), (4, 4)):
        (data,), _ = _encoded(Float8Recipe(block), stack, num_ranks)
        expected = [in_float8(matrix, block, torch.float8_e4m3fn)[0] for matrix in stack]
        assert torch.equal(data.view(torch.uint8), torch.stack(expected))


@pytest.mark.parametrize("recipe", [*FLOAT8, MXFP8Recipe()], ids=repr)
def test_dequantised_values_are_data_times_scales(recipe: Float8Recipe | MXFP8Recipe) -> None:
    weight = _weight(70, 50, 1)
    recipe = replace(recipe, compute_dtype=torch.float32)
    payloads, scales = _encoded(recipe, weight, 2)
    decoded = recipe.decode(payloads, weight.shape, scales)
    block, dtype = ((1, 32), torch.float8_e4m3fn) if isinstance(recipe, MXFP8Recipe) else (recipe.block, recipe.dtype)
    power_of_two = isinstance(recipe, MXFP8Recipe) or recipe.power_of_two
    data, block_scales = in_float8(weight, block, dtype, power_of_two=power_of_two)
    height, width = block[0] or 70, block[1] or 50
    element_scales = block_scales.repeat_interleave(height, 0)[:70].repeat_interleave(width, 1)[:, :50]
    assert torch.equal(decoded + 0, data.view(dtype).float() * element_scales)
    error = (decoded - weight).abs().double() / weight.abs().amax()
    assert error.max() < 2**-3


@pytest.mark.parametrize("recipe", [*FLOAT8, MXFP8Recipe()], ids=repr)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_no_number_of_a_block_with_nan_or_infinity_is_taken_for_another(
    recipe: Float8Recipe | MXFP8Recipe, number: float
) -> None:
    weight = torch.ones(64, 64)
    weight[9, 9] = number
    recipe = replace(recipe, compute_dtype=torch.float32)
    payloads, scales = _encoded(recipe, weight, 2)
    values = recipe.decode(payloads, weight.shape, scales) + 0
    height, width = (1, 32) if isinstance(recipe, MXFP8Recipe) else recipe.block
    rows, columns = slice(9 // (height or 64) * (height or 64), None), slice(9 // (width or 64) * (width or 64), None)
    block = values[rows, columns][: height or 64, : width or 64]
    assert block.isnan().all()
    assert (values == 1.0).sum() == values.numel() - block.numel()


def test_delayed_scales_follow_the_latest_amaxes_and_ignore_a_second_measurement_of_the_same_weight() -> None:
    recipe = Float8Recipe(num_past_amaxes=2)
    scales, past = torch.empty(1), torch.full((2, 1), -1.0)
    amaxes = []
    for amax in (4.0, 8.0, 8.0, 2.0, 1.0, 1.0, 0.0, 16.0):
        recipe.rescale(torch.tensor([amax]), scales, past)
        amaxes.append(scales.item() * 448)
    # The largest of the latest two: (4), (8, 4), the same again, (2, 8), (1, 2), again, nothing measured, (16, 1).
    assert amaxes == pytest.approx([4.0, 8.0, 8.0, 8.0, 2.0, 2.0, 2.0, 16.0])


def test_a_weight_of_zeros_keeps_the_scale_from_before() -> None:
    recipe = Float8Recipe(num_past_amaxes=2)
    scales, past = torch.ones(2), torch.full((2, 2), -1.0)
    recipe.rescale(torch.tensor([0.0, 448.0 * 3]), scales, past)
    assert scales.tolist() == [1.0, 3.0], "a scale of nothing would saturate whatever the optimizer writes next"


def test_a_weight_that_outgrew_its_delayed_scale_saturates_and_nan_stays_nan() -> None:
    recipe = Float8Recipe(num_past_amaxes=1, compute_dtype=torch.float32)
    weight = torch.tensor([[1000.0, -1000.0], [float("nan"), 1.0]])
    data, scales = torch.empty(2, 2, dtype=torch.float8_e4m3fn), torch.full((1, 1), 1.0)
    encode_into(recipe, weight, [data], WeightRows((2, 2), 0, scales))
    assert torch.equal(data.float().nan_to_num(7.0), torch.tensor([[448.0, -448.0], [7.0, 1.0]]))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dtype": torch.bfloat16}, "`dtype`"),
        ({"block": (0, None)}, r"`block` to be a tuple of two positive sizes or None, got \(0, None\)"),
        ({"block": 128}, r"got 128\. Pass \(128, 128\)"),
        ({"block": (128,)}, r"got \(128,\)"),
        ({"block": [128, 128]}, r"got \[128, 128\]"),
        ({"num_past_amaxes": -1}, "at least 0"),
        ({"num_past_amaxes": 1.5}, r"`num_past_amaxes` to be an int, got 1\.5"),
        ({"num_past_amaxes": "2"}, "got '2'"),
    ],
)
def test_impossible_recipes_are_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        Float8Recipe(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("recipe", "shape"), [(Float8Recipe(), (4,)), (MXFP8Recipe(), (2, 4, 4))])
def test_weights_that_a_recipe_cannot_serve_are_refused(recipe: Recipe, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Give .* no recipe"):
        recipe.payloads(shape, torch.float32)


@pytest.mark.gpu1
@pytest.mark.parametrize("recipe", [*FLOAT8, Float8Recipe((1, None), power_of_two=True), MXFP8Recipe()], ids=repr)
def test_a_gpu_encodes_the_same_bits(recipe: Recipe) -> None:
    weight = _weight(300, 200, 0)
    cpu_payloads, scales = _encoded(recipe, weight, 3)
    gpu_payloads, gpu_scales = _encoded(recipe, weight.cuda(), 3)
    for one, other in zip(cpu_payloads, gpu_payloads, strict=True):
        assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))
    assert scales is None or (gpu_scales is not None and torch.equal(scales, gpu_scales.cpu()))
    values = [
        recipe.decode(payloads, weight.shape, device_scales) + 0
        for payloads, device_scales in ((cpu_payloads, scales), (gpu_payloads, gpu_scales))
    ]
    assert torch.equal(values[0], values[1].cpu())
