"""Linear layers in float8: forward and both gradients are products of the quantised operands."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from lamella_precision import Float8Linear, Float8Recipe, Part, QuantizedWeight, drop_float8_matmul, use_float8_matmul
from lamella_precision.testing import encode_into, measured

TENSOR, ROW = Float8Recipe(), Float8Recipe((1, None))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _quantised(matrix: torch.Tensor, dim: int | None, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """The float64 values of a matrix in float8, with a scale for all (None) or for each index along `dim`."""
    values = matrix.detach().float()
    amaxes = values.abs().amax() if dim is None else values.abs().amax(1 - dim, keepdim=True)
    scales = amaxes / torch.full_like(amaxes, torch.finfo(dtype).max)  # CUDA rounds a division by a number twice
    return (values / scales).to(dtype).double() * scales.double()


def _expected(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, *, by_rows: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and both gradients of quantised operands, multiplied in float64."""
    dim, of_gradients = (0, E4M3) if by_rows else (None, E5M2)
    quantised = _quantised(weight, dim)
    output = _quantised(x, dim) @ quantised.T
    if by_rows:
        amaxes = weight.detach().float().abs().amax(1)
        scales = amaxes / torch.full_like(amaxes, 448)
        of_x = _quantised(gradient.float() * scales, 0) @ (quantised / scales.double()[:, None])
    else:
        of_x = _quantised(gradient, None, E5M2) @ quantised
    of_weight = _quantised(gradient.T, dim, of_gradients) @ _quantised(x.T, dim).T
    return output, of_x, of_weight


def _layer(recipe: Float8Recipe, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False)).to(device, dtype)
    assert use_float8_matmul(model, recipe) == ["0"]
    return cast(nn.Linear, model[0])


def _gathered(weight: torch.Tensor, recipe: Float8Recipe) -> QuantizedWeight:
    """The weight as a gather leaves it."""
    amaxes = measured(recipe, [weight], weight.shape)
    scales = torch.empty_like(amaxes)
    recipe.rescale(amaxes, scales, torch.empty(0, len(amaxes), device=weight.device))
    data = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scales = scales.view(recipe.scale_shape(weight.shape))
    encode_into(recipe, weight, [data], Part(tuple(weight.shape), 0, scales))
    return recipe.decode([data], weight.shape, scales)


def _without_ties(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix in bf16 with a largest magnitude of 251 / 32 in each row and column.

    Compiled division on GPUs is off by a bit, which rounds a quotient halfway between two float8 numbers to the other.
    Quotients by a prime number of the mantissa's size lie on no half.
    """
    made = matrix.detach().clone()
    rows, columns = made.shape
    at = torch.arange(max(rows, columns), device=made.device)
    made[at % rows, at % columns] = 251 / 32
    return made


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [TENSOR, ROW], ids=["tensor", "row"])
@pytest.mark.parametrize("is_gathered", [False, True], ids=["plain", "gathered"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")  # both by Dynamo
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # It imports what is so declared.
def test_the_products_are_of_the_quantised_operands(
    device: str, recipe: Float8Recipe, is_gathered: bool, is_compiled: bool
) -> None:
    torch._dynamo.reset()
    layer = _layer(recipe, device, torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(_without_ties(layer.weight))
    plain = layer.weight.detach().clone()
    if is_gathered:
        layer.weight = nn.Parameter(_gathered(plain.float(), recipe))
    if is_compiled:
        layer.compile(fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    generator = torch.Generator().manual_seed(1)
    for num_tokens in (7, 32):  # the gradient of the weight adds up over tokens, in multiples of 16
        x, gradient = (
            _without_ties(torch.randn(2 * num_tokens, size, generator=generator).bfloat16()).view(2, num_tokens, size)
            for size in (64, 48)
        )
        x, gradient = x.to(device).requires_grad_(), gradient.to(device)
        output = layer(x)
        output.backward(gradient)
        expected = _expected(x.flatten(0, 1), plain, gradient.flatten(0, 1), by_rows=recipe is ROW)
        for got, exact in zip((output, x.grad, layer.weight.grad), expected, strict=True):
            assert got is not None
            # A rounding to bf16. On the GPU the forward's sums have 14 bits.
            error = (got.flatten(0, -2).double() - exact).abs().max() / exact.abs().max()
            assert error < 2**-8
        layer.weight.grad = None


@pytest.mark.parametrize("recipe", [TENSOR, ROW], ids=["tensor", "row"])
def test_a_gathered_weight_computes_the_bits_of_a_plain_one(recipe: Float8Recipe) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for is_gathered in (False, True):
        layer = _layer(recipe)
        if is_gathered:
            layer.weight = nn.Parameter(_gathered(layer.weight.detach(), recipe))
        own = x.clone().requires_grad_()
        layer(own).square().sum().backward()
        results.append((own.grad, layer.weight.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.to(other.dtype), other)  # the gathered weight computes in bf16


def test_a_weight_of_another_recipe_is_dequantised_first() -> None:
    layer = _layer(ROW)
    gathered = _gathered(layer.weight.detach(), TENSOR)
    layer.weight = nn.Parameter(gathered)
    x = torch.randn(4, 64)
    expected = _quantised(x, 0) @ _quantised(gathered + 0, 0).T
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
    assert drop_float8_matmul(model) == ["attn", "mlp"]
    assert torch.equal(model["attn"](x), nn.functional.linear(x, weight, bias))
    assert {type(module) for module in model.values()} == {nn.Linear}


@pytest.mark.parametrize(
    ("recipe", "names", "complaint"),
    [
        (Float8Recipe((128, 128)), "*", "a scale a tensor or a row"),
        (Float8Recipe(dtype=E5M2), "*", "float8_e4m3fn"),
        (TENSOR, "*", r"'1' that are multiples of 16, .* got 16 and 5"),
        (TENSOR, "2", r"got none for \['2'\]"),
    ],
)
def test_layers_without_a_float8_product_are_refused_and_none_is_changed(
    recipe: Float8Recipe, names: str, complaint: str
) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 5))
    with pytest.raises(ValueError, match=complaint):
        use_float8_matmul(model, recipe, names=names)
    assert {type(module) for module in model} == {nn.Linear}
