"""Optimizers whose step hides the ends of passes: the first gathers of the next, and the last reduction of this one.

    backward          ends without waiting for its last reductions       (late gradients)
    optimizer.step()  updates units that were reduced early              (late gradients)
                      waits for all gradients
                      updates what the next forward gathers first        compute stream
                      starts these gathers                               gather stream, which waits for that
                      updates the rest                                   compute stream
    next forward      finds its first units on the way, or there

The parts are steps of views of the optimizer (`_split_steps`), made in its last pre-hook: whatever else is called
before a step may yet change gradients. If another pre-hook came later, one step is made as without this, and the
pre-hook goes behind it.

Note [What is gathered inside a step]. What the next forward gathers first: the unit that it begins with, and one more,
as the last forward had it that a backward followed, so that every rank gathers the same. More would have to be updated
first, and so come later than it is wanted. A unit is gathered here only if:
- all of its parameters that train are the optimizer's: another one that holds some may step later;
- it is at rest, nobody holds it, and its shards do not rest on the CPU.
The first that is not ends the row, so units are never gathered out of order. Passed over are those with nothing to
gather: whose parameters lie in other units, or compute as main weights themselves (`DDP` without a compute dtype). And
a tree of which the optimizer updates nothing at first (a discriminator in its generator's step) is left alone.

Note [When an early gather is thrown away]. Main weights may change between the step and the next forward. What was
gathered is freed and gathered again at that forward after: the step of an optimizer that has some of the unit's
parameters, `mark_updated()`, a state dict that is asked for or loaded, `to()` and what else replaces shards, a write to
the DTensors that torch counts (`_version`). A write to this rank's shard that torch counts is an error there, since
other ranks need not have made one. Others torch does not count, and they need `mark_updated()`: through `.data`,
`torch._foreach_*`, under `torch.inference_mode()`, and into tensors that an earlier `state_dict()` gave.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from lamella_engine._context import Context, Listener, Member, finish_left, trees
from lamella_engine._optimizers import shard_optimizer
from lamella_engine._plain_steps import plain_view_of, step_on
from lamella_engine._split_steps import cheapest_view_of, check_steps_apart, own_step
from lamella_engine._staleness import begin_step, forget_step
from lamella_engine._step_hooks import has_other_hooks, held_by, is_compiled

Parts = list[list[torch.Tensor]]
_Events = weakref.WeakKeyDictionary[Member, dict[torch.Stream, torch.Event]]  # by unit, and by stream


class OverlapOptimizer(Listener):
    """An optimizer whose step hides gathers, until `remove()`; `overlap_optimizer` gives one. It need not be kept."""

    def __init__(self, optimizer: Optimizer, *, late_gradients: bool = False) -> None:
        self.waits_late = late_gradients
        self._optimizer = weakref.ref(optimizer)  # weak: it holds this, by its hooks
        # Trees whose last backward is over, or nearly, and whether their gradients are late.
        self._ended: weakref.WeakKeyDictionary[Context, bool] = weakref.WeakKeyDictionary()
        # Not a WeakSet: ranks must free in the same order.
        self._early: weakref.WeakKeyDictionary[Member, None] = weakref.WeakKeyDictionary()
        # After which events a unit's gradients are there: units in the order of their reductions.
        self._reduced: weakref.WeakKeyDictionary[Context, _Events] = weakref.WeakKeyDictionary()
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(self._after_step)
        self._listen_to(held_by(optimizer))

    def remove(self) -> None:
        """Let the optimizer step as before, and free what its last step has gathered, if no forward has used it yet.

        Effects: the gather stream waits for the current one, and that for the gathers; no host sync on CUDA.
        """
        self._before.remove()
        self._after.remove()
        for tree in tuple(trees):
            tree.ignore(self)
        finish_left()
        if (optimizer := self._optimizer()) is not None:
            forget_step(optimizer)
        self.drop_early()

    def drop_early(self) -> None:
        """Free what the last step has gathered, unless a forward has used it.

        Effects: those of `FSDPModule.reshard`.
        """
        for member in list(self._early):
            member.drop_early()

    # -- moments of a step -------------------------------------------------------------------------------------------

    def gradients_final(self, tree: Context) -> None:
        """Note that a tree is at the end of its last backward, and leave its reductions to the step if asked to."""
        if tree not in self._ended:
            self._ended[tree] = self.waits_late and self._holds_some_of(tree)
        # Of every microbatch: one that another follows may not say so, and that one's forward finishes its reductions.
        tree.leaves_reductions |= self._ended[tree]

    def gradients_reduced(self, tree: Context, unit: Member, streams: Iterable[torch.Stream]) -> None:
        """Note the events after which a unit's gradients are there, for a step that waits for some units alone."""
        if self.waits_late:
            noted = self._reduced.setdefault(tree, weakref.WeakKeyDictionary())
            earlier = noted.pop(unit, {})  # of other groups, or of a reduction that was not finished since
            noted[unit] = {**earlier, **{stream: stream.record_event() for stream in streams}}

    def reductions_finished(self, tree: Context) -> None:
        """Forget the events: the compute stream has waited for all of them."""
        self._reduced.pop(tree, None)

    def _listen_to(self, held: Sequence[torch.Tensor]) -> None:
        """Listen to the trees that some of the optimizer's parameters are in: also to those made since the last step.

        A tree that is sharded after `overlap_optimizer` was called is heard from its second step on.
        """
        ids = {id(parameter) for parameter in held}
        for tree in tuple(trees):
            if self not in tree.listeners and any(member.holds_any(ids) for member in tree.states):
                tree.listen(self)

    def _holds_some_of(self, context: Context) -> bool:
        optimizer = self._optimizer()
        held = set() if optimizer is None else {id(p) for p in held_by(optimizer)}
        return any(id(p) in held for member in context.states for p in member.trained)

    def _reduced_first(self, tree: Context, without: Container[Member]) -> list[Member]:
        """Of the units whose gradients were noted, the first half by bytes in the order of their reductions."""
        members = [member for member in self._reduced.get(tree, ()) if member not in without]
        left = sum(member.unsharded_nbytes for member in members) // 2
        chosen = []
        for member in members:
            left -= member.unsharded_nbytes
            if left < 0:
                break
            chosen.append(member)
        return chosen

    def _wait_for_gradients_of(self, tree: Context, members: Iterable[Member]) -> None:
        """Order the compute stream after these units' gradients, of those that were noted."""
        noted = self._reduced.get(tree, _Events())
        for member in members:
            for event in noted.get(member, {}).values():
                tree.compute_stream.wait_event(event)

    # -- the optimizer's hooks ---------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Make all parts of the step but the last, which is left to the step that follows."""
        # A view is another object each time, for which a compiler would compile the step again.
        if is_compiled():
            return self._leave_whole(optimizer)
        return self._step_in_parts(optimizer, args, kwargs)

    @_disable_dynamo
    def _leave_whole(self, optimizer: Optimizer) -> None:
        """Have the step that follows go over everything, with all gradients there."""
        self._ended.clear()
        forget_step(optimizer)  # one that raised
        finish_left()

    @_disable_dynamo
    def _step_in_parts(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        contexts = list(self._ended)
        self._ended.clear()
        forget_step(optimizer)  # one that raised
        is_plain = args[0] is optimizer and all(argument is None for argument in (*args[1:], *kwargs.values()))
        if not (is_plain and self._is_last_hook(optimizer)):
            finish_left()
            return None
        held = {id(p) for p in held_by(optimizer)}
        self._listen_to(held_by(optimizer))
        first = {context: _gathered_first(context, held) for context in contexts}
        early = {context: self._reduced_first(context, first[context]) for context in contexts if context.is_left}
        *parts, rest = _split(optimizer, [_ids(early), _ids(first)])
        if not any(rest) or not any(map(any, parts)):
            finish_left()
            view = plain_view_of(optimizer, [group["params"] for group in optimizer.param_groups])
            return None if view is None else step_on(view, optimizer, args, kwargs)
        begin_step(optimizer)
        self._early.clear()
        for context, members in early.items():
            self._wait_for_gradients_of(context, members)
        _step(optimizer, parts[0])
        finish_left()
        _step(optimizer, parts[1])
        for context, members in first.items():
            context.gather_early(members)
            self._early.update(dict.fromkeys(members))
        return step_on(cheapest_view_of(optimizer, rest), optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Be the last hook before the next step."""
        hooks: Any = optimizer._optimizer_step_pre_hooks
        if self._before.id in hooks:
            hooks.move_to_end(self._before.id)

    def _is_last_hook(self, optimizer: Optimizer) -> bool:
        return bool(next(reversed(optimizer._optimizer_step_pre_hooks)) == self._before.id)


def overlap_optimizer(optimizer: Optimizer, *, late_gradients: bool = False) -> OverlapOptimizer:
    """Let an optimizer's step hide the gathers that the next forward begins with.

    `optimizer.step()` updates first what the next forward gathers first: the unit that it begins with, as a rule the
    outermost one with embedding and head, and one more. These gathers then run while the optimizer updates the rest,
    and forward need not wait for them. The training loop stays as it is. Weights, state and state dict are to the bit
    those of the same training without this. Clipping, gradient scalers, step hooks and learning rate schedulers work
    as before. A step with a closure, without a backward before it, or that is compiled (`torch.compile`) gathers
    nothing, and is made as without this. One in a CUDA graph gathers nothing either, but late gradients are late there
    too: `capture_step` sees to it; before other captures `remove()` what this returns.

    What was gathered is gathered again at the next forward if the weights changed since: by `load_state_dict`, `.to()`,
    another optimizer, operations on the parameters. Say `mark_updated()`, on every rank, after writes that torch's
    version counters do not show: through `.data`, by `torch._foreach_*` or a fused kernel on the parameters, in
    inference mode, or into tensors from an earlier `state_dict()` (averages that are swapped in, checkpoints that are
    loaded in place). After a write to a local shard (`to_local()`) without it, the next forward raises.

    Args:
        optimizer: Of `torch.optim`, or like those: it updates each parameter from its own gradient and state, and
            counts steps a parameter. Its parameters may lie in any units, or in none; a unit is gathered inside its
            step only if it has all of the unit's that train. Of several optimizers over one model, each may be given.
            One that was built before `fully_shard` goes on with the shards.
        late_gradients: Let a backward that hooks drive end without waiting for its last reductions. The step updates
            what was reduced early, waits for the rest, and goes on. Whoever reads or changes `.grad` before the step
            must call `model.wait_for_gradients()` first, on the same stream, or finds it half reduced without an error:
            torch's own clipping, `GradScaler`, `optimizer.zero_grad(set_to_none=False)`, your code. Our
            `clip_grad_norm_`, `find_nonfinite` and `parameter_norms`, the model's `zero_grad`, `state_dict` and `to`,
            step hooks, steps of other `torch.optim` optimizers and the next forward wait by themselves. Gradients that
            go to the CPU are not late.

    Returns:
        What ends this when its `remove()` is called.

    Raises:
        TypeError: Not a `torch.optim.Optimizer`.
        ValueError: Two of its parameters that are stepped apart do not become what they become when stepped together,
            as two small ones show on which it is tried; or it was given to this already.

    Effects: tries two steps on parameters of four elements, with a host sync if they are on a GPU; not a collective.
        In `optimizer.step()` the collectives of the next forward's first units, on the gather stream, which waits for
        their updates; the optimizer's own step is called twice, with late gradients three times. From there to the next
        forward the unsharded bytes of these two units are held; with late gradients, from backward to the step, the
        unreduced gradients of the unit that was reduced last. No host sync.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if _given(optimizer) is not None:
        raise ValueError(
            f"Expected {type(optimizer).__name__} once, got it again. remove() what overlap_optimizer returned first."
        )
    shard_optimizer(optimizer)
    check_steps_apart(optimizer, overlap_optimizer.__name__)
    return OverlapOptimizer(optimizer, late_gradients=late_gradients)


def _given(optimizer: Optimizer) -> OverlapOptimizer | None:
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, OverlapOptimizer)), None)


def drop_early(optimizer: Optimizer) -> None:
    """Free what this optimizer's last step has gathered, unless a forward has used it."""
    if (found := _given(optimizer)) is not None:
        found.drop_early()


def _gathered_first(context: Context, held: Container[int]) -> list[Member]:
    """The units to gather inside a step: see Note [What is gathered inside a step]."""
    chosen: list[Member] = []
    if context.is_captured:
        return chosen
    for member in context.begins_next_forward():
        if not member.may_be_early or any(id(p) not in held for p in member.trained):
            break
        chosen.append(member)
    return chosen if any(member.trained for member in chosen) else []


def _ids(members: Mapping[Context, Iterable[Member]]) -> set[int]:
    return {id(p) for each in members.values() for member in each for p in member.trained}


def _split(optimizer: Optimizer, kinds: Sequence[Container[int]]) -> list[Parts]:
    """The optimizer's parameters by group: those of each kind, by their ids, and all others."""
    wholes = [group["params"] for group in optimizer.param_groups]
    parts = [[[p for p in whole if id(p) in kind] for whole in wholes] for kind in kinds]
    others = [[p for p in whole if not any(id(p) in kind for kind in kinds)] for whole in wholes]
    return [*parts, others]


def _step(optimizer: Optimizer, part: Parts) -> None:
    """Step some of an optimizer's parameters, if there are any."""
    if any(part):
        own_step(optimizer)(cheapest_view_of(optimizer, part))


@_disable_dynamo
def finish_late_reductions(optimizer: Optimizer, *_: object) -> None:
    """Have gradients there for whatever comes before a step, and for a step that does not wait for them itself."""
    found = _given(optimizer)
    if found is None or not found.waits_late or has_other_hooks(optimizer, than=1):
        finish_left()
