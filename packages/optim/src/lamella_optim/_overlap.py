"""Overlapped steps: an optimizer's step hides the first gathers of the next forward, and backward's last reductions.

    backward          ends without waiting for its last reductions          (late gradients)
    optimizer.step()  updates units whose gradients were reduced early      (late gradients)
                      waits for all gradients
                      updates the units that the next forward gathers first compute stream
                      starts these gathers                                  gather stream, after the updates
                      updates the rest                                      compute stream
    next forward      finds its first units in flight, or gathered

The parts are steps of views of the optimizer (`_partial`), made in the optimizer's last pre-hook: earlier hooks may
still change gradients. If a later pre-hook is registered, the next step is whole, and this pre-hook goes behind it.

Note [Units gathered inside a step]. A step gathers the first two units of the last forward that a backward followed, so
that every rank gathers the same units. A third unit would have to be updated first, and would delay the first gather.
A unit is gathered only if:
- the optimizer holds all trainable parameters of the unit: another optimizer may step later;
- the unit is at rest, without a hold, and its shards are not on the CPU.
The first unit that fails ends the row, so units are never gathered out of order. Units with nothing to gather are
passed over: units without parameters of their own, or with main weights in compute (`DDP` without a compute dtype). A
tree without a parameter of the optimizer in these units (a discriminator in its generator's step) is left alone.

Note [Discarded early gathers]. Main weights may change between the step and the next forward. The next forward frees
and repeats an early gather after: the step of an optimizer with some of the unit's parameters, `mark_updated()`, a
state dict that is read or loaded, `to()` and other replacements of shards, a write to the DTensors that torch counts
(`_version`). A counted write to this rank's shard is an error at the forward, since other ranks need not have written.
Uncounted writes need `mark_updated()`: through `.data`, by `torch._foreach_*`, under `torch.inference_mode()`, and into
tensors of an earlier `state_dict()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from lamella_engine.extending import (
    Listener,
    Tree,
    Unit,
    finish_deferred,
    held_by,
    is_compiled,
    living_trees,
    note_step,
)
from lamella_optim._hooks import has_other_hooks
from lamella_optim._installation import install, step_hook
from lamella_optim._originals import shard_optimizer
from lamella_optim._partial import cheapest_view_of, check_steps_apart, own_step
from lamella_optim._plain import plain_view_of, step_on

Parts = list[list[torch.Tensor]]
_Events = weakref.WeakKeyDictionary[Unit, dict[torch.Stream, torch.Event]]  # by unit, and by stream


class OverlapOptimizer(Listener):
    """An overlapped optimizer, until `remove()`; made by `overlap_optimizer`. The caller need not keep the object."""

    def __init__(self, optimizer: Optimizer, *, late_gradients: bool = False) -> None:
        self.waits_late = late_gradients
        self._optimizer = weakref.ref(optimizer)  # weak: the optimizer's hooks hold this object
        # Trees at the end of their last backward, and whether their gradients are late.
        self._ended: weakref.WeakKeyDictionary[Tree, bool] = weakref.WeakKeyDictionary()
        # Not a WeakSet: ranks must free in the same order.
        self._early: weakref.WeakKeyDictionary[Unit, None] = weakref.WeakKeyDictionary()
        # Events behind a unit's gradients: units in the order of their reductions.
        self._reduced: weakref.WeakKeyDictionary[Tree, _Events] = weakref.WeakKeyDictionary()
        self._is_noted = False  # at the step's begin: units gathered between its parts are current
        self._num_states = 0  # in the groups' order
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(self._after_step)
        self._listen_to(_ids_of(optimizer))

    def remove(self) -> None:
        """Let the optimizer step as before, and free units gathered by its last step without a forward since.

        Effects: the gather stream waits for the current stream, and the current stream for the gathers; no host sync on
            CUDA.
        """
        self._before.remove()
        self._after.remove()
        for tree in living_trees():
            tree.ignore(self)
        finish_deferred()
        self.drop_early()

    def _note_rest(self, optimizer: Optimizer) -> None:
        """Make units stale at the end of the optimizer's step, unless the step's begin did."""
        is_noted, self._is_noted = self._is_noted, False
        if not is_noted:
            note_step(optimizer)

    def drop_early(self) -> None:
        """Free units gathered by the last step and not used by a forward.

        Effects: those of `FSDPModule.reshard`.
        """
        for unit in list(self._early):
            unit.drop_early()

    # -- moments of a step -------------------------------------------------------------------------------------------

    def gradients_final(self, tree: Tree) -> None:
        """Note a tree at the end of its last backward, and leave its reductions to the step for late gradients."""
        if tree not in self._ended:
            self._ended[tree] = self.waits_late and self._holds_some_of(tree)
        # After every microbatch: a loop need not announce a further one, whose forward finishes the reductions.
        tree.step_end.defers_wait |= self._ended[tree]

    def gradients_reduced(self, tree: Tree, unit: Unit, streams: Iterable[torch.Stream]) -> None:
        """Note the events behind a unit's gradients, for a step that waits for some units only."""
        if self.waits_late:
            noted = self._reduced.setdefault(tree, weakref.WeakKeyDictionary())
            earlier = noted.pop(unit, {})  # of other groups, or of an unfinished reduction
            noted[unit] = {**earlier, **{stream: stream.record_event() for stream in streams}}

    def reductions_finished(self, tree: Tree) -> None:
        """Forget the events: the compute stream has waited for all."""
        self._reduced.pop(tree, None)

    def _listen_to(self, parameter_ids: Container[int]) -> None:
        """Listen to all trees with some of the optimizer's parameters, also to trees made since the last step.

        Trees sharded after the call of `overlap_optimizer` are heard from their second step on.
        """
        for tree in living_trees():
            if self not in tree.listeners and any(unit.parameters.holds_any(parameter_ids) for unit in tree.units):
                tree.listen(self)

    def _holds_some_of(self, tree: Tree) -> bool:
        optimizer = self._optimizer()
        parameter_ids = set() if optimizer is None else _ids_of(optimizer)
        return any(id(p) in parameter_ids for unit in tree.units for p in unit.parameters.trained)

    def _reduced_first(self, tree: Tree, without: Container[Unit]) -> list[Unit]:
        """The first half, by bytes, of the units with noted gradients, in the order of their reductions."""
        units = [unit for unit in self._reduced.get(tree, ()) if unit not in without]
        remaining_nbytes = sum(unit.parameters.unsharded_nbytes for unit in units) // 2
        chosen = []
        for unit in units:
            remaining_nbytes -= unit.parameters.unsharded_nbytes
            if remaining_nbytes < 0:
                break
            chosen.append(unit)
        return chosen

    def _wait_for_gradients_of(self, tree: Tree, units: Iterable[Unit]) -> None:
        """Order the compute stream after the noted gradients of some units."""
        noted = self._reduced.get(tree, _Events())
        for unit in units:
            for event in noted.get(unit, {}).values():
                tree.streams.compute_stream.wait_event(event)

    # -- the optimizer's hooks ---------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Make all parts of the step but the last, left to the class's own step."""
        # Each step has a new view, and a compiler would compile the step again for a new object.
        if is_compiled():
            return self._leave_whole(optimizer)
        return self._step_in_parts(optimizer, args, kwargs)

    @_disable_dynamo
    def _leave_whole(self, optimizer: Optimizer) -> None:
        """Leave all parameters to the class's own step, after all reductions."""
        self._ended.clear()
        self._is_noted = False  # of a step that raised
        finish_deferred()

    @_disable_dynamo
    def _step_in_parts(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        trees = list(self._ended)
        self._ended.clear()
        self._is_noted = False  # of a step that raised
        is_plain = args[0] is optimizer and all(argument is None for argument in (*args[1:], *kwargs.values()))
        if not (is_plain and self._is_last_hook(optimizer)):
            finish_deferred()
            return None
        parameter_ids = _ids_of(optimizer)
        self._listen_to(parameter_ids)
        first = {tree: _gathered_first(tree, parameter_ids) for tree in trees}
        early = {tree: self._reduced_first(tree, first[tree]) for tree in trees if tree.step_end.is_deferred}
        *parts, last_part = _split(optimizer, [_ids(early), _ids(first)])
        if not any(last_part) or not any(map(any, parts)):
            finish_deferred()
            view = plain_view_of(optimizer, [group["params"] for group in optimizer.param_groups])
            return None if view is None else step_on(view, optimizer, args, kwargs)
        note_step(optimizer)
        self._is_noted = True
        self._early.clear()
        for tree, units in early.items():
            self._wait_for_gradients_of(tree, units)
        _step(optimizer, parts[0])
        finish_deferred()
        _step(optimizer, parts[1])
        for tree, units in first.items():
            tree.gather_early(units)
            self._early.update(dict.fromkeys(units))
        return step_on(cheapest_view_of(optimizer, last_part), optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Move this object's pre-hook behind all others, and put new states in the groups' order."""
        hooks: Any = optimizer._optimizer_step_pre_hooks
        if self._before.id in hooks:
            hooks.move_to_end(self._before.id)
        # Parts make states in their own order, and a rank that waited for its gradients before the step makes others:
        # torch's full state dicts gather states one by one, in each rank's order.
        if len(optimizer.state) != self._num_states and not is_compiled():
            self._num_states = len(optimizer.state)
            _sort_states(optimizer)

    def _is_last_hook(self, optimizer: Optimizer) -> bool:
        return bool(next(reversed(optimizer._optimizer_step_pre_hooks)) == self._before.id)


def overlap_optimizer(optimizer: Optimizer, *, late_gradients: bool = False) -> OverlapOptimizer:
    """Let an optimizer's step hide the gathers at the begin of the next forward.

    `optimizer.step()` updates first the units that the next forward gathers first: the first unit, as a rule the
    outermost with embedding and head, and one more. Their gathers run while the optimizer updates the rest, and forward
    need not wait for them. The training loop stays unchanged. Weights, state and state dict equal, bit by bit, those of
    training without this call. Clipping, gradient scalers, step hooks and learning rate schedulers work as before. A
    step with a closure, without a backward before, or compiled (`torch.compile`) gathers nothing. A step in a CUDA
    graph gathers nothing either, and keeps late gradients late: `capture_step` sees to that; before other captures call
    `remove()` on the result.

    Early gathers are repeated at the next forward after changes of the weights: by `load_state_dict`, `.to()`, another
    optimizer, operations on the parameters. Call `mark_updated()`, on every rank, after writes invisible to torch's
    version counters: through `.data`, by `torch._foreach_*` or a fused kernel on the parameters, in inference mode, or
    into tensors of an earlier `state_dict()` (averages swapped in, checkpoints loaded in place). After a write to a
    local shard (`to_local()`) without this call, the next forward raises.

    Args:
        optimizer: A `torch.optim` optimizer or a class like those: each parameter is updated from its own gradient and
            state, and steps are counted by parameter. Parameters may lie in any units, or in none; a unit is gathered
            inside the step only if the optimizer holds all its trainable parameters. Several optimizers over one model
            may each be given. An optimizer built before `fully_shard` continues with the shards.
        late_gradients: Let a backward driven by hooks end without waiting for its last reductions. The step updates
            units reduced early, waits for the rest, and goes on. Code that reads or changes `.grad` before the step has
            to call `model.wait_for_gradients()` first, on the same stream, or reads half-reduced gradients without an
            error: torch's own clipping, `GradScaler`, `optimizer.zero_grad(set_to_none=False)`, your code.
            `clip_grad_norm_` of this package, `find_nonfinite` and `parameter_norms`, the model's `zero_grad`,
            `state_dict` and `to`, step hooks, steps of other `torch.optim` optimizers and the next forward wait by
            themselves. Gradients of offloaded parameters are not late.

    Returns:
        The overlapped optimizer, whose `remove()` ends the overlap.

    Raises:
        TypeError: Not a `torch.optim.Optimizer`.
        ValueError: A trial on two small parameters gave different results when stepped separately; or the optimizer
            steps by other optimizers (`MuonAndAdam`), or is overlapped already.

    Effects: tries two steps on parameters of four elements, with a host sync if parameters are on a GPU; not a
        collective. In `optimizer.step()` the collectives of the next forward's first units, on the gather stream, after
        their updates; the optimizer's own step is called twice, with late gradients three times. From the step to the
        next forward the unsharded bytes of these two units are held; with late gradients, from backward to the step,
        the unreduced gradients of the last reduced unit. No host sync. Calls `install`.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if _overlap_of(optimizer) is not None:
        raise ValueError(
            f"Expected {type(optimizer).__name__} once, got it again. Call remove() on the first call's result before."
        )
    install()
    shard_optimizer(optimizer)
    check_steps_apart(optimizer, overlap_optimizer.__name__)
    return OverlapOptimizer(optimizer, late_gradients=late_gradients)


def _overlap_of(optimizer: Optimizer) -> OverlapOptimizer | None:
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, OverlapOptimizer)), None)


def drop_early(optimizer: Optimizer) -> None:
    """Free units gathered by an optimizer's last step and not used by a forward."""
    if (overlap := _overlap_of(optimizer)) is not None:
        overlap.drop_early()


def _gathered_first(tree: Tree, parameter_ids: Container[int]) -> list[Unit]:
    """The units to gather inside a step: see Note [Units gathered inside a step]."""
    chosen: list[Unit] = []
    if tree.streams.is_captured:
        return chosen
    for unit in tree.first_of_next_forward():
        if not unit.may_gather_early or any(id(p) not in parameter_ids for p in unit.parameters.trained):
            break
        chosen.append(unit)
    return chosen if any(unit.parameters.trained for unit in chosen) else []


def _ids_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for parameter in held_by(optimizer)}


def _ids(units: Mapping[Tree, Iterable[Unit]]) -> set[int]:
    return {id(p) for tree_units in units.values() for unit in tree_units for p in unit.parameters.trained}


def _split(optimizer: Optimizer, kinds: Sequence[Container[int]]) -> list[Parts]:
    """The optimizer's parameters by group: a list for each kind (a set of ids), and the remaining parameters."""
    groups = [group["params"] for group in optimizer.param_groups]
    parts = [[[p for p in group if id(p) in kind] for group in groups] for kind in kinds]
    last_part = [[p for p in group if not any(id(p) in kind for kind in kinds)] for group in groups]
    return [*parts, last_part]


def _sort_states(optimizer: Optimizer) -> None:
    """Put an optimizer's states in the order of its groups, in place."""
    state = optimizer.state
    for parameter in held_by(optimizer):
        if parameter in state:
            state[parameter] = state.pop(parameter)


def _step(optimizer: Optimizer, part: Parts) -> None:
    """Step some of an optimizer's parameters, if any."""
    if any(part):
        own_step(optimizer)(cheapest_view_of(optimizer, part))


@step_hook("gradients")
@_disable_dynamo
def finish_late_reductions(optimizer: Optimizer, *_: object) -> None:
    """Wait for all gradients, unless the optimizer's own step does and no foreign hook comes before."""
    overlap = _overlap_of(optimizer)
    if overlap is None or not overlap.waits_late or has_other_hooks(optimizer, than=1):
        finish_deferred()


@step_hook("staleness")
@_disable_dynamo
def note_overlapped_step(optimizer: Optimizer, *_: object) -> None:
    """Make units stale after a step, unless the begin of an overlapped step did."""
    overlap = _overlap_of(optimizer)
    if overlap is None:
        note_step(optimizer)
    else:
        overlap._note_rest(optimizer)
