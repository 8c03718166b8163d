"""Linear layers in float8: forward and both gradients are products of the quantised operands."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from float64_oracle import in_float8
from gathered_weights import gathered
from torch import nn

from lamella_precision import (
    Float8Linear,
    Float8Recipe,
    drop_float8_matmul,
    float8_matmul_layers,
    multiplies_in_float8,
    use_float8_matmul,
)
from lamella_precision._products.operands import quantised
from lamella_precision._scales.tiles import Block

TENSOR, ROW, SQUARE = Float8Recipe(), Float8Recipe((1, None)), Float8Recipe((128, 128))
RECIPES = pytest.mark.parametrize("recipe", [TENSOR, ROW, SQUARE], ids=["tensor", "row", "square"])
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# The blocks of activations, and the format of gradients.
BLOCKS_OF: dict[Block, tuple[Block, torch.dtype]] = {
    (None, None): ((None, None), E5M2),
    (1, None): ((1, None), E4M3),
    (128, 128): ((1, 128), E4M3),
}


def _quantised(matrix: torch.Tensor, block: Block, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """The float64 values of a matrix in float8, with a scale for each block; cut blocks are padded with zeros."""
    rows, columns = (length or numel for length, numel in zip(block, matrix.shape, strict=True))
    num_rows, num_columns = matrix.shape
    padded = nn.functional.pad(matrix.detach().float(), (0, -num_columns % columns, 0, -num_rows % rows))
    values = padded.view(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    amaxes = values.abs().amax((1, 3), keepdim=True)
    # CUDA rounds a division by a number twice.
    scales = (amaxes / torch.full_like(amaxes, torch.finfo(dtype).max)).clamp_min(2.0**-126)
    quantised_matrix: torch.Tensor = (values / scales).to(dtype).double() * scales.double()
    return quantised_matrix.reshape(padded.shape)[:num_rows, :num_columns]


def _expected(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and both gradients of quantised operands, multiplied in float64."""
    x_block, gradient_block = BLOCKS_OF[block]
    values = _quantised(weight, block)
    output = _quantised(x, x_block) @ values.T
    if block == (1, None):
        amaxes = weight.detach().float().abs().amax(1)
        scales = amaxes / torch.full_like(amaxes, 448)
        grad_x = _quantised(gradient.float() * scales, x_block) @ (values / scales.double()[:, None])
    else:
        grad_x = _quantised(gradient, x_block, gradient_block) @ values
    grad_weight = _quantised(gradient.T, x_block, gradient_block) @ _quantised(x.T, x_block).T
    return output, grad_x, grad_weight


def _layer(recipe: Float8Recipe, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    sizes = (384, 256) if recipe is SQUARE else (64, 48)  # three blocks a row, which kernels read padded to four
    model = nn.Sequential(nn.Linear(*sizes, bias=False)).to(device, dtype)
    if recipe is SQUARE:  # blocks of different magnitudes: a scale of another block is then an error
        powers = torch.exp2(torch.arange(6, dtype=dtype, device=device) * 2 - 6).view(2, 3)
        with torch.no_grad():
            cast(nn.Linear, model[0]).weight.mul_(powers.repeat_interleave(128, 0).repeat_interleave(128, 1))
    assert use_float8_matmul(model, recipe) == ["0"]
    return cast(nn.Linear, model[0])


def _without_ties(matrix: torch.Tensor, block: tuple[int | None, int | None]) -> torch.Tensor:
    """A matrix in bf16, with 251 times a power of two as the largest magnitude of each block, also of its transpose.

    Compiled division on GPUs is off by a bit, which rounds a quotient halfway between two float8 numbers to the other.
    Quotients by a prime number of the mantissa's size lie on no half.
    """
    changed = matrix.detach().clone()
    for view in (changed, changed.t()):
        rows, columns = (length or size for length, size in zip(block, view.shape, strict=True))
        for tile in (part for band in torch.split(view, rows) for part in torch.split(band, columns, 1)):
            at = divmod(int(tile.abs().argmax()), tile.shape[1])
            tile[at] = 251 / 64 * tile.abs().max().log2().floor().exp2()
    return changed


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu1)]


@pytest.mark.parametrize("device", DEVICES)
@RECIPES
@pytest.mark.parametrize("is_gathered", [False, True], ids=["plain", "gathered"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")  # both by Dynamo
def test_the_products_are_of_the_quantised_operands(
    device: str, recipe: Float8Recipe, is_gathered: bool, is_compiled: bool
) -> None:
    torch._dynamo.reset()
    layer = _layer(recipe, device, torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(_without_ties(layer.weight, recipe.block))
    plain = layer.weight.detach().clone()
    if is_gathered:
        layer.weight = nn.Parameter(gathered(plain.float(), recipe))
    if is_compiled:
        on_gpu = device == "cuda"
        # Squares in symbolic sizes are traced for seconds, which the GPU's run has.
        is_dynamic = False if recipe is SQUARE and not on_gpu else None
        layer.compile(fullgraph=True, backend="inductor" if on_gpu else "aot_eager", dynamic=is_dynamic)
    generator = torch.Generator().manual_seed(1)
    x_block = (1, 128) if recipe is SQUARE else recipe.block
    for num_tokens in (7, 32):  # the gradient of the weight adds up over tokens, in multiples of 16 or 128
        x, gradient = (
            _without_ties(torch.randn(2 * num_tokens, size, generator=generator).bfloat16(), x_block)
            .view(2, num_tokens, size)
            .to(device)
            for size in (layer.in_features, layer.out_features)
        )
        x.requires_grad_()
        output = layer(x)
        output.backward(gradient)
        expected = _expected(x.flatten(0, 1), plain, gradient.flatten(0, 1), recipe.block)
        for got, exact in zip((output, x.grad, layer.weight.grad), expected, strict=True):
            assert got is not None
            # A rounding to bf16. On the GPU the forward's sums have 14 bits.
            error = (got.flatten(0, -2).double() - exact).abs().max() / exact.abs().max()
            assert error < 2**-8
        layer.weight.grad = None


@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=["vectors", "squares"])
def test_blocks_along_the_summed_dim_have_the_bytes_of_exact_arithmetic(block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(128, 256) * torch.exp2(torch.arange(256.0) / 16 - 8)).bfloat16()[-block[0] :]
    matrix[0, 3] = 0.0
    data, scales = quantised(matrix, block)
    expected, expected_scales = in_float8(matrix, block, E4M3)
    assert torch.equal(data.view(torch.uint8), expected)
    assert torch.equal(scales, expected_scales)


@RECIPES
def test_a_gathered_weight_computes_the_bits_of_a_plain_one(recipe: Float8Recipe) -> None:
    gradients = []
    for is_gathered in (False, True):
        layer = _layer(recipe)
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
        if is_gathered:
            layer.weight = nn.Parameter(gathered(layer.weight.detach(), recipe))
        leaf = x.clone().requires_grad_()
        layer(leaf).square().sum().backward()
        gradients.append((leaf.grad, layer.weight.grad))
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.to(other.dtype), other)  # the gathered weight computes in bf16


@RECIPES
@pytest.mark.parametrize("shape", [(0,), (2, 0), ()], ids=["no tokens", "no tokens of two", "a vector"])
def test_a_vector_and_no_tokens_are_taken_as_by_linear_layers(recipe: Float8Recipe, shape: tuple[int, ...]) -> None:
    layer = _layer(recipe)
    x = torch.randn(*shape, layer.in_features, requires_grad=True)
    output = layer(x)
    assert output.shape == nn.functional.linear(x, layer.weight).shape
    output.square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    if not shape:
        row = x.detach()[None].requires_grad_()
        vector_gradient, layer.weight.grad = layer.weight.grad, None
        layer(row).square().sum().backward()
        assert torch.equal(output, layer(row)[0])
        assert torch.equal(x.grad[None], cast(torch.Tensor, row.grad))
        assert torch.equal(vector_gradient, cast(torch.Tensor, layer.weight.grad))
    else:
        assert not layer.weight.grad.any()


@RECIPES
def test_float8_linear_under_autocast_gives_the_bits_of_bf16_inputs(recipe: Float8Recipe) -> None:
    layer = _layer(recipe)
    layer.bias = nn.Parameter(torch.randn(layer.out_features))
    x = torch.randn(3, layer.in_features)
    outputs = []
    for is_autocast in (True, False):
        leaf = (x if is_autocast else x.bfloat16()).clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            output = layer(leaf)
            output.square().sum().backward()  # inside: a product of the fallback stays one in fp32
        outputs.append((output, cast(torch.Tensor, leaf.grad).bfloat16(), layer.weight.grad))
        layer.bias = nn.Parameter(layer.bias.detach().bfloat16())
    assert outputs[0][0].dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert layer.to("meta")(torch.empty(3, layer.in_features, device="meta")).shape == (3, layer.out_features)


def test_a_weight_of_another_recipe_is_dequantised_first() -> None:
    layer = _layer(ROW)
    weight = gathered(layer.weight.detach(), TENSOR)
    layer.weight = nn.Parameter(weight)
    x = torch.randn(4, 64)
    expected = _quantised(x, (1, None)) @ _quantised(weight + 0, (1, None)).T
    assert torch.allclose(layer(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_layers_are_chosen_by_name_and_changed_back() -> None:
    model = nn.ModuleDict({"attn": nn.Linear(16, 32), "mlp": nn.Linear(32, 16), "head": nn.Linear(16, 5)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert use_float8_matmul(model, names=["attn", "mlp"]) == ["attn", "mlp"]
    assert [type(module) for module in model.values()] == [Float8Linear, Float8Linear, nn.Linear]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    x = torch.randn(3, 16)
    weight, bias = (model.get_parameter(f"attn.{name}") for name in ("weight", "bias"))
    assert not torch.equal(model["attn"](x), nn.functional.linear(x, weight, bias))
    assert float8_matmul_layers(model, TENSOR) == []  # changed already
    assert drop_float8_matmul(model) == ["attn", "mlp"]
    assert float8_matmul_layers(model, TENSOR) == ["attn", "mlp"]
    assert float8_matmul_layers(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 64)), SQUARE) == ["0"]
    assert torch.equal(model["attn"](x), nn.functional.linear(x, weight, bias))
    assert {type(module) for module in model.values()} == {nn.Linear}


@pytest.mark.parametrize(
    ("recipe", "names", "complaint"),
    [
        (Float8Recipe((1, 128)), "*", "a scale a tensor, a row or 128 x 128"),
        (SQUARE, "0", r"'0' that are multiples of 128, .* got 16 and 16"),
        (Float8Recipe(dtype=E5M2), "*", "float8_e4m3fn"),
        (TENSOR, "*", r"'1' that are multiples of 16, .* got 16 and 5"),
        (TENSOR, "2", r"got none for \['2'\]"),
        (TENSOR, ["0", "2"], r"every one of `names` to match an nn.Linear, got none for \['2'\]"),
        (TENSOR, [], "every one of `names`"),
    ],
)
def test_layers_without_a_float8_product_are_refused_and_none_is_changed(
    recipe: Float8Recipe, names: str | list[str], complaint: str
) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 5))
    with pytest.raises(ValueError, match=complaint):
        use_float8_matmul(model, recipe, names=names)
    assert {type(module) for module in model} == {nn.Linear}


class _Unit(Float8Linear):
    """As `fully_shard` makes of a layer: a subclass, in place."""


def test_layers_that_are_units_are_refused_by_name_and_none_is_changed_back() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    use_float8_matmul(model)
    model[1].__class__ = _Unit
    with pytest.raises(ValueError, match=r"no units themselves, got \{'1': '_Unit'\}"):
        drop_float8_matmul(model)
    assert [type(layer) for layer in model] == [Float8Linear, _Unit]


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cpu", (9, 0), (False, False, False)),
        (
            "cuda:70",
            (8, 0),
            (False, False, False),
        ),  # answers are cached by index: each case takes an index beyond any machine's
        ("cuda:71", (8, 9), (True, True, False)),
        ("cuda:72", (9, 0), (True, True, True)),
        ("cuda:73", (10, 0), (True, True, False)),
    ],
)
def test_devices_with_products_are_known_by_recipe(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], expected: tuple[bool, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert tuple(multiplies_in_float8(recipe, torch.device(device)) for recipe in (TENSOR, ROW, SQUARE)) == expected
