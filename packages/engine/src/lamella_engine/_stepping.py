"""Optimizers that step inside backward: each unit as soon as its gradients are reduced, while the others' go on.

    in backward      a unit's gradients are installed on its sharded parameters (reduce or all-reduce stream)
                     the optimizer's own step runs over these parameters alone (update stream, which waits for that)
    its end          the compute stream waits for the update stream
    optimizer.step() runs hooks, and the optimizer's own step over whatever was not stepped yet

The optimizer is not changed: its own step is called with views of it (`_split_steps`).

Note [When a unit is stepped]. Main weights must not change under anybody who still reads them in this backward. A unit
is stepped in backward only if all of these hold, and in `optimizer.step()` otherwise:
- Its forwards since the last step, as its hooks saw them in passes that began with gradients enabled, have each had
  their backward. So a unit that is called twice, or whose microbatches' backwards are yet to come, waits for the last
  one, and one that no hook saw so (driven by verbs, or in a model that is checkpointed as a whole) for
  `optimizer.step()`. Forwards that no backward follows, as under `no_grad` in the same pass, make it wait too.
- It is the step's last backward, which hooks drive, and gradients were installed, not kept unreduced.
- Nobody holds the unit, none of its gradients comes late, and no gather of it is under way.
- Its unsharded parameters are a copy, and not the main weights themselves: where a weight is computed from others,
  autograd may yet read those. Copies, kept ones too (`ZERO1`, `reshard_after_backward=False`), do not change.
- Its shards do not rest on the CPU, where gradients arrive when backward is over.
What is stepped all the same and used again in the same backward is an error there, and never a wrong gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from lamella_engine._optimizers import shard_optimizer
from lamella_engine._plain_steps import step_on
from lamella_engine._split_steps import cheapest_view_of, check_steps_apart, claim, own_step, release, show
from lamella_engine._step_hooks import held_by, wait_before_update


@dataclass
class _Uses:
    """A unit's passes since the last step."""

    num_forwards: int = 0
    num_backwards: int = 0
    stepped: list[torch.Tensor] = field(default_factory=list)


class StepInBackward:
    """An optimizer that steps inside backward, until `remove()`; `step_in_backward` gives one. It need not be kept."""

    def __init__(self, optimizer: Optimizer, *, free_gradients: bool = False) -> None:
        self._frees = free_gradients
        self._key = key = next(_keys)
        # Weak: it holds this, by its hooks.
        self._optimizer = weakref.ref(optimizer, lambda _: _active.pop(key, None))
        self._uses: weakref.WeakKeyDictionary[object, _Uses] = weakref.WeakKeyDictionary()
        self._stepped: set[int] = set()  # ids of parameters, which the optimizer keeps alive
        self._group_of: dict[int, int] = {}
        self._indexed: list[tuple[int, int]] = []
        # A view of what is left for the step. Always the same object: a compiler would compile the step for each anew.
        self._rest: Optimizer | None = None
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        _active[key] = self

    def remove(self) -> None:
        """Let the optimizer step in `optimizer.step()` alone again.

        Raises:
            RuntimeError: Some of its parameters were stepped in a backward, and `optimizer.step()` was not called.
        """
        if self._stepped:
            raise RuntimeError(
                f"Expected {self._name}.step() after a backward that updated {len(self._stepped)} of its parameters, "
                "got remove(), after which it would step them again. Call step() first."
            )
        for hook in self._hooks:
            hook.remove()
        _active.pop(self._key, None)
        if (optimizer := self._optimizer()) is not None:
            release(optimizer)

    @property
    def _name(self) -> str:
        return type(self._optimizer()).__name__

    # -- what units say ----------------------------------------------------------------------------------------------

    def _uses_of(self, unit: object) -> _Uses:
        """What became of a unit since the last step."""
        if (uses := self._uses.get(unit)) is None:
            uses = self._uses[unit] = _Uses()
        return uses

    def _holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether some of the parameters are the optimizer's."""
        self._index()
        return any(id(parameter) in self._group_of for parameter in parameters)

    def stepped(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that were stepped in a backward after which nobody called `optimizer.step()` yet."""
        return [parameter for parameter in parameters if id(parameter) in self._stepped] if self._stepped else []

    def _step(self, unit: object, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Step those of a unit's parameters that are the optimizer's, and have a gradient.

        Returns:
            The gradients that they were to let go of.

        Effects: those of the optimizer's own step, on the current stream.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        self._index()
        parts: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for parameter in parameters:
            index = self._group_of.get(id(parameter))
            if index is not None and parameter.grad is not None:
                parts[index].append(parameter)
        if not any(parts):
            return []
        stepped = [parameter for part in parts for parameter in part]
        self._uses_of(unit).stepped += stepped  # first: whatever becomes of it, these are not to be stepped again
        self._stepped.update(id(parameter) for parameter in stepped)
        wait_before_update(optimizer)
        own_step(optimizer)(cheapest_view_of(optimizer, parts))
        return _take_gradients(stepped) if self._frees else []

    def _forget(self, unit: object) -> None:
        """Expect nothing of a unit that a step was dropped in."""
        if (uses := self._uses.pop(unit, None)) is not None:
            self._stepped.difference_update(id(parameter) for parameter in uses.stepped)

    def _index(self) -> None:
        """Know which group each parameter is in; groups are added, and replaced when a state dict is loaded."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        seen = [(id(group["params"]), len(group["params"])) for group in groups]
        if seen != self._indexed:
            self._group_of = {id(parameter): i for i, group in enumerate(groups) for parameter in group["params"]}
            self._indexed = seen

    # -- the optimizer's hooks ---------------------------------------------------------------------------------------

    @_disable_dynamo
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Have the step that follows go over what was not stepped yet."""
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise RuntimeError(
                f"Expected {self._name}.step() without a closure or other arguments, since it steps inside backward, "
                "got some. Run forward and backward before, or remove() what step_in_backward returned."
            )
        if not self._stepped:
            return None
        if getattr(optimizer, "found_inf", None) is not None:  # GradScaler.step sets it
            raise RuntimeError(
                f"Expected no gradient scaler for {self._name}, which steps inside backward, got one: weights were "
                "updated with scaled gradients. Train in bfloat16, which needs no scaling, or without "
                "step_in_backward."
            )
        rest = [[p for p in group["params"] if id(p) not in self._stepped] for group in optimizer.param_groups]
        if len(held_by(optimizer)) - sum(map(len, rest)) < len(self._stepped):
            raise RuntimeError(
                f"Expected {self._name} to hold the {len(self._stepped)} parameters that were stepped inside backward, "
                "got others in its param groups: they would be stepped again. Change groups between steps."
            )
        if type(self._rest) is not type(optimizer):
            self._rest = object.__new__(type(optimizer))
        show(self._rest, optimizer, zip(optimizer.param_groups, rest, strict=True))
        return step_on(self._rest, optimizer, args, kwargs)

    def _after_step(self, *_: object) -> None:
        """Begin anew. Not before the step: one that raises may be called again, for what is left."""
        self._stepped.clear()
        self._uses.clear()
        if self._rest is not None:
            vars(self._rest).clear()  # what somebody lets go of between steps is freed


_keys = itertools.count()
# In the order of their calls, which every rank makes alike: an update may communicate.
_active: dict[int, StepInBackward] = {}


def step_in_backward(optimizer: Optimizer, *, free_gradients: bool = False) -> StepInBackward:
    """Let an optimizer step each unit inside backward, as soon as the unit's gradients are reduced.

    The update then overlaps with the rest of backward. The training loop stays as it is: `optimizer.step()` must still
    follow each step's last backward. It steps whatever was not stepped inside (parameters outside of units, units that
    must wait), runs the optimizer's step hooks once, and counts as one step for learning rate schedulers. Weights,
    state and state dict are to the bit those of the same training without this. Gradients stay until `zero_grad()`,
    unless they are to be freed.

    Weights change during backward, so nothing may look at all gradients before, or change them: no clipping by the
    global norm, no gradient scaler, no step that is skipped or takes a closure. Our `clip_grad_norm_` raises; torch's,
    and `GradScaler.unscale_`, do not notice, and change gradients that were used. With several microbatches, call
    `set_is_last_backward(False)`, or `set_requires_gradient_sync(False)`, before the backwards of all but the last.
    After an exception inside backward some units have been stepped, and others not: load a checkpoint.

    Args:
        optimizer: Of `torch.optim`, or like those: it updates each parameter from its own gradient and state, and
            counts steps a parameter. Options (`lr`) are read when a unit is stepped. Its parameters may lie in any
            units, or in none. One that was built before `fully_shard` goes on with the shards.
        free_gradients: Let go of each gradient that was used inside backward, so that those of two or three units are
            alive and not the model's: in fp32, 4 bytes a main weight that this rank owns. `.grad` is None after.

    Returns:
        What ends this when its `remove()` is called.

    Raises:
        TypeError: Not a `torch.optim.Optimizer`.
        ValueError: Two of its parameters that are stepped apart do not become what they become when stepped together,
            as two small ones show on which it is tried; another optimizer steps one of its parameters in backward; or
            `overlap_optimizer` steps it in parts already.

    Effects: tries two steps on parameters of four elements, with a host sync if they are on a GPU; not a collective.
        In backward those of the optimizer's own step, on the update stream, and of a unit's parameters alone; no host
        sync. At the end of the step's last backward the current stream waits for the update stream.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    shard_optimizer(optimizer)
    for other in _in_order():
        if other._holds(held_by(optimizer)):
            raise ValueError(
                f"Expected parameters of {type(optimizer).__name__} that no other optimizer steps in backward, got "
                f"some that {other._name} does. remove() what step_in_backward returned for it."
            )
    check_steps_apart(optimizer, step_in_backward.__name__)
    claim(optimizer, step_in_backward.__name__)
    return StepInBackward(optimizer, free_gradients=free_gradients)


# -- what units call -----------------------------------------------------------------------------------------------


def is_stepped(unit: object) -> bool:
    """Whether a unit was stepped in a backward after which nobody called `optimizer.step()` yet."""
    return bool(_active) and any(each._uses_of(unit).stepped for each in _in_order())


def refuse(title: str, use: str) -> NoReturn:
    """Refuse to use a unit that is stepped.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"Expected optimizer.step() after the backward in which {title} was updated (step_in_backward), got {use}. "
        "Call it after each step's last backward, and set_is_last_backward(False) before the backwards that others "
        "follow. reset_iter_state() gives the rest of a step up. What is used again in the same backward cannot be "
        "updated in it."
    )


def check_gradients_unused(parameters: Iterable[torch.Tensor], what: str) -> None:
    """Refuse to change gradients that an optimizer has used.

    Raises:
        RuntimeError: One of the parameters was stepped in a backward, and `optimizer.step()` was not called.
    """
    parameters = list(parameters)
    for each in _in_order():
        if stepped := each.stepped(parameters):
            raise RuntimeError(
                f"Expected gradients that no optimizer has used, got {len(stepped)} of {len(parameters)} parameters "
                f"that {each._name} updated inside backward: {what} comes too late. To do without step_in_backward, "
                "remove() what it returned."
            )


def note_forward(unit: object) -> None:
    """Count a forward that a backward may follow."""
    for each in _in_order():
        each._uses_of(unit).num_forwards += 1


def note_backward(unit: object) -> None:
    """Count the end of a backward."""
    for each in _in_order():
        each._uses_of(unit).num_backwards += 1


def step(unit: object, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Have each optimizer step those of a unit's parameters that are its own, unless a backward of the unit is to come.

    Returns:
        Gradients that nobody refers to any more. They must be kept until the current stream has read them.

    Effects: those of the optimizers' own steps, on the current stream.
    """
    freed = []
    for each in _in_order():
        uses = each._uses_of(unit)
        if uses.num_forwards == uses.num_backwards > 0:
            freed += each._step(unit, parameters)
    return freed


def forget(unit: object) -> None:
    """Drop a step that some of the unit's parameters may have been stepped in."""
    for each in _in_order():
        each._forget(unit)


def is_asked_for() -> bool:
    """Whether any optimizer steps inside backward."""
    return bool(_active)


def _in_order() -> tuple[StepInBackward, ...]:
    """Asked several times a unit and pass, as a rule of nobody."""
    return tuple(_active.values()) if _active else ()


def _take_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    taken = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    return taken
