"""Optimizers whose kernels know no DTensors step on each rank's own shards, and keep their state as DTensors.

Note [Stand-ins]. Kernels over many tensors may write beside a tensor without elements, and some operations fail on one.
Left out of the step, a parameter of which this rank has no rows would get no state here while other ranks make some:
collectives over state, and writes to the parameters that have state, would then hang. So a small plain parameter of
zeros, with zero gradients, steps in the place of an empty shard. State of its shape becomes a DTensor with an empty
shard, and a count of steps advances as on all other ranks.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamella_engine.extending import held_by, local_of, refuse_kernels_on_dtensors
from lamella_optim._installation import install, step_hook
from lamella_optim._plain import LOCAL_PARAMETERS, laid_out

Opt = TypeVar("Opt", bound=Optimizer)
State = dict[str, Any]
LocalTensors = dict[int, tuple[torch.Tensor, DTensor]]
"""The DTensor over each local tensor, by the tensor's id: held, so that no other tensor gets the id."""

_NEED_WHOLE_TENSORS = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def step_on_local_shards(optimizer: Opt) -> Opt:
    """Let an optimizer whose kernels take plain tensors train sharded parameters: Transformer Engine's, apex's, yours.

    `step()` sees, in place of each DTensor, a plain `Parameter` over this rank's shard, with the shard's gradient; in
    place of an empty shard a few zeros, so that state is alike on all ranks. Outside of `step`, `state_dict` and
    `load_state_dict` the optimizer looks unchanged: param groups hold DTensors, and state of a shard's shape is a
    DTensor with its parameter's placements, also in checkpoints. Other state (single values, blocks, quantised tensors)
    stays as the optimizer made it.

    The update of an element must depend only on the element's own gradient and state. Right for Adam, SGD and the
    like; wrong, without an error, for optimizers with norms or products of whole parameters.

    Without this call the first step of Transformer Engine's and apex's optimizers on DTensors is refused.

    Args:
        optimizer: An optimizer over any parameters; plain parameters are stepped unchanged. Call this function before
            a learning-rate scheduler is built on the optimizer.

    Returns:
        `optimizer`, whose class is now a subclass of its former class. A second call changes nothing.

    Raises:
        ValueError: The optimizer is one of torch's that need whole tensors; or a scheduler has replaced its `step`.

    Effects: a later step costs some microseconds of host time a parameter, and for an empty shard a launch for its
        gradient and each of its states; no copies, no collectives, no host sync. Calls `install`.
    """
    kind: Any = type(optimizer)
    if hasattr(optimizer, LOCAL_PARAMETERS):
        return optimizer
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _NEED_WHOLE_TENSORS:
        raise ValueError(
            f"Expected an optimizer that updates each element by itself, got {kind.__name__}, which needs whole "
            "tensors. Leave out step_on_local_shards: the optimizer steps on DTensors, or raises its own error."
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"Expected a {kind.__name__} whose step() is its class's own, got one that was replaced, as learning-rate "
            "schedulers do. Call step_on_local_shards before building the scheduler."
        )
    install()
    setattr(optimizer, LOCAL_PARAMETERS, {})
    optimizer.__class__ = _on_local_shards(kind)
    return optimizer


class _OnLocalShards(Optimizer):
    """Comes before an optimizer's own class, whose methods then see plain parameters over local shards."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not getattr(self, "use_decoupled_grad", False):
            super().zero_grad(set_to_none=set_to_none)
            return
        Optimizer.zero_grad(self, set_to_none)  # Transformer Engine's clears `decoupled_grad` alone, of `step` alone
        for parameter in held_by(self):
            if (gradient := getattr(parameter, "decoupled_grad", None)) is not None:  # a plain parameter's
                parameter.decoupled_grad = None if set_to_none else gradient.zero_()  # type: ignore[attr-defined]

    def state_dict(self) -> State:
        with _holding_locals(self):
            state_dict: State = super().state_dict()
        parameters = held_by(self)
        state_dict["state"] = {
            key: _laid_out(parameters[key], state) if isinstance(key, int) else state
            for key, state in state_dict["state"].items()
        }
        return state_dict

    def load_state_dict(self, state_dict: State) -> None:
        local = pytree.tree_map_only(DTensor, lambda value: _filled(local_of(value)), state_dict["state"])
        with _holding_locals(self):
            super().load_state_dict({**state_dict, "state": local})

    def __reduce__(self) -> tuple[Any, ...]:
        mro = type(self).__mro__
        return _new, (mro[mro.index(_OnLocalShards) + 1],), self.__getstate__()


@cache
def _on_local_shards(kind: Any) -> Any:
    """A subclass with steps on local shards."""
    members = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    members["step"] = _step_on_local_shards(kind)
    return types.new_class(kind.__name__, (_OnLocalShards, kind), exec_body=lambda namespace: namespace.update(members))


def _step_on_local_shards(kind: Any) -> Any:
    """A class's `step`, below the hooks of `step`: hooks still see DTensors."""
    unhooked = getattr(kind.step, "__wrapped__", kind.step)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, *more: Any, **options: Any) -> Any:
        loss = None
        if options.get("grad_scaler") is not None:
            raise RuntimeError(
                f"Expected no gradient scaler for {kind.__name__}, which looks for infinities itself and would see "
                "those of this rank's shards alone, got one. Train in bfloat16, which needs no scaling, or build the "
                "optimizer so that the scaler does (TransformerEngine and apex: capturable=False)."
            )
        if closure is not None:  # a closure makes gradients, and gradients belong on the DTensors
            with torch.enable_grad():
                loss = closure()
        with _holding_locals(self, with_gradients=True):
            output = unhooked(self, *((None, *more) if more else ()), **options)
        return output if closure is None else loss

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    hooked.__signature__ = inspect.signature(unhooked)  # gradient scalers ask it
    return hooked


def _new(kind: Any) -> Any:
    """An empty optimizer for `copy` and `pickle`, which cannot find a class made at run time."""
    local_class = _on_local_shards(kind)
    optimizer = local_class.__new__(local_class)
    setattr(optimizer, LOCAL_PARAMETERS, {})
    return optimizer


@contextmanager
def _holding_locals(optimizer: Optimizer, *, with_gradients: bool = False) -> Iterator[None]:
    """Let param groups and state hold plain parameters over local shards for a while.

    Optimizers with `use_decoupled_grad` (Transformer Engine's) find gradients in `decoupled_grad`.
    """
    mine: dict[DTensor, nn.Parameter] = getattr(optimizer, LOCAL_PARAMETERS)
    parameter_lists = [group["params"] for group in optimizer.param_groups]
    pairs = [(p, _local(mine, p)) for parameters in parameter_lists for p in parameters if isinstance(p, DTensor)]
    state = optimizer.state
    before = {dtensor: state.pop(dtensor) for dtensor, _ in pairs if dtensor in state}
    local_tensors: LocalTensors = {}
    for dtensor, local in pairs:
        if dtensor in before:
            state[local] = _local_state(dtensor, before[dtensor], local_tensors)
        if dtensor.grad is not None and with_gradients:
            if not local_of(dtensor).numel():
                local.detach().zero_()  # an update of nothing may be no number (0 / 0), and would stay
            gradient = _filled(local_of(dtensor.grad))
            if getattr(optimizer, "use_decoupled_grad", False):
                local.decoupled_grad = gradient  # type: ignore[attr-defined]
                continue
            if gradient.dtype != local.dtype:
                local.grad_dtype = gradient.dtype
            local.grad = gradient
    local_by_dtensor = dict(pairs)
    for group in optimizer.param_groups:
        group["params"] = [local_by_dtensor.get(parameter, parameter) for parameter in group["params"]]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, parameter_lists, strict=True):
            group["params"] = parameters
        state = optimizer.state  # another one, if a state dict was loaded
        for dtensor, local in pairs:
            local.grad = None
            vars(local).pop("decoupled_grad", None)
            if local in state:
                state[dtensor] = _laid_out(dtensor, state.pop(local), local_tensors)


def _local(mine: dict[DTensor, nn.Parameter], dtensor: DTensor) -> nn.Parameter:
    """The plain parameter over a DTensor's shard: one object for all steps, as an optimizer may keep its identity."""
    shard = local_of(dtensor)
    local = mine.get(dtensor)
    if local is None:
        local = mine[dtensor] = nn.Parameter(_filled(shard), requires_grad=dtensor.requires_grad)
    elif shard.numel() == 0:
        if (local.shape, local.dtype, local.device) != (_stand_in_shape(shard), shard.dtype, shard.device):
            local.data = _filled(shard)  # the shard was moved, cast or loaded
    elif local.data_ptr() != shard.data_ptr() or local.dtype != shard.dtype:
        local.data = shard  # the shard was moved, cast or loaded
    local.requires_grad_(dtensor.requires_grad)
    return local


def _filled(shard: torch.Tensor) -> torch.Tensor:
    """A local tensor, or zeros in the place of an empty one. Note [Stand-ins]."""
    return shard if shard.numel() else shard.new_zeros(_stand_in_shape(shard))


def _stand_in_shape(shard: torch.Tensor) -> tuple[int, ...]:
    return (7,) * shard.ndim  # a length of no optimizer's own state: single values, pairs and blocks are none of it


def _local_state(dtensor: DTensor, state: State, local_tensors: LocalTensors) -> State:
    """An optimizer's state of a DTensor, with local tensors in place of DTensors.

    Args:
        local_tensors: Gets the DTensor of each local tensor.
    """
    shard = local_of(dtensor)

    def local(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):  # put there by a loader, maybe
            return _filled(value) if value.shape == shard.shape else value
        tensor = _filled(local_of(value))
        local_tensors[id(tensor)] = tensor, value
        return tensor

    return pytree.tree_map_only(torch.Tensor, local, state)  # type: ignore[no-any-return]


def _laid_out(parameter: torch.Tensor, state: State, local_tensors: LocalTensors | None = None) -> State:
    """An optimizer's state of a local shard, with DTensors in place of tensors of the shard's shape.

    Args:
        local_tensors: DTensors before the step: a DTensor over the same local tensor stays the same object.
    """
    if not isinstance(parameter, DTensor):
        return state
    shard = local_of(parameter)

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        if local_tensors and id(tensor) in local_tensors:
            return local_tensors[id(tensor)][1]
        if shard.numel() == 0 and type(tensor) is torch.Tensor and tensor.shape == _stand_in_shape(shard):
            tensor = tensor.new_empty(shard.shape)
        return laid_out(parameter, tensor)

    return pytree.tree_map_only(torch.Tensor, lay_out, state)  # type: ignore[no-any-return]


@step_hook("kernels")
def refuse_unprepared_kernels(optimizer: Optimizer, *_: object) -> None:
    """Refuse DTensors to kernels without DTensor support, unless `step_on_local_shards` has prepared the optimizer."""
    if not hasattr(optimizer, LOCAL_PARAMETERS):
        refuse_kernels_on_dtensors(optimizer)
