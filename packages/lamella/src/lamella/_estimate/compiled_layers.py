"""Layers as torch's inductor compiles layers, on tensors without memory: saved tensors, and allocations.

AOTAutograd traces a layer, and the min-cut partitioner chooses the tensors to save, as under `torch.compile`.
The graphs run operator by operator. Chains of pointwise operators and reductions count as one kernel: a value without
further readers takes no memory.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from lamella._estimate.live_bytes import LiveBytes
from lamella._model.compilation import COMPILED_TYPES, is_long_to_compile
from lamella._model.spec import load_spec
from lamella._settings.config import Config

_ATEN: Final = torch.ops.aten
_VIEWS: Final = frozenset(
    (
        *(_ATEN.view.default, _ATEN.reshape.default, _ATEN.expand.default, _ATEN.permute.default, _ATEN.slice.Tensor),
        *(_ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.transpose.int, _ATEN.t.default, _ATEN.select.int),
    )
)
_FUSED: Final = frozenset(
    (
        *(torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default, _ATEN.clone.default),
        *(_ATEN.cat.default, _ATEN.mean.dim, _ATEN.sum.dim_IntList, _ATEN.full.default, _ATEN.slice_scatter.default),
    )
)
"""Operators of inductor's kernels beside those that torch tags as pointwise."""


def compiles(config: Config) -> bool:
    """Return whether a run compiles layers, on a machine with the compilers."""
    if config.parallel.compile is not None:
        return config.parallel.compile
    model_type = load_spec(config.model.name, config.data.vocab_size).model_type
    return is_long_to_compile(config, model_type, config.data.packing)


def is_estimated_compiled(config: Config) -> bool:
    """Return whether a run's layers are estimated as compiled: without options on the layers' operators."""
    parallel = config.parallel
    is_changed = parallel.recompute != "no" or parallel.float8 != "no" or parallel.offload_activations
    is_replaced = config.model.kernels != "none" or config.model.lora_rank is not None
    if is_changed or is_replaced or not compiles(config):
        return False
    return load_spec(config.model.name, config.data.vocab_size).model_type in COMPILED_TYPES


def compile_layers(layers: Sequence[nn.Module], live: LiveBytes) -> None:
    """Let layers run the graphs of compiled layers.

    Args:
        layers: The layers, in memory; equal layers share their graphs.
        live: Counts the graphs' memory.
    """
    functions: dict[Any, Callable[..., Any]] = {}
    for layer in layers:
        layer.forward = _Graphs(layer, live, functions)


class _Graphs:
    """A layer's forward, as graphs.

    Args:
        layer: The layer.
        live: Counts the graphs' memory.
        functions: The graphs of equal layers, by the shapes of weights and arguments.
    """

    def __init__(self, layer: nn.Module, live: LiveBytes, functions: dict[Any, Callable[..., Any]]) -> None:
        self._layer, self._live, self._functions = layer, live, functions
        self._forward = layer.forward

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        leaves, spec = tree_flatten((arguments, options))
        weights = dict(chain(self._layer.named_parameters(), self._layer.named_buffers()))
        tensors = [*weights.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
        constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
        key = (*weights, shapes, str(constants), torch.is_grad_enabled(), getattr(self._layer, "attention_type", None))
        if key not in self._functions:
            places = [isinstance(leaf, torch.Tensor) for leaf in leaves]
            self._functions[key] = self._traced([*weights], constants, places, spec)
            with _disable_current_modes():  # under further modes, torch's own could not trace
                # Tensors like the arguments: a graph refers to the tensors of the first call.
                self._functions[key](*(torch.empty_like(t).requires_grad_(t.requires_grad) for t in tensors))
        return self._functions[key](*tensors)

    def _traced(self, names: Sequence[str], constants: Sequence[Any], places: Sequence[bool], spec: Any) -> Any:
        # Here, since inductor takes seconds to import.
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        def layer_of(*tensors: torch.Tensor) -> Any:
            weights, inputs = dict(zip(names, tensors, strict=False)), iter(tensors[len(names) :])
            filled = [
                next(inputs) if is_tensor else constant for is_tensor, constant in zip(places, constants, strict=True)
            ]
            arguments, options = tree_unflatten(filled, spec)
            with _reparametrize_module(self._layer, weights):
                return self._forward(*arguments, **options)

        compiler: Any = self._compiled  # torch's protocol names the arguments
        return aot_function(
            layer_of,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def _compiled(self, graph: fx.GraphModule, _: Any) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        # An interpreter for each run: an interpreter holds its outputs.
        return make_boxed_func(lambda *arguments: _Kernels(graph, self._live).run(*arguments))


class _Kernels(fx.Interpreter):
    """Runs a graph; values inside a kernel do not count."""

    def __init__(self, graph: fx.GraphModule, live: LiveBytes) -> None:
        super().__init__(graph)
        self._live = live

    def run_node(self, node: fx.Node) -> Any:
        if _is_fused(node) and not _is_written(node):
            with self._live.nothing_counts():
                return super().run_node(node)
        return super().run_node(node)


def _is_fused(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in _FUSED


def _is_written(node: fx.Node) -> bool:
    """Whether a kernel writes a value, for a reader outside of kernels."""
    return any(_is_written(user) if user.target in _VIEWS else not _is_fused(user) for user in node.users)
