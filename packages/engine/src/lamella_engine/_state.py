"""One unit at run time: the verbs that hooks, schedules and users drive it with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import NamedTuple

import torch
from torch.profiler import record_function

from lamella_buffers import Pending, Transport, all_gather, reduce_scatter, transport_for
from lamella_engine import _updates as updates
from lamella_engine._context import Context, Member, Reduction
from lamella_engine._parameter_group import ParameterGroup
from lamella_precision import MixedPrecisionPolicy


class Residency(Enum):
    """Where a unit's parameters are, and what that costs in memory."""

    SHARDED = "shards only"
    UNSHARDING = "shards and the unsharded buffer, which a gather is filling; modules hold DTensors"
    UNSHARDED = "shards and the unsharded buffer; modules hold plain tensors"


_LEGAL = {
    (Residency.SHARDED, Residency.UNSHARDING),
    (Residency.UNSHARDING, Residency.UNSHARDED),
    (Residency.UNSHARDING, Residency.SHARDED),  # gathered ahead, never used
    (Residency.UNSHARDED, Residency.SHARDED),
}


class _Gather(NamedTuple):
    """A gather in flight: what the host waits for (gloo), what a stream waits for (CUDA), and what to put back."""

    pending: Pending
    event: torch.Event
    versions: AbstractContextManager[None]


class FSDPState:
    """A unit's parameters and what is happening to them.

    Life in a step: `unshard` and `wait_for_unshard` before forward and again before backward, `reshard` after each,
    `reduce_gradients` after backward. The hooks of `fully_shard` call these at module boundaries; a schedule that never
    calls `module.forward` may call them itself.

    Args:
        groups: Its parameters.
        context: Shared with the rest of the tree.
        policy: Number formats; here only those of inputs and outputs.
        reshard_after_forward: FSDP2's; None means "unless I am the outermost unit".
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        context: Context,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.name = ""
        self.groups = tuple(groups)
        self.context = context
        self.index = -1
        self.is_outermost = True
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.reduces_unused_parameters = False
        self.awaits_backward_end = False
        self._residency = Residency.SHARDED
        self._gather: _Gather | None = None
        self._gathered_at = -1
        self._transport: Transport | None = None
        context.add(self)

    @property
    def transport(self) -> Transport:
        """The axis that the unit's groups share."""
        if self._transport is None:
            self._transport = transport_for(self.groups[0].mesh.get_group())
        return self._transport

    @property
    def residency(self) -> Residency:
        """Where the parameters are."""
        return self._residency

    @residency.setter
    def residency(self, to: Residency) -> None:
        assert (self._residency, to) in _LEGAL, f"{self.name}: {self._residency} -> {to}"
        self._residency = to

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the parameters go after forward. The outermost unit's stay for the backward that begins with it."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return not (self.is_outermost and torch.is_grad_enabled())

    @property
    def is_unsharding(self) -> bool:
        """Whether a gather was started and not waited for."""
        return self._residency is Residency.UNSHARDING

    # -- parameters -------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start gathering the parameters; nothing if they are unsharded or on the way.

        Raises:
            RuntimeError: The parameters are on the meta device.

        Effects: collective on the unit's axis, one for all of its groups; allocates the unsharded buffers on the gather
            stream and casts this rank's shards there; no host sync.
        """
        if self._residency is not Residency.SHARDED or not self.groups:
            return
        context = self.context
        if context.is_resting:
            self.adopt_replaced_shards()
            context.order_gathers_after_compute()
        self._check_materialized()
        # Autograd may hold views of the buffers: filling them again with the same values is no modification. On
        # gloo they are filled when the gather is waited for, so that is when the counters are put back.
        buffers = tuple(group.unsharded_weight.flat for group in self.groups)
        versions = torch.autograd.grad_mode._unsafe_preserve_version_counter(buffers)
        label = record_function(f"FSDP::all_gather ({self.name})")
        with label, torch.no_grad(), context.on(context.all_gather_stream):
            pending = all_gather([group.prepare_gather() for group in self.groups], self.transport)
            self._gather = _Gather(pending, context.all_gather_stream.record_event(), versions)
        self._gathered_at = updates.count
        self.residency = Residency.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Order the compute stream after the gather, and make the modules hold the unsharded parameters.

        Effects: no host sync on CUDA; blocks the host on gloo.
        """
        if self._residency is not Residency.UNSHARDING:
            return
        self._finish_gather()
        for group in self.groups:
            group.install_unsharded()
        self.residency = Residency.UNSHARDED

    def reshard(self) -> None:
        """Make the modules hold the DTensors, and free the unsharded buffers; nothing if they are free.

        Effects: the gather stream waits for the compute stream; no host sync on CUDA; not a collective.
        """
        if self._residency is Residency.SHARDED:
            return
        self._finish_gather()
        for group in self.groups:
            group.install_sharded()
        self.context.order_gathers_after_compute()
        for group in self.groups:
            group.unsharded_weight.free()
        self.residency = Residency.SHARDED

    def adopt_replaced_shards(self, *, keep_parameters: bool = False) -> None:
        """Take back shards whose storage, or whose Parameter, somebody replaced while they were at rest.

        Effects: see `ParameterGroup.adopt_replaced_shards`.
        """
        if self._residency is Residency.SHARDED:
            for group in self.groups:
                group.adopt_replaced_shards(keep_parameters=keep_parameters)

    def drop_stale_weights(self) -> None:
        """Reshard if the weights changed since they were gathered: they were kept over an optimizer step."""
        if self._residency is not Residency.SHARDED and self._gathered_at != updates.count:
            self.reshard()

    def _finish_gather(self) -> None:
        if self._gather is not None:
            self._gather.pending.wait()
            self._gather.versions.__exit__(None, None, None)
            self.context.compute_stream.wait_event(self._gather.event)
            self._gather = None

    def _check_materialized(self) -> None:
        names = [name for group in self.groups for name in group.meta_names()]
        if names:
            raise RuntimeError(
                f"Expected the parameters of {self.name or 'the outermost unit'} on {self.context.device}, got "
                f"{len(names)} on the meta device, {names[0]!r} among them. Call "
                f'`model.to_empty(device="{self.context.device.type}")` and initialise them first.'
            )

    # -- gradients --------------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce the gradients that backward left into the sharded parameters' `.grad`.

        A group takes part if any member has a gradient here (or whatever happened, with
        `reduces_unused_parameters`), and then with all of its members: one without a gradient sends zeros, and gets
        none unless `reduces_unused_parameters`.

        Effects: collective on the unit's axis, one for all of its groups, on the reduce stream; the compute stream
            waits for the unit reduced before, whose gradients are then freed; no host sync on CUDA.
        """
        groups = [g for g in self.groups if g.has_gradients or (self.reduces_unused_parameters and g.is_trainable)]
        if not groups:
            return
        context = self.context
        context.retire_reductions()
        gradients = [group.take_gradients() for group in groups]
        stream = context.reduce_scatter_stream
        stream.wait_stream(context.compute_stream)
        with record_function(f"FSDP::post_backward_reduce ({self.name})"), torch.no_grad(), context.on(stream):
            reduced = [group.new_reduced() for group in groups]
            moves = list(zip(gradients, reduced, strict=True))
            reduce_scatter(moves, self.transport, groups[0].reduce_op).wait()
            for group, taken, shards in zip(groups, gradients, reduced, strict=True):
                group.install_gradients(shards, [self.reduces_unused_parameters or g is not None for g in taken])
            context.hold(Reduction(stream.record_event(), [g for taken in gradients for g in taken if g is not None]))

    def begin_backward(self) -> None:
        """Unshard for the unit's backward, and gather the next unit ahead."""
        if self.awaits_backward_end:
            return  # another output of the same forward
        self.awaits_backward_end = True
        self.unshard_with(self.context.enter_backward(self))

    def end_backward(self) -> None:
        """Reshard, and reduce the gradients or keep them for a later microbatch."""
        self.awaits_backward_end = False
        if self.reshard_after_backward:
            self.reshard()
        if self.requires_gradient_sync:
            self.reduce_gradients()
        else:
            for group in self.groups:
                group.accumulate_gradients()

    def finish_backward(self) -> None:
        """End what autograd did not reach: inputs that need no gradient, a forward whose output was not used."""
        if self.awaits_backward_end or any(group.has_gradients for group in self.groups):
            self.end_backward()
        elif self.reshard_after_backward:
            self.reshard()

    def unshard_with(self, successor: Member | None) -> None:
        """Unshard now, and gather `successor` ahead so that its gather overlaps with this unit's compute."""
        self.unshard()
        if successor is not None:
            successor.unshard()
        self.wait_for_unshard()

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        for group in self.groups:
            for parameter in group.parameters:
                parameter.drop_gradient()

    def abandon(self) -> None:
        """Drop this pass: gradients that were not reduced, and the unsharded parameters."""
        self.awaits_backward_end = False
        self.drop_gradients()
        self.reshard()
