"""What happens at a unit's boundaries: each hook is a few calls of the state's verbs.

    forward   pre_forward    unshard, gather the next unit ahead, cast inputs, watch them for the end of backward
              post_forward   reshard, watch the outputs for the beginning of backward, cast them
    backward  an output's gradient arrives     FSDPState.begin_backward
              all inputs' gradients are made   FSDPState.end_backward
              autograd is done                 Context's callback, for whatever the two did not reach

A compiler traces none of the forward hooks: its graph ends where one is.

Note [Recomputed forwards]. Activation checkpointing runs forward again inside backward. The unit is unsharded for its
backward by then, or must be now, and stays so until its backward ends: a recomputed forward unshards if needed, gathers
nothing ahead and does not reshard. It is recognised by autograd's running graph task, which both kinds of
checkpointing have.

Note [Units of several modules]. Their hooks run for each module. Every output is watched; of the inputs only those of
the first module to run, as whatever autograd does for the others comes before. A module that is called again while
others have not run is part of the same forward; one that is called after all have run begins another.

Note [Units that another reads]. A unit whose parameters another reads without calling its modules hands them over: its
hooks then drive the other, `state.unit`, and only inputs and outputs are still cast as its own policy says. Inside the
other's forward and backward they find everything unsharded and do nothing. Called anywhere else, such a module is a
forward of the other unit by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import _MultiHandle
from torch.utils.hooks import RemovableHandle

from lamella_engine._labels import label
from lamella_engine._state import FSDPState
from lamella_engine._tensors import hides_tensors, map_tensors, tensors_in

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
T = TypeVar("T")


def register_hooks(
    modules: Sequence[nn.Module], owners: Iterable[nn.Module], state: FSDPState
) -> tuple[RemovableHandle, RemovableHandle]:
    """Make the modules of a unit drive its state.

    Args:
        modules: The unit: one module as a rule.
        owners: They, and the modules below that hold its parameters: asked for a state dict, each must hold DTensors.
        state: What the unit's hooks call.

    Returns:
        What removes the hooks before forward, and those after it.

    Effects: registers forward hooks on the modules, and state-dict hooks on the owners.
    """

    def leave_nothing_but_shards(*_: object) -> None:
        state.unit.leave_nothing_but_shards()

    def adopt(*_: object) -> None:
        state.unit.adopt_replaced_shards(keep_parameters=True)

    state.module_ids = frozenset(id(module) for module in modules)
    # Partials of what a compiler skips: it would trace a closure around them, and refuse it with `fullgraph=True`.
    before, after = partial(pre_forward, state), partial(post_forward, state)
    handles = (
        _MultiHandle(tuple(each.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for each in modules)),
        _MultiHandle(tuple(each.register_forward_hook(after) for each in modules)),
    )
    for owner in state.modules_with_directions():
        owner.register_forward_pre_hook(partial(_pre_recompute, state), prepend=True)
    for owner in owners:
        owner.register_state_dict_pre_hook(leave_nothing_but_shards)  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_pre_hook(leave_nothing_but_shards)  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_post_hook(adopt)  # type: ignore[no-untyped-call]
    return handles


@_disable_dynamo
def pre_forward(state: FSDPState, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Unshard, and prepare the inputs."""
    unit = state.unit
    with label("pre_forward", unit.name):
        begins = unit.begin_forward(id(module), is_recomputed=_in_backward())
    if unit.context.is_forward_root(unit):
        args, kwargs = _move((args, kwargs), unit.context.device)
    args, kwargs = _cast((args, kwargs), state.input_dtype, "cast_forward_inputs")
    return _watch_inputs(unit, args, kwargs) if begins else (args, kwargs)


def _pre_recompute(state: FSDPState, *_: object) -> None:
    """Gather forward's payloads where a module inside the unit runs again in backward, unseen by the unit's own hooks.

    A compiled graph that recomputes calls no module: its recipe must make payloads that serve both directions.
    """
    if not torch.compiler.is_compiling() and _in_backward():
        state.unit.recompute_forward()


@_disable_dynamo
def post_forward(state: FSDPState, module: nn.Module, _: Args, output: object) -> object:
    """Reshard, and prepare the outputs."""
    unit = state.unit
    output = _cast(output, state.output_dtype, "cast_forward_outputs")
    with label("post_forward", unit.name):
        is_watched = _watch_outputs(unit, output)
        unit.end_forward(id(module), is_watched=is_watched, is_recomputed=_in_backward())
    return output


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _watch_outputs(state: FSDPState, output: object) -> bool:
    """Begin the unit's backward when the gradient of any output arrives.

    Returns:
        Whether backward will be seen. If all outputs are hidden in an object of an unknown kind it will not, and the
        unit must stay unsharded until autograd is done.
    """
    if not torch.is_grad_enabled():
        return True
    tensors = tensors_in(output)
    if torch._C._are_functorch_transforms_active():
        tensors = [_innermost(tensor) for tensor in tensors]
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    for tensor in outputs:
        tensor.register_hook(lambda _: state.begin_backward())  # type: ignore[no-untyped-call]
    return bool(outputs) or not hides_tensors(output)


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside `torch.func`'s wrappers, which autograd records: a batched wrapper requires no gradient."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _watch_inputs(state: FSDPState, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """End the unit's backward when the gradients of all inputs have been made."""
    if not torch.is_grad_enabled():
        return args, kwargs
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    is_transformed = torch._C._are_functorch_transforms_active()
    passes = _EndTransformedBackward if is_transformed else _EndBackward
    passed = iter(passes.apply(state.end_backward, *inputs))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: next(passed) if tensor.requires_grad else tensor, (args, kwargs))


class _EndBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs when nothing inside the unit is left to do."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.end = end
        ctx.set_materialize_grads(False)  # an input that the unit does not use gets no gradient, not one of zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.end()
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(tangent if tangent is None else tangent.view_as(tangent) for tangent in tangents)


class _EndTransformedBackward(_EndBackward):
    """The same in the form that transforms of `torch.func` ask for, whose calls cost the host more."""

    @staticmethod
    def forward(end: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.end = inputs[0]
        ctx.set_materialize_grads(False)


def _move(tree: T, device: torch.device) -> T:
    """Move the tensors of a nest. On CPU they are there already."""
    if device.type == "cpu":
        return tree
    with label("inputs_to_device"):
        return map_tensors(lambda tensor: tensor.to(device), tree)


def _cast(tree: T, dtype: torch.dtype | None, phase: str) -> T:
    """Cast the floating-point tensors of a nest; None leaves all as it is."""
    if dtype is None:
        return tree

    def is_other(tensor: torch.Tensor) -> bool:
        return tensor.dtype != dtype and tensor.is_floating_point()

    with label(phase):
        if not any(is_other(tensor) for tensor in tensors_in(tree)):
            return tree
        return map_tensors(lambda tensor: tensor.to(dtype) if is_other(tensor) else tensor, tree)
