"""One unit at run time: the verbs that hooks, schedules and users drive it with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from lamella_buffers import Done, Pending, all_gather
from lamella_engine import _overlapping as overlapping
from lamella_engine import _stepping as stepping
from lamella_engine import _updates as updates
from lamella_engine._context import Context, Member, label, log
from lamella_engine._extended_group import split_extended
from lamella_engine._gradients import Gradients
from lamella_engine._offload import CPU
from lamella_engine._parameter_group import ParameterGroup, by_axes
from lamella_engine._placements import Strategy
from lamella_engine._sharded_parameter import ShardedParameter
from lamella_precision import MixedPrecisionPolicy


class Residency(Enum):
    """Where a unit's parameters are, and what that costs in memory."""

    SHARDED = "shards only"
    UNSHARDING = "shards and the unsharded buffer, which a gather is filling; modules hold DTensors"
    UNSHARDED = "shards and the unsharded buffer; modules hold plain tensors"
    KEPT = "shards and the unsharded buffer, whose contents may still be used; modules hold DTensors"

    __hash__ = object.__hash__  # by identity, as they are compared; an enum's own is of its name, in Python


_LEGAL = {
    (Residency.SHARDED, Residency.UNSHARDING),
    (Residency.UNSHARDING, Residency.UNSHARDED),
    (Residency.UNSHARDING, Residency.SHARDED),  # gathered ahead, never used
    (Residency.UNSHARDED, Residency.SHARDED),
    (Residency.UNSHARDING, Residency.KEPT),
    (Residency.UNSHARDED, Residency.KEPT),
    (Residency.KEPT, Residency.UNSHARDING),
    (Residency.KEPT, Residency.SHARDED),
}


_AS_FSDP2 = Strategy()


class _Gather(NamedTuple):
    """A gather in flight: what the host waits for (gloo), and what a stream waits for (CUDA)."""

    pending: list[Pending]
    event: torch.Event


class FSDPState:
    """A unit's parameters and what is happening to them.

    Life in a step: `unshard` and `wait_for_unshard` before forward and again before backward, `reshard` after each,
    `end_backward_by_hand` after backward. The hooks of `fully_shard` do the same at module boundaries; a schedule that
    never calls `module.forward` may call them itself. What becomes of the gradients is told in `_gradients`.

    Who unshards is a holder. Hooks and plain verbs count as one, and every `Hold` as another; the parameters go when
    the last holder lets go.

    Args:
        groups: Its parameters.
        context: Shared with the rest of the tree.
        policy: Number formats; here only those of inputs and outputs.
        reshard_after_forward: FSDP2's flag; None means "unless I am the outermost unit".
        strategy: What its ZeRO stage makes it do.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        context: Context,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        strategy: Strategy = _AS_FSDP2,
    ) -> None:
        self.name = ""
        self.groups = tuple(groups)
        self.context = context
        self.index = -1
        self.is_outermost = True
        self.hooks_of_outermost: list[RemovableHandle] = []
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        self.reshard_after_forward = reshard_after_forward
        self.strategy = strategy
        self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.max_reductions_in_flight = 1
        self.forward_prefetch: tuple[weakref.ref[FSDPState], ...] = ()
        self.backward_prefetch: tuple[weakref.ref[FSDPState], ...] = ()
        self.awaits_backward_end = False
        self.module_ids: frozenset[int] = frozenset()
        self.view: Callable[[], object] = lambda: None  # what torch's tools see of it: weak, as that holds this
        self._reader: FSDPState | None = None
        self._awaited: set[int] = set()
        self._forward_is_watched = True
        self._residency = Residency.SHARDED
        self._gather: _Gather | None = None
        self._gathered: torch.Event | None = None
        self._holders: set[object] = set()
        self._readers: list[torch.Event] = []
        self.gradients = Gradients()
        self._gathered_at = -1
        self._expects_update = False
        self._early: list[tuple[int, int]] | None = None  # versions of what was gathered before the next forward
        context.add(self)

    @property
    def residency(self) -> Residency:
        """Where the parameters are."""
        return self._residency

    @residency.setter
    def residency(self, to: Residency) -> None:
        assert (self._residency, to) in _LEGAL, f"{self.name}: {self._residency} -> {to}"
        self._residency = to

    @property
    def unit(self) -> FSDPState:
        """The unit that has the parameters: this one, or one that reads them and took them over."""
        return self if self._reader is None else self._reader.unit

    def become_inner(self) -> None:
        """Be a unit inside of another, without the hooks that are the outermost unit's."""
        self.is_outermost = False
        for hook in self.hooks_of_outermost:
            hook.remove()
        self.hooks_of_outermost.clear()

    def take_over(self, other: FSDPState) -> None:
        """Communicate another unit's parameters from now on, with this one's own. Both must be at rest.

        Effects: none; not a collective.
        """
        other.drop_copy()
        self.gradients.take_over(other.gradients)
        for parameter in (p for group in other.groups for p in group.parameters):
            parameter.name = f"{other.name}.{parameter.name}"
        self.groups += other.groups
        other.groups, other._reader = (), self
        self._gathered_at = -1

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the parameters go after forward. The outermost unit's stay for the backward that begins with it."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return not (self.is_outermost and torch.is_grad_enabled())

    @property
    def goes_after_forward(self) -> bool:
        """Whether the parameters are freed after forward, and gathered again for backward."""
        return self.reshards_after_forward and self.unshards_in_backward and not self.strategy.keeps_copy

    @property
    def _is_current(self) -> bool:
        """Whether what was gathered last is what main weights say, as far as is known."""
        return self._gathered_at == updates.count and not self._expects_update

    @property
    def is_offloaded(self) -> bool:
        """Whether shards rest on the CPU."""
        return any(group.offload is not None for group in self.groups)

    @property
    def is_unsharding(self) -> bool:
        """Whether a gather was started and not waited for."""
        return self._residency is Residency.UNSHARDING

    def awaits(self, module_id: int) -> bool:
        """Whether the forward under way has yet to run this one of the unit's modules."""
        return module_id in self._awaited

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules hold unsharded parameters."""
        return self._residency is Residency.UNSHARDED

    @property
    def unsharded_nbytes(self) -> int:
        """What the parameters weigh unsharded, as every rank counts it."""
        return sum(group.unsharded_nbytes for group in self.groups)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """With whom the unit communicates."""
        all_axes = dict.fromkeys(group.axes for group in self.groups)
        found = [g for axes in all_axes for g in (axes.shard_group, axes.replicate_group, axes.outer_group)]
        return list(dict.fromkeys(group for group in found if group is not None))

    def check_order(self, verb: str, nbytes: Callable[[], int]) -> None:
        """Refuse a collective that other ranks are not about to begin, if that is checked.

        Effects: none unless it is; see `OrderCheck.before`.
        """
        if (check := self.context.order_check) is not None:
            check.before(f"{verb} {self.name or self.title}", self.process_groups, f" ({nbytes()} bytes)")

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def num_holds(self) -> int:
        """How many keep the parameters unsharded, beside hooks and plain verbs."""
        return len(self._holders) - (None in self._holders)

    def check_not_held(self) -> None:
        """Refuse what needs the modules to hold DTensors while somebody keeps the parameters unsharded.

        Raises:
            RuntimeError: Somebody does.
        """
        if self.num_holds:
            raise RuntimeError(
                f"Expected nobody to hold {self.title}, got {self.num_holds} holds. Release each first, let every "
                "delayed gradient come, or call reset_iter_state() after an exception."
            )

    @property
    def title(self) -> str:
        """How errors call it."""
        return repr(self.name) if self.name else "the outermost unit"

    def unshard(self, *, holder: object = None) -> None:
        """Start gathering the parameters; nothing if they are unsharded or on the way.

        Args:
            holder: For whom. None is the one holder that hooks and plain verbs are.

        Raises:
            RuntimeError: The parameters are on the meta device, or rest on the CPU and are not there.

        Effects: collective on the unit's shard axis, one for all groups on the same axes; allocates the unsharded
            buffers on the gather stream and casts this rank's shards there, copied to the device before if they rest on
            the CPU; no host sync.
        """
        if self._residency in (Residency.UNSHARDING, Residency.UNSHARDED) or not self.groups:
            self._holders.add(holder)
            return
        context = self.context
        if not self._is_current:
            self._drop_stale()
        if context.is_resting:
            self.adopt_replaced_shards()
            context.order_gathers_after_updates()
        self._check_materialized()
        if self._residency is Residency.KEPT:
            if self._is_current:
                self._holders.add(holder)
                self.residency = Residency.UNSHARDING
                return
            self.drop_copy()
        if is_offloaded := self.is_offloaded:
            self._check_at_home()
        self.check_order("gather", lambda: self.unsharded_nbytes)
        if is_offloaded:
            context.note_shards_are_read()
        if stepping.is_stepped(self):
            context.order_gathers_after_steps()
        stream = context.all_gather_stream
        with label("all_gather", self.name), context.on(stream):
            self._gather = _Gather(self._start_gathers(), stream.record_event())
        self._holders.add(holder)
        self._gathered_at, self._expects_update = updates.count, False
        self.residency = Residency.UNSHARDING

    def _start_gathers(self) -> list[Pending]:
        """Start a gather for each set of axes, or leave no bytes behind: who catches what is raised may try again.

        Returns:
            Those that the host has to wait for.
        """
        try:
            started = [_start_gather(same) for same in by_axes(self.groups)]
            return [each for each in started if not isinstance(each, Done)]
        except BaseException:
            for group in self.groups:
                if group.unsharded_weight.has_bytes:
                    group.unsharded_weight.free()
            raise

    def wait_for_unshard(self) -> None:
        """Order the compute stream after the gather, and make the modules hold the unsharded parameters.

        Effects: no host sync on CUDA; blocks the host on gloo.
        """
        if self._residency is not Residency.UNSHARDING:
            return
        self._finish_gather()
        for group in self.groups:
            group.install_unsharded()
        for grads in self.gradients.main_grads:
            grads.mark()
        self.residency = Residency.UNSHARDED

    def order_after_gather(self) -> None:
        """Order the current stream after the gather, though another stream was the first to wait for it."""
        if self._gathered is not None:
            self.context.compute_stream.wait_event(self._gathered)

    def reshard(self, *, keep_parts: bool = False, holder: object = None) -> None:
        """Make the modules hold the DTensors, and free the unsharded buffers, unless the ZeRO stage keeps them.

        Nothing happens while others than the holder hold them.

        Args:
            keep_parts: Keep what the neighbours need to gather again among themselves, where there are any
                (`reshard_after_forward` was a number).
            holder: Who lets go.

        Effects: the gather stream waits for the compute stream; no host sync on CUDA; not a collective.
        """
        if not keep_parts:
            self._drop_parts()
        self._holders.discard(holder)
        if self._residency in (Residency.SHARDED, Residency.KEPT):
            return
        if self._holders:
            self._readers.append(self.context.compute_stream.record_event())
            return
        self._expects_update |= self._early is not None  # before the forward that it was gathered for: copies too
        self._finish_gather()
        self._order_gathers_after_readers()
        if self._residency is Residency.UNSHARDED:  # else modules hold DTensors, maybe others than they were given
            for group in self.groups:
                group.install_sharded()
        if self.strategy.keeps_copy:
            self.residency = Residency.KEPT
            return
        self.context.order_gathers_after_compute()
        for group in self.groups:
            if keep_parts and group.neighbours is not None:
                with torch.no_grad(), self.context.on(self.context.all_gather_stream):
                    group.keep_part()
            group.unsharded_weight.free()
        self.residency = Residency.SHARDED

    def drop_copy(self) -> None:
        """Free copies of the parameters that were kept: somebody may be about to write main weights.

        Effects: the gather stream waits for the compute stream; no host sync on CUDA; not a collective.
        """
        self._drop_stale()
        if self._residency is Residency.KEPT:
            self.context.order_gathers_after_compute()
            for group in self.groups:
                group.unsharded_weight.free()
            self.residency = Residency.SHARDED

    def leave_nothing_but_shards(self) -> None:
        """Return to rest, since somebody is about to read, write or replace main weights.

        Raises:
            RuntimeError: Somebody holds the parameters.

        Effects: those of `reshard` and `drop_copy`. Where main weights rest on the CPU, a host sync if some were
            gathered since the last one.
        """
        self.check_not_held()
        self.context.finish_left()
        self.reshard()
        self.drop_copy()
        self.context.wait_for_shards()

    def adopt_replaced_shards(self, *, keep_parameters: bool = False) -> None:
        """Take back shards whose storage, or whose Parameter, somebody replaced while they were at rest.

        Effects: see `ParameterGroup.adopt_replaced_shards`.
        """
        if self._residency not in (Residency.SHARDED, Residency.KEPT):
            return
        if is_replaced := any(group.is_replaced for group in self.groups):
            self.drop_copy()
        if self._gathered_at == -1:
            self.groups = split_extended(self.groups)
        for group in self.groups if is_replaced else ():
            before = group.main_weight
            group.adopt_replaced_shards(keep_parameters=keep_parameters)
            if group.main_weight is not before:
                self.context.post_optim_event = None  # it says nothing of these copies

    def drop_stale_weights(self) -> None:
        """Reshard if the weights changed since they were gathered: they were kept over an optimizer step.

        Raises:
            RuntimeError: What was gathered inside an optimizer's step was written on this rank alone, for all it knows.
        """
        if self._is_current and not self._is_written_since():
            return
        if self._gathered_at not in (-1, updates.count):  # else never gathered, or a copy that is made anew in any case
            self.check_not_held()
        self.reshard()

    # -- gathers inside an optimizer's step --------------------------------------------------------------------------

    @property
    def has_copies(self) -> bool:
        """Whether unsharded parameters are others than the main weights: there is something to gather."""
        return any(not group.computes_with_main for group in self.groups)

    @property
    def may_be_early(self) -> bool:
        """Whether it may be gathered before the next forward begins: nobody uses it, and shards are on the device."""
        at_rest = self.context.is_resting and self._residency in (Residency.SHARDED, Residency.KEPT)
        return at_rest and not (self.num_holds or self.is_offloaded)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The sharded forms that take gradients, or have one that a step would still use, of a unit at rest."""
        forms = (p.sharded for group in self.groups for p in group.parameters)
        return [form for form in forms if form.requires_grad or form.grad is not None]

    def gather_early(self) -> None:
        """Start gathering for the next forward: whoever updates the parameters is done with them.

        Effects: those of `unshard` between passes. The bytes stay until that forward.
        """
        self.unshard()
        self._early = self._versions()
        updates.note_early(self)

    def drop_early(self) -> None:
        """Free what was gathered so; nothing if it is used already.

        Effects: those of `reshard`.
        """
        if self._early is not None:
            self.reshard()

    def outlives(self, updated: Container[int]) -> bool:
        """Whether it was gathered so, and still is current when the parameters of these ids are updated."""
        is_current = self._early is not None and self._is_current
        return is_current and not any(id(p.sharded) in updated for group in self.groups for p in group.parameters)

    def confirm(self) -> None:
        """Be current: what was noted was of others."""
        self._gathered_at = updates.count

    def _is_written_since(self) -> bool:
        """Whether what was gathered early is not what shards hold now, as far as torch's version counters can tell.

        A DTensor is written by every rank alike, so that all gather again. This rank's shard may be written by this
        rank alone, and a gather that others do not begin would never end.
        """
        if self._early is None:
            return False
        if any(group.is_replaced for group in self.groups):
            return True
        before, now = self._early, self._versions()
        if [of_whole for of_whole, _ in before] != [of_whole for of_whole, _ in now]:
            return True
        if before != now:
            raise RuntimeError(
                f"Expected mark_updated(), on every rank, after this rank's shards of {self.title} were written "
                "between optimizer.step() and the next forward, got none: the step has gathered them for that forward "
                "already (overlap_optimizer)."
            )
        return False

    def _versions(self) -> list[tuple[int, int]]:
        return [(p.sharded._version, p.shard._version) for group in self.groups for p in group.parameters]

    def _order_gathers_after_readers(self) -> None:
        for event in self._readers:
            self.context.all_gather_stream.wait_event(event)
        self._readers.clear()

    def _drop_parts(self) -> None:
        for group in self.groups:
            group.parts = None

    def _drop_stale(self) -> None:
        self._drop_parts()
        for group in self.groups:
            group.model_weight = None

    def _finish_gather(self) -> None:
        if self._gather is None:
            return
        context = self.context
        (pending, event), self._gather = self._gather, None
        self._early = None
        if pending:  # gloo copies its results into place now: where what they lie in was allocated
            with context.on(context.all_gather_stream):
                for each in pending:
                    each.wait()
            event = context.all_gather_stream.record_event()
        self._gathered = event
        self.order_after_gather()

    def _check_materialized(self) -> None:
        names = [self._full_name(name) for group in self.groups for name in group.meta_names()]
        if names:
            raise RuntimeError(
                f"Expected the parameters of {self.title} on {self._home}. FSDP parameters should be materialized "
                f"from meta device before training, but the following were still on meta device: {names}. Call "
                f'`model.to_empty(device="{self._home.type}")` and initialise them first.'
            )

    def _check_at_home(self) -> None:
        if away := [group for group in self.groups if not group.is_at_home]:
            devices = [(self._full_name(p.name), p.shard.device) for group in away for p in group.parameters]
            raise RuntimeError(
                f"Expected the parameters of {self.title} on the CPU, as `offload_policy` says. FSDP parameters "
                "should be materialized on CPU when enabling CPU offloading: load a CPU state dict, or call "
                '`model.to_empty(device="cpu")` and initialise them. Found following parameters on non-CPU device: '
                f"{devices}."
            )

    def _full_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name and len(self.module_ids) == 1 else name

    @property
    def _home(self) -> torch.device:
        return CPU if self.is_offloaded else self.context.device

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Get ready for another forward pass of the tree: forget one that an exception ended, take shards back.

        Parts that are left from a forward without a backward go too: somebody may have written the weights since.

        Effects: see `ParameterGroup.adopt_replaced_shards`.
        """
        self._awaited.clear()
        self._drop_parts()
        if self._early is not None:
            self._check_not_captured()
            self.drop_stale_weights()
        self.adopt_replaced_shards()

    def _check_not_captured(self) -> None:
        if self.context.is_captured:
            raise RuntimeError(
                f"Expected nothing to be gathered yet when a CUDA graph of a forward is captured, got {self.title}, "
                "which an optimizer's step has gathered before (overlap_optimizer). remove() what overlap_optimizer "
                "returned before the capture: a captured step cannot gather for the next one."
            )

    def begin_forward(self, module_id: int, *, is_recomputed: bool) -> bool:
        """Unshard for the forward of one of the unit's modules, and gather units ahead.

        Args:
            module_id: Whose forward begins: one of the unit's modules, or one whose parameters were taken over.
            is_recomputed: It runs again inside backward: nothing is gathered ahead.

        Returns:
            Whether the unit's forward begins here. That of a unit of several modules begins with the first of them to
            run, and is over when each has run.
        """
        is_read = module_id not in self.module_ids
        if is_read and self._residency is Residency.UNSHARDED and (is_recomputed or self._is_current):
            return False
        begins = not self._awaited or len(self.module_ids) == 1
        if torch.is_grad_enabled() and stepping.is_stepped(self):
            stepping.refuse(self.title, "another forward")
        ahead: Sequence[Member] = ()
        if begins and not is_recomputed:
            ahead = self.ahead_in_forward(self.context.enter_forward(self))
            self.drop_stale_weights()
        if begins:
            self._awaited = {module_id} if is_read else set(self.module_ids)
            self._forward_is_watched = True
        self.unshard()
        _gather_ahead(ahead, "forward")
        self.wait_for_unshard()
        if begins and not is_recomputed and (self.context.makes_graph or torch.is_grad_enabled()):
            stepping.note_forward(self)
        return begins

    def end_forward(self, module_id: int, *, is_watched: bool, is_recomputed: bool) -> None:
        """Reshard, if all of the unit's modules have run.

        A pass that began with one of several modules ends with it. If it has a backward, that is likely to come next,
        and the parameters stay for it.

        Args:
            module_id: Whose forward ended.
            is_watched: Whether its outputs will say when the unit's backward begins; else the parameters must stay.
            is_recomputed: It ran again inside backward, which reshards when it ends.
        """
        if module_id not in self.module_ids | self._awaited:
            return  # one whose parameters were taken over, inside the unit's own forward
        self._awaited.discard(module_id)
        self._forward_is_watched &= is_watched
        if is_recomputed or (self._awaited and not self.context.is_forward_root(self)):
            return
        if not (self._awaited and torch.is_grad_enabled()):
            self._reshard_after_forward()
        self._awaited.clear()
        self.context.leave_forward(self)

    def finish_forward(self) -> None:
        """End a forward that not all of the unit's modules took part in."""
        if self._awaited and not self.context.is_forward_root(self):
            self._awaited.clear()
            self._reshard_after_forward()
            self.context.leave_forward(self)

    def _reshard_after_forward(self) -> None:
        if self.reshards_after_forward and self._forward_is_watched and not self.context.kept.keeps(self):
            self.reshard(keep_parts=torch.is_grad_enabled())

    def ahead_in_forward(self, learned: Sequence[Member]) -> Sequence[Member]:
        """The units to gather ahead when a forward begins: those that the unit was told, or what an order says."""
        return self._ahead(self.forward_prefetch, learned)

    def _ahead(self, asked: Sequence[weakref.ref[FSDPState]], learned: Sequence[Member]) -> Sequence[Member]:
        """The units to gather ahead, so that their gathers overlap with this unit's compute."""
        return [state.unit for ref in asked if (state := ref()) is not None] if asked else learned

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Unshard for the unit's backward, and gather the next unit ahead."""
        if self.awaits_backward_end:
            return  # another output of the same forward
        if stepping.is_stepped(self):
            stepping.refuse(self.title, "another backward")
        self.awaits_backward_end = True
        if self._early is not None:
            self.drop_stale_weights()
        for grads in self.gradients.main_grads:
            grads.offer()
        with label("pre_backward", self.name):
            ahead = self._ahead(self.backward_prefetch, self.context.enter_backward(self))
            if self.unshards_in_backward:
                self.unshard()
            _gather_ahead([member for member in ahead if member.unshards_in_backward], "backward")
            self.wait_for_unshard()

    def end_backward(self) -> None:
        """Reshard, and reduce the gradients or keep them for a later microbatch, once those that are delayed came."""
        log("post_backward", self.name)
        self.awaits_backward_end = False
        self._awaited.clear()
        stepping.note_backward(self)
        is_complete = self._note_end()
        if self.reshard_after_backward:
            with label("post_backward_reshard", self.name):
                self.reshard()
        if is_complete:
            self.gradients.use(self)

    def end_backward_by_hand(self) -> None:
        """The same for a backward that no hook ends; who drives it reshards.

        Raises:
            RuntimeError: A hook will end it, or no gradient is there.

        Effects: those of `Gradients.reduce`, unless gradients are kept or still to come.
        """
        if self.awaits_backward_end:
            raise RuntimeError(
                f"Expected a unit whose backward no hook ends, got {self.title} in the middle of one. It is reduced "
                "when that is over."
            )
        gradients = self.gradients
        gradients.settle(self.context.compute_stream)
        trains = any(group.is_trainable for group in self.groups)
        if trains and not (self.has_gradients or gradients.delayed.parameters or gradients.reduces_unused_parameters):
            raise RuntimeError(
                f"Expected gradients to reduce in {self.title}, got none. Run its backward first; where some ranks "
                "have none, call set_reduce_scatter_unused_params(True)."
            )
        if self._note_end():
            gradients.use(self)

    def note_gradient(self, parameter: ShardedParameter) -> None:
        """Note that a delayed gradient is there, made on the current stream.

        Raises:
            RuntimeError: It came before.

        Effects: with the last one of a backward, those that the end of the backward was put off with.
        """
        delayed = self.gradients.delayed
        if not delayed.arrive(parameter, self.context.compute_stream):
            return
        if not delayed.num_due:
            self.reshard(holder=delayed)
        self.gradients.use(self)
        self.context.finish_awaited()

    def _note_end(self) -> bool:
        """Whether all gradients are there. If not, the modules hold the parameters that get them until they are."""
        delayed = self.gradients.delayed
        if not delayed.are_expected or delayed.end(self.context.compute_stream):
            return True
        if self._residency is Residency.UNSHARDED:
            self._holders.add(delayed)
        return False

    @property
    def has_gradients(self) -> bool:
        """Whether there is something to reduce."""
        return any(group.has_gradients for group in self.groups)

    @property
    def awaits_gradients(self) -> bool:
        """Whether a backward of the unit ended, and some of its gradients come later."""
        return self.gradients.delayed.num_due > 0

    def finish_backward(self) -> None:
        """End what autograd did not reach: inputs that need no gradient, a forward whose output was not used.

        Also what earlier microbatches left, if this one was the last and did not use the unit. Left alone is a unit
        that somebody holds, or whose delayed gradients are to come: its backward is not over.

        Effects: those of `end_backward`; a collective on the outer axis for gradients that were not reduced over it.
        """
        if self.awaits_backward_end:
            self.end_backward()
        elif self.reshard_after_backward:
            self.reshard()
        self.gradients.finish(self)

    def check_ended(self) -> None:
        """Refuse to end a step that somebody holds the unit in, or that gradients are missing from.

        Raises:
            RuntimeError: So it is.
        """
        if missing := self.gradients.delayed.missing:
            raise RuntimeError(
                f"Expected every delayed gradient of {self.title} at the end of a step, got none yet for "
                f"{missing}. Compute them, and call the callback that `delay_gradient` gave for each."
            )
        self.check_not_held()

    def expect_an_update(self) -> None:
        """Make copies anew at the next use: an optimizer of any kind is likely to write main weights now."""
        overlapping.expect_step(self.context)
        for group in self.groups:
            if self.strategy.keeps_copy or group.outer is not None:
                self._expects_update = True

    def abandon(self) -> None:
        """Drop this pass: gradients that were not reduced, and the unsharded parameters."""
        self._awaited.clear()
        self.awaits_backward_end = False
        self.gradients.delayed.forget()
        stepping.forget(self)
        self.gradients.drop(self)
        self._holders.clear()
        self.reshard()


def _gather_ahead(members: Sequence[Member], direction: str) -> None:
    for member in members:
        with label(f"{direction}_prefetch for {member.name}"):
            member.unshard()


def _start_gather(groups: Sequence[ParameterGroup]) -> Pending:
    first = groups[0]
    if first.parts is not None and first.neighbours is not None:
        return first.neighbours.all_gather([payload for group in groups for payload in group.take_parts()])
    return all_gather([group.prepare_gather() for group in groups], first.transport)
