"""What the units of one module tree share: streams, the order they run in, and reductions in flight."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from lamella_engine._ahead import Gatherable, GatheredAhead
from lamella_engine._kept import KeptForBackward
from lamella_engine._order import LearnedOrders, ReplayedOrder
from lamella_engine._order_check import OrderCheck

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")


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

    def unshard(self) -> None:
        """Start gathering."""
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


class Reduction(NamedTuple):
    """A collective that was put on a stream, and the tensors of other streams that it reads.

    They are held here, and dropped only after the streams that allocated them were made to wait for `event`: freed
    earlier, their memory would be written while it is still read.
    """

    event: torch.Event
    reads: list[torch.Tensor]
    allocated_on: tuple[torch.Stream, ...] = ()  # the caller's at the time, and others
    frees: tuple[Callable[[], None], ...] = ()  # to call when dropped: buffers that somebody else still refers to


def label(phase: str, unit: str = "") -> AbstractContextManager[object]:
    """A range in a profile, and a line in FSDP2's log, named as FSDP2 names them.

    Under `torch.autograd.profiler.emit_nvtx()` the range is one of NVTX, for Nsight.

    Effects: none unless a profiler runs or the log is on: a range that nobody sees costs several microseconds.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        log(phase, unit)
    return record_function(_name(phase, unit)) if _is_profiled() else _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()
_is_profiled = torch._C._autograd._profiler_enabled


def log(phase: str, unit: str = "") -> None:
    """A line in FSDP2's log, which `TORCH_LOGS=fsdp` turns on.

    Effects: none unless it is on.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s", _name(phase, unit))


def _name(phase: str, unit: str) -> str:
    return f"FSDP::{phase} ({unit})" if unit else f"FSDP::{phase}"


class Context:
    """Shared by all units under one outermost `fully_shard`; a new outer unit takes over its children's.

    `makes_graph` says whether the last forward pass began with gradients enabled: a backward may follow.

    Note [Streams]. Gathers run on one stream and reductions on another, so that each overlaps with compute and with
    the other. These waits make this right:
    1. The gather stream waits for the compute stream when a pass begins, and at each gather outside of passes: the
       optimizer, a load or the user wrote the shards there. So does a gather inside an optimizer's step, which comes
       behind the update of what it reads; what the step updates after that, no such gather reads.
    2. The gather stream waits for the compute stream before an unsharded buffer is freed: the buffer was allocated on
       the gather stream, so whatever gets its memory next is ordered after the last reader. This is also what bounds
       memory: a gather cannot run ahead of the compute that frees its place.
    3. The reduce stream waits for the compute stream before it reads gradients (and before it adds to earlier ones).
    4. What is reduced once more, over replicas or the outer axis, is so on the all-reduce stream, which waits for each
       reduction; and what is only cast is cast there, so that the next reduction does not wait for it. The reduce
       stream waits for an older one before what that read is freed, and the compute stream for all of them at the end
       of the step's last backward. Where an optimizer was asked to, it waits in its place: for the gradients of some
       units before it updates these, and for all before it goes on. Who else looks at gradients waits for all before.
    5. Shards that rest on the CPU are copied from there on the gather stream, and their gradients to there on the
       stream that reduced or cast them. What the copies have on the device is allocated and read on these streams
       alone. The host waits once: at the end of backward, for the compute stream, which has waited for both by then.
       After it the optimizer may read gradients, and write shards that no copy reads any more. If there was another
       forward in between, it waits for that one's gathers when an optimizer of torch's steps.
    6. Optimizers that step inside backward do so on the update stream, a unit at a time. It waits for the stream that
       installed the unit's gradients, which has waited for the compute stream (3), and that for the gather that read
       the shards. A gather of a unit that was updated waits for the update stream, and so does the compute stream at
       the end of the step's last backward: before gradients are freed, to the streams that reduced them, which use
       that memory only after they have waited for the compute stream again (3). Gradients that go right after their
       update are held until those streams were made to wait for it.
    The compute stream is whatever stream is current. A schedule that uses several calls the verbs on one that is
    ordered after those that used the unit; where the engine knows of others (who let go of a hold, where a delayed
    gradient was made), it waits for them too.
    On CPU torch's own null streams stand in, and the same code runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._accelerator = torch.get_device_module(device)  # torch.cuda, or torch.cpu with streams that do nothing
        self.is_last_backward = True
        self.post_optim_event: torch.Event | None = None
        self._phase = Phase.RESTING
        # Weak: modules own their states. A strong reference back would keep a deleted model's memory until the cyclic
        # collector runs.
        self._states: list[weakref.ref[Member]] = []
        self._reductions: deque[Reduction] = deque()
        self._all_reductions: deque[Reduction] = deque()
        self._max_reductions = 1
        self._last_backward_ended_on: torch.Stream | None = None
        self._learned = LearnedOrders()
        self._order = ReplayedOrder()
        self.ahead = GatheredAhead()
        self.kept = KeptForBackward()
        self.order_check = OrderCheck.from_environment()
        self.makes_graph = False
        self._forward_root: int | None = None
        self._updates: deque[Reduction] = deque()
        self._has_updates = False
        self._awaits_gradients = False
        self._reads_shards = False
        self._on_arrival: dict[Callable[[], None], None] = {}
        self.leaves_reductions = False  # at the end of this backward: to an optimizer that waits for them
        # By unit, in the order in which they were reduced, and by stream.
        self._installed: dict[int, dict[torch.Stream, torch.Event]] = {}

    @property
    def is_resting(self) -> bool:
        """Whether no pass is under way."""
        return self._phase is Phase.RESTING

    @property
    def is_in_backward(self) -> bool:
        """Whether the pass under way is a backward."""
        return self._phase is Phase.BACKWARD

    # -- units ------------------------------------------------------------------------------------------------------

    @property
    def states(self) -> Iterator[Member]:
        """The units that are still alive, in the order of their `fully_shard` calls: equal on every rank."""
        return (state for ref in self._states if (state := ref()) is not None)

    def add(self, state: Member) -> None:
        """Make a unit one of this tree's."""
        state.context = self
        state.index = len(self._states)
        self._states.append(weakref.ref(state))

    # -- streams ----------------------------------------------------------------------------------------------------

    @cached_property
    def all_gather_stream(self) -> torch.Stream:
        """Where buffers are allocated, filled and freed."""
        return self._new_stream()

    @cached_property
    def reduce_scatter_stream(self) -> torch.Stream:
        """Where gradients are staged and reduced."""
        return self._new_stream()

    @cached_property
    def all_reduce_stream(self) -> torch.Stream:
        """Where reduced gradients are reduced again, over replicas or the outer axis, and cast."""
        return self._new_stream()

    @cached_property
    def update_stream(self) -> torch.Stream:
        """Where optimizers step inside backward."""
        # No priority over compute, which it is to fill the gaps of.
        stream: torch.Stream = self._accelerator.Stream(priority=0)
        return stream

    @property
    def compute_stream(self) -> torch.Stream:
        """The stream that the caller runs on."""
        stream: torch.Stream = self._accelerator.current_stream(self.device)
        return stream

    def on(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Make a stream current."""
        entered: AbstractContextManager[None] = self._accelerator.stream(stream)
        return entered

    def _new_stream(self) -> torch.Stream:
        # High priority: a collective that is ready should not queue behind a matmul that is not waiting for it.
        stream: torch.Stream = self._accelerator.Stream(priority=-1)
        return stream

    def order_gathers_after_compute(self) -> None:
        """Make what comes on the gather stream wait for what was put on the compute stream so far."""
        self.all_gather_stream.wait_stream(self.compute_stream)

    def order_gathers_after_updates(self) -> None:
        """The same, or only for the event after which the optimizer was said to be done."""
        if self.post_optim_event is None:
            self.order_gathers_after_compute()
        else:
            self.all_gather_stream.wait_event(self.post_optim_event)
            self.post_optim_event = None

    def on_updates(self, after: Iterable[torch.Stream]) -> AbstractContextManager[None]:
        """Make the update stream current, ordered after those that gradients were made on."""
        self._has_updates = True
        for stream in after:
            self.update_stream.wait_stream(stream)
        return self.on(self.update_stream)

    def hold_update(self, gradients: list[torch.Tensor], allocated_on: Iterable[torch.Stream]) -> None:
        """Keep gradients that nobody else refers to until the streams that allocated them wait for their update."""
        if gradients:
            streams = (self.reduce_scatter_stream, *allocated_on)
            self._updates.append(Reduction(self.update_stream.record_event(), gradients, streams))
        if len(self._updates) > 1:
            update = self._updates.popleft()
            for stream in set(update.allocated_on):
                stream.wait_event(update.event)

    def order_gathers_after_steps(self) -> None:
        """Make what comes on the gather stream wait for the updates that were started in backward."""
        self.all_gather_stream.wait_stream(self.update_stream)

    def share_communication(self, other: Context) -> None:
        """Use another tree's streams from now on, and let its reductions in flight and ours count as one.

        Effects: the compute stream waits for the reductions that this tree has in flight.
        """
        self.finish_reductions()
        for state in self.states:
            state.drop_early()
        self.all_gather_stream = other.all_gather_stream
        self.reduce_scatter_stream = other.reduce_scatter_stream
        self.all_reduce_stream = other.all_reduce_stream
        self.update_stream = other.update_stream
        self._reductions = other._reductions
        self._all_reductions = other._all_reductions

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
        self.makes_graph = torch.is_grad_enabled()
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

    @property
    def is_captured(self) -> bool:
        """Whether what is put on the compute stream goes into a CUDA graph, and does not run now."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

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

    def finish_backward(self) -> None:
        """Leave every unit at rest, whether or not autograd reached it, and reduce what was kept back if that is due.

        Effects: those of `Gradients.reduce`, unit by unit; the compute stream waits for all reductions if this was the
            step's last backward, or when the last gradient that comes later has come.
        """
        for state in self.states:
            state.finish_backward()
        self._drop_unused_gathers()
        if self.is_last_backward:
            self._last_backward_ended_on = self.compute_stream
            self.finish_awaited()
        elif self._on_arrival:
            self.finish_reductions()

    def finish_awaited(self) -> None:
        """Let the stream that the last backward ended on wait for all reductions, if nothing comes later.

        Or leave them to the optimizer's step, where that waits for them itself.
        """
        stream = self._last_backward_ended_on
        if stream is None or any(state.awaits_gradients for state in self.states):
            return
        self._last_backward_ended_on = None
        if self.leaves_reductions and self.is_in_backward and not self._awaits_gradients:
            self.leaves_reductions = False
            _left.add(self)
            return
        self.finish_reductions()
        if stream != self.compute_stream:  # the last gradient was made on another
            stream.wait_stream(self.compute_stream)

    def end_step(self) -> None:
        """End a backward that was driven by hand: its last one, or one that others follow.

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
        if self.is_last_backward:
            for state in self.states:
                state.check_ended()
        self.finish_backward()

    def reset(self) -> None:
        """Return to rest after an exception."""
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

    def hold(self, reduction: Reduction) -> None:
        """Keep a reduction's gradients alive until it is retired."""
        self._reductions.append(reduction)

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

    def finish_reductions(self) -> None:
        """Order the compute stream after every reduction and update, and let go of what they read.

        Effects: where gradients go to the CPU, the host waits for the compute stream.
        """
        _left.discard(self)
        self.leaves_reductions = False
        self._installed.clear()
        if self._reductions:
            # For more than their events: gradients are divided, cast and added to after those.
            self.compute_stream.wait_stream(self.reduce_scatter_stream)
        self._retire_all_but(0)
        while self._all_reductions:
            event = self._all_reductions.popleft().event
            self.compute_stream.wait_event(event)
            self.reduce_scatter_stream.wait_event(event)
        if self._has_updates:
            self._has_updates = False
            self.compute_stream.wait_stream(self.update_stream)
            self._updates.clear()
        self._wait_for_gradients()

    @property
    def is_left(self) -> bool:
        """Whether the last backward is over, and gradients are still being reduced that nobody has waited for."""
        return self in _left

    def finish_left(self) -> None:
        """Finish what the last backward has left; nothing if nothing is.

        Effects: those of `finish_reductions`.
        """
        if self.is_left:
            self.finish_reductions()

    def note_installed(self, unit: int, streams: Iterable[torch.Stream]) -> None:
        """Note that a unit's gradients will be there when these streams have come here."""
        earlier = self._installed.pop(unit, {})  # of other groups, or of a reduction that was not finished since
        self._installed[unit] = {**earlier, **{stream: stream.record_event() for stream in streams}}

    def reduced_first(self, without: Container[Member]) -> list[Member]:
        """Of the units whose gradients were noted, the first half by bytes in the order of their reductions."""
        members = [member for member in self._members(list(self._installed)) if member not in without]
        left = sum(member.unsharded_nbytes for member in members) // 2
        chosen = []
        for member in members:
            left -= member.unsharded_nbytes
            if left < 0:
                break
            chosen.append(member)
        return chosen

    def wait_for_gradients_of(self, members: Iterable[Member]) -> None:
        """Order the compute stream after these units' gradients, of those that were noted."""
        for member in members:
            for event in self._installed.get(member.index, {}).values():
                self.compute_stream.wait_event(event)

    def _retire_all_but(self, num_left: int) -> None:
        while len(self._reductions) > num_left:
            reduction = self._reductions.popleft()
            for stream in {self.compute_stream, *reduction.allocated_on}:
                stream.wait_event(reduction.event)
            for free in reduction.frees:
                free()

    def hold_all_reduce(self, reduction: Reduction) -> None:
        """Keep what a second reduction reads until the reduce stream, which allocated it, was made to wait for it."""
        self._all_reductions.append(reduction)
        if len(self._all_reductions) > 2:
            self.reduce_scatter_stream.wait_event(self._all_reductions.popleft().event)

    # -- the host ---------------------------------------------------------------------------------------------------

    def expect_gradients(self, on_arrival: Sequence[Callable[[], None]]) -> None:
        """Note that gradients are on their way to the CPU.

        Args:
            on_arrival: What to call when they are there, at the end of this backward; once, however often it is noted.
        """
        self._awaits_gradients = True
        self._on_arrival.update(dict.fromkeys(on_arrival))

    def _wait_for_gradients(self) -> None:
        """Let the host wait for the compute stream, which has waited for the gradients that go to the CPU."""
        if not self._awaits_gradients:
            return
        self._awaits_gradients = self._reads_shards = False
        _wait_on_host(self.compute_stream)
        on_arrival, self._on_arrival = self._on_arrival, {}
        with torch.no_grad():
            for call in on_arrival:
                call()

    def note_shards_are_read(self) -> None:
        """Note that the gather stream will read shards on the CPU."""
        if not self._reads_shards:
            self._reads_shards = True
            _reading.add(self)

    def wait_for_shards(self) -> None:
        """Let the host wait until shards on the CPU have been read: somebody may be about to write them.

        Effects: a host sync if there was a gather since the last one, else none.
        """
        if self._reads_shards:
            self._reads_shards = False
            _wait_on_host(self.all_gather_stream)


# Those whose last backward has left reductions under way: whoever looks at gradients waits for them before.
_left: weakref.WeakSet[Context] = weakref.WeakSet()


def finish_left() -> None:
    """Order the current stream after all gradients that are still being reduced, of whatever tree.

    Effects: those of `Context.finish_reductions`; none where nothing was left.
    """
    for context in tuple(_left) if _left else ():
        context.finish_reductions()


# Those that may read shards on the CPU: an optimizer must not write them meanwhile.
_reading: weakref.WeakSet[Context] = weakref.WeakSet()


@_disable_dynamo
def _wait_before_step(optimizer: Optimizer, *_: object) -> None:
    """A forward may have come after the last backward, of whose gathers nobody has waited for."""
    if not _reading:
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(isinstance(parameter, DTensor) and parameter.device.type == "cpu" for parameter in parameters):
        for context in tuple(_reading):
            context.wait_for_shards()
            _reading.discard(context)


register_optimizer_step_pre_hook(_wait_before_step)


def _wait_on_host(stream: torch.Stream) -> None:
    event: torch.Event | None = stream.record_event()
    if event is not None:  # torch's CPU streams record none
        event.synchronize()
