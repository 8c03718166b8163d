"""Weight gradients that Transformer Engine's layers add to buffers themselves, or compute after their backward."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lamella_engine import FSDPModule, delay_gradient, set_main_grads
from lamella_engine.extending import Unit, unit_of


def connect_fused_layers(model: nn.Module) -> None:
    """Give a sharded model's layers of Transformer Engine what their options ask for.

    With `fuse_wgrad_accumulation` a layer adds gradients of weights to `main_grad`, in the reduce dtype, and autograd
    gets a dummy: see `lamella_engine.set_main_grads`. With `delay_wgrad_compute` a layer computes gradients of weights
    and biases in `backward_dw()`, which the training loop calls after each backward; the layer's unit is reduced then:
    see `lamella_engine.delay_gradient`. Linears of megatron-core's own that fuse would write over `main_grad` instead
    of adding: their `gradient_accumulation_fusion` becomes False, and their gradients come as all others.

    `fully_shard_model` and `build_sharded_model` have done this already.

    Args:
        model: A model in units of `fully_shard`. Call once, before training.

    Raises:
        NotImplementedError: A weight of a layer that fuses is a DTensor of other axes, or of a class that defines the
            gather.
        RuntimeError: A unit is in the middle of a step.

    Effects: from the next backward on, allocates and zeroes a buffer for each unit with fusing weights; layers hold
        the callbacks.

    Source: Transformer Engine 2.11's linears; `ColumnParallelLinear` of megatron-core 0.19.2.
    """
    fused: dict[Unit | None, tuple[nn.Module, list[nn.Parameter]]] = {}
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        _, weights = fused.setdefault(unit_of(unit), (unit, []))  # several modules may be one unit
        for layer in _within(unit):
            if getattr(layer, "gradient_accumulation_fusion", False):
                layer.gradient_accumulation_fusion = False  # type: ignore[assignment]
            parameters = list(layer.parameters(recurse=False))
            if getattr(layer, "fuse_wgrad_accumulation", False):
                weights += [parameter for parameter in parameters if parameter.ndim == 2]  # no bias, no norm
            if (register := getattr(layer, "register_wgrad_accumulation_and_reduce_hooks", None)) is not None:
                for parameter in parameters:
                    if getattr(parameter, "skip_backward_post_hook", False):
                        register(delay_gradient(unit, parameter))
    for module, weights in fused.values():
        if weights:
            set_main_grads(module, weights)


def _within(unit: nn.Module) -> Iterator[nn.Module]:
    """The modules of a unit, without units below."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _within(child)
