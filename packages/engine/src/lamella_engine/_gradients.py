"""A unit's gradients, from where backward leaves them to where its optimizer finds them.

    kept        unsharded, added up in the reduce dtype, for a later microbatch or until delayed ones are there
    reduced     over the shard axis, on the reduce stream (`reduce`)
    partial     kept once more, as a sum of this replica's ranks alone, if the outer axis is reduced over later
    installed   reduced over the outer axis, shown to the all-reduce hook, and put on the sharded parameters' `.grad`

When that happens is the unit's to say (`_state`); whether its gradients wait for later ones is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from lamella_buffers import reduce_scatter
from lamella_engine._context import Member
from lamella_engine._delayed import DelayedGradients
from lamella_engine._labels import label
from lamella_engine._main_grads import MainGrads
from lamella_engine._parameter_group import ParameterGroup, Reduced, by_axes
from lamella_engine._placements import Strategy
from lamella_engine._streams import Reduction

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class Reducible(Member, Protocol):
    """A member of a tree, with what gradients ask of their unit beside that."""

    groups: tuple[ParameterGroup, ...]
    strategy: Strategy

    @property
    def title(self) -> str:
        """How errors call it."""
        ...

    @property
    def num_holds(self) -> int:
        """How many keep the parameters unsharded, beside hooks and plain verbs."""
        ...

    @property
    def has_gradients(self) -> bool:
        """Whether there is something to reduce."""
        ...

    def check_order(self, verb: str, nbytes: Callable[[], int]) -> None:
        """Refuse a collective that other ranks are not about to begin, if that is checked."""
        ...

    def expect_an_update(self) -> None:
        """Make copies of the parameters anew at the next use."""
        ...


class Gradients:
    """What becomes of a unit's gradients.

    A unit owns one of these and gives itself to each call. It is not kept here: two objects that refer to each other
    would keep a deleted model's memory until the cyclic collector runs.

    Attributes:
        delayed: Those that come after the unit's backward.
        main_grads: The buffers that layers add theirs to.
        requires_sync: Whether backward reduces them, or keeps them unsharded for a later microbatch.
        requires_all_reduce: Whether they are reduced over the outer axis too, or each replica keeps its own sum.
        reduces_unused_parameters: Whether every group that trains takes part in a reduction, with zeros where a
            parameter has no gradient.
        all_reduce_hook: Shown the flat shards, without gaps between them, before they are installed.
        all_reduce_hook_stream: Where it runs; None means the stream of the all-reduces.
        has_sums: Whether microbatches, on this rank or on another, left gradients that are not reduced yet.
    """

    def __init__(self) -> None:
        self.delayed = DelayedGradients()
        self.main_grads: tuple[MainGrads, ...] = ()
        self.requires_sync = True
        self.requires_all_reduce = True
        self.reduces_unused_parameters = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_reduce_hook_stream: torch.Stream | None = None
        self.has_sums = False

    def take_over(self, other: Gradients) -> None:
        """Be another unit's gradients too, from now on. Both units must be at rest."""
        self.main_grads += other.main_grads
        self.delayed.take_over(other.delayed)
        self.has_sums |= other.has_sums
        other.main_grads = ()

    # -- at the end of a backward -----------------------------------------------------------------------------------

    def use(self, unit: Reducible) -> None:
        """Reduce the gradients, or keep them for a later microbatch, or for one that still waits for delayed ones.

        Effects: those of `reduce`, unless they are kept.
        """
        compute = unit.context.compute_stream
        self.settle(compute)
        if self._wait_for_later(unit) or self.delayed.num_due:
            self.has_sums = True
            self.delayed.join(compute)
            for group in unit.groups:
                group.accumulate_gradients()
            self.delayed.release(compute)
            return
        self.reduce(unit)
        if unit.context.is_last_backward:
            unit.expect_an_update()

    def finish(self, unit: Reducible) -> None:
        """Use what the end of the whole tree's backward finds, and what earlier microbatches left if it is the last.

        Left alone are those of a unit that somebody holds, or whose delayed gradients are to come: its backward is not
        over.

        Effects: those of `reduce`; a collective on the outer axis for gradients that were not reduced over it.
        """
        self.has_sums |= self._wait_for_later(unit)  # here too, if it is another rank that used the unit
        if self.delayed.num_due or unit.num_holds:
            return
        self.settle(unit.context.compute_stream)
        if unit.has_gradients:
            self.use(unit)
        if not self.requires_sync or not unit.context.is_last_backward:
            return
        self._drop_main_grads()
        if self.requires_all_reduce:
            self._reduce_partials(unit)
        unit.expect_an_update()

    def settle(self, compute: torch.Stream) -> None:
        """Count what layers added to main-grad buffers as gradients.

        Effects: the compute stream waits for delayed gradients, where there are such buffers.
        """
        if self.main_grads:  # which delayed gradients may be in, or be added to
            self.delayed.join(compute)
        for grads in self.main_grads:
            grads.settle()

    def drop(self, unit: Reducible) -> None:
        """Forget those that were not reduced."""
        self.has_sums = False
        for group in unit.groups:
            group.partial = None
            for parameter in group.parameters:
                parameter.drop_gradient()
        self._drop_main_grads()

    def _wait_for_later(self, unit: Reducible) -> bool:
        """Whether they are kept for a later microbatch."""
        reduces_once = unit.strategy.reduces_once and not unit.context.is_last_backward
        return reduces_once or not self.requires_sync

    def _drop_main_grads(self) -> None:
        for grads in self.main_grads:
            grads.drop()

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, unit: Reducible) -> None:
        """Reduce the gradients that backward left into the sharded parameters' `.grad`.

        A group takes part if any member has a gradient here (or whatever happened, with
        `reduces_unused_parameters`), and then with all of its members: one without a gradient sends zeros, and gets
        none unless `reduces_unused_parameters`.

        Effects: collective on the unit's shard axis, one for all groups on the same axes, on the reduce stream; the
            compute stream waits for the unit reduced before, whose gradients are then freed. With replicas, another
            collective on their axis, on its own stream. No host sync on CUDA.
        """
        groups = [g for g in unit.groups if g.has_gradients or (self.reduces_unused_parameters and g.is_trainable)]
        if not groups:
            self._drop_main_grads()
            return
        context = unit.context
        context.retire_reductions()
        compute, stream = context.compute_stream, context.reduce_scatter_stream
        self.delayed.join(compute)
        parts = [(group, group.take_gradients(), self._wire_of(group)) for group in groups]
        self.has_sums = False
        self.delayed.release(compute)
        unit.check_order("reduce", lambda: sum(g.gradient_nbytes(taken, wire) for g, taken, wire in parts))
        stream.wait_stream(compute)
        with label("post_backward_reduce", unit.name), _no_graph():
            reads = [gradient for _, taken, _ in parts for gradient in taken.values() if gradient is not None]
            with context.on(stream):
                reduced, moves = {}, {}
                for group, taken, wire in parts:
                    made = group.new_reduced(
                        taken,
                        self._sum_dtype_of(group),
                        installs_all=self.reduces_unused_parameters,
                        without_gaps=self.all_reduce_hook is not None,
                    )
                    reduced[group], moves[group] = made, (taken, wire, made.shards)
                for same in by_axes(groups):
                    transport = same[0].reduce_transport or same[0].transport
                    reduce_scatter([moves[group] for group in same], transport, same[0].reduce_op).wait()
                for group in groups:
                    if group.partial is not None:
                        reduced[group] = group.add_partial(reduced[group])
                event = stream.record_event()
                context.hold(self._reduction(event, reads, compute))
                self._install(unit, reduced, event)

    def _wire_of(self, group: ParameterGroup) -> torch.dtype:
        """What a group's gradients travel in. Sums of microbatches, and what layers add up, are as wide as they get."""
        if self.has_sums or (self.main_grads and any(grads.group is group for grads in self.main_grads)):
            return group.reduce_dtype
        return group.wire_dtype

    def _sum_dtype_of(self, group: ParameterGroup) -> torch.dtype:
        """What a group's gradients are added up in. A hook is shown what the policy says."""
        return group.sum_dtype if self.all_reduce_hook is None else group.reduce_dtype

    def _reduction(self, event: torch.Event, reads: list[torch.Tensor], compute: torch.Stream) -> Reduction:
        """What keeps a reduction's gradients alive, wherever they were made."""
        buffers = [taken for grads in self.main_grads if (taken := grads.take()) is not None]
        streams = (compute, *self.delayed.take_streams(), *(stream for stream, _ in buffers))
        return Reduction(event, reads, streams, tuple(free for _, free in buffers))

    def _install(self, unit: Reducible, reduced: Mapping[ParameterGroup, Reduced], event: torch.Event) -> None:
        """Install what was reduced over all axes. The reduce stream must be current."""
        finished = {group: self._install_group(unit, group, part, event) for group, part in reduced.items()}
        for listener in unit.context.listeners:
            listener.gradients_reduced(unit.context, unit, {s for s in finished.values() if s is not None})

    def _install_group(
        self, unit: Reducible, group: ParameterGroup, reduced: Reduced, event: torch.Event
    ) -> torch.Stream | None:
        """Reduce over the axes that are left, and install the gradients; or keep that for a later microbatch.

        Returns:
            The stream that they were installed on, if they were.
        """
        context = unit.context
        has_outer = group.replicas is not None or group.outer is not None
        waits = unit.strategy.reduces_outer_once and not context.is_last_backward
        if has_outer and (waits or not self.requires_all_reduce):
            group.partial = reduced
            return None
        stream = context.reduce_scatter_stream
        if has_outer or self.all_reduce_hook is not None or reduced.shards.dtype != group.main_weight.dtype:
            stream = self.all_reduce_hook_stream or context.all_reduce_stream
            stream.wait_event(event)
        if has_outer:
            unit.check_order("all-reduce", lambda: reduced.shards.flat.nbytes)
        with context.on(stream) if stream is not context.reduce_scatter_stream else _AS_IT_IS:
            total = group.reduce_over_outer(reduced)
            shows = self.all_reduce_hook
            are_divided = shows is not None and group.show_gradients(total, shows)
            group.install_gradients(total, are_divided=are_divided)
            hooks = group.hooks(total.present)
            if group.offload is not None:
                context.expect_gradients(hooks)
            else:
                for hook in hooks:
                    hook()
            if stream is not context.reduce_scatter_stream:
                context.hold_all_reduce(Reduction(stream.record_event(), [reduced.shards.flat]))
        return stream

    def _reduce_partials(self, unit: Reducible) -> None:
        """Reduce over the outer axis what this backward added nothing to."""
        groups = [group for group in unit.groups if group.partial is not None]
        if not groups:
            return
        stream = unit.context.reduce_scatter_stream
        stream.wait_stream(unit.context.compute_stream)
        with label("post_backward_reduce", unit.name), torch.no_grad():
            partials = {group: group.partial for group in groups if group.partial is not None}
            for group in groups:
                group.partial = None
            with unit.context.on(stream):
                self._install(unit, partials, stream.record_event())


def _no_graph() -> AbstractContextManager[object]:
    """Record no graph. As a rule autograd runs, which records none either, and torch's context costs 18 us."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS
