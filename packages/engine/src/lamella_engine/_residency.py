"""Where a unit's parameters are: gathered and freed, held, and gathered again where main weights have changed since."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from lamella_buffers import Done, Pending, all_gather
from lamella_engine._context import Context
from lamella_engine._extended_group import split_extended
from lamella_engine._gradients import Gradients
from lamella_engine._labels import label
from lamella_engine._offload import CPU
from lamella_engine._parameter_group import ParameterGroup, by_axes
from lamella_engine._placements import Strategy
from lamella_engine._sharded_parameter import ShardedParameter, refuse_displaced
from lamella_engine._ties import merge_tied
from lamella_precision import Direction


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


class _Gather(NamedTuple):
    """A gather in flight: what the host waits for (gloo), and what a stream waits for (CUDA)."""

    pending: list[Pending]
    event: torch.Event


class UnitParameters:
    """A unit as far as its parameters go; `FSDPState` adds what happens to it in a pass.

    Who unshards is a holder. Hooks and plain verbs count as one, and every `Hold` as another; the parameters go when
    the last holder lets go.

    Args:
        groups: Its parameters.
        context: Shared with the rest of the tree.
        strategy: What its ZeRO stage makes it do.
    """

    def __init__(self, groups: Sequence[ParameterGroup], context: Context, strategy: Strategy) -> None:
        self.name = ""
        self.groups = tuple(groups)
        self.context = context
        self.strategy = strategy
        self.module_ids: frozenset[int] = frozenset()
        self.gradients = Gradients()
        self._residency = Residency.SHARDED
        self._holders: set[object] = set()
        self._readers: list[torch.Event] = []
        self._gather: _Gather | None = None
        self._forbidden: _unsafe_preserve_version_counter | None = None
        self._gathered: torch.Event | None = None
        self._there: Direction | None = None  # the passes whose payloads are gathered
        self._num_updates = 0  # of main weights
        self._gathered_at = -1  # how many updates had been by then
        self._expects_update = False
        self._early: list[tuple[int, int]] | None = None  # versions of what was gathered before the next forward

    @property
    def residency(self) -> Residency:
        """Where the parameters are."""
        return self._residency

    @residency.setter
    def residency(self, to: Residency) -> None:
        assert (self._residency, to) in _LEGAL, f"{self.name}: {self._residency} -> {to}"
        self._residency = to

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """With whom the unit communicates."""
        all_axes = dict.fromkeys(group.axes for group in self.groups)
        found = [g for axes in all_axes for g in (axes.shard_group, axes.replicate_group, axes.outer_group)]
        return list(dict.fromkeys(group for group in found if group is not None))

    @property
    def title(self) -> str:
        """How errors call it."""
        return repr(self.name) if self.name else "the outermost unit"

    @property
    def unsharded_nbytes(self) -> int:
        """What the parameters weigh unsharded, as every rank counts it."""
        return sum(group.unsharded_nbytes for group in self.groups)

    @property
    def is_offloaded(self) -> bool:
        """Whether shards rest on the CPU."""
        return any(group.offload is not None for group in self.groups)

    @property
    def is_unsharding(self) -> bool:
        """Whether a gather was started and not waited for."""
        return self._residency is Residency.UNSHARDING

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules hold unsharded parameters."""
        return self._residency is Residency.UNSHARDED

    @property
    def _is_current(self) -> bool:
        """Whether what was gathered last is what main weights say, as far as is known."""
        return self._gathered_at == self._num_updates and not self._expects_update

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

    def check_order(self, verb: str, nbytes: Callable[[], int]) -> None:
        """Refuse a collective that other ranks are not about to begin, if that is checked.

        Effects: none unless it is; see `OrderCheck.before`.
        """
        if (check := self.context.order_check) is not None:
            check.before(f"{verb} {self.name or self.title}", self.process_groups, f" ({nbytes()} bytes)")

    # -- gathered and freed ------------------------------------------------------------------------------------------

    def unshard(self, direction: Direction = Direction.BOTH, *, holder: object = None) -> None:
        """Start gathering the parameters; nothing if they are unsharded or on the way.

        Args:
            direction: The passes that use them. Payloads that these need, and an earlier gather left out, are added.
            holder: For whom. None is the one holder that hooks and plain verbs are.

        Raises:
            RuntimeError: The parameters are on the meta device, or rest on the CPU and are not there.

        Effects: collective on the unit's shard axis, one for all groups on the same axes; allocates the unsharded
            buffers on the gather stream and casts this rank's shards there, copied to the device before if they rest on
            the CPU; no host sync.
        """
        if self._residency in (Residency.UNSHARDING, Residency.UNSHARDED) or not self.groups:
            self._holders.add(holder)
            if self._there is not direction and self._there is not Direction.BOTH:
                self._add_payloads(direction)
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
                self._add_payloads(direction)
                return
            self.drop_copy()
        if is_offloaded := self.is_offloaded:
            self._check_at_home()
        self.check_order("gather", lambda: self.unsharded_nbytes)
        if is_offloaded:
            context.note_shards_are_read()
        stream = context.all_gather_stream
        with label("all_gather", self.name), context.on(stream):
            self._gather = _Gather(self._start_gathers(direction, None), stream.record_event())
        self._there = direction
        self._holders.add(holder)
        self._gathered_at, self._expects_update = self._num_updates, False
        self.residency = Residency.UNSHARDING

    def _add_payloads(self, direction: Direction) -> None:
        """Gather the payloads that a direction needs, beside those that are there or on the way for another.

        Modules that hold the unsharded parameters keep them: `wait_for_unshard` orders the compute stream.

        Effects: those of `unshard`, if payloads are missing; else none.
        """
        there = self._there
        if any(group.chosen(direction, there) for group in self.groups):
            self.check_order("gather more", lambda: self.unsharded_nbytes)
            if not self._is_current:
                self._drop_stale()
            if self.is_offloaded:
                self._check_at_home()
                self.context.note_shards_are_read()
            stream = self.context.all_gather_stream
            with label("all_gather", self.name), self.context.on(stream):
                earlier = [] if self._gather is None else self._gather.pending
                pending = [*earlier, *self._start_gathers(direction, there)]
                self._gather = _Gather(pending, stream.record_event())
        self._there = direction.joined(there)

    def _start_gathers(self, direction: Direction, there: Direction | None) -> list[Pending]:
        """Start a gather for each set of axes, or leave no bytes behind: who catches what is raised may try again.

        Returns:
            Those that the host has to wait for.
        """
        try:
            started = [_start_gather(same, direction, there) for same in by_axes(self.groups)]
            return [each for each in started if not isinstance(each, Done)]
        except BaseException:
            for group in self.groups if there is None else ():
                group.free_unsharded()
            raise

    def forbid_frozen(self) -> None:
        """Let autograd refuse frozen parameters until a gather in flight is waited for.

        It sees them modified. What uses others so early leaves gradients, which show it.
        """
        frozen = tuple(p.unsharded for group in self.groups for p in group.parameters if not p.trains)
        if frozen and self._gather is not None and self._forbidden is None:
            self._forbidden = _unsafe_preserve_version_counter(frozen)
            increment_version(frozen)

    def wait_for_unshard(self) -> None:
        """Order the compute stream after the gather, and make the modules hold the unsharded parameters.

        Raises:
            RuntimeError: A parameter was replaced since the gather began.

        Effects: no host sync on CUDA; blocks the host on gloo.
        """
        if self._residency is not Residency.UNSHARDING:
            if self._gather is not None and self._residency is Residency.UNSHARDED:
                self._finish_gather()  # payloads of another direction
            return
        self._finish_gather()
        displaced: list[str] = []
        for group in self.groups:
            displaced += group.install_unsharded()
        for grads in self.gradients.main_grads:
            grads.mark()
        self.residency = Residency.UNSHARDED
        if displaced:
            refuse_displaced(displaced)

    def _finish_gather(self) -> None:
        if self._gather is None:
            return
        context = self.context
        (pending, event), self._gather = self._gather, None
        if self._forbidden is not None:
            self._forbidden.__exit__(None, None, None)
            self._forbidden = None
        self._early = None
        if pending:  # gloo copies its results into place now: where what they lie in was allocated
            with context.on(context.all_gather_stream):
                for each in pending:
                    each.wait()
            event = context.all_gather_stream.record_event()
        self._gathered = event
        self.order_after_gather()

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

        Raises:
            RuntimeError: A parameter was replaced while it was unsharded. The unit is sharded then.

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
        displaced: list[str] = []
        if self._residency is Residency.UNSHARDED:  # else modules hold DTensors, maybe others than they were given
            for group in self.groups:
                displaced += group.install_sharded()
        if self.strategy.keeps_copy:
            self.residency = Residency.KEPT
        else:
            self.context.order_gathers_after_compute()
            for group in self.groups:
                if keep_parts and group.neighbours is not None:
                    with torch.no_grad(), self.context.on(self.context.all_gather_stream):
                        group.keep_part()
                group.free_unsharded()
            self.residency, self._there = Residency.SHARDED, None
        if displaced:
            refuse_displaced(displaced)

    def _order_gathers_after_readers(self) -> None:
        for event in self._readers:
            self.context.all_gather_stream.wait_event(event)
        self._readers.clear()

    def keep_bytes(self, keep: bool) -> None:
        """Say whether unsharded buffers stay where they are when they are freed.

        Effects: those that were kept and are not used are freed if they are to go, after the compute stream.
        """
        for group in self.groups:
            group.keeps_bytes = keep
        if not keep and self._residency is Residency.SHARDED:
            self.context.order_gathers_after_compute()
            for group in self.groups:
                group.free_unsharded()

    def _drop_parts(self) -> None:
        for group in self.groups:
            group.parts = None

    def drop_copy(self) -> None:
        """Free copies of the parameters that were kept: somebody may be about to write main weights.

        Effects: the gather stream waits for the compute stream; no host sync on CUDA; not a collective.
        """
        self._drop_stale()
        if self._residency is Residency.KEPT:
            self.context.order_gathers_after_compute()
            for group in self.groups:
                group.free_unsharded()
            self.residency, self._there = Residency.SHARDED, None

    def _drop_stale(self) -> None:
        self._drop_parts()
        for group in self.groups:
            group.model_weights.clear()

    # -- main weights that change ------------------------------------------------------------------------------------

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

        Effects: see `ParameterGroup.adopt_replaced_shards` and `merge_tied`.
        """
        if self._residency not in (Residency.SHARDED, Residency.KEPT):
            return
        if is_replaced := any(group.is_replaced for group in self.groups):
            self.drop_copy()
            self.context.post_optim_event = None  # it says nothing of the copies that are made here
            self.groups = merge_tied(self.groups, self._name_of, keep_parameters=keep_parameters)
        if self._gathered_at == -1:
            self.groups = split_extended(self.groups)
        for group in self.groups if is_replaced else ():
            group.adopt_replaced_shards(keep_parameters=keep_parameters)

    def drop_stale_weights(self) -> None:
        """Reshard if the weights changed since they were gathered: they were kept over an optimizer step.

        Raises:
            RuntimeError: What was gathered inside an optimizer's step was written on this rank alone, for all it knows.
        """
        if self._is_current and not self._is_written_since():
            return
        # Of the others, one was never gathered, and a copy is made anew in any case.
        if self._gathered_at not in (-1, self._num_updates):
            self.check_not_held()
        self.reshard()

    def holds_any(self, ids: Container[int]) -> bool:
        """Whether one of the unit's sharded parameters has one of these ids."""
        return any(id(parameter.sharded) in ids for group in self.groups for parameter in group.parameters)

    def note_update(self) -> None:
        """Note that main weights may have changed: unsharded weights from before are stale."""
        self._num_updates += 1

    def expect_an_update(self) -> None:
        """Make copies anew at the next use: an optimizer of any kind is likely to write main weights now."""
        for listener in self.context.listeners:
            listener.gradients_final(self.context)
        for group in self.groups:
            if self.strategy.keeps_copy or group.outer is not None:
                self._expects_update = True

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
        self.unshard(Direction.FORWARD)
        self._early = self._versions()

    def drop_early(self) -> None:
        """Free what was gathered so; nothing if it is used already.

        Effects: those of `reshard`.
        """
        if self._early is not None:
            self.reshard()

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

    # -- parameters that cannot be gathered --------------------------------------------------------------------------

    def _check_materialized(self) -> None:
        names = [self._full_name(name) for group in self.groups for name in group.meta_names()]
        if names:
            raise RuntimeError(
                f"Expected the parameters of {self.title} on {self._home}. FSDP parameters should be materialized "
                f"from meta device before training, but the following were still on meta device: {names}. "
                f'Call `module.to_empty(device="{self._home.type}")`, and `module.reset_parameters()` on each module.'
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

    def _name_of(self, parameter: ShardedParameter) -> str:
        """A parameter's full name, of this unit or of another in its tree."""
        for unit in self.context.states:
            if isinstance(unit, UnitParameters) and any(parameter in group.parameters for group in unit.groups):
                return unit._full_name(parameter.name)
        return parameter.name

    def _full_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name and len(self.module_ids) == 1 else name

    @property
    def _home(self) -> torch.device:
        return CPU if self.is_offloaded else self.context.device


def _start_gather(groups: Sequence[ParameterGroup], direction: Direction, there: Direction | None) -> Pending:
    first = groups[0]
    if first.parts is not None and first.neighbours is not None:
        return first.neighbours.all_gather([payload for group in groups for payload in group.take_parts()])
    return all_gather([group.prepare_gather(direction, there) for group in groups], first.transport)
