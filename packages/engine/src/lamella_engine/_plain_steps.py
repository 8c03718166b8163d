"""torch's elementwise optimizers step on plain tensors over local shards: what DTensors would do, without dispatch.

DTensor's dispatcher unwraps each tensor of each list that an optimizer's operators are given (parameters, gradients,
states), and runs the operator on what it finds: for small parameters this takes the host longer than the operator.
Here they are unwrapped once. The optimizer's own step is called with a *view* of it, an object of its class whose
parameters and state are plain tensors in the same memory. Outside of that nobody sees them: param groups hold DTensors,
and so does state, where what a step makes is laid out as soon as it is made.

Only where that cannot be told from a step on DTensors:
- The optimizer is one of torch's that update each element from its own gradient and state, and no subclass of it.
- Nothing comes between: no closure, which makes gradients inside the step, and no hooks before it, of the optimizer or
  of all but this package's own, which may change gradients or give the step another optimizer.
- Gradients and state lie as their parameters do, and all are plain tensors below.
- This rank has rows of each parameter in the flat layout: kernels are not given the others (Note [Empty shards]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lamella_engine._optimizers import held_by
from lamella_engine._ragged import RaggedDTensor, dtensor_over
from lamella_engine._sharded_parameter import is_sharded
from lamella_engine._sharding import local_of

State = dict[str, Any]

_NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _NAMES)


class PlainView:
    """What an optimizer's own step takes for the optimizer; kept from step to step, and empty between them."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self.optimizer: Any = object.__new__(kind)
        self._plain: dict[torch.Tensor, nn.Parameter] = {}
        self._pointed: list[nn.Parameter] = []
        self._states = _States()
        self._given: dict[str, Any] = {}

    def point(self, optimizer: Optimizer, parts: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Make the view one of some of the optimizer's parameters, with the gradients that they have now.

        Args:
            optimizer: The one that this is of.
            parts: Which parameters, by group.

        Returns:
            Whether it could be done. If not, the step has to be made on DTensors.

        Effects: none on a stream.
        """
        self._let_go()  # of what a step was given that failed
        self._states.own = optimizer.state
        groups = []
        for group, part in zip(optimizer.param_groups, parts, strict=True):
            plain = [found for whole in part if (found := self._point_one(whole)) is not None]
            if len(plain) < len(part):
                self._let_go()
                return False
            if plain:
                groups.append({**group, "params": plain})
        self._given = {**vars(optimizer), "param_groups": groups, "state": self._states}
        vars(self.optimizer).update(self._given)
        return True

    def finish(self, optimizer: Optimizer) -> None:
        """Take over what the step has noted on the view, and hold nothing of the optimizer's."""
        noted, given = vars(self.optimizer), self._given
        vars(optimizer).update({key: noted[key] for key in noted if noted[key] is not given.get(key)})
        noted.clear()
        given.clear()
        self._let_go()

    def forget_all_but(self, held: Iterable[torch.Tensor]) -> None:
        """Let go of parameters that the optimizer no longer has."""
        kept = set(held)
        for whole in [whole for whole in self._plain if whole not in kept]:
            self._states.forget(self._plain.pop(whole))

    @property
    def num_parameters(self) -> int:
        """How many it has come across."""
        return len(self._plain)

    def _let_go(self) -> None:
        for plain in self._pointed:
            plain.grad = None
        self._pointed.clear()

    def _point_one(self, whole: torch.Tensor) -> torch.Tensor | None:
        """A parameter as the step is to see it, or None if the step has to see it as it is."""
        if not isinstance(whole, DTensor):
            self._states.share(whole)
            return whole
        shard, gradient = whole._local_tensor, whole.grad
        if isinstance(whole, RaggedDTensor) and shard.numel() == 0:
            return None
        if (plain := self._plain.get(whole)) is None:
            if type(shard) is not torch.Tensor or not (isinstance(whole, nn.Parameter) and is_sharded(whole)):
                return None
            plain = self._plain[whole] = nn.Parameter(shard, requires_grad=False)
            self._states.wholes[plain] = whole
        elif (plain.data_ptr(), plain.dtype, plain.device) != (shard.data_ptr(), shard.dtype, shard.device):
            plain.data = shard  # it was moved, cast or loaded
        if not self._states.follow(plain, whole):
            return None
        if gradient is not None:
            if not _lies_below(gradient, whole) or gradient.dtype != whole.dtype:
                return None
            plain.grad = local_of(gradient)
            self._pointed.append(plain)
        return plain


class _States(dict[torch.Tensor, State]):
    """An optimizer's state by plain parameters; what is made here is made in the optimizer's own state too.

    Attributes:
        own: The optimizer's.
        wholes: The DTensor that each plain parameter stands for.
    """

    own: dict[torch.Tensor, State]

    def __init__(self) -> None:
        super().__init__()
        self.wholes: dict[torch.Tensor, DTensor] = {}

    def __missing__(self, plain: torch.Tensor) -> State:
        whole = self.wholes.get(plain)
        made = self.own[plain] if whole is None else _State(whole, self.own[whole])
        self[plain] = made
        return made

    def follow(self, plain: torch.Tensor, whole: DTensor) -> bool:
        """Have the optimizer's state of a parameter, which somebody may have replaced since the last step.

        Returns:
            Whether all of it lies as the parameter does.
        """
        own, mine = self.own.get(whole), self.get(plain)
        if own is None:
            self.pop(plain, None)
        elif not (isinstance(mine, _State) and mine.is_of(own)):
            if not all(_lies_below(value, whole) for value in own.values() if isinstance(value, DTensor)):
                return False
            self[plain] = _State(whole, own)
        return True

    def share(self, parameter: torch.Tensor) -> None:
        """Have the optimizer's very own state of a parameter that is plain in any case."""
        if parameter in self.own:
            self[parameter] = self.own[parameter]
        else:
            self.pop(parameter, None)

    def forget(self, plain: torch.Tensor) -> None:
        """Let go of a parameter."""
        self.pop(plain, None)
        self.wholes.pop(plain, None)


class _State(State):
    """The state of one plain parameter; what is written to it is laid out in the DTensor's state too."""

    def __init__(self, whole: DTensor, own: State) -> None:
        super().__init__({key: local_of(value) for key, value in own.items()})
        self._whole, self._own = whole, own

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._own[key] = laid_out(self._whole, value) if isinstance(value, torch.Tensor) else value

    def is_of(self, own: State) -> bool:
        """Whether this is still what the DTensor's state is made of."""
        if own is not self._own or len(own) != len(self):
            return False
        return all(local_of(value) is mine for value, mine in zip(own.values(), self.values(), strict=True))


def laid_out(whole: DTensor, tensor: torch.Tensor) -> torch.Tensor:
    """State of a local shard, as a DTensor that lies as its parameter does if it has the shard's shape.

    Effects: none.
    """
    shard, spec = local_of(whole), whole._spec
    if type(tensor) is not torch.Tensor or tensor.ndim == 0 or tensor.shape != shard.shape:
        return tensor
    meta = TensorMeta(whole.shape, whole.stride(), tensor.dtype)
    return dtensor_over(tensor, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta))


def _lies_below(tensor: torch.Tensor, whole: DTensor) -> bool:
    """Whether a tensor's local part, and a plain one, is to be used with a parameter's."""
    if not isinstance(tensor, DTensor) or type(tensor._local_tensor) is not torch.Tensor:
        return False
    if tensor._spec is whole._spec:
        return True
    mine, others = ((each.shape, each.device_mesh, each.placements) for each in (tensor, whole))
    return mine == others


_views: WeakKeyDictionary[Optimizer, PlainView] = WeakKeyDictionary()


def plain_view_of(optimizer: Optimizer) -> PlainView | None:
    """The view that an optimizer's steps may be made on; None if it may need more than an element at a time."""
    if type(optimizer) not in _ELEMENTWISE or any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    if (view := _views.get(optimizer)) is None:
        view = _views[optimizer] = PlainView(type(optimizer))
    return view


@_disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Have the step made on a view, where it can be."""
    held = held_by(optimizer)
    if not any(isinstance(parameter, DTensor) for parameter in held) or (view := plain_view_of(optimizer)) is None:
        return None
    if view.num_parameters > len(held):
        view.forget_all_but(held)
    if _has_other_hooks(optimizer) or any(argument is not None for argument in (*args[1:], *kwargs.values())):
        return None
    if not view.point(optimizer, [group["params"] for group in optimizer.param_groups]):
        return None
    return (view.optimizer, *args[1:]), kwargs


@_disable_dynamo
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    view = _views.get(optimizer)
    if view is not None and args[:1] == (view.optimizer,):
        view.finish(optimizer)


def _has_other_hooks(optimizer: Optimizer) -> bool:
    """Whether something is called before the step that may change what it finds."""
    hooks = _global_optimizer_pre_hooks.values()
    foreign = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith(f"{__package__}.")]
    return bool(foreign or optimizer._optimizer_step_pre_hooks)


# After the one of `_optimizers`, which exchanges parameters.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
