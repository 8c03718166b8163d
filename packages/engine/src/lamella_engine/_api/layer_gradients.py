"""Gradients accumulated by fused layers, or delayed beyond their unit's backward: functions of a unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch.nn as nn

from lamella_engine._modules.state import FSDPState, find_state
from lamella_engine._parameters.group import ParameterGroup
from lamella_engine._parameters.sharded_parameter import ShardedParameter
from lamella_engine._unit.main_grads import main_grads_of
from lamella_engine._unit.unit import Unit


def delay_gradient(module: nn.Module, parameter: nn.Parameter) -> Callable[[], None]:
    """Let a parameter's gradient come after its unit's backward, from now on.

    For delayed weight gradients, such as Transformer Engine's with `delay_wgrad_compute`. When a backward of the unit
    ends, by a hook or by `reduce_gradients()`, the unit's gradients are reduced, and the parameters resharded, as soon
    as the last delayed gradient has come; the module holds the unsharded parameters until then. An optimizer of
    `torch.optim` that holds the parameter does not step before. A second call for the same parameter gives another
    callback; call one of the two.

    Args:
        module: The parameter's unit.
        parameter: A parameter of this unit, in either form.

    Returns:
        A callback for the layer: one call for each backward, on the stream that made the gradient, after the layer has
        put the gradient on the unsharded parameter's `.grad` (or into the parameter's `main_grad`), or has found no
        gradient. The last call has the effects of `reduce_gradients`. A second call for one backward is a RuntimeError.

    Raises:
        ValueError: The module is no unit, or the parameter is not this unit's.
        RuntimeError: The unit is in the middle of a step.
    """
    state = _resting_state_of(module)
    delayed = _find(state.unit, parameter)[1]
    if delayed not in state.unit.gradients.delayed.parameters:
        state.unit.gradients.delayed.add(delayed)
    ref = weakref.ref(state)  # weak: the state may hold the callback's holder, such as a parameter

    def note() -> None:
        if (state := ref()) is not None:
            state.acting.tree.step_end.note_gradient(state.acting.unit, delayed)

    return note


def set_main_grads(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Give some parameters of a unit a `main_grad`, to which fused layers add gradients.

    For layers that add to a given buffer, as Transformer Engine's do with `fuse_wgrad_accumulation`. Unsharded
    parameters then have the attributes of the layers' protocol: `main_grad` (a buffer of zeros in the reduce dtype,
    from the beginning of the unit's backward to the unit's reduction), `get_main_grad()`, `grad_added_to_main_grad`
    and `overwrite_main_grad` (False: layers add). Gradients are reduced from the buffer. Microbatches that are not
    reduced add to one buffer. `.grad` counts if the layer did not set `grad_added_to_main_grad`, and is a dummy if
    the layer did.

    Args:
        module: The unit; not for units below.
        parameters: Parameters of this unit, in either form; all parameters with a `main_grad` from now on. An empty
            list removes every `main_grad`.

    Raises:
        ValueError: The module is no unit, or a parameter is not this unit's.
        NotImplementedError: A parameter is a DTensor of other axes (tensor parallel), its class defines the gather, or
            its layer writes over the buffer (megatron-core's own linears with `gradient_accumulation_fusion`).
        RuntimeError: The unit is in the middle of a step.

    Effects: from the next backward on, allocates the buffer on the stream that the backward begins on, and zeroes the
        buffer.
    """
    unit = _resting_state_of(module).unit
    members = [_find(unit, parameter) for parameter in parameters]
    main_grads = main_grads_of(members, unit.parameters.context.streams)
    # Only now: a refusal above leaves the former buffers in place.
    for grads in unit.parameters.main_grads:
        grads.unmark()
    unit.parameters.main_grads = main_grads


def allocate_main_grads(module: nn.Module) -> None:
    """Allocate a unit's `main_grad` for a backward that no hook begins, unless the buffer is allocated.

    Only for layers that read the attribute: layers that call `get_main_grad()` need no help.

    Args:
        module: The unit; not for units below.

    Raises:
        ValueError: The module is no unit.

    Effects: allocates the buffer on the current stream, and zeroes the buffer.
    """
    for grads in _state_of(module).unit.parameters.main_grads:
        grads.offer()


def _state_of(module: nn.Module) -> FSDPState:
    state = find_state(module)
    if state is None:
        raise ValueError(f"Expected `module` to be a unit, got {type(module).__name__}. Call fully_shard on it.")
    return state


def _resting_state_of(module: nn.Module) -> FSDPState:
    state = _state_of(module)
    parameters, delayed = state.unit.parameters, state.unit.gradients.delayed
    if not parameters.context.is_resting or parameters.has_gradients or delayed.num_due:
        raise RuntimeError(
            f"Expected {parameters.title} between steps, got a pass under way or gradients that were not reduced. Call "
            "this after the step, or reset_iter_state() after an exception."
        )
    return state


def _find(unit: Unit, parameter: nn.Parameter) -> tuple[ParameterGroup, ShardedParameter]:
    """A unit's parameter and its group, from either form of the parameter."""
    for group in unit.parameters.groups:
        for member in group.parameters:
            if parameter is member.sharded or parameter is member.unsharded:
                return group, member
    raise ValueError(
        f"Expected a parameter of {unit.parameters.title}, got one of shape {tuple(parameter.shape)} that is not. Ask "
        "the unit that owns it, after it was sharded."
    )
