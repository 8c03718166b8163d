"""What units save for backward: recomputed, or kept in the host's memory."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial, update_wrapper, wraps
from typing import Any, Final, Literal, NamedTuple, cast

import torch
import torch.nn.attention.varlen  # The operator of attention within documents is defined there.
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lamella._settings.options import ConfigError
from lamella._settings.sections import ParallelConfig
from lamella_engine.extending import dtensor_over, local_of

_LEFT_MATRIX: Final = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten._scaled_mm.default: 0,
    torch.ops.aten._grouped_mm.default: 0,
}
"""Matrix product -> the argument whose last dimension is the inner one."""

_ATTENTION: Final = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)

_SMALLEST_INNER_SIZE: Final = 128
"""The inner size from which a product's output is saved. Below about 200 an H100 writes the output longer than it
multiplies (3.3 TB/s, 700 TFLOPS), so that the product's second run takes the time of an addition. The output is as
large as another product's: with the outputs of adapters' second matrices, a layer saves twice a plain layer's bytes."""


def check_recompute(units: Sequence[nn.Module], parallel: ParallelConfig) -> None:
    """Refuse --recompute-layers of more layers than a model has.

    Raises:
        ConfigError: Names both numbers.
    """
    if parallel.recompute_layers is not None and parallel.recompute_layers > len(units):
        raise ConfigError(
            f"Expected --recompute-layers of at most {len(units)}, the layers of this model, got "
            f"{parallel.recompute_layers}. Leave it out to run all layers again."
        )


def recompute(
    units: Sequence[nn.Module], kind: Literal["full", "selective"], num_recomputed: int | None = None
) -> None:
    """Let units run their forward again in backward.

    Args:
        units: The units in the order of forward. Changed in place, before `fully_shard`: a unit is gathered before its
            forward runs again.
        kind: "full" saves the inputs of a unit alone; "selective" the outputs of large matrix products and of
            attention too, most of a layer's time.
        num_recomputed: Number of units that run again; None for all. The first ones: their backward comes last, and
            when it makes their tensors again, the other units' tensors are gone.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        # Else torch 2.15 warns under --offload-activations, and a later one moves the saved outputs to the host too.
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
            options["respect_saved_tensors_hooks"] = False
    for unit in units[:num_recomputed]:
        unit.forward = RecomputedForward(unit.forward, options)


class RecomputedForward:
    """The forward of a unit that runs again in backward.

    Args:
        forward: The unit's forward.
        options: Arguments of `torch.utils.checkpoint.checkpoint`.
    """

    def __init__(self, forward: Callable[..., Any], options: dict[str, Any]) -> None:
        self._forward, self._options = forward, options
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, **self._options, **kwargs)

    @property
    def saves_inputs_alone(self) -> bool:
        """Whether backward runs all of the forward again; else the outputs of some operators are saved."""
        return "context_fn" not in self._options

    def compile(self, **options: Any) -> None:
        """Compile the forward by `torch.compile`, whose arguments these are; the checkpoint around it stays eager."""
        self._forward = torch.compile(self._forward, **options)


def _policy(_: object, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    index = _LEFT_MATRIX.get(operator)
    is_saved = operator in _ATTENTION if index is None else args[index].shape[-1] >= _SMALLEST_INNER_SIZE
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def offload_activations(units: Sequence[nn.Module], host: saved_tensors_hooks | None = None) -> None:
    """Let each unit save tensors for backward in host memory, pinned for CUDA; of recomputed units, the inputs.

    Args:
        units: Changed in place, after `recompute` and before `fully_shard`.
        host: Hooks that move a tensor to the host's memory and back; None for torch's.

    Effects: the copies are on the current stream, and the host waits for each.
    """
    for unit in units:
        unit.forward = _offloaded(unit, unit.forward, host)


def _offloaded(unit: nn.Module, forward: Callable[..., Any], host: saved_tensors_hooks | None) -> Callable[..., Any]:
    @wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with _on_host(unit, host or save_on_cpu(pin_memory=torch.cuda.is_available())):
            return forward(*args, **kwargs)

    return offloaded


class _OnHost(NamedTuple):
    """A saved tensor in the host's memory, by the hooks' own form, and the placements of a DTensor."""

    content: Any
    spec: Any


def _on_host(unit: nn.Module, host: saved_tensors_hooks) -> AbstractContextManager[object]:
    """Hooks that save tensors in host memory, but weights: the engine frees and gathers those itself."""
    # Spread experts are DTensors also while they are unsharded.
    weights = {local_of(parameter).untyped_storage()._cdata for parameter in unit.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        local = local_of(tensor)
        if type(local) not in (torch.Tensor, FakeTensor) or local.untyped_storage()._cdata in weights:
            return tensor
        # Layers cut by tensor parallelism save their inputs as DTensors.
        return _OnHost(host.pack_hook(local), tensor._spec if isinstance(tensor, DTensor) else None)

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _OnHost):
            return cast(torch.Tensor, packed)
        local = host.unpack_hook(packed.content)
        return local if packed.spec is None else dtensor_over(local, packed.spec)

    return saved_tensors_hooks(pack, unpack)
