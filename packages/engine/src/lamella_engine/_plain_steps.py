"""torch's elementwise optimizers step on plain tensors over local shards: what DTensors would do, without dispatch.

DTensor's dispatcher unwraps each tensor of each list that an optimizer's operators are given (parameters, gradients,
states), and runs the operator on what it finds: for small parameters this takes the host longer than the operator.
Here they are unwrapped once a step. The optimizer's own step is called with a *view* of it, an object of its class
whose parameters and state are plain tensors in the same memory. Outside of that nobody sees them: param groups hold
DTensors, and so does state, where what a step makes is laid out as soon as it is made.

Only where that cannot be told from a step on DTensors:
- The optimizer is one of torch's that update each element from its own gradient and state, and no subclass of it.
- Nothing comes between: no closure, which makes gradients inside the step, and no hooks but this package's before it,
  which may change gradients or give the step another optimizer. Those that only wait are let be.
- Gradients and state lie as their parameters do, and all are plain tensors below.
- No compiler traces the step: it knows how to trace one on DTensors.
- This rank has rows of each parameter in the flat layout: kernels are not given the others (Note [Empty shards]).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from lamella_engine._ragged import RaggedDTensor, dtensor_over
from lamella_engine._sharded_parameter import is_sharded
from lamella_engine._sharding import local_of
from lamella_engine._step_hooks import has_other_hooks, held_by, is_compiled

Opt = TypeVar("Opt", bound=Optimizer)
State = dict[str, Any]

_NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _NAMES)


def plain_view_of(optimizer: Opt, parts: Sequence[Sequence[torch.Tensor]]) -> Opt | None:
    """What an optimizer's own step takes for the optimizer, with the gradients that its parameters have now.

    For one step. Nothing of it is kept: what somebody lets go of between two steps (state, gradients, weights that are
    moved) is freed.

    Args:
        parts: Which of the optimizer's parameters, by group.

    Returns:
        An object of its class; None if the step has to be made on DTensors.

    Effects: none on a stream. Autograd takes the parameters for updated.
    """
    if type(optimizer) not in _ELEMENTWISE or any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    states = _States(optimizer)
    groups = []
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        plain = []
        for whole in part:
            if (found := states.plain_of(whole)) is None:
                return None
            plain.append(found)
        if plain:
            groups.append({**group, "params": plain})
    increment_version([whole for plain, whole in states.wholes.items() if plain.grad is not None])
    view = object.__new__(type(optimizer))
    vars(view).update({**states.given, "param_groups": groups, "state": states})
    return view


class _States(dict[torch.Tensor, State]):
    """An optimizer's state by plain parameters; what is made here is made in the optimizer's own state too.

    Attributes:
        given: What is on the optimizer.
        wholes: The DTensor that each plain parameter stands for.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.given = dict(vars(optimizer))
        self.wholes: dict[torch.Tensor, DTensor] = {}
        self._own = optimizer.state

    def __missing__(self, plain: torch.Tensor) -> State:
        whole = self.wholes.get(plain)
        self[plain] = found = self._own[plain] if whole is None else _State(whole, self._own[whole])
        return found

    def plain_of(self, whole: torch.Tensor) -> torch.Tensor | None:
        """A parameter as the step is to see it, or None if the step has to see it as it is."""
        if not isinstance(whole, DTensor):
            return whole
        shard, gradient = whole._local_tensor, whole.grad
        if isinstance(whole, RaggedDTensor) and shard.numel() == 0:
            return None
        if type(shard) is not torch.Tensor or not (isinstance(whole, nn.Parameter) and is_sharded(whole)):
            return None
        if not all(_is_single(value) or _lies_below(value, whole) for value in self._own.get(whole, {}).values()):
            return None
        plain = shard.detach()  # not the shard, on which a step that fails would leave the gradient
        if gradient is not None:
            local = local_of(gradient)
            if not _lies_below(gradient, whole) or local.dtype != shard.dtype:
                return None
            plain.grad = local
        self.wholes[plain] = whole
        return plain


class _State(State):
    """The state of one plain parameter; what is written to it is laid out in the DTensor's state too."""

    def __init__(self, whole: DTensor, own: State) -> None:
        super().__init__({key: local_of(value) for key, value in own.items()})
        self._whole, self._own = whole, own

    def __setitem__(self, key: str, value: Any) -> None:
        if value is self.get(key, self):
            return  # a buffer that was updated in place, as SGD's momentum is
        super().__setitem__(key, value)
        self._own[key] = laid_out(self._whole, value) if isinstance(value, torch.Tensor) else value


def laid_out(whole: DTensor, tensor: torch.Tensor) -> torch.Tensor:
    """State of a local shard, as a DTensor that lies as its parameter does if it has the shard's shape.

    Effects: none.
    """
    shard, spec = local_of(whole), whole._spec
    if type(tensor) is not torch.Tensor or tensor.ndim == 0 or tensor.shape != shard.shape:
        return tensor
    if tensor.dtype != whole.dtype:
        meta = TensorMeta(whole.shape, whole.stride(), tensor.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return dtensor_over(tensor, spec)


def _is_single(value: object) -> bool:
    """Whether a part of a state goes with every element, as a count of steps does."""
    return not isinstance(value, torch.Tensor) or (value.ndim == 0 and not isinstance(value, DTensor))


def _lies_below(tensor: torch.Tensor, whole: DTensor) -> bool:
    """Whether a tensor's local part is to be used with a parameter's. Nobody knows which rows a plain tensor has."""
    if not isinstance(tensor, DTensor) or type(tensor._local_tensor) is not torch.Tensor:
        return False
    mine, others = tensor._spec, whole._spec
    if mine is others:
        return True
    return tensor.shape == whole.shape and mine.mesh == others.mesh and mine.placements == others.placements


def step_on_plain_tensors(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Have the step made on a view, where it can be."""
    return _for_compiler(optimizer) if is_compiled() else _stepping_on_view(optimizer, args, kwargs)


@_disable_dynamo
def _for_compiler(optimizer: Optimizer) -> None:
    """Make gradients such as Dynamo can trace a step on: there a DTensor must have its local tensor's offset."""
    for parameter in held_by(optimizer):
        if isinstance(gradient := parameter.grad, DTensor):
            parameter.grad = dtensor_over(local_of(gradient), gradient._spec)


@_disable_dynamo
def _stepping_on_view(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """What to call the step with, if it can be made on a view."""
    if not any(isinstance(parameter, DTensor) for parameter in held_by(optimizer)):
        return None
    if has_other_hooks(optimizer) or any(argument is not None for argument in (*args[1:], *kwargs.values())):
        return None
    view = plain_view_of(optimizer, [group["params"] for group in optimizer.param_groups])
    return None if view is None else step_on(view, optimizer, args, kwargs)


def step_on(view: Opt, optimizer: Opt, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """What a hook before an optimizer's step returns to have the step made on a view.

    Hooks after the step see the optimizer and not the view: one of ours is the first of them.
    """
    after = optimizer._optimizer_step_post_hooks
    if next(iter(after), None) != _FIRST:
        after[_FIRST] = _leave_view
        after.move_to_end(_FIRST, last=False)  # type: ignore[attr-defined]
    return [view, *args[1:]], kwargs  # a list, in which the optimizer can be put back


_FIRST = -1  # torch's keys for hooks begin at 0


@_disable_dynamo
def _leave_view(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give hooks that follow the optimizer, with what the step has noted on a view beside parameters and state."""
    if not isinstance(args, list):
        return  # a step that was made on no view
    view, args[0] = args[0], optimizer
    if isinstance(states := view.state, _States):
        given, noted, ours = states.given, vars(view), ("param_groups", "state")
        vars(optimizer).update({k: noted[k] for k in noted if noted[k] is not given.get(k) and k not in ours})
