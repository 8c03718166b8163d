"""Elementwise steps on plain tensors over local shards: torch's optimizers without DTensor's dispatch.

DTensor's dispatcher unwraps each tensor of each list given to an optimizer's operators (parameters, gradients, states)
and runs the operator on local tensors: for small parameters the dispatch takes the host longer than the operator. Here
tensors are unwrapped once a step. The optimizer's own step is called with a *view*: an object of the same class whose
parameters and state are plain tensors in the same memory. Outside the step, param groups and state hold DTensors; state
made by a step becomes a DTensor at once.

A view is used only where the result equals a step on DTensors:
- The class is one of torch's optimizers that update each element from its own gradient and state, and no subclass.
- There is no closure, which makes gradients inside the step, and no foreign pre-hook, which may change gradients or
  the step's arguments. Hooks that only wait are allowed.
- Gradients and state lie as their parameters do, over plain local tensors.
- No compiler traces the step: a compiler traces steps on DTensors.
- In the flat layout this rank has rows of each parameter: kernels get no empty shards (Note [Empty shards]).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from lamella_engine import RaggedDTensor
from lamella_engine.extending import dtensor_over, held_by, is_compiled, is_sharded, local_of, step_on_dtensors
from lamella_optim._hooks import has_other_hooks
from lamella_optim._installation import step_hook

Opt = TypeVar("Opt", bound=Optimizer)
State = dict[str, Any]

LOCAL_PARAMETERS: Final = "_lamella_local_parameters"
"""The attribute of an optimizer that steps on plain parameters by itself; see `step_on_local_shards`."""

_NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _NAMES)


def plain_view_of(optimizer: Opt, parts: Sequence[Sequence[torch.Tensor]]) -> Opt | None:
    """A view of an optimizer over plain tensors, with the present gradients, for one step.

    No tensor of the view outlives the step: state, gradients and moved weights released between two steps are freed.

    Args:
        parts: The parameters to step, by group.

    Returns:
        An object of the optimizer's class; None if the step must run on DTensors.

    Effects: raises the parameters' version counters.
    """
    if type(optimizer) not in _ELEMENTWISE or any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    states = _States(optimizer)
    groups = []
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        plain = []
        for parameter in part:
            if (plain_parameter := states.plain_of(parameter)) is None:
                return None
            plain.append(plain_parameter)
        if plain:
            groups.append({**group, "params": plain})
    increment_version([parameter for plain, parameter in states.dtensors.items() if plain.grad is not None])
    view = object.__new__(type(optimizer))
    vars(view).update({**states.attributes, "param_groups": groups, "state": states})
    return view


class _States(dict[torch.Tensor, State]):
    """An optimizer's state by plain parameters; new state is made in the optimizer's own state too.

    Attributes:
        attributes: Attributes of the optimizer before the step.
        dtensors: The DTensor of each plain parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.attributes = dict(vars(optimizer))
        self.dtensors: dict[torch.Tensor, DTensor] = {}
        self._optimizer_state = optimizer.state

    def __missing__(self, plain: torch.Tensor) -> State:
        dtensor = self.dtensors.get(plain)
        self[plain] = state = (
            self._optimizer_state[plain] if dtensor is None else _PlainState(dtensor, self._optimizer_state[dtensor])
        )
        return state

    def plain_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The plain parameter of a view for a parameter; None if the step must see the DTensor."""
        if not isinstance(parameter, DTensor):
            return parameter
        shard, gradient = parameter._local_tensor, parameter.grad
        if isinstance(parameter, RaggedDTensor) and shard.numel() == 0:
            return None
        if type(shard) is not torch.Tensor or not (isinstance(parameter, nn.Parameter) and is_sharded(parameter)):
            return None
        if not all(
            _is_single(value) or _lies_below(value, parameter)
            for value in self._optimizer_state.get(parameter, {}).values()
        ):
            return None
        plain = shard.detach()  # not the shard, on which a step that fails would leave the gradient
        if gradient is not None:
            local = local_of(gradient)
            if not _lies_below(gradient, parameter) or local.dtype != shard.dtype:
                return None
            plain.grad = local
        self.dtensors[plain] = parameter
        return plain


class _PlainState(State):
    """The state of one plain parameter; new entries are laid out in the DTensor's state too."""

    def __init__(self, dtensor: DTensor, dtensor_state: State) -> None:
        super().__init__({key: local_of(value) for key, value in dtensor_state.items()})
        self._dtensor, self._dtensor_state = dtensor, dtensor_state

    def __setitem__(self, key: str, value: Any) -> None:
        if value is self.get(key, self):
            return  # a buffer updated in place, as SGD's momentum is
        super().__setitem__(key, value)
        self._dtensor_state[key] = laid_out(self._dtensor, value) if isinstance(value, torch.Tensor) else value


def laid_out(parameter: DTensor, tensor: torch.Tensor) -> torch.Tensor:
    """State of a local shard: a DTensor with its parameter's placements if the state has the shard's shape."""
    shard, spec = local_of(parameter), parameter._spec
    if type(tensor) is not torch.Tensor or tensor.ndim == 0 or tensor.shape != shard.shape:
        return tensor
    if tensor.dtype != parameter.dtype:
        meta = TensorMeta(parameter.shape, parameter.stride(), tensor.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return dtensor_over(tensor, spec)


def _is_single(value: object) -> bool:
    """Whether a part of a state serves all elements, as a count of steps does."""
    return not isinstance(value, torch.Tensor) or (value.ndim == 0 and not isinstance(value, DTensor))


def _lies_below(tensor: torch.Tensor, parameter: DTensor) -> bool:
    """Whether a tensor's local part covers the rows of a parameter's shard. A plain tensor's rows are unknown."""
    if not isinstance(tensor, DTensor) or type(tensor._local_tensor) is not torch.Tensor:
        return False
    tensor_spec, parameter_spec = tensor._spec, parameter._spec
    if tensor_spec is parameter_spec:
        return True
    return (
        tensor.shape == parameter.shape
        and tensor_spec.mesh == parameter_spec.mesh
        and tensor_spec.placements == parameter_spec.placements
    )


@step_hook("view")
def step_on_plain_tensors(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run the step on a view of plain tensors, where possible."""
    # Each step has a new view, and a compiler would compile the step again for a new object.
    return None if is_compiled() else _stepping_on_view(optimizer, args, kwargs)


@_disable_dynamo
def _stepping_on_view(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Arguments of a step on a view; None for a step on DTensors."""
    if not any(isinstance(parameter, DTensor) for parameter in held_by(optimizer)):
        return None
    if has_other_hooks(optimizer):
        return None  # An overlapping step makes views by itself, in a hook after this one.
    has_closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
    view = None if has_closure else plain_view_of(optimizer, [group["params"] for group in optimizer.param_groups])
    if view is None:
        if not hasattr(optimizer, LOCAL_PARAMETERS):
            step_on_dtensors(optimizer)
        return None
    return step_on(view, optimizer, args, kwargs)


def step_on(view: Opt, optimizer: Opt, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Arguments for a pre-hook to return, so that torch runs the step on a view.

    Post-hooks see the optimizer and not the view: `_leave_view` runs as the first of them.
    """
    after = optimizer._optimizer_step_post_hooks
    if next(iter(after), None) != _FIRST:
        after[_FIRST] = _leave_view
        after.move_to_end(_FIRST, last=False)  # type: ignore[attr-defined]
    return [view, *args[1:]], kwargs  # a list, in which the optimizer can be put back


_FIRST = -1  # torch's keys for hooks begin at 0


@_disable_dynamo
def _leave_view(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give later hooks the optimizer again, with attributes that the step has set on the view."""
    if not isinstance(args, list):
        return  # this step used no view
    view, args[0] = args[0], optimizer
    if isinstance(states := view.state, _States):
        earlier, noted, ours = states.attributes, vars(view), ("param_groups", "state")
        vars(optimizer).update({k: noted[k] for k in noted if noted[k] is not earlier.get(k) and k not in ours})
