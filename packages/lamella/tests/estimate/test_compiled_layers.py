"""Graphs of an estimate's compiled layers save what torch's own compilation saves, and compute what layers compute."""

from typing import Any, cast

import pytest
import torch
from conftest import TINY_LLAMA
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lamella._estimate.compiled_layers import compile_layers
from lamella._estimate.live_bytes import LiveBytes


@pytest.fixture
def inputs() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 16, _config().hidden_size, requires_grad=True)
    positions = LlamaRotaryEmbedding(_config())(hidden, torch.arange(16)[None])
    return hidden, positions


def _config() -> LlamaConfig:
    config = LlamaConfig.from_dict(dict(TINY_LLAMA))
    config._attn_implementation = "sdpa"
    return config


def _layers(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [LlamaDecoderLayer(_config(), index) for index in range(count)]


def _outputs(layer: nn.Module, inputs: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    output = layer(inputs[0], position_embeddings=inputs[1])
    return cast(torch.Tensor, output[0] if isinstance(output, tuple) else output)


def _saved_nbytes(output: torch.Tensor, layer: nn.Module) -> int:
    """Return the bytes that a graph's backward holds beside the layer's weights."""
    function: Any = output.grad_fn
    while "CompiledFunction" not in type(function).__name__:
        function = function.next_functions[0][0]
    weights = {weight.untyped_storage()._cdata for weight in layer.parameters()}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in function.saved_tensors}
    return sum(nbytes for key, nbytes in storages.items() if key not in weights)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # in torch's own imports
def test_compiled_layer_graphs_save_torchs_bytes_and_compute_eager_outputs(
    inputs: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    eager, graphs, compiled = (_layers(2) for _ in range(3))
    compile_layers(graphs, LiveBytes())
    compiled[1].compile(backend="aot_eager_decomp_partition", dynamic=False)
    outputs = [_outputs(layers[1], inputs) for layers in (eager, graphs, compiled)]
    assert _saved_nbytes(outputs[1], graphs[1]) == _saved_nbytes(outputs[2], compiled[1])
    torch.testing.assert_close(outputs[1], outputs[0])
    for layers, output in ((eager, outputs[0]), (graphs, outputs[1])):
        output.square().sum().backward()  # type: ignore[no-untyped-call]
        assert all(weight.grad is None for weight in layers[0].parameters())
    for expected, weight in zip(eager[1].parameters(), graphs[1].parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad)


def test_equal_layers_share_their_graphs(inputs: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]) -> None:
    eager, graphs = _layers(2), _layers(2)
    compile_layers(graphs, LiveBytes())
    for first, second in zip(eager, graphs, strict=True):
        torch.testing.assert_close(_outputs(second, inputs), _outputs(first, inputs))


def test_values_inside_kernels_take_no_memory(inputs: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]) -> None:
    births = []
    for is_compiled in (False, True):
        live, (layer,) = LiveBytes(), _layers(1)
        if is_compiled:
            compile_layers([layer], live)
        with live:
            _outputs(layer, inputs)
        births.append(sum(max(0, change.nbytes) for change in live.log.changes))
    assert births[1] < 0.7 * births[0]
