"""What the units of one module tree share: the order they run in, beside their streams (`_streams`)."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lamella_engine._ahead import Gatherable, GatheredAhead
from lamella_engine._kept import KeptForBackward
from lamella_engine._labels import label
from lamella_engine._options import DEFAULT_OPTIONS, ShardingOptions
from lamella_engine._order import LearnedOrders, ReplayedOrder
from lamella_engine._order_check import OrderCheck
from lamella_engine._step_hooks import held_by
from lamella_engine._streams import Streams
from lamella_precision import Direction

# Every tree that is alive: one hook is called before any optimizer's step, whatever trees its parameters are of.
trees: weakref.WeakSet[Context] = weakref.WeakSet()


class Phase(Enum):
    """What the tree is doing. Between passes only shards hold memory, but for units that were asked to stay."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


class Member(Gatherable, Protocol):
    """What a context asks of a unit."""

    context: Context
    name: str
    max_reductions_in_flight: int
    unshards_in_backward: bool
    direction_in_backward: Direction

    @property
    def awaits_gradients(self) -> bool:
        """Whether a backward of the unit ended, and some of its gradients come later."""
        ...

    @property
    def goes_after_forward(self) -> bool:
        """Whether it is freed after forward, and gathered again for backward."""
        ...

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """With whom it communicates."""
        ...

    def holds_any(self, ids: Container[int]) -> bool:
        """Whether one of the unit's sharded parameters has one of these ids."""
        ...

    def note_update(self) -> None:
        """Note that main weights may have changed."""
        ...

    def unshard(self, direction: Direction) -> None:
        """Start gathering for these passes."""
        ...

    def forbid_frozen(self) -> None:
        """Let nobody compute with frozen parameters until the gather is waited for."""
        ...

    def ahead_in_forward(self, learned: Sequence[Member]) -> Sequence[Member]:
        """The units to gather ahead when its forward begins: those that it was told, or what a learned order says."""
        ...

    @property
    def has_copies(self) -> bool:
        """Whether its unsharded parameters are others than its main weights."""
        ...

    @property
    def may_be_early(self) -> bool:
        """Whether it may be gathered before the next forward begins."""
        ...

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """Of a unit at rest, the parameters that take gradients."""
        ...

    def gather_early(self) -> None:
        """Start gathering for the next forward, before it begins."""
        ...

    def drop_early(self) -> None:
        """Free what was gathered so."""
        ...

    def begin_pass(self) -> None:
        """Get ready for another forward pass of the tree."""
        ...

    def finish_forward(self) -> None:
        """End a forward that not all of the unit's modules took part in."""
        ...

    def finish_backward(self) -> None:
        """End what autograd did not reach."""
        ...

    def check_ended(self) -> None:
        """Refuse to end a step that something is missing from."""
        ...

    def abandon(self) -> None:
        """Drop this pass."""
        ...


class Listener:
    """Called at moments of a tree's step; each method does nothing until a subclass says what.

    The engine names no listener: optional features subclass this and call `Context.listen`. Listeners are called on
    every rank, at the same points of the program, on the thread and the stream that the moment belongs to. A listener
    that starts a collective must do so on every rank alike.
    """

    def gradients_final(self, tree: Context) -> None:
        """A unit has started the last reduction of its gradients in this step, or has none: a step is likely next.

        A unit may say so more than once.
        """

    def gradients_reduced(self, tree: Context, unit: Member, streams: Iterable[torch.Stream]) -> None:
        """A unit's gradients were put on its parameters, by kernels that are queued on these streams."""

    def reductions_finished(self, tree: Context) -> None:
        """The compute stream was ordered after every reduction of the tree."""


class Context(Streams):
    """Shared by all units under one outermost `fully_shard`; a new outer unit takes over its children's.

    Args:
        device: Of the tree's parameters while they are used.
        options: The first unit's.

    Attributes:
        options: The outermost unit's; only the fields of the tree count here.
        is_last_backward: Whether the backward under way, or the next one, is the step's last.
        finalizes_by_hand: Whether it is the user who ends a step's backward, and no hook (`finalize`).
        num_resets: How often whatever was under way was dropped.
    """

    def __init__(self, device: torch.device, options: ShardingOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(device)
        self.is_last_backward = True
        self.finalizes_by_hand = False
        self.num_resets = 0
        self.ahead = GatheredAhead()
        self.kept = KeptForBackward()
        self.order_check: OrderCheck | None = None
        self.follow(options)
        # Weak: modules own their states. A strong reference back would keep a deleted model's memory until the cyclic
        # collector runs.
        self._states: list[weakref.ref[Member]] = []
        self._listeners: list[weakref.ref[Listener]] = []
        self._phase = Phase.RESTING
        self._forward_root: int | None = None
        self._learned = LearnedOrders()
        self._order = ReplayedOrder()
        self._max_reductions = 1
        self._last_backward_ended_on: torch.Stream | None = None
        self._says_last_backward = True
        self._is_unfinalized = False
        trees.add(self)

    @property
    def is_resting(self) -> bool:
        """Whether no pass is under way."""
        return self._phase is Phase.RESTING

    @property
    def is_in_backward(self) -> bool:
        """Whether the pass under way is a backward."""
        return self._phase is Phase.BACKWARD

    @property
    def awaits_finalization(self) -> bool:
        """Whether there was a backward that is to be finalized by hand, and was not yet."""
        return self._is_unfinalized

    # -- units ------------------------------------------------------------------------------------------------------

    @property
    def states(self) -> Iterator[Member]:
        """The units that are still alive, in the order of their `fully_shard` calls: equal on every rank."""
        return (state for ref in self._states if (state := ref()) is not None)

    def follow(self, options: ShardingOptions) -> None:
        """Let the fields of the tree in some options count from now on."""
        self.options = options
        self.ahead.budget, self.kept.budget = options.prefetch_budget, options.keep_budget
        timeout_s = options.order_check_timeout_s if options.checks_order else None
        if timeout_s != (self.order_check and self.order_check.timeout_s):  # else it goes on with what it has noted
            self.order_check = None if timeout_s is None else OrderCheck(timeout_s)

    def add(self, state: Member) -> None:
        """Make a unit one of this tree's."""
        state.context = self
        state.index = len(self._states)
        self._states.append(weakref.ref(state))

    def share_communication(self, other: Context) -> None:
        """Use another tree's streams from now on, and let its reductions in flight and ours count as one.

        Effects: the compute stream waits for the reductions that this tree has in flight.
        """
        self.finish_reductions()
        for state in self.states:
            state.drop_early()
        self.use_streams_of(other)

    # -- listeners --------------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Call a listener from now on, after those that listen already; it is not kept alive."""
        if listener not in self.listeners:
            self._listeners.append(weakref.ref(listener, self._listeners.remove))

    def ignore(self, listener: Listener) -> None:
        """Call a listener no more; nothing if it is not called."""
        self._listeners[:] = [ref for ref in self._listeners if ref() is not listener]

    @property
    def listeners(self) -> list[Listener]:
        """Who is called at moments of the tree's step, in the order of `listen`."""
        return [listener for ref in self._listeners if (listener := ref()) is not None]

    def finish_reductions(self) -> None:
        """Order the compute stream after every reduction, let go of what they read, and tell listeners.

        Effects: where gradients go to the CPU, the host waits for the compute stream.
        """
        super().finish_reductions()
        for listener in self.listeners:
            listener.reductions_finished(self)

    # -- passes -----------------------------------------------------------------------------------------------------

    def enter_forward(self, state: Member) -> list[Member]:
        """Note that a unit's forward begins; the first one begins a pass.

        Returns:
            The units to gather ahead.
        """
        if self._phase is not Phase.FORWARD or self._forward_root == state.index:
            with label("root_pre_forward"):
                self._begin_forward(state)
        return self._look_ahead(state)

    def _begin_forward(self, root: Member) -> None:
        self.finish_left()
        self._phase = Phase.FORWARD
        self._forward_root = root.index
        self._order = self._learned.begin_forward(root.index)
        backward = self._learned.backward_of_forward(root.index) if torch.is_grad_enabled() else ()
        self.kept.plan(member for member in self._members(backward) if member.goes_after_forward)
        for member in self.states:
            member.begin_pass()
        self.order_gathers_after_updates()

    def is_forward_root(self, state: Member) -> bool:
        """Whether the pass under way is a forward, and began with this unit."""
        return self._phase is Phase.FORWARD and self._forward_root == state.index

    def begins_next_forward(self) -> list[Member]:
        """The units that the next forward is likely to gather first: the one that it begins with, and one more.

        As the last forward had it that a backward followed; none before there was one.
        """
        members = [member for member in self._members(self._learned.last_forward) if member.has_copies]
        return [*members[:1], *(members[0].ahead_in_forward(members[1:])[:1] if members else ())]

    def gather_early(self, members: Iterable[Member]) -> None:
        """Gather for the next forward, while an optimizer still updates others than these. They count as ahead.

        Effects: the gather stream waits for the compute stream; those of the units' gathers.
        """
        self.post_optim_event = None  # it is of an earlier update
        for member in members:
            with label(f"optimizer_prefetch for {member.name}"):
                member.gather_early()
            self.ahead.add(member)

    def leave_forward(self, state: Member) -> None:
        """Note that a unit's forward is over; that of the first one ends the pass."""
        is_root = self.is_forward_root(state)
        if is_root:
            for member in self.states:
                member.finish_forward()
        self._order.leave(state.index)
        if is_root:
            self._learned.end_forward(state.index, self._order, backward_follows=torch.is_grad_enabled())
            self._drop_unused_gathers()
            self._check_order_at_end()
            self._phase = Phase.RESTING

    def enter_backward(self, state: Member) -> list[Member]:
        """Note that a unit's backward begins; the first one begins the pass, which ends with autograd's.

        Returns:
            The units to gather ahead.
        """
        if self._phase is not Phase.BACKWARD:
            self._phase = Phase.BACKWARD
            self._order = self._learned.begin_backward()
            self._max_reductions = self._most_reductions()
            if self.finalizes_by_hand:
                self._is_unfinalized = True
            Variable._execution_engine.queue_callback(self._end_backward)
        return self._look_ahead(state)

    def _look_ahead(self, running: Member) -> list[Member]:
        if self.order_check is not None:
            self.order_check.note(f"{self._phase.value} of {running.name or 'the outermost unit'}")
        upcoming, passed = self._order.visit(running.index)
        if passed:
            self.ahead.free(set(passed).difference(upcoming))
        members = self._members(upcoming)
        if self._phase is Phase.BACKWARD:
            members = (member for member in members if member.unshards_in_backward)
        return self.ahead.choose(running, members)

    def _members(self, indices: Sequence[int]) -> Iterator[Member]:
        return (member for index in indices if (member := self._states[index]()) is not None)

    def _end_backward(self) -> None:
        with label("root_post_backward_callback"):
            self.finish_backward()
        self._learned.end_backward(self._order)
        self._check_order_at_end()
        self._phase = Phase.RESTING

    def _check_order_at_end(self) -> None:
        """Find a rank whose pass is over while others' go on."""
        if self.order_check is not None:
            groups = dict.fromkeys(group for state in self.states for group in state.process_groups)
            self.order_check.before(f"end the {self._phase.value}", groups)

    def finish_backward(self, *, leaves: bool = False) -> None:
        """Leave every unit at rest, whether or not autograd reached it, and reduce what was kept back if that is due.

        Args:
            leaves: Do not wait for the reductions: `finish_left` is called for that.

        Effects: those of `Gradients.reduce`, unit by unit; the compute stream waits for all reductions if this was the
            step's last backward, or when the last gradient that comes later has come.
        """
        for state in self.states:
            state.finish_backward()
        self._drop_unused_gathers()
        if self.is_last_backward:
            self._last_backward_ended_on = self.compute_stream
            self.finish_awaited(leaves=leaves)
        elif self._on_arrival:
            self.finish_reductions()

    def finish_awaited(self, *, leaves: bool = False) -> None:
        """Let the stream that the last backward ended on wait for all reductions, if nothing comes later.

        Or leave them to the optimizer's step, where that waits for them itself, or to whoever asked for that.
        """
        stream = self._last_backward_ended_on
        if stream is None or any(state.awaits_gradients for state in self.states):
            return
        self._last_backward_ended_on = None
        leaves_to_step = self.leaves_reductions and self.is_in_backward and not self._awaits_gradients
        if leaves_to_step or leaves:
            self.leave_reductions()
            return
        self.finish_reductions()
        if stream != self.compute_stream:  # the last gradient was made on another
            stream.wait_stream(self.compute_stream)

    def end_step(self, *, leaves: bool = False) -> None:
        """End a backward that was driven by hand: its last one, or one that others follow.

        Args:
            leaves: As for `finish_backward`.

        Raises:
            RuntimeError: A pass is under way; or this is the last backward, and somebody keeps a unit unsharded, or
                gradients are missing that were to come later.

        Effects: those of `finish_backward`.
        """
        if not self.is_resting:
            raise RuntimeError(
                f"Expected no pass under way, got one ({self._phase.value}) that hooks end. Call wait_for_gradients() "
                "after it, or reset_iter_state() after an exception."
            )
        self.finish_left()
        if self.is_last_backward:
            for state in self.states:
                state.check_ended()
        self.finish_backward(leaves=leaves)

    def say_last_backward(self, is_last: bool) -> None:
        """Say whether the next backward is the step's last; it counts where hooks end backwards."""
        self._says_last_backward = is_last
        self.is_last_backward = is_last and not self.finalizes_by_hand

    def finalize_by_hand(self, enabled: bool) -> None:
        """Say whether the caller ends steps' backwards, by `finalize`."""
        self.finalizes_by_hand = enabled
        self.say_last_backward(self._says_last_backward)

    def finalize(self, *, leaves: bool) -> None:
        """End a step's backward, all of which hooks have left to this.

        Args:
            leaves: As for `finish_backward`.

        Raises:
            RuntimeError: Hooks end backwards; or as `end_step`.

        Effects: those of `end_step`.
        """
        if not self.finalizes_by_hand:
            raise RuntimeError(
                "Expected backwards that are finalized by hand, got ones that hooks end: finalize_backward requires "
                "manual backward finalization. Call set_manual_backward_finalization(True) before forward."
            )
        if not self.is_resting:
            raise RuntimeError(
                f"Expected no pass under way, got one ({self._phase.value}): finalize_backward must be called after "
                "backward completes. Call it after the step's last, or reset_iter_state() after an exception."
            )
        self.is_last_backward = True
        try:
            self.end_step(leaves=leaves)
        finally:
            self.is_last_backward = False
        self._is_unfinalized = False

    def reset(self) -> None:
        """Return to rest after an exception."""
        self.num_resets += 1
        self._is_unfinalized = False
        for state in self.states:
            state.abandon()
        self._last_backward_ended_on = None
        self._on_arrival.clear()
        self.finish_reductions()
        if self.order_check is not None:
            self.order_check.forget()
        self._phase = Phase.RESTING

    def _drop_unused_gathers(self) -> None:
        for state in self.states:
            if state.is_unsharding:
                state.reshard()

    # -- reductions -------------------------------------------------------------------------------------------------

    def retire_reductions(self) -> None:
        """Let go of the gradients of earlier reductions, all but as many as may stay in flight beside a new one.

        Called before each new reduction. One may be in flight unless a unit asked for more, so at most two units'
        gradients are alive: those being reduced, and those being made.

        Effects: the compute stream waits for the reductions; no host sync.
        """
        if self._phase is not Phase.BACKWARD:
            self._max_reductions = self._most_reductions()
        with label("post_backward_rs_wait"):
            self._retire_all_but(self._max_reductions - 1)

    def _most_reductions(self) -> int:
        return max(member.max_reductions_in_flight for member in self.states)


def living_trees() -> tuple[Context, ...]:
    """Every tree of units that is alive."""
    return tuple(trees)


def finish_left() -> None:
    """Order the current stream after all gradients that are still being reduced, of whatever tree.

    Effects: those of `Streams.finish_reductions`; none where nothing was left.
    """
    for tree in tuple(trees):
        tree.finish_left()


@_disable_dynamo
def wait_for_offloaded_shards(optimizer: Optimizer, *_: object) -> None:
    """A forward may have come after the last backward, of whose gathers nobody has waited for."""
    reading = [tree for tree in tuple(trees) if tree.reads_shards]
    if reading and any(isinstance(p, DTensor) and p.device.type == "cpu" for p in held_by(optimizer)):
        for tree in reading:
            tree.wait_for_shards()


@_disable_dynamo
def refuse_before_finalization(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step whose gradients wait for `finalize_backward`."""
    unfinalized = [tree for tree in tuple(trees) if tree.awaits_finalization]
    held = set(map(id, held_by(optimizer))) if unfinalized else ()
    for tree in unfinalized:
        if any(id(parameter) in held for member in tree.states for parameter in member.trained):
            raise RuntimeError(
                "Expected finalize_backward() before the optimizer's step, got none since the last backward: "
                "set_manual_backward_finalization(True) leaves gradients unreduced until then. Call it on the "
                "outermost unit, or reset_iter_state() after an exception."
            )
