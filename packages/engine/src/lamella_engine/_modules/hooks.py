"""The hooks at a unit's boundaries: each is a few calls of the state's verbs.

    forward   pre_forward    unshard, gather the next unit ahead, cast inputs, watch them for the end of backward
              post_forward   reshard, watch the outputs for the beginning of backward, cast them
    backward  an output's gradient arrives     FSDPState.begin_backward
              all inputs' gradients are made   FSDPState.end_backward
              autograd is done                 the tree's callback, for units that neither hook reached

A compiler traces none of the forward hooks: its graph ends at a hook.

Note [Recomputed forwards]. Activation checkpointing runs forward again inside backward. The unit stays unsharded until
its backward ends: a recomputed forward unshards if needed, prefetches nothing and does not reshard. Both kinds of
checkpointing recompute inside a graph task of autograd, which tells a recomputed forward from a first one.

Note [Graphs of backwards]. A backward with `create_graph=True` records a graph of itself, which holds views of weights
that are freed when the unit's backward ends. A later walk through this graph comes to the unit by the gradients of the
unit's inputs: a hook on these gradients gathers again. The walk ends the unit with its own pass, or sooner, where it
goes on through the unit's forward.

Note [Units of several modules]. Hooks run for each module of the unit. Every output is watched, but only the inputs of
the first module to run: autograd's work for the other modules comes before. A module called again while other modules
have not run is part of the same forward; a call after all modules have run begins a new forward.

Note [Calls inside a call]. A unit's module may call itself, or be called by a module that it calls. The inner call is
part of the forward under way: it computes with the weights gathered for the outer call; its end neither reshards nor
ends a pass. Its inputs are not watched, since their gradients are made before the outer call's backward has ended. Nor
are they where a reentrant checkpoint recomputes the inner call, outside of the outer call's frames: the unit is in its
backward then. In units of several modules, and in compiled callers, such a call is not told from a new forward.

Note [Containers that forward writes into]. Forward gets a copy of a list, a dict or another container in which a tensor
was moved, cast or watched. After forward the caller's container gets the items that forward put into the copy, which
are watched as outputs are, and loses the items that forward removed.

Note [Units that another reads]. An outer unit that reads an inner unit's parameters without calling the inner modules
takes the parameters over. The inner hooks then drive the outer unit, `state.acting`; only casts of inputs and outputs
follow the inner policy. Inside the outer unit's forward and backward the hooks find everything unsharded and do
nothing. Called anywhere else, an inner module is a forward of the outer unit by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn as nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import _MultiHandle
from torch.utils.hooks import RemovableHandle

from lamella_engine._common.labels import label
from lamella_engine._common.tensors import Copied, hides_tensors, map_tensors, tensors_in, write_back
from lamella_engine._modules.state import FSDPState
from lamella_engine._parameters.registrations import registrations
from lamella_engine._scaling.events import WeightsChange

if TYPE_CHECKING:
    from lamella_engine._unit.unit import Unit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
T = TypeVar("T")

_Creation = torch._C._autograd.CreationMeta
_creation_of = torch._C._autograd._get_creation_meta
_graph_task = torch._C._current_graph_task_id
_NO_GRAPH_TASK = -1  # autograd is not running


def register_hooks(
    modules: Sequence[nn.Module], owners: Iterable[nn.Module], state: FSDPState
) -> tuple[RemovableHandle, RemovableHandle]:
    """Make the modules of a unit drive its state.

    Args:
        modules: The unit's modules: one module as a rule.
        owners: The modules, and all below outside inner units: asked for a state dict, each must hold DTensors.
        state: The unit's state, which the hooks call.

    Returns:
        Handles that remove the hooks before forward, and the hooks after forward.

    Effects: registers forward hooks on the modules, and state-dict hooks on the owners.
    """

    def bring_to_rest(*_: object) -> None:
        acting = state.acting
        acting.tree.bring_to_rest(acting.unit)

    def prepare_load(owner: nn.Module, entries: Mapping[str, object], prefix: str, *_: object) -> None:
        # Before anything is written: values loaded into unsharded forms would be lost at the next gather.
        bring_to_rest()
        replaced = {id(parameter) for name, parameter in owner._parameters.items() if prefix + name in entries}
        unit = state.acting.unit
        for listener in unit.parameters.listeners:
            listener.weights_changed(unit.weights, WeightsChange.REPLACED, replaced)

    def adopt(*_: object) -> None:
        # `assign=True` has put other Parameters into the modules: their values move to the group's buffer, and the
        # Parameters that an optimizer holds go back in place.
        state.acting.unit.weights.adopt_replaced_shards(keep_parameters=True)

    state.unit.parameters.module_ids = frozenset(id(module) for module in modules)
    # Partials of functions that a compiler skips: a closure would be traced, and refused with `fullgraph=True`.
    # Modules hold the state by these hooks, so the state refers to modules weakly or by id.
    before, after = partial(pre_forward, state), partial(post_forward, state)
    # Before the user's hooks, which may read parameters.
    handles = (
        _MultiHandle(
            tuple(hooked.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for hooked in modules)
        ),
        _MultiHandle(tuple(hooked.register_forward_hook(after) for hooked in modules)),
    )
    for owner in state.unit.parameters.modules_with_directions():
        owner.register_forward_pre_hook(partial(_pre_recompute, state), prepend=True)
    for owner in owners:
        owner.register_state_dict_pre_hook(bring_to_rest)  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_pre_hook(prepare_load)  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_post_hook(adopt)  # type: ignore[no-untyped-call]
    return handles


@_disable_dynamo
def pre_forward(state: FSDPState, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Unshard, and prepare the inputs."""
    acting = state.acting
    unit, tree = acting.unit, acting.tree
    if registrations and tree.context.is_resting:
        acting.adopt_late_units()
    with label("pre_forward", unit.parameters.name):
        module_id = id(module)
        if module_id in unit.awaited and _is_inner_call(unit, module):
            unit.has_inner_call, begins = True, False
        else:
            begins = tree.begin_forward(unit, module_id, is_recomputed=_graph_task() != _NO_GRAPH_TASK)
    inputs = (*args, *kwargs.values())
    copied: list[Copied] = []
    # Once a pass: later inputs are outputs of modules on the device, and the first may come from the host.
    if tree.is_forward_root(unit):
        inputs = _move(inputs, tree.streams.device, copied)
    inputs = _cast(inputs, state.input_dtype, "cast_forward_inputs", copied)
    # Recomputed in the middle of the unit's backward: inputs of another call end it, Note [Calls inside a call].
    if begins and not (unit.is_in_backward and len(unit.parameters.module_ids) == 1):
        inputs = _watch_inputs(acting, inputs, copied)
    args, kwargs = inputs[: len(args)], dict(zip(kwargs, inputs[len(args) :], strict=True))
    if copied:
        args = noting = _ArgsOfCopies(args)
        noting.copied = copied
    return args, kwargs


class _ArgsOfCopies(tuple[Any, ...]):
    """The arguments of one call, for which containers were copied: Note [Containers that forward writes into].

    With the call's arguments the copies go, also where an exception ends the call.
    """

    copied: Sequence[Copied]


def _pre_recompute(state: FSDPState, *_: object) -> None:
    """Gather forward's payloads for a module inside the unit that runs again in backward, without the unit's hooks.

    A compiled graph that recomputes calls no module: the recipe must make payloads for both directions.
    """
    if not torch.compiler.is_compiling() and _graph_task() != _NO_GRAPH_TASK:
        state.acting.unit.recompute_forward()


@_disable_dynamo
def post_forward(state: FSDPState, module: nn.Module, args: Args, output: object) -> object:
    """Reshard, and prepare the outputs."""
    acting = state.acting
    unit = acting.unit
    written = write_back(args.copied) if isinstance(args, _ArgsOfCopies) else None
    output = _cast(output, state.output_dtype, "cast_forward_outputs")
    with label("post_forward", unit.parameters.name):
        is_watched = _watch_outputs(acting, (output, written) if written else output)
        if is_watched is None:  # else kept tensors would meet resharded parameters before any hook runs
            output = map_tensors(lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, output)
            is_watched = bool(_watch_outputs(acting, output))
        if unit.has_inner_call and _is_inner_call(unit, module):
            unit.end_inner_call(is_watched=is_watched)
            return output
        acting.tree.end_forward(unit, id(module), is_watched=is_watched, is_recomputed=_graph_task() != _NO_GRAPH_TASK)
    return output


def call_between_hooks(
    state: FSDPState, module: nn.Module, method: Callable[..., object], args: Args, kwargs: Kwargs
) -> object:
    """Call a method of a unit's module with the hooks that `forward` has."""
    args, kwargs = pre_forward(state, module, args, kwargs)
    return post_forward(state, module, args, method(*args, **kwargs))


_MODULE_NAMES = {nn.Module._call_impl.__code__: "self", call_between_hooks.__code__: "module"}
"""The variable with the module in each function that runs hooks."""


def _is_inner_call(unit: Unit, module: nn.Module) -> bool:
    """Whether a call lies inside another call of the module, in a unit of one module: Note [Calls inside a call].

    The stack tells, where a count would be wrong after an exception: no hook runs when an interrupt ends a forward.
    """
    if len(unit.parameters.module_ids) != 1:
        return False
    num_calls = 0
    frame = inspect.currentframe()
    while frame is not None and num_calls < 2:
        name = _MODULE_NAMES.get(frame.f_code)
        num_calls += name is not None and frame.f_locals[name] is module
        frame = frame.f_back
    return num_calls == 2


def _watch_outputs(state: FSDPState, output: object) -> bool | None:
    """Begin the unit's backward when the gradient of any output arrives.

    Returns:
        Whether a hook will see backward begin. Without, as with all outputs inside an object of unknown kind or no
        output at all, the unit must stay unsharded until autograd is done: tensors in attributes may reach the loss.
        None for outputs that are the call's inputs: autograd runs their hooks behind the unit's backward.
    """
    if not torch.is_grad_enabled():
        return True
    tensors = tensors_in(output)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        tensors = [form for tensor in tensors for form in _forms(tensor)]
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    are_inputs = bool(outputs)
    for tensor in outputs:  # by these hooks the graph holds the state: a reference back would keep activations
        tensor.register_hook(state.begin_backward)  # type: ignore[no-untyped-call]
        if (node := tensor.grad_fn) is not None:
            # Autograd runs the node with the highest number first. A tensor that forward computed last, and kept in an
            # attribute or a list, would else come before its outputs, and read parameters that no hook has gathered.
            node._set_sequence_nr(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]
        are_inputs &= getattr(node, "state", None) is state  # of `_EndBackward`
        if tensor._base is not None:
            _watch_base(state, tensor, tensor._base)
    if are_inputs:
        return None
    return bool(outputs) or (bool(tensors) and not hides_tensors(output))


def _watch_base(state: FSDPState, view: torch.Tensor, base: torch.Tensor) -> None:
    """Begin the unit's backward also where the caller changes a view in place that the unit returned.

    An operator in place gives the view another node of the graph, without the view's hooks. The base's hooks stay, and
    run before the base's node. Autograd refuses such operators on views of inputs, and on views made several at a time.
    Hooks on a leaf, such as a parameter, would outlive the pass.
    """
    if not base.is_leaf and _creation_of(view) == _Creation.DEFAULT:
        base.register_hook(state.begin_backward)  # type: ignore[no-untyped-call]


def _forms(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, all tensors inside `torch.func`'s wrappers, and their tangents: a graph of its own may record each.

    The backward of `torch.func.grad` runs over the wrapper, a backward after all transforms over the innermost tensor.
    A batched wrapper requires no gradient.
    """
    yield tensor
    is_batched = torch._C._functorch.is_batchedtensor(tensor)  # without a rule for tangents; the tensor inside has them
    if forward_ad._current_level >= 0 and not is_batched:
        tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
        if tangent is not None:
            yield from _forms(tangent)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        yield from _forms(torch._C._functorch.get_unwrapped(tensor))


def _watch_inputs(state: FSDPState, inputs: Args, copied: list[Copied]) -> Args:
    """End the unit's backward when the gradients of all inputs have been made."""
    if not torch.is_grad_enabled():
        return inputs
    watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if not watched:
        return inputs
    is_transformed = torch._C._are_functorch_transforms_active()
    passes = _EndTransformedBackward if is_transformed else _EndBackward
    # The graph holds the state for as long as an output lives: the state must not hold the graph.
    passed = iter(passes.apply(state, *watched))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: next(passed) if tensor.requires_grad else tensor, inputs, copied)


class _EndBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs after all of the unit's backward."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Strong: backward may run after the last reference to the model is gone, and needs the unit's buffers.
        ctx.state = state
        ctx.set_materialize_grads(False)  # an unused input gets no gradient, as without sharding; not zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # First: the reduction is under way before autograd turns to the units below.
        ctx.state.end_backward()
        if torch.is_grad_enabled():
            _watch_gradients(ctx.state, gradients)
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Forward returns inputs as they are: torch refuses tangents that are no views.
        return tuple(tangent if tangent is None else tangent.view_as(tangent) for tangent in tangents)


class _EndTransformedBackward(_EndBackward):
    """The same in the form for transforms of `torch.func`, whose calls cost the host more."""

    @staticmethod
    def forward(state: FSDPState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.state = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[int | None, ...], state: FSDPState, *inputs: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
        return _EndTransformedBackward.apply(state, *inputs), in_dims[1:]  # type: ignore[no-untyped-call]


def _watch_gradients(state: FSDPState, gradients: Iterable[torch.Tensor | None]) -> None:
    """Begin the unit's backward again when a gradient of its inputs' gradients arrives: Note [Graphs of backwards]."""
    recorded = [form for gradient in gradients if gradient is not None for form in _forms(gradient)]
    for gradient in recorded:
        if gradient.requires_grad:
            gradient.register_hook(state.begin_backward)  # type: ignore[no-untyped-call]


def _move(tree: T, device: torch.device, copied: list[Copied]) -> T:
    """Move the tensors of a nest; nothing to move on CPU."""
    if device.type == "cpu":
        return tree
    with label("inputs_to_device"):
        return map_tensors(lambda tensor: tensor.to(device), tree, copied)


def _cast(tree: T, dtype: torch.dtype | None, phase: str, copied: list[Copied] | None = None) -> T:
    """Cast the floating-point tensors of a nest; None casts nothing."""
    if dtype is None:
        return tree
    with label(phase):
        return map_tensors(
            lambda tensor: tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor,
            tree,
            copied,
        )
