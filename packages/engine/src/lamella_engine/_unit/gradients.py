"""A unit's gradients, from autograd's `.grad` on unsharded parameters to the optimizer's `.grad` on sharded parameters.

    kept        unsharded, summed in the reduce dtype, for a later microbatch or until delayed gradients have come
    reduced     over the shard axis, on the reduce stream (`reduce`)
    partial     kept once more, as a sum of this replica's ranks alone, if the outer axis is reduced over later
    installed   reduced over the outer axis, shown to the all-reduce hook, and put on the sharded parameters' `.grad`

The end of the unit's backward (`end`) and the end of the tree's backward (`finish`) decide here whether gradients wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from lamella_buffers import reduce_scatter
from lamella_engine._common.labels import label
from lamella_engine._parameters import reduction
from lamella_engine._parameters.group import ParameterGroup, Reduced, by_axes
from lamella_engine._parameters.sharded_parameter import attributes_alone
from lamella_engine._streams.streams import Reduction
from lamella_engine._unit.delayed import DelayedGradients
from lamella_engine._unit.parameters import UnitParameters

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class GroupGradients(NamedTuple):
    """A group's part in a reduction: its unreduced gradients, which nothing else holds any more."""

    group: ParameterGroup
    gradients: dict[int, torch.Tensor | None]  # by member: None where backward made no gradient, and zeros are sent
    wire_dtype: torch.dtype  # of the communication


class Ended(NamedTuple):
    """The gradients of a unit at the end of a backward."""

    installed_on: tuple[torch.Stream, ...] = ()  # of the kernels that installed gradients; empty without any
    is_final: bool = False  # the step's last reduction was started, or the unit has no gradient to reduce


class Gradients:
    """The gradients of one unit.

    Args:
        parameters: The unit's parameters.

    Attributes:
        delayed: Gradients that come after the unit's backward.
        requires_sync: Whether backward reduces gradients, or keeps unsharded gradients for a later microbatch.
        requires_all_reduce: Whether gradients are reduced over the outer axis too, or each replica keeps its own sum.
        reduces_unused_parameters: Whether every group that trains takes part in a reduction, with zeros where a
            parameter has no gradient.
        all_reduce_hook: Called with the flat shards, without gaps in between, before gradients are installed.
        all_reduce_hook_stream: The hook's stream; None means the stream of the all-reduces.
        has_sums: Whether microbatches, on any rank, left unreduced gradients.
    """

    def __init__(self, parameters: UnitParameters) -> None:
        self.parameters = parameters
        self.delayed = DelayedGradients()
        self.requires_sync = True
        self.requires_all_reduce = True
        self.reduces_unused_parameters = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_reduce_hook_stream: torch.Stream | None = None
        # Set at the end of a backward that keeps gradients, on every rank alike (`_wait_for_later`), also where this
        # rank made none; cleared by the reduction and by `drop`. Sums travel in the reduce dtype: a rank that forgot
        # the kept microbatch would send another dtype than its peers.
        self.has_sums = False

    def take_over(self, other: Gradients) -> None:
        """Serve another unit's parameters too, from now on. Both units must be at rest."""
        self.delayed.take_over(other.delayed)
        self.has_sums |= other.has_sums

    # -- at the end of a backward -----------------------------------------------------------------------------------

    def end(self) -> Ended:
        """Reduce the gradients, or keep the gradients for a later microbatch or until delayed gradients have come.

        Effects: those of `reduce`, unless gradients are kept.
        """
        context = self.parameters.context
        compute = context.streams.compute_stream
        if self.parameters.main_grads:
            self.settle(compute)
        if self._wait_for_later() or self.delayed.num_due:
            self.has_sums = True
            self.delayed.join(compute)  # the sums below read delayed gradients of other streams
            for group in self.parameters.groups:
                reduction.accumulate_gradients(group)
            self.delayed.release(compute)
            return Ended()
        return Ended(self.reduce(compute), context.is_last_backward)

    def finish(self, *, is_held: bool) -> Ended:
        """Reduce gradients left at the end of the tree's backward; in the last one also sums of earlier microbatches.

        The backward of a held unit, or of a unit that waits for delayed gradients, is not over: its gradients stay.

        Effects: those of `reduce`; a collective on the outer axis for gradients not reduced over the axis yet.
        """
        parameters = self.parameters
        self.has_sums |= self._wait_for_later()  # else a rank that skipped the unit would send another dtype
        if is_held or self.delayed.num_due:
            return Ended()
        if parameters.main_grads:
            self.settle(parameters.context.streams.compute_stream)
        installed_on: tuple[torch.Stream, ...] = ()
        if parameters.has_gradients:
            installed_on, _ = self.end()
        is_final = self.requires_sync and parameters.context.is_last_backward
        if is_final:
            self._drop_main_grads()
            if self.requires_all_reduce:
                installed_on += self._reduce_partials()
        return Ended(installed_on, is_final)

    def settle(self, compute: torch.Stream) -> None:
        """Count the sums in main-grad buffers as gradients.

        Effects: the compute stream waits for delayed gradients, in a unit with main-grad buffers.
        """
        if self.parameters.main_grads:  # a delayed gradient may be in a buffer, made on another stream
            self.delayed.join(compute)
        for grads in self.parameters.main_grads:
            grads.settle()

    def drop(self) -> None:
        """Forget unreduced gradients."""
        self.has_sums = False
        with attributes_alone():
            for group in self.parameters.groups:
                group.partial = None
                for parameter in group.parameters:
                    parameter.drop_gradient()
        self._drop_main_grads()

    def divide(self, *, divisor: float | None = None, sums_only: bool | None = None) -> None:
        """Choose the divisor of later reductions, or whether they sum only; None leaves a choice as it is.

        Gradients kept for the outer axis stay divided as they were chosen to be when they were reduced.

        Effects: with kept gradients whose division changes, one multiplication on the reduce stream.
        """
        streams = self.parameters.context.streams
        for group in self.parameters.groups:
            before = group.outer_divisor
            group.divisor = group.divisor if divisor is None else divisor
            group.sums_only = group.sums_only if sums_only is None else sums_only
            if group.partial is not None and group.outer_divisor != before:
                # The later reduction divides the kept sum, which the reduce stream made, as it divides its own terms.
                with torch.no_grad(), streams.on(streams.reduce_scatter_stream):
                    group.partial.shards.flat.mul_(group.outer_divisor / before)

    def _wait_for_later(self) -> bool:
        """Whether gradients are kept for a later microbatch."""
        if not self.requires_sync:
            return True
        return self.parameters.strategy.reduces_once and not self.parameters.context.is_last_backward

    def _drop_main_grads(self) -> None:
        for grads in self.parameters.main_grads:
            grads.drop()

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, compute: torch.Stream) -> tuple[torch.Stream, ...]:
        """Reduce the unsharded gradients into the sharded parameters' `.grad`.

        A group takes part if any member has a gradient here (always, with `reduces_unused_parameters`), and then with
        all members: a member without a gradient sends zeros, and gets no gradient unless `reduces_unused_parameters`.

        Args:
            compute: The current stream, which made the gradients.

        Returns:
            The streams with the kernels that install gradients; empty if the outer axis is reduced over later.

        Effects: collective on the unit's shard axis, one for all groups on the same axes, on the reduce stream; the
            compute stream waits for the unit reduced before, whose gradients are then freed. With replicas, another
            collective on their axis, on its own stream. No host sync on CUDA.
        """
        parameters = self.parameters
        context, streams = parameters.context, parameters.context.streams
        delayed = self.delayed if self.delayed.are_expected else None
        if delayed is not None:
            delayed.join(compute)
        inputs, reads = list[GroupGradients](), list[torch.Tensor | None]()
        for group in parameters.groups:
            gradients, has_any = reduction.take_gradients(group)
            # By `has_any` alone the collective depends on gradients here: the caller promises equal use on all ranks.
            if has_any or (self.reduces_unused_parameters and group.is_trainable):
                inputs.append(GroupGradients(group, gradients, self._wire_of(group)))
                reads += gradients.values()  # parameters hold these tensors no more: the reduction's record must
        # No layer has added to the main-grad buffers either: without a reduction nobody else frees them.
        if not inputs:
            self._drop_main_grads()
            return ()
        # Bounds memory: without the wait a fast host would queue reductions, and hold every unit's unsharded gradients.
        with label("post_backward_rs_wait"):
            streams.retire_all_but(context.max_reductions_in_flight - 1)
        stream = streams.reduce_scatter_stream
        self.has_sums = False
        if delayed is not None:
            delayed.release(compute)
        if context.order_check is not None:
            parameters.check_order(
                "reduce",
                lambda: sum(reduction.gradient_nbytes(*group_gradients) for group_gradients in inputs),
            )
        # The compute stream made the gradients, and may have changed an earlier `.grad` that the reduction adds to.
        stream.wait_stream(compute)
        with label("post_backward_reduce", parameters.name), _no_graph(), streams.on(stream):
            reductions, transfers = {}, {}
            for group, gradients, wire_dtype in inputs:
                output = reduction.new_reduced(
                    group,
                    gradients,
                    reduction.sum_dtype(group) if self.all_reduce_hook is None else group.reduce_dtype,
                    installs_all=self.reduces_unused_parameters,
                    without_gaps=self.all_reduce_hook is not None,
                )
                is_float16 = group.reduce_dtype is torch.float16  # without a call for all other dtypes
                terms = reduction.predivided(group, gradients, wire_dtype) if is_float16 else gradients
                reductions[group], transfers[group] = output, (terms, wire_dtype, output.shards)
            groups = list(reductions)
            for axis_groups in by_axes(groups):
                transport = axis_groups[0].transports.reduce or axis_groups[0].transports.shard
                reduce_scatter([transfers[group] for group in axis_groups], transport, axis_groups[0].reduce_op).wait()
            for group in groups:
                if group.partial is not None:
                    # On the stream that reduced the partial sum, behind the reduction: no further wait.
                    reductions[group] = reduction.add_partial(group, reductions[group])
            # The record holds the tensors: the reduce stream still reads memory that belongs to other streams.
            event = stream.record_event()
            # Before gradients are installed: an error in a user's hook must not free tensors that the reduction reads.
            streams.hold(self._reduction(event, reads, compute))
            return self._install(reductions, event)

    def _wire_of(self, group: ParameterGroup) -> torch.dtype:
        """A group's communication dtype: for sums, of microbatches or of layers, the reduce dtype."""
        main_grads = self.parameters.main_grads
        if self.has_sums or (main_grads and any(grads.group is group for grads in main_grads)):
            return group.reduce_dtype
        return reduction.wire_dtype(group)

    def _reduction(self, event: torch.Event, reads: list[torch.Tensor | None], compute: torch.Stream) -> Reduction:
        """The record that keeps a reduction's gradients alive until every stream that made some has waited."""
        streams, frees = [compute], []
        if self.delayed.are_expected:
            streams += self.delayed.take_streams()
        for grads in self.parameters.main_grads:
            if (buffer_and_stream := grads.take()) is not None:
                stream, free = buffer_and_stream
                streams.append(stream)
                frees.append(free)
        return Reduction(event, reads, streams, frees)

    def _install(self, reduced: Mapping[ParameterGroup, Reduced], event: torch.Event) -> tuple[torch.Stream, ...]:
        """Install gradients reduced over the shard axis. The reduce stream must be current."""
        streams: dict[torch.Stream, None] = {}
        for group, group_reduction in reduced.items():
            if (stream := self._install_group(group, group_reduction, event)) is not None:
                streams[stream] = None
        return tuple(streams)

    def _install_group(self, group: ParameterGroup, reduced: Reduced, event: torch.Event) -> torch.Stream | None:
        """Reduce over the outer axes and install the gradients, or keep the partial sum for a later microbatch.

        Returns:
            The stream with the kernels that install the gradients, or None for a kept sum.
        """
        parameters, streams = self.parameters, self.parameters.context.streams
        has_outer = group.transports.replicas is not None or group.transports.outer is not None
        if has_outer and (self._waits_for_outer() or not self.requires_all_reduce):
            group.partial = reduced
            return None
        stream = streams.reduce_scatter_stream
        # Rule 6 of Note [Streams]: a cast on the reduce stream would delay the next unit's reduction.
        if has_outer or self.all_reduce_hook is not None or reduced.shards.dtype != group.main_grads_dtype:
            stream = self.all_reduce_hook_stream or streams.all_reduce_stream
            stream.wait_event(event)
        if has_outer:
            parameters.check_order("all-reduce", lambda: reduced.shards.flat.nbytes)
        with streams.on(stream) if stream is not streams.reduce_scatter_stream else _AS_IT_IS:
            total = reduction.reduce_over_outer(group, reduced)
            shows = self.all_reduce_hook
            are_divided = shows is not None and reduction.show_gradients(group, total, shows)
            reduction.install_gradients(group, total, are_divided=are_divided)
            hooks = reduction.hooks_of(group, total.present)
            if group.offload is not None:  # on the way to the CPU: a hook called now would read half-copied gradients
                streams.expect_gradients(hooks)
            else:
                for hook in hooks:
                    hook()
            if stream is not streams.reduce_scatter_stream:
                # Allocated on the reduce stream, read on this one: without a holder the next reduction gets the memory.
                streams.hold_all_reduce(Reduction(stream.record_event(), [reduced.shards.flat]))
        return stream

    def _waits_for_outer(self) -> bool:
        return self.parameters.strategy.reduces_outer_once and not self.parameters.context.is_last_backward

    def _reduce_partials(self) -> tuple[torch.Stream, ...]:
        """Reduce kept partial sums over the outer axis, of groups without a gradient in this backward."""
        partials: dict[ParameterGroup, Reduced] = {}
        for group in self.parameters.groups:
            if (partial := group.partial) is not None:
                partials[group], group.partial = partial, None
        if not partials:
            return ()
        streams = self.parameters.context.streams
        stream = streams.reduce_scatter_stream
        stream.wait_stream(streams.compute_stream)  # which may have changed a `.grad` that the sums are added to
        with label("post_backward_reduce", self.parameters.name), torch.no_grad(), streams.on(stream):
            return self._install(partials, stream.record_event())


def _no_graph() -> AbstractContextManager[object]:
    """Record no graph. Inside autograd recording is off already, and torch's context costs 18 us."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS
