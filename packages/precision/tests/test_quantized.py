"""A gathered weight under torch's operators: values of the running pass, no plain copy of what a view is taken of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from gathered_weights import gathered
from torch import nn

from lamella_precision import Direction, Float8Linear, Float8Recipe, MXFP8Recipe, QuantizedWeight

FP32 = torch.float32
MXFP8 = MXFP8Recipe(compute_dtype=FP32)
Function = Callable[[torch.Tensor, torch.Tensor], Any]


def _release(weight: QuantizedWeight, *directions: Direction) -> None:
    formats = weight.recipe.payloads(weight.weight_shape, FP32)
    for payload, payload_format in zip(weight.payloads, formats, strict=True):
        if payload_format.direction in directions:
            payload.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.addmm(x.new_zeros(32), x, w),
        lambda x, w: x[:, :32] @ w[:32].t(),
        lambda x, w: F.linear(x, w.t()),
    ],
    ids=["matmul", "addmm", "slice", "linear"],
)
def test_backward_reads_the_payloads_that_are_gathered_for_it(multiply: Function) -> None:
    torch.manual_seed(0)
    magnitudes = torch.exp2(torch.randint(-12, 12, (64, 32)))  # some are subnormal in blocks of one direction alone
    weight = gathered(torch.randn(64, 32) * magnitudes, MXFP8)
    forward_weight, backward_weight = (
        weight.dequantize_for(direction) for direction in (Direction.FORWARD, Direction.BACKWARD)
    )
    assert not torch.equal(forward_weight, backward_weight)
    payloads = [payload.clone() for payload in weight.payloads]
    _release(weight, Direction.BACKWARD)
    parameter = nn.Parameter(weight)
    x = torch.randn(8, 64, requires_grad=True)
    output = multiply(x, parameter)
    _release(weight, Direction.FORWARD)
    for payload, before in zip(weight.payloads[2:], payloads[2:], strict=True):
        payload.untyped_storage().resize_(payload.nbytes)
        payload.copy_(before)
    output.sum().backward()
    leaf = x.detach().requires_grad_()
    assert torch.equal(output, multiply(leaf, forward_weight))
    multiply(leaf, backward_weight).sum().backward()
    assert x.grad is not None and leaf.grad is not None
    assert torch.equal(x.grad, leaf.grad)


@pytest.mark.parametrize("recipe", [MXFP8, Float8Recipe()], ids=["mxfp8", "float8"])
@pytest.mark.parametrize("read", [lambda w: w + 0, lambda w: w.t() + 0, lambda w: F.linear(w.new_ones(32), w)])
def test_a_weight_without_bytes_is_an_error(recipe: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = gathered(torch.randn(64, 32), recipe)
    _release(weight, *Direction)
    with pytest.raises(RuntimeError, match=r"Expected a weight of shape \(64, 32\) that is gathered for"):
        read(weight)


def _grouped(x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    ends = torch.arange(1, len(stack) + 1, dtype=torch.int32, device=x.device) * len(x)
    return torch._grouped_mm(x.repeat(len(stack), 1), stack.transpose(-2, -1), ends)


def _pieces(x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    gates, ups = stack.chunk(2, dim=1)
    return torch.cat([x @ gates[1].t(), F.linear(x, ups[-1]), x @ stack.permute(0, 2, 1)[2:][0]], 1)


VIEWS: dict[str, Function] = {
    "an expert": lambda x, w: F.linear(x, w[2]) + x @ w[1].t(),
    "a view of all": lambda x, w: F.linear(x, w.view_as(w)[2]),
    "a row": lambda x, w: F.linear(x, w[2][0]),
    "all experts": lambda x, w: torch.stack([F.linear(x, expert) for expert in w]),
    "some experts": lambda x, w: _grouped(x, w[1:3]) + _grouped(x, torch.split(w, [2, 2])[0]),
    "every second": lambda x, w: F.linear(x, w[::2][1]),
    "grouped": _grouped,
    "pieces": _pieces,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu1)]
RECIPES = [Float8Recipe(), Float8Recipe((1, None)), Float8Recipe((8, 8))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES, ids=["tensor", "row", "block"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_stack_save_no_values_and_compute_the_same_bits(
    name: str, recipe: Float8Recipe, device: str
) -> None:
    torch.manual_seed(0)
    weight = gathered(torch.randn(4, 32, 64, device=device), recipe)
    outputs = []
    for stack in (weight, weight + 0):
        parameter = nn.Parameter(stack)
        x = torch.ones(24, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        saved: list[torch.Tensor] = []

        def note(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = VIEWS[name](x, parameter)
        output.square().sum().backward()
        outputs.append((output, x.grad, parameter.grad))
        if stack is weight:
            shapes = {t.shape for t in saved if not isinstance(t, QuantizedWeight) and t.ndim > 1}
            assert not [shape for shape in shapes if 32 in shape and 64 in shape]
    for one, other in zip(*outputs, strict=True):
        assert one is not None and other is not None
        # On GPUs a product of other strides, as torch's own gradients of `linear` have, may add up in another order.
        error = (one - other).abs().max() / other.abs().max()
        assert error <= (0.0 if device == "cpu" else 2**-7)


def test_a_selected_expert_is_dequantised_alone() -> None:
    stack = gathered(torch.randn(4, 32, 64), Float8Recipe())
    for expert in (stack[2], stack[1:][1], stack.transpose(1, 2)[2].t(), stack.unbind()[2]):
        assert isinstance(expert, QuantizedWeight)
        assert expert.weight_shape == (32, 64)
        assert expert.payload_0.data_ptr() == stack.payload_0[2].data_ptr()
        assert torch.equal(expert + 0, (stack + 0)[2])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks wrappers for gradients
def test_views_are_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    weight = gathered(torch.randn(4, 32, 64), Float8Recipe())

    def all_of(x: torch.Tensor, w: torch.Tensor) -> Any:
        return VIEWS["an expert"](x, w).square().sum() + VIEWS["pieces"](x, w).square().sum()

    outputs = []
    for function in (all_of, torch.compile(all_of, backend="aot_eager", fullgraph=True)):
        parameter, x = nn.Parameter(weight), torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
        output = function(x, parameter)
        output.backward()
        outputs.append((output, x.grad, parameter.grad))
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


@pytest.mark.parametrize("index", [None, 1], ids=["matrix", "expert"])
def test_hooks_may_save_a_plain_copy(index: int | None) -> None:
    weight = gathered(torch.randn(*([] if index is None else [4]), 32, 64), Float8Recipe(compute_dtype=FP32))
    gradients = []
    for hook in (torch.clone, lambda tensor: tensor):
        x = torch.ones(3, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(hook, hook):
            parameter = nn.Parameter(weight)
            output: Any = F.linear(x, parameter if index is None else parameter[index])
            output.square().sum().backward()
        gradients.append(cast(torch.Tensor, x.grad))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(3, 64), (64,), (0, 64)], ids=["tokens", "vector", "no tokens"])
@pytest.mark.parametrize("is_autocast", [False, True], ids=["plain", "autocast"])
def test_linear_with_a_gathered_weight_takes_the_inputs_of_a_plain_linear(
    shape: tuple[int, ...], is_autocast: bool
) -> None:
    torch.manual_seed(0)
    weight = gathered(torch.randn(32, 64), Float8Recipe(compute_dtype=FP32))
    x, bias = torch.randn(shape), torch.randn(32)
    outputs = []
    for matrix in (weight, weight + 0):
        parameter, leaf, bias_leaf = nn.Parameter(matrix), x.clone().requires_grad_(), bias.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            output: Any = F.linear(leaf, parameter, bias_leaf)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
        outputs.append((output, leaf.grad, parameter.grad, bias_leaf.grad))
    for one, other in zip(*outputs, strict=True):
        assert one is not None and other is not None
        assert one.dtype == other.dtype
        # The bias is added after the product is rounded.
        torch.testing.assert_close(one, other, rtol=2**-7 if is_autocast else 1e-5, atol=0.1 if is_autocast else 1e-5)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: nn.init.zeros_(w),
        lambda w: w.data.copy_(torch.zeros(32, 64)),
        lambda w: w[:8].t().fill_(0),
        lambda w: torch.add(torch.ones(32, 64), 1, out=w),
        lambda w: torch._foreach_mul_([w], 2),
    ],
    ids=["mul_", "init", "data", "view", "out", "foreach"],
)
def test_a_write_that_would_be_lost_is_refused(write: Callable[[torch.Tensor], object]) -> None:
    parameter = nn.Parameter(gathered(torch.ones(32, 64), Float8Recipe(compute_dtype=FP32)))
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="got .* writing to a weight of .* Write to the sharded"),
    ):
        write(parameter)
    assert torch.equal(parameter + 0, torch.ones(32, 64))


def test_a_read_of_a_weight_into_a_plain_tensor_is_no_write() -> None:
    weight, into = gathered(torch.ones(32, 64), Float8Recipe(compute_dtype=FP32)), torch.zeros(32, 64)
    assert torch.equal(into.copy_(weight), torch.ones(32, 64))


@pytest.mark.parametrize("layer", [nn.Linear, Float8Linear], ids=["dequantised", "float8"])
def test_a_second_derivative_is_an_error_and_never_without_the_weights_part(layer: type[nn.Linear]) -> None:
    linear, x = layer(64, 32, bias=False), torch.ones(16, 64, requires_grad=True)
    linear.recipe = Float8Recipe()  # type: ignore[assignment]
    linear.weight = nn.Parameter(gathered(torch.ones(32, 64), Float8Recipe(compute_dtype=FP32)))
    (gradient,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]
