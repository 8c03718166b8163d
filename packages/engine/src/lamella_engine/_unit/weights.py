"""The weights of one unit: gathered, held and freed, and gathered again after changes of main weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import increment_version

from lamella_buffers import Done, Pending, all_gather
from lamella_engine._common.labels import label
from lamella_engine._parameters.group import ParameterGroup, by_axes
from lamella_engine._parameters.new_group import split_extended
from lamella_engine._parameters.sharded_parameter import LostChange, attributes_alone, has_assigned_data, report_lost
from lamella_engine._parameters.ties import merge_tied
from lamella_engine._scaling.events import WeightsChange
from lamella_engine._streams.context import PassPhase
from lamella_engine._unit.parameters import UnitParameters
from lamella_engine._unit.writes import is_written_since, refuse_assigned_data
from lamella_precision import Direction


class Residency(Enum):
    """The place of a unit's parameters, and its cost in memory."""

    SHARDED = "shards only"
    UNSHARDING = "shards and the unsharded buffer, which a gather is filling; modules hold DTensors"
    UNSHARDED = "shards and the unsharded buffer; modules hold plain tensors"
    KEPT = "shards and the unsharded buffer, whose contents may still be used; modules hold DTensors"

    __hash__ = object.__hash__  # by identity, as members are compared; an enum's own hash runs in Python


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


class Contents(Enum):
    """The age of the gathered values, against main weights.

    Version counters alone cannot tell (fused and multi-tensor optimizers leave them alone), so the rule is explicit: a
    unit is stale after the step of any `torch.optim` optimizer that holds one of the unit's parameters, and after
    `FSDPModule.mark_updated()`. Both happen on every rank alike, as the gathers that follow must. Staleness matters
    only to unsharded weights and copies that outlive a pass: all other weights are gathered anew each time. Beside the
    rule, `renew_written` sees operators in place on the sharded parameters.
    """

    NONE = "nothing was gathered yet"
    CURRENT = "main weights, as far as is known"
    DUE = "an optimizer of any kind is likely to write main weights before the next use"
    STALE = "main weights may have changed since"


@dataclass(slots=True)  # a call less than a tuple, for each gather
class _Gather:
    """A gather in flight: the host waits for `pending` (gloo), a stream for `event` (CUDA)."""

    pending: list[Pending]
    event: torch.Event


class UnitWeights:
    """The unsharded form of a unit's parameters, from a gather to the end of its last use.

    Each user of the unsharded parameters is a holder. Hooks and plain verbs count as one, and every `Hold` as another;
    the parameters go when the last holder lets go.

    Note [Interrupts]. A KeyboardInterrupt may end any method between two lines, with the parameters of some modules
    installed and of others not, and some buffers allocated. `residency` and `contents` follow the actions, and only
    vouch for a complete gather: parameters whose residency is UNSHARDED or KEPT have the values of one. `abandon`
    therefore looks at modules and storages themselves, and may be interrupted and called again.

    Args:
        parameters: The unit's parameters.

    Attributes:
        residency: The place of the parameters.
        contents: The values of the unsharded form.
        versions_at_rest: Versions of the sharded parameters when the last pass left gathered weights behind, or when
            weights were gathered between passes. None without such weights: freed, or gathered anew in a pass.
        early: Tensor versions at a gather inside an optimizer's step, until the next forward uses the gathered weights.
    """

    def __init__(self, parameters: UnitParameters) -> None:
        self.parameters = parameters
        self.residency = Residency.SHARDED
        self.contents = Contents.NONE
        # Added by `unshard` and `keep_for`, removed by `reshard`; `abandon` clears them. None stands for hooks and
        # plain verbs, which count as one user however often they gather.
        self._holders: set[object] = set()
        # Of holders that let go on streams of their own: the buffers may not be freed before these readers are done.
        # Cleared when the gather stream has waited for all, in the last `reshard`.
        self._readers: list[torch.Event] = []
        # From the start of a gather to the wait for it. `_finish_gather` clears it last, so an interrupt between any
        # two lines leaves a gather to wait for, and no buffer that looks filled.
        self._gather: _Gather | None = None
        # Parameters and their counters, from `forbid_reads` in backward until the gather is waited for.
        self._forbidden: tuple[tuple[torch.Tensor, ...], tuple[int, ...]] | None = None
        # For streams that use the weights after another stream has waited. Stays when the weights go: an event holds
        # no memory.
        self._gathered: torch.Event | None = None
        # The passes whose payloads are gathered or in flight; None without gathered bytes. Kept copies keep it, since
        # the next gather adds only missing payloads.
        self._gathered_for: Direction | None = None
        self.versions_at_rest: list[int] | None = None
        self.early: list[tuple[int, int]] | None = None

    def _become(self, to: Residency) -> None:
        assert (self.residency, to) in _LEGAL, f"{self.parameters.name}: {self.residency} -> {to}"
        self.residency = to

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules hold unsharded parameters."""
        return self.residency is Residency.UNSHARDED

    @property
    def num_holds(self) -> int:
        """The holders beside hooks and plain verbs."""
        return len(self._holders) - (None in self._holders)

    def may_be_read(self, *, is_recomputed: bool) -> bool:
        """Whether a module may run now: parameters unsharded, and current unless the module is recomputed.

        Args:
            is_recomputed: The module runs again inside backward, on the weights of its forward.
        """
        return self.residency is Residency.UNSHARDED and (is_recomputed or self.contents is Contents.CURRENT)

    def keep_for(self, holder: object) -> None:
        """Keep unsharded parameters until `holder` lets go too (`reshard`)."""
        # Else the bytes are gone already, and a holder that nothing was kept for would block later reshards.
        if self.residency is Residency.UNSHARDED:
            self._holders.add(holder)

    # -- gathered ----------------------------------------------------------------------------------------------------

    def unshard(self, direction: Direction = Direction.BOTH, *, holder: object = None) -> None:
        """Start gathering the parameters; nothing if the parameters are unsharded or a gather is in flight.

        Args:
            direction: The passes that use the parameters. Payloads missing from an earlier gather are added.
            holder: The user of the parameters. None stands for hooks and plain verbs.

        Raises:
            RuntimeError: The parameters are on the meta device, or should rest on the CPU and do not.

        Effects: collective on the unit's shard axis, one for all groups on the same axes; allocates the unsharded
            buffers and casts this rank's shards on the gather stream, after a copy to the device of shards on the CPU;
            no host sync.
        """
        parameters = self.parameters
        if self.residency in (Residency.UNSHARDING, Residency.UNSHARDED) or not parameters.groups:
            self._holders.add(holder)
            if self._gathered_for is not direction and self._gathered_for is not Direction.BOTH:
                self.add_payloads(direction)
            return
        context = parameters.context
        if self.contents is not Contents.CURRENT:
            # Shards gathered over an outer axis, and parts kept for neighbours, are copies of main weights too.
            parameters.drop_gathered_shards()
        # Rule 1 of Note [Streams]: outside of passes, no wait so far covers the last write of the shards.
        is_resting = context.phase is PassPhase.RESTING
        if is_resting:
            self.adopt_replaced_shards()
            context.streams.order_gathers_after_updates()
            for listener in parameters.listeners:
                listener.weights_changed(self, WeightsChange.UNSEEN)
        for group in parameters.groups:  # an attribute, not the method alone: asked at every gather of every unit
            if group.is_meta:
                parameters.refuse_meta()
        if self.residency is Residency.KEPT:
            if self.contents is Contents.CURRENT:
                self._holders.add(holder)
                self._become(Residency.UNSHARDING)  # still valid: only missing payloads are gathered
                self.add_payloads(direction)
                return
            # Freed first, which makes the gather stream wait for readers of the values from before the change.
            self.drop_copy()
        for listener in parameters.listeners:
            listener.weights_needed(self)
        # State follows the gather: after an error in it the unit is sharded, and a caller may try again.
        self._start_gathers("gather", direction, None)
        self._gathered_for = direction
        self._holders.add(holder)
        self.contents = Contents.CURRENT
        # Gathered by hand, the weights may meet a write before any pass ends.
        self.versions_at_rest = parameters.sharded_versions if is_resting else None
        self._become(Residency.UNSHARDING)

    def add_payloads(self, direction: Direction) -> None:
        """Gather the payloads that a direction needs, beside payloads gathered or in flight for another direction.

        Modules keep the unsharded parameters: `wait_for_unshard` orders the compute stream.

        Effects: those of `unshard`, if payloads are missing; else none.
        """
        gathered_for = self._gathered_for
        if any(group.form.chosen(direction, gathered_for) for group in self.parameters.groups):
            if self.contents is not Contents.CURRENT:
                self.parameters.drop_gathered_shards()
            self._start_gathers("gather more", direction, gathered_for)
        self._gathered_for = direction.joined(gathered_for)

    def recompute_forward(self) -> None:
        """Add forward's payloads to backward's, for a part of the unit that runs again inside backward.

        Effects: none if the payloads are gathered; else those of `unshard` and `wait_for_unshard`.
        """
        if self._gathered_for is Direction.BACKWARD:
            self.add_payloads(Direction.FORWARD)
            self.wait_for_unshard()

    def stay_for_backward(self) -> None:
        """Add backward's payloads to forward's, in a unit that stays unsharded in between."""
        if self._gathered_for is Direction.FORWARD:
            self.add_payloads(Direction.BACKWARD)

    def _start_gathers(self, verb: str, direction: Direction, gathered_for: Direction | None) -> None:
        """Start a gather for each set of axes; after an error no bytes stay, so that a caller may try again."""
        if torch._C._are_functorch_transforms_active():
            # Inside a transform of `torch.func` views of buffers would be wrappers, which have no address.
            with temporarily_clear_interpreter_stack():
                self._start_gathers(verb, direction, gathered_for)
            return
        parameters = self.parameters
        context, streams = parameters.context, parameters.context.streams
        if parameters.is_offloaded:
            parameters.check_at_home()
            streams.reads_shards = True  # the host must not write the shards before the gather stream has copied them
        if context.order_check is not None:
            parameters.check_order(verb, lambda: parameters.unsharded_nbytes)
        stream = streams.all_gather_stream
        # With payloads of another direction in flight one event covers both: the gather stream runs them in order.
        pending = [] if self._gather is None else self._gather.pending
        with label("all_gather", parameters.name), streams.on(stream):
            try:
                for axis_groups in by_axes(parameters.groups):
                    if not isinstance(pending_gather := _start_gather(axis_groups, direction, gathered_for), Done):
                        pending.append(pending_gather)
            except BaseException:
                for group in parameters.groups:
                    group.settle_bytes(frees=gathered_for is None)  # else modules use the earlier payloads
                raise
            self._gather = _Gather(pending, stream.record_event())

    def forbid_reads(self) -> None:
        """Let autograd refuse the unit's parameters as modified in place, until a gather in flight is waited for.

        A kernel that read them so early would compute with memory that the gather has not filled. Functions that keep a
        parameter past autograd's saved tensors are not refused so: `Unit.check_not_begun` finds their gradient.
        """
        if self._gather is not None and self._forbidden is None:
            parameters = tuple([p.unsharded for group in self.parameters.groups for p in group.parameters])
            with attributes_alone():
                self._forbidden = parameters, tuple([parameter._version for parameter in parameters])
            increment_version(parameters)

    def _allow_reads(self) -> None:
        """Restore the counters that `forbid_reads` has advanced: left ahead, they would fail the right backward too."""
        if self._forbidden is not None:
            torch._C._autograd._unsafe_set_version_counter(*self._forbidden)
            self._forbidden = None

    def wait_for_unshard(self) -> None:
        """Order the compute stream after the gather, and make the modules hold the unsharded parameters.

        Raises:
            RuntimeError: A parameter was replaced since the gather began.

        Effects: no host sync on CUDA; blocks the host on gloo.
        """
        if self.residency is not Residency.UNSHARDING:
            if self._gather is not None and self.residency is Residency.UNSHARDED:
                self._finish_gather()  # payloads of another direction, in a unit whose modules are unsharded already
            return
        if self._gather is not None:
            self._finish_gather()
        lost: list[LostChange] = []
        for group in self.parameters.groups:
            lost += group.install_unsharded()
        for grads in self.parameters.main_grads:
            grads.mark()  # forward of a fused layer looks for the attributes on the weight that it reads
        self._become(Residency.UNSHARDED)
        if lost:  # last: the error leaves an unsharded unit, which `reshard` can end
            report_lost(lost)

    def _finish_gather(self) -> None:
        assert self._gather is not None
        streams = self.parameters.context.streams
        pending, event = self._gather.pending, self._gather.event
        self._allow_reads()
        self.early = None
        if pending:  # gloo copies results into place now: on the stream that allocated the memory
            with streams.on(streams.all_gather_stream):
                for gather in pending:
                    gather.wait()
            event = streams.all_gather_stream.record_event()
        # A device-side wait: the host goes on, and the compute stream reads the buffers only after the gather.
        self._gathered = event
        streams.compute_stream.wait_event(event)
        self._gather = None  # last: until then an interrupt leaves a gather to wait for

    def order_after_gather(self) -> None:
        """Order the current stream after the gather, which another stream may have waited for first."""
        if self._gathered is not None:
            self.parameters.context.streams.compute_stream.wait_event(self._gathered)

    # -- freed -------------------------------------------------------------------------------------------------------

    def reshard(self, *, keep_parts: bool = False, holder: object = None) -> None:
        """Make the modules hold the DTensors, and free the unsharded buffers, unless the ZeRO stage keeps them.

        Nothing happens while other holders are left.

        Args:
            keep_parts: Keep this rank's part for a gather among neighbours (`reshard_after_forward` is a number).
            holder: The holder that lets go.

        Raises:
            RuntimeError: A parameter was replaced while it was unsharded. The unit is sharded then.

        Warns:
            UserWarning: A gathered weight was written in place. The write is lost.

        Effects: the gather stream waits for the compute stream; no host sync on CUDA, except to compare a weight that
            counts writes with this rank's shard; not a collective.
        """
        # Also of a sharded unit: parts that a forward without a backward kept would be gathered as if current.
        for group in self.parameters.groups if not keep_parts else ():
            group.parts = None
        self._holders.discard(holder)
        if self.residency in (Residency.SHARDED, Residency.KEPT):
            return
        streams = self.parameters.context.streams
        if self._holders:
            # The last holder may let go on another stream, which knows nothing of this one's kernels.
            self._readers.append(streams.compute_stream.record_event())
            return
        if self.early is not None:  # freed before its forward: copies are made anew too
            self.expect_update()
        if self._gather is not None:  # prefetched in vain: freed before its end, the next gather would write beside it
            self._finish_gather()
        for event in self._readers:  # the gather stream's next allocation takes the bytes
            streams.all_gather_stream.wait_event(event)
        self._readers.clear()
        lost: list[LostChange] = []
        if self.residency is Residency.UNSHARDED:  # else modules hold DTensors, maybe replaced by the user
            for group in self.parameters.groups:
                lost += group.install_sharded()
        if self.parameters.strategy.keeps_copy:
            self._become(Residency.KEPT)
        else:
            self._free(keep_parts=keep_parts)
        if lost:  # last: the error leaves a unit at rest
            report_lost(lost)

    def _free(self, *, keep_parts: bool = False) -> None:
        """Give the unsharded buffers' bytes back."""
        streams = self.parameters.context.streams
        self.versions_at_rest = None
        # The bytes go back to the gather stream's pool: without the wait, the next gather writes into weights which
        # queued kernels of the compute stream still read. The storage objects stay, since autograd holds views of them.
        streams.order_gathers_after_compute()
        for group in self.parameters.groups:
            if keep_parts and group.transports.neighbours is not None:
                # Copied on the stream that has just waited, before the bytes go.
                with torch.no_grad(), streams.on(streams.all_gather_stream):
                    group.keep_part()
        if self.residency is not Residency.SHARDED:
            self._become(Residency.SHARDED)  # first: a copy that an interrupt has freed in part would count as KEPT
            self._gathered_for = None
        for group in self.parameters.groups:
            group.free_unsharded()

    def keep_bytes(self, keep: bool) -> None:
        """Choose whether unsharded buffers keep their bytes when the parameters are resharded.

        Effects: False frees kept bytes of a unit at rest, after the compute stream.
        """
        # A unit in use only takes note: its next reshard frees the bytes, or leaves them in place.
        for group in self.parameters.groups:
            group.keeps_bytes = keep
        if not keep and self.residency is Residency.SHARDED:
            self._free()

    def drop_copy(self) -> None:
        """Free kept copies of the parameters: main weights may be about to change.

        Effects: the gather stream waits for the compute stream; no host sync on CUDA; not a collective.
        """
        self.parameters.drop_gathered_shards()
        self.versions_at_rest = None
        if self.residency is Residency.KEPT:
            self._free()

    def abandon(self) -> None:
        """Return to rest from any point of a dropped pass: Note [Interrupts]. Values of a complete gather may be kept.

        A tensor that the user put into a module stays there, for the next forward to adopt or refuse.

        Effects: as `reshard`. Waits for a gather in flight if the ZeRO stage keeps the gathered values.
        """
        # Holders of a dropped pass let go later: `reshard` of a sharded unit then does nothing.
        self._holders.clear()
        streams, groups = self.parameters.context.streams, self.parameters.groups
        for group in groups:
            group.put_back()
            group.parts = None
        for event in self._readers:
            streams.all_gather_stream.wait_event(event)
        self._readers.clear()
        self.expect_update()  # No end of a pass has noted versions: a write from now on would not be seen.
        self.versions_at_rest = None
        self._allow_reads()
        if self.residency is not Residency.SHARDED and self.parameters.strategy.keeps_copy:
            if self._gather is not None:
                self._finish_gather()
            self.early = None
            self.residency = Residency.KEPT
        else:
            # Memory that a gather still writes goes back to the gather stream's pool, behind the gather. gloo writes
            # into memory of its own, which is copied into place by a wait.
            self._gather = self.early = self._gathered_for = None
            self.residency = Residency.SHARDED
            streams.order_gathers_after_compute()
        for group in groups:
            group.settle_bytes(frees=self.residency is Residency.SHARDED)

    # -- main weights that change ------------------------------------------------------------------------------------

    def bring_to_rest(self) -> None:
        """Return to rest before main weights are read, written or replaced; the unit must have no holder.

        Effects: those of `reshard` and `drop_copy`. With main weights on the CPU, a host sync after a new gather.
        """
        self.reshard()
        self.drop_copy()
        # The caller writes CPU shards on the host, which no stream orders after the gathers' copies.
        self.parameters.context.streams.wait_for_shards()

    def adopt_replaced_shards(self, *, keep_parameters: bool = False) -> None:
        """Take back shards whose storage or Parameter the user replaced while the unit was at rest.

        Effects: see `ParameterGroup.adopt_replaced_shards` and `merge_tied`.
        """
        if self.residency not in (Residency.SHARDED, Residency.KEPT):
            return
        parameters = self.parameters
        if is_replaced := parameters.is_replaced:
            self.drop_copy()  # of the replaced values
            refuse_assigned_data(parameters)
            parameters.context.streams.post_optim_event = None  # too early for the copies made here
            parameters.replace_groups(merge_tied(parameters.groups, keep_parameters=keep_parameters))
        if self.contents is Contents.NONE:  # once: a look at the class of every local tensor would cost each pass
            parameters.replace_groups(split_extended(parameters.groups))
        for group in parameters.groups if is_replaced else ():
            group.adopt_replaced_shards(keep_parameters=keep_parameters)

    # -- weights that outlive a pass ---------------------------------------------------------------------------------

    def keep_until_next_pass(self) -> None:
        """Note the tensor versions at the end of a pass that leaves gathered weights for the next pass.

        Noted versions stay: main weights may have been written since, between a forward and its backward.
        """
        if self.contents is Contents.CURRENT and self.versions_at_rest is None:
            self.versions_at_rest = self.parameters.sharded_versions

    def renew_written(self) -> None:
        """Make weights stale that outlived a pass, if an operator wrote a sharded parameter in place since.

        An operator in place on a DTensor advances the DTensor's counter on every rank alike, so all ranks gather again.
        Counters of local tensors may differ between ranks, and a gather that other ranks do not begin would never end:
        writes through `.data`, `to_local()` or `torch._foreach_*` need `mark_updated()`.

        Raises:
            RuntimeError: The conditions of `refuse_assigned_data`.
        """
        parameters, versions = self.parameters, self.versions_at_rest
        if versions is None or self.contents is not Contents.CURRENT:
            return
        members = [parameter for group in parameters.groups for parameter in group.parameters]
        if self.residency is Residency.UNSHARDED and not self.num_holds and has_assigned_data(members):
            # Sharded and without a copy, as the refusal requires: it makes the unsharded forms anew.
            self.reshard()
            self.drop_copy()
            refuse_assigned_data(parameters)
        if versions != parameters.sharded_versions:
            self.note_update()

    def drop_stale_weights(self) -> None:
        """Reshard if main weights changed since the gather: the unsharded weights were kept over an optimizer step.

        Raises:
            RuntimeError: The conditions of `renew_written`; or shards gathered inside an optimizer's step were written
                since, maybe on this rank alone.
        """
        if self.versions_at_rest is not None:
            self.renew_written()
        early, is_current = self.early, self.contents is Contents.CURRENT
        if is_current and (early is None or not is_written_since(self.parameters, early)):
            return
        if self.contents is Contents.STALE:  # NONE was never gathered, and DUE only renews copies
            refuse_holds(self)
        self.reshard()

    @property
    def will_be_encoded(self) -> bool:
        """Whether main weights are encoded before the next use, and nothing uses earlier encodings."""
        is_kept = self.residency is Residency.KEPT and self.contents is not Contents.CURRENT
        return is_kept or self.residency is Residency.SHARDED

    def note_update(self) -> None:
        """Note that main weights may have changed: earlier unsharded weights are stale."""
        for listener in self.parameters.listeners:
            listener.weights_changed(self, WeightsChange.UPDATED)
        # NONE stays: before the first gather, `adopt_replaced_shards` looks for extensions in new local tensors.
        if self.contents is not Contents.NONE:
            self.contents = Contents.STALE

    def expect_update(self) -> None:
        """Renew copies at the next use: an optimizer of any kind is likely to write main weights now."""
        # STALE stays: its next use refuses holders, which read values from before an update. DUE does not.
        if self.contents is Contents.CURRENT:
            self.contents = Contents.DUE


def refuse_holds(weights: UnitWeights) -> None:
    """Refuse a call that needs the modules to hold DTensors while a holder keeps the parameters unsharded.

    Raises:
        RuntimeError: The unit has a holder beside hooks and plain verbs.
    """
    if weights.num_holds:
        raise RuntimeError(
            f"Expected nobody to hold {weights.parameters.title}, got {weights.num_holds} holds. Release each first, "
            "let every delayed gradient come, or call reset_iter_state() after an exception."
        )


def _start_gather(groups: Sequence[ParameterGroup], direction: Direction, gathered_for: Direction | None) -> Pending:
    first = groups[0]
    # Taken: the parts serve one gather, and the next starts again from main weights, over the whole axis.
    if first.parts is not None and (neighbours := first.transports.neighbours) is not None:
        return neighbours.all_gather([payload for group in groups for payload in group.take_parts()])
    plans = [group.form.prepare_gather(group, direction, gathered_for) for group in groups]
    return all_gather(plans, first.transports.shard)
