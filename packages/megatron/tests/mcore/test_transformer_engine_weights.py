"""Layers of Transformer Engine with quantised weights have in units the bytes and gradients that they have without."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lamella_engine import FSDPModule, MixedPrecisionPolicy, fully_shard
from lamella_precision.te import replace_quantized_weights
from lamella_testing import run_ranks
from lamella_testing.te_weights import in_mxfp8

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of Transformer Engine

# Rows of each of a grouped layer's products are a multiple of 128, as blocks of activations need.
WIDTH, ROWS, NUM_GEMMS = 256, 512, 4
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_dtype=torch.float32)
Gradients = dict[str, torch.Tensor]


class _Grouped(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = _te().GroupedLinear(NUM_GEMMS, WIDTH, WIDTH, **options)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        output: torch.Tensor = self.linear(x, [len(x) // NUM_GEMMS] * NUM_GEMMS, **options)
        return output


class _Stack(nn.Sequential):
    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        recompute: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        for layer in self:
            x = layer(x, **options) if recompute is None else recompute(layer, x)
        return x


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **options: _te().Linear(WIDTH, WIDTH, **options),
    "LayerNormLinear": lambda **options: _te().LayerNormLinear(WIDTH, WIDTH, **options),
    "LayerNormMLP": lambda **options: _te().LayerNormMLP(WIDTH, 2 * WIDTH, **options),
    "GroupedLinear": _Grouped,
}
RECIPES: dict[str, Callable[[], Any]] = {
    "current": lambda: _recipes().Float8CurrentScaling(),
    "delayed": lambda: _recipes().DelayedScaling(amax_history_len=4),
    "squares": lambda: _recipes().Float8BlockScaling(),
}


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def _recipes() -> Any:
    return importlib.import_module("transformer_engine.common.recipe")


def _make(kind: str, recipe: str, *, preserves: bool = True) -> _Stack:
    """Two layers with quantised weights, the same on every rank."""
    torch.manual_seed(0)
    with _te().quantized_model_init(enabled=True, recipe=RECIPES[recipe](), preserve_high_precision_init_val=preserves):
        return _Stack(*(LAYERS[kind](params_dtype=torch.bfloat16, device="cuda") for _ in range(2)))


def _shard(model: _Stack) -> _Stack:
    policy = replace(POLICY, recipe=replace_quantized_weights(model))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def _run(model: nn.Module, recipe: str, x: torch.Tensor, **options: Any) -> torch.Tensor:
    with _te().autocast(enabled=True, recipe=RECIPES[recipe]()):
        output: torch.Tensor = model(x, **options)
        return output


def _backward(model: _Stack, recipe: str, x: torch.Tensor, **options: Any) -> None:
    # A sum: delayed scaling has no scale of gradients yet, and those of a mean would be zeros in float8.
    _run(model, recipe, x, **options).float().square().sum().backward()  # type: ignore[no-untyped-call]


def _microbatches(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator).to("cuda", torch.bfloat16) for _ in range(num)]


def _quantised(model: nn.Module) -> dict[str, Any]:
    """The parameters of Transformer Engine's classes, by name."""
    return {name: weight for name, weight in model.named_parameters() if hasattr(weight, "_quantizer")}


def _row_bytes(weight: Any) -> dict[str, torch.Tensor]:
    """Data and scales for forward, without the scales' padding."""
    metadata = weight.get_metadata()
    if "data" in metadata:
        return {"data": metadata["data"], "scale": metadata["fp8_scale_inv"].view(1)}
    columns = -(-weight.shape[1] // 128)
    return {"data": metadata["rowwise_data"], "scale": metadata["rowwise_scale_inv"][:, :columns]}


@contextmanager
def _unsharded(model: _Stack) -> Iterator[None]:
    for layer in model:
        assert isinstance(layer, FSDPModule)
        layer.unshard()
    yield
    for layer in model:
        assert isinstance(layer, FSDPModule)
        layer.reshard()


def _assert_same_bytes(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    assert weights.keys() == expected.keys() and weights
    for name, weight in weights.items():
        assert type(weight) is type(expected[name])
        for part, got in _row_bytes(weight).items():
            assert torch.equal(got, _row_bytes(expected[name])[part]), f"{name}: {part}"


def _copy_bytes(weights: dict[str, Any], into: dict[str, Any]) -> None:
    for name, weight in weights.items():
        # The copy for backward is dropped first: the layer makes it anew from the copied data.
        into[name].update_usage(rowwise_usage=True, columnwise_usage=False)
        for part, got in _row_bytes(weight).items():
            _row_bytes(into[name])[part].copy_(got)


def _gradients(model: nn.Module) -> Gradients:
    """Whole gradients in fp32."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        assert gradient is not None, name
        gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).float()
        parameter.grad = None
    return gradients


def _assert_near(gradients: Gradients, expected: Gradients, limit: float) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        distance = (gradient - expected[name]).norm() / expected[name].norm()
        assert distance < limit, f"{name}: {distance:.2e}"


@pytest.mark.gpu1
@pytest.mark.parametrize("recipe", ["current", "squares"])
@pytest.mark.parametrize("kind", LAYERS)
def test_gathered_bytes_are_those_of_the_layers_own_quantisation(kind: str, recipe: str) -> None:
    def check() -> None:
        _assert_bytes(kind, recipe)

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu2
@pytest.mark.parametrize("recipe", ["current", "squares"])
def test_two_ranks_gather_the_bytes_of_the_whole(recipe: str) -> None:
    def check() -> None:
        _assert_bytes("LayerNormMLP", recipe)

    run_ranks(check, 2, device="cuda")


def _assert_bytes(kind: str, recipe: str) -> None:
    model, reference = _shard(_make(kind, recipe)), _make(kind, recipe)
    with _unsharded(model):
        _assert_same_bytes(_quantised(model), _quantised(reference))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    _backward(model, recipe, _microbatches(1)[0])
    optimizer.step()
    main = {name: cast(DTensor, weight).full_tensor() for name, weight in model.named_parameters()}
    with torch.no_grad():
        expected = {name: weight._quantizer.copy()(main[name]) for name, weight in _quantised(reference).items()}
    with _unsharded(model):
        _assert_same_bytes(_quantised(model), expected)


@pytest.mark.gpu1
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_quantised_units_are_those_of_plain_quantised_layers(kind: str, recipe: str) -> None:
    def check() -> None:
        _assert_gradients(kind, recipe)

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu2
@pytest.mark.parametrize("recipe", ["current", "squares"])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_two_ranks_are_the_mean_of_both_microbatches(kind: str, recipe: str) -> None:
    def check() -> None:
        _assert_gradients(kind, recipe)

    run_ranks(check, 2, device="cuda")


def _assert_gradients(kind: str, recipe: str) -> None:
    batches = _microbatches(dist.get_world_size())
    model, reference = _shard(_make(kind, recipe)), _make(kind, recipe)
    with _unsharded(model):
        _copy_bytes(_quantised(model), _quantised(reference))
    expected: Gradients = {}
    for x in batches:
        _backward(reference, recipe, x)
        for name, gradient in _gradients(reference).items():
            expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient / len(batches)
    # A second pass over the same weights; but delayed scales of activations differ in the second.
    for _ in range(1 if recipe == "delayed" else 2):
        _backward(model, recipe, batches[dist.get_rank()])
        _assert_near(_gradients(model), expected, 1e-3)


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_read_gathered_weights_without_the_classes_python(kind: str) -> None:
    def check() -> None:
        read: list[object] = []
        base = _te().QuantizedTensor
        class_function = base.__dict__["__torch_function__"].__func__

        def noted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
            read.extend(argument for argument in args if isinstance(argument, nn.Parameter))
            return class_function(cls, func, types, args, kwargs)

        model, alone = _shard(_make(kind, "current")), _make(kind, "current")
        with patch.object(base, "__torch_function__", classmethod(noted)):
            _backward(model, "current", _microbatches(1)[0])
            assert not read
            _backward(alone, "current", _microbatches(1)[0])
            assert read

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", LAYERS)
def test_microbatches_with_reused_or_requantised_weights_have_close_gradients(kind: str) -> None:
    def check() -> None:
        batches = _microbatches(2)
        gradients: list[Gradients] = []
        for is_told in (False, True):
            model = _shard(_make(kind, "current"))
            for i, x in enumerate(batches):
                _backward(model, "current", x, is_first_microbatch=i == 0 if is_told else None)
            gradients.append(_gradients(model))
        _assert_near(gradients[0], gradients[1], 1e-3)

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu1
@pytest.mark.parametrize("library", ["torch", "te"])
@pytest.mark.parametrize("recipe", ["current", "squares"])
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_recomputed_layers_have_the_same_gradients(kind: str, recipe: str, library: str) -> None:
    def check() -> None:
        (x,) = _microbatches(1)

        def recompute(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if library == "te":
                return cast(torch.Tensor, _te().checkpoint(layer, x, use_reentrant=False))
            # torch repeats a forward without Transformer Engine's context, so that the context is entered inside.
            return cast(torch.Tensor, checkpoint(partial(_run, layer, recipe), x, use_reentrant=False))

        gradients: list[Gradients] = []
        for options in ({}, {"recompute": recompute}):
            model = _shard(_make(kind, recipe))
            _backward(model, recipe, x, **options)
            gradients.append(_gradients(model))
        _assert_near(gradients[0], gradients[1], 1e-3)

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu1
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_are_near_those_of_layers_in_bf16_with_dequantised_weights(recipe: str) -> None:
    def check() -> None:
        (x,) = _microbatches(1)
        model = _shard(_make("LayerNormMLP", recipe))
        torch.manual_seed(0)
        plain = _Stack(*(LAYERS["LayerNormMLP"](params_dtype=torch.bfloat16, device="cuda") for _ in range(2)))
        with _unsharded(model), torch.no_grad():
            weights = dict(plain.named_parameters())
            for name, weight in _quantised(model).items():
                weights[name].copy_(weight.dequantize())
        with torch.no_grad():
            expected = plain(x).float()
            for _ in range(3):  # delayed scales of activations are of passes before
                output = _run(model, recipe, x).float()
        # Two products with operands of 4 significant bits, in each of two layers.
        assert (output - expected).norm() / expected.norm() < 0.1

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu1
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("preserves", [True, False])
def test_layers_train_and_keep_no_copy_for_backward(recipe: str, preserves: bool) -> None:
    def check() -> None:
        model = _shard(_make("LayerNormMLP", recipe, preserves=preserves))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
        weights_in_forward: dict[str, Any] = {}
        for name, layer in model.named_children():
            layer.register_forward_pre_hook(
                lambda module, _, name=name: weights_in_forward.update(
                    {f"{name}.{key}": each for key, each in _quantised(module).items()}
                )
            )
        (x,) = _microbatches(1)
        losses, nbytes = [], []
        for _ in range(8):
            loss = _run(model, recipe, x).float().square().mean()
            assert all(weight.get_usages()["rowwise"] for weight in weights_in_forward.values())
            assert not any(weight.get_usages()["columnwise"] for weight in weights_in_forward.values())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            assert len(weights_in_forward) == 4 and not any(
                weight.get_usages()["columnwise"] for weight in weights_in_forward.values()
            )
            losses.append(loss.item())
            nbytes.append(torch.cuda.memory_allocated())
        assert losses[-1] < losses[0]
        assert nbytes[-1] == nbytes[2]

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu1
@pytest.mark.parametrize(("recipe", "policy"), [("squares", None), ("current", POLICY)])
def test_weights_that_keep_no_format_of_their_own_in_shards_are_refused(
    recipe: str, policy: MixedPrecisionPolicy | None
) -> None:
    def check() -> None:
        model = _make("Linear", recipe)
        with pytest.raises(TypeError, match=r"'weight' .*Float8.*Tensor.*replace_quantized_weights"):
            fully_shard(model[0], mp_policy=policy or MixedPrecisionPolicy())

    run_ranks(check, 1, device="cuda")


def _in_mxfp8(model: _Stack) -> _Stack:
    """Weights in MXFP8 with the values of before; not quantised, which takes a GPU with MXFP8."""
    for layer in cast(Any, model):
        values = layer.weight.detach().cpu()
        weight: Any = nn.Parameter(_mxfp8().make_empty(values.shape, dtype=torch.bfloat16, device="cuda"))
        weight.get_high_precision_init_val = lambda values=values: values
        layer.weight = weight
    return model


def _mxfp8() -> Any:
    kind = importlib.import_module("transformer_engine.pytorch.tensor.mxfp8_tensor").MXFP8Quantizer
    return kind(importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3)


def _mxfp8_bytes(weight: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in weight.get_metadata().items() if isinstance(tensor, torch.Tensor)}


def _assert_mxfp8_bytes(quantised: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Gather MXFP8 weights before and after a step, and compare all bytes of their class."""
    torch.manual_seed(0)
    linear = partial(_te().Linear, WIDTH, 2 * WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda")
    model = _shard(_in_mxfp8(_Stack(linear(), linear())))
    for _ in range(2):
        main = {name: cast(DTensor, weight).full_tensor() for name, weight in model.named_parameters()}
        with _unsharded(model):
            bytes_by_weight = {name: _mxfp8_bytes(weight) for name, weight in _quantised(model).items()}
        assert bytes_by_weight.keys() == main.keys()
        for name, got in bytes_by_weight.items():
            expected = quantised(main[name])
            assert got.keys() == expected.keys()
            for part, content in got.items():
                assert torch.equal(content, expected[part]), f"{name}: {part}"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.7)


def _by_exact_arithmetic(values: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = (in_mxfp8(values.cpu(), by_columns=by_columns) for by_columns in (False, True))
    named = {"rowwise_data": rows[0], "rowwise_scale_inv": rows[1]}
    named |= {"columnwise_data": columns[0], "columnwise_scale_inv": columns[1]}
    return {name: tensor.view(torch.uint8) for name, tensor in named.items()}


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.gpu1), pytest.param(2, marks=pytest.mark.gpu2)]
)
def test_mxfp8_weights_are_gathered_into_their_class_to_the_bytes_of_the_whole(num_ranks: int) -> None:
    def check() -> None:
        _assert_mxfp8_bytes(_by_exact_arithmetic)

    run_ranks(check, num_ranks, device="cuda")


def _by_transformer_engine(values: torch.Tensor) -> dict[str, torch.Tensor]:
    quantizer = _mxfp8()
    quantised = quantizer.make_empty(values.shape, device="cuda")
    for tensor in quantised.get_metadata().values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(1)
    quantizer.update_quantized(values, quantised)
    return _mxfp8_bytes(quantised)


def _has_mxfp8_kernels() -> bool:
    """Whether Transformer Engine quantises on this GPU: below compute capability 10 it fails, or writes nothing."""
    try:
        tensors = _by_transformer_engine(torch.randn(WIDTH, WIDTH, device="cuda"))
    except RuntimeError:
        assert torch.cuda.get_device_capability() < (10, 0)
        return False
    return not all((tensor == 1).all() for tensor in tensors.values())


@pytest.mark.gpu1
def test_gathered_mxfp8_bytes_are_those_of_transformer_engines_quantisation() -> None:
    def check() -> bool:
        if has_kernels := _has_mxfp8_kernels():
            _assert_mxfp8_bytes(_by_transformer_engine)
        return has_kernels

    if not all(run_ranks(check, 1, device="cuda")):
        pytest.skip("Transformer Engine has no MXFP8 kernels for this GPU: they ask for compute capability 10.")
