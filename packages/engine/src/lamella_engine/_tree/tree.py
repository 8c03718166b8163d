"""A tree of units, and the passes through it; `step_end` has what follows a unit's backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable

import torch
from torch.autograd import Variable, graph

from lamella_engine._common.labels import label
from lamella_engine._options.options import DEFAULT_OPTIONS, ShardingOptions
from lamella_engine._parameters.registrations import refuse_late_parameters, registrations
from lamella_engine._scaling.scaling import WeightScaling
from lamella_engine._streams.context import Context, PassPhase
from lamella_engine._streams.order_check import OrderCheck
from lamella_engine._tree.prefetch import Prefetch
from lamella_engine._tree.step_end import StepEnd, settle_weights
from lamella_engine._unit.gradients import Ended
from lamella_engine._unit.unit import Unit
from lamella_engine._unit.weights import refuse_holds
from lamella_precision import Direction

# The process's: a step hook is called for every optimizer, and looks for trees with its parameters here. Weak: modules
# own the trees.
_living: weakref.WeakSet[Tree] = weakref.WeakSet()


class Listener:
    """Called at moments of a tree's step; each method does nothing unless a subclass overrides it.

    The engine names no listener: optional features subclass `Listener` and call `Tree.listen`. Listeners are called on
    every rank, at the same points of the program, on the thread of the moment. A listener's collectives must start on
    every rank alike.
    """

    def gradients_final(self, tree: Tree) -> None:
        """A unit has started the last reduction of its gradients in a step, or has no gradients: a step is likely next.

        A unit may announce its end more than once.
        """

    def gradients_reduced(self, tree: Tree, unit: Unit, streams: Iterable[torch.Stream]) -> None:
        """A unit's gradients were installed on its parameters, by kernels queued on `streams`."""

    def reductions_finished(self, tree: Tree) -> None:
        """The compute stream was ordered after every reduction of the tree."""


class Listeners:
    """The listeners of one tree, in the order in which they were added.

    Args:
        tree: The listeners' tree, referred to weakly: the tree holds this object.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = weakref.ref(tree)
        # Weak: an optimizer's hooks own its listener, which must not be called after the optimizer is gone.
        self.references: list[weakref.ref[Listener]] = []

    @property
    def living(self) -> list[Listener]:
        """The listeners that are still alive."""
        return [listener for reference in self.references if (listener := reference()) is not None]

    def add(self, listener: Listener) -> None:
        """Call a listener from now on, after earlier ones; nothing if it is called already."""
        if listener not in self.living:
            self.references.append(weakref.ref(listener, self.references.remove))

    def drop(self, listener: Listener) -> None:
        """Stop calling a listener; nothing if it was not called."""
        self.references[:] = [reference for reference in self.references if reference() is not listener]

    def gradients_ended(self, unit: Unit, ended: Ended) -> None:
        """Call the listeners at the end of a unit's backward."""
        if (tree := self._tree()) is None:
            return
        for listener in self.living if ended.installed_on else ():
            listener.gradients_reduced(tree, unit, ended.installed_on)
        for listener in self.living if ended.is_final else ():
            listener.gradients_final(tree)

    def reductions_finished(self) -> None:
        """Call the listeners after the compute stream was ordered after all reductions."""
        if (tree := self._tree()) is None:  # a handle of `finalize_backward` may outlive the model
            return
        for listener in self.living:
            listener.reductions_finished(tree)


class Tree:
    """All units under one outermost `fully_shard`; a new outer unit takes over its children's units.

    Hooks and schedules begin and end units' forwards and backwards here; the first unit starts a pass of the whole
    tree.

    Args:
        device: The device of the tree's parameters while they are used.
        options: The first unit's.

    Attributes:
        context: Shared with the units.
        streams: The context's.
        scaling: Hears of needs and changes of the units' weights.
        options: The outermost unit's; only the fields of the tree count here.
        step_end: Ends units' backwards, the tree's backward and the step.
    """

    def __init__(self, device: torch.device, options: ShardingOptions = DEFAULT_OPTIONS) -> None:
        self.context = Context(device)
        self.streams = self.context.streams
        # Weak: modules own their units. A strong reference back would keep a deleted model's memory until the cyclic
        # collector runs. A dead unit's place in the list stays, since indices name units in the learned orders.
        self._units: list[weakref.ref[Unit]] = []
        self._listeners = Listeners(self)
        self.step_end = StepEnd(self._units, self.context, self._listeners)
        self._prefetch = Prefetch(self._units)
        self.scaling = WeightScaling(self._units)
        # The unit whose forward began the last forward pass. An index: the tree refers to units weakly.
        self._forward_root: int | None = None
        self.follow(options)
        _living.add(self)

    @property
    def units(self) -> list[Unit]:
        """The living units, in the order of their `fully_shard` calls: equal on every rank."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def follow(self, options: ShardingOptions) -> None:
        """Take the tree's fields from `options` from now on."""
        self.options = options
        self._prefetch.follow(options)
        check = self.context.order_check
        timeout_s = options.order_check_timeout_s if options.checks_order else None
        if timeout_s != (check and check.timeout_s):  # else the check keeps its notes
            self.context.order_check = None if timeout_s is None else OrderCheck(timeout_s)

    def add(self, unit: Unit) -> None:
        """Add a unit to the tree."""
        unit.parameters.join(self.context, (self.scaling,))
        # Places are never given away: learned orders name units by index, on every rank alike.
        unit.index = len(self._units)
        self._units.append(weakref.ref(unit))

    def share_communication(self, other: Tree) -> None:
        """Use another tree's streams from now on, with one limit on reductions in flight for both trees.

        Effects: the compute stream waits for this tree's reductions in flight.
        """
        self.step_end.finish_reductions()
        for unit in self.units:  # their bytes belong to the gather stream left behind
            unit.drop_early()
        self.streams.use_streams_of(other.streams)

    # -- listeners --------------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Call a listener from now on, after earlier listeners; the tree holds a weak reference."""
        self._listeners.add(listener)

    def ignore(self, listener: Listener) -> None:
        """Stop calling a listener; nothing if it was not called."""
        self._listeners.drop(listener)

    @property
    def listeners(self) -> list[Listener]:
        """The listeners, in the order of `listen`."""
        return self._listeners.living

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit, module_id: int, *, is_recomputed: bool) -> bool:
        """Unshard a unit for the forward of one of its modules, and gather units ahead.

        Args:
            unit: The module's.
            module_id: The module whose forward begins: of the unit, or with parameters that the unit took over.
            is_recomputed: The module runs again inside backward: no prefetch.

        Returns:
            Whether the unit's forward begins here. In a unit of several modules, forward begins with the first module
            to run, and is over when each module has run.

        Raises:
            RuntimeError: An exception has ended the last backward, and `reset` was not called.
            NotImplementedError: The conditions of `_refuse_clones_of_copies`.
        """
        weights = unit.weights
        if module_id not in unit.parameters.module_ids and weights.may_be_read(is_recomputed=is_recomputed):
            if is_recomputed:
                unit.recompute_forward()
            return False
        # In a unit of one module no other is left to run: an id is of an earlier forward that an exception ended.
        begins = not unit.awaited or len(unit.parameters.module_ids) == 1
        prefetched: list[Unit] = []
        if begins and not is_recomputed:
            if graph._allow_mutation_on_saved_tensors_enabled:
                _refuse_clones_of_copies(unit)
            if self.context.phase is not PassPhase.FORWARD or self._forward_root == unit.index:
                self._begin_pass(unit)
            if (check := self.context.order_check) is not None:
                check.note(self._place_of(unit))
            prefetched = self._prefetch.before_forward_of(unit)
            weights.drop_stale_weights()  # kept unsharded over an optimizer's step, or written since
        if begins:
            unit.begin_forward(module_id)
        if is_recomputed:
            unit.direction_in_backward = Direction.BOTH
        # Before the gather, whose encodings read the scales: computed later, scales would not fit the payloads.
        for listener in unit.parameters.listeners:
            listener.weights_needed(weights, is_in_pass=True)
        weights.unshard(Direction.BOTH if is_recomputed else Direction.FORWARD)
        for other in prefetched:
            with label(f"forward_prefetch for {other.parameters.name}"):
                for listener in other.parameters.listeners:
                    listener.weights_needed(other.weights, is_in_pass=True)
                other.weights.unshard(Direction.FORWARD)
        # Last: the prefetches are queued behind this unit's gather before the host blocks on it (gloo).
        weights.wait_for_unshard()
        return begins

    def _begin_pass(self, root: Unit) -> None:
        if self.context.is_in_backward:
            raise RuntimeError(
                "Expected reset_iter_state() after a backward that an exception has ended, got another forward. The "
                "gradients of units that were in their backward would be wrong. Call it on the outermost unit, then "
                "zero_grad(), and repeat the step."
            )
        with label("root_pre_forward"):
            self.step_end.finish_deferred()
            self.context.phase = PassPhase.FORWARD
            self._forward_root = root.index
            self._prefetch.begin_forward(root)
            for unit in self.units:
                unit.begin_pass()
            if registrations:
                refuse_late_parameters(unit.parameters for unit in self.units)
            # The optimizer wrote shards on the compute stream: a gather without the wait reads half-written weights.
            self.streams.order_gathers_after_updates()
            self.scaling.begin_pass()

    def is_forward_root(self, unit: Unit) -> bool:
        """Whether the pass under way is a forward which began with `unit`."""
        return self.context.phase is PassPhase.FORWARD and self._forward_root == unit.index

    def end_forward(self, unit: Unit, module_id: int, *, is_watched: bool, is_recomputed: bool) -> None:
        """Reshard a unit, if all of its modules have run; the end of the first unit's forward ends the pass.

        A pass that began with one of several modules ends with the module. A pass with gradients keeps the parameters,
        since backward is likely next.

        Args:
            unit: The module's.
            module_id: The module whose forward ended.
            is_watched: Whether output hooks will begin the unit's backward; else the parameters must stay.
            is_recomputed: The module ran again inside backward, whose end reshards.
        """
        awaited = unit.awaited
        if module_id not in awaited and module_id not in unit.parameters.module_ids:
            return  # a module whose parameters were taken over, inside the unit's own forward
        unit.end_forward(module_id, is_watched=is_watched)
        if is_recomputed:
            return
        is_root = self.is_forward_root(unit)
        if awaited and not is_root:
            return
        # Some modules have not run, and the pass ends: with gradients backward is likely next, on these parameters.
        if not (awaited and torch.is_grad_enabled()):
            self._free_unless_kept(unit)
        awaited.clear()
        if is_root:
            self._end_pass(unit)
        else:
            self._prefetch.note_end(unit)

    def _free_unless_kept(self, unit: Unit) -> None:
        if unit.may_free and not self._prefetch.keeps(unit):
            unit.weights.reshard(keep_parts=torch.is_grad_enabled())

    def _end_pass(self, root: Unit) -> None:
        for unit in self.units:
            if unit.awaited:  # some of the unit's modules did not run
                unit.awaited.clear()
                self._free_unless_kept(unit)
                self._prefetch.note_end(unit)
        self._prefetch.note_end(root)
        self._prefetch.end_forward(root)
        settle_weights(self.units)
        # While the phase still tells the pass, which the message names.
        self._check_order_at_end()
        self.context.phase = PassPhase.RESTING

    def _place_of(self, running: Unit) -> str:
        return f"{self.context.phase.value} of {running.parameters.name or 'the outermost unit'}"

    def _check_order_at_end(self) -> None:
        """Find a rank whose pass ends while other ranks go on."""
        if (check := self.context.order_check) is not None:
            groups = dict.fromkeys(group for unit in self.units for group in unit.parameters.process_groups)
            check.before(f"end the {self.context.phase.value}", groups)

    # -- between passes ---------------------------------------------------------------------------------------------

    def first_of_next_forward(self) -> list[Unit]:
        """Up to two units that the next forward is likely to gather first, by the last forward with a backward."""
        return self._prefetch.first_of_next_forward()

    def gather_early(self, units: Iterable[Unit]) -> None:
        """Prefetch for the next forward, while an optimizer still updates other units.

        Effects: the gather stream waits for the compute stream; those of the units' gathers, and of
            `WeightScaling.compute_measured`.
        """
        self.streams.post_optim_event = None  # recorded at an earlier update
        self.scaling.compute_measured()
        for unit in units:
            with label(f"optimizer_prefetch for {unit.parameters.name}"):
                unit.gather_early()
            self._prefetch.count_ahead(unit)

    def bring_to_rest(self, unit: Unit) -> None:
        """Return a unit to rest before main weights are read, written or replaced.

        Raises:
            RuntimeError: The unit has a holder.

        Effects: those of `UnitWeights.bring_to_rest` and `StepEnd.finish_deferred`.
        """
        refuse_holds(unit.weights)
        self.step_end.finish_deferred()
        unit.weights.bring_to_rest()

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self, unit: Unit) -> None:
        """Unshard a unit for its backward, and prefetch the next unit; the first unit begins the pass.

        Raises:
            RuntimeError: A part of the unit's backward ran already, with parameters not gathered yet.
        """
        if unit.is_in_backward:
            return  # another output of the same forward
        unit.is_in_backward = True
        weights = unit.weights
        if weights.early is not None:
            weights.drop_stale_weights()
        for grads in unit.parameters.main_grads:
            grads.offer()  # allocated and zeroed on backward's stream
        unit.check_not_begun()
        with label("pre_backward", unit.parameters.name):
            if self.context.phase is not PassPhase.BACKWARD:
                self._begin_backward_pass()
            if (check := self.context.order_check) is not None:
                check.note(self._place_of(unit))
            prefetched = self._prefetch.before_backward_of(unit)
            # The unit's own gather before the prefetched ones: gathers run in the order in which they were queued.
            if unit.unshards_in_backward:
                weights.unshard(unit.direction_in_backward)
            else:
                weights.stay_for_backward()
            for other in prefetched:
                with label(f"backward_prefetch for {other.parameters.name}"):
                    other.weights.unshard(other.direction_in_backward)
                other.weights.forbid_reads()  # autograd may run kernels of the unit before its wait
            weights.wait_for_unshard()

    def _begin_backward_pass(self) -> None:
        _refuse_compiled_autograd()
        self.context.phase = PassPhase.BACKWARD
        self._prefetch.begin_backward()
        self.step_end.begin_backward()
        # Autograd's engine holds the callback, and with it the tree, until this backward is over.
        # After an exception the callback is not called: the phase stays BACKWARD, and `_begin_pass` asks for a reset.
        Variable._execution_engine.queue_callback(self._end_backward_pass)

    def _end_backward_pass(self) -> None:
        with label("root_post_backward_callback"):
            self.step_end.finish_backward()
        self._prefetch.end_backward()
        self._check_order_at_end()
        self.context.phase = PassPhase.RESTING


def _refuse_clones_of_copies(unit: Unit) -> None:
    """Refuse a forward inside a context that clones saved tensors before writes.

    Autograd saves views of the unsharded buffers. A gather writes into bytes that were given back since: the context's
    clone reads freed memory, which ends in a segmentation fault or in wrong gradients.

    Raises:
        NotImplementedError: Autograd will save unsharded parameters that are copies of main weights.
    """
    if torch.is_grad_enabled() and unit.parameters.has_copies:
        raise NotImplementedError(
            f"Expected the forward of {unit.parameters.title} outside of "
            "torch.autograd.graph.allow_mutation_on_saved_tensors(), got it inside. The context clones saved tensors "
            "before they are written, and gathers write into saved weights whose memory was freed. Leave the context "
            "out, and clone() the tensor that your code writes in place."
        )


def _refuse_compiled_autograd() -> None:
    """Refuse a backward of which no callback will tell the end.

    Raises:
        NotImplementedError: Compiled autograd runs the backward.
    """
    if "torch._dynamo.compiled_autograd" not in sys.modules:
        return  # the import takes seconds, and is the program's that uses it
    from torch._dynamo.compiled_autograd import in_compiled_autograd_region

    if in_compiled_autograd_region:
        raise NotImplementedError(
            "Expected a backward run by autograd's own engine, got one of compiled autograd, which calls nothing at "
            "its end: the outermost unit's gradients would not be reduced. Compile forward alone, without "
            "torch._dynamo.config.compiled_autograd, and call reset_iter_state() on the outermost unit."
        )


def living_trees() -> tuple[Tree, ...]:
    """Every living tree of units."""
    return tuple(_living)


def finish_deferred() -> None:
    """Order the current stream after all reductions in flight, of every tree.

    Effects: those of `StepEnd.finish_reductions`; none where no wait for reductions was deferred.
    """
    for tree in living_trees():
        tree.step_end.finish_deferred()
