"""One unit at run time: the verbs that hooks, schedules and users drive it with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from lamella_engine._context import Context, Member
from lamella_engine._labels import label, log
from lamella_engine._options import DEFAULT_OPTIONS, ShardingOptions
from lamella_engine._parameter_group import ParameterGroup
from lamella_engine._placements import Strategy
from lamella_engine._residency import Residency, UnitParameters
from lamella_engine._sharded_parameter import ShardedParameter
from lamella_precision import Direction, MixedPrecisionPolicy

_AS_FSDP2 = Strategy()


class FSDPState(UnitParameters):
    """A unit's parameters and what is happening to them.

    Life in a step: `unshard` and `wait_for_unshard` before forward and again before backward, `reshard` after each,
    `end_backward_by_hand` after backward. The hooks of `fully_shard` do the same at module boundaries; a schedule that
    never calls `module.forward` may call them itself. Where the parameters are meanwhile is told in `_residency`, what
    becomes of the gradients in `_gradients`.

    Args:
        groups: Its parameters.
        context: Shared with the rest of the tree.
        policy: Number formats; here only those of inputs and outputs.
        reshard_after_forward: FSDP2's flag; None means "unless I am the outermost unit".
        strategy: What its ZeRO stage makes it do.
        options: As `fully_shard` was given them; the fields of the tree count in `context`.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        context: Context,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        strategy: Strategy = _AS_FSDP2,
        options: ShardingOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__(groups, context, strategy)
        self.options = options
        self.index = -1
        self.is_outermost = True
        self.hooks_of_outermost: list[RemovableHandle] = []
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.max_reductions_in_flight = 1
        self.forward_prefetch: tuple[weakref.ref[FSDPState], ...] = ()
        self.backward_prefetch: tuple[weakref.ref[FSDPState], ...] = ()
        self.awaits_backward_end = False
        self.view: Callable[[], object] = lambda: None  # what torch's tools see of it: weak, as that holds this
        self._reader: FSDPState | None = None
        self._awaited: set[int] = set()
        self._forward_is_watched = True
        self.direction_in_backward = Direction.BACKWARD  # of both where forward runs again in backward
        context.add(self)

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
        """Communicate another unit's parameters from now on, with this one's own. Both must be at rest."""
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
    def is_in_forward(self) -> bool:
        """Whether a forward of the unit is under way."""
        return bool(self._awaited)

    def awaits(self, module_id: int) -> bool:
        """Whether the forward under way has yet to run this one of the unit's modules."""
        return module_id in self._awaited

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
                "which an optimizer's step has gathered before (overlap_optimizer). A captured step cannot gather for "
                "the next one. Use capture_step(), or remove() what overlap_optimizer returned before the capture."
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
            if is_recomputed:
                self.recompute_forward()
            return False
        begins = not self._awaited or len(self.module_ids) == 1
        ahead: Sequence[Member] = ()
        if begins and not is_recomputed:
            ahead = self.ahead_in_forward(self.context.enter_forward(self))
            self.drop_stale_weights()
        if begins:
            self._awaited = {module_id} if is_read else set(self.module_ids)
            self._forward_is_watched = True
        if is_recomputed:
            self.direction_in_backward = Direction.BOTH
        self.unshard(Direction.BOTH if is_recomputed else Direction.FORWARD)
        _gather_ahead(ahead, "forward")
        self.wait_for_unshard()
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
        return _ahead(self.forward_prefetch, learned)

    def modules_with_directions(self) -> list[nn.Module]:
        """The modules that hold a parameter of which forward and backward need different payloads."""
        parameters = (p for group in self.groups if group.is_directional for p in group.parameters)
        found = (owner.module() for parameter in parameters for owner in parameter.owners)
        return list(dict.fromkeys(module for module in found if module is not None))

    def recompute_forward(self) -> None:
        """Gather forward's payloads for a part of the unit that runs again inside backward.

        Later backwards gather them from the start.

        Effects: none where the payloads are there; else those of `unshard` and `wait_for_unshard`.
        """
        self.direction_in_backward = Direction.BOTH
        if self._there is Direction.BACKWARD:
            self._add_payloads(Direction.FORWARD)
            self.wait_for_unshard()

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Unshard for the unit's backward, and gather the next unit ahead.

        Raises:
            RuntimeError: Some of its backward ran already, with parameters that were not there yet.
        """
        if self.awaits_backward_end:
            return  # another output of the same forward
        self.awaits_backward_end = True
        if self._early is not None:
            self.drop_stale_weights()
        for grads in self.gradients.main_grads:
            grads.offer()
        if self.is_unsharding and self.has_gradients and not self.gradients.has_sums:
            raise RuntimeError(
                f"Expected no gradient of {self.title} before its backward begins, got some, made with parameters that "
                "were still being gathered. A tensor that it computed reaches the loss past its outputs: by an object "
                "that it was given, an attribute, or a hook. Return the tensor from forward, or shard the unit with "
                "reshard_after_forward=False. Gradients of this pass are wrong: call reset_iter_state()."
            )
        with label("pre_backward", self.name):
            ahead = _ahead(self.backward_prefetch, self.context.enter_backward(self))
            if self.unshards_in_backward:
                self.unshard(self.direction_in_backward)
            elif self._there is Direction.FORWARD:
                self._add_payloads(Direction.BACKWARD)
            ahead = [member for member in ahead if member.unshards_in_backward]
            _gather_ahead(ahead, "backward")
            for member in ahead:
                member.forbid_frozen()
            self.wait_for_unshard()

    def end_backward(self) -> None:
        """Reshard, and reduce the gradients or keep them for a later microbatch, once those that are delayed came."""
        log("post_backward", self.name)
        self.awaits_backward_end = False
        self._awaited.clear()
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

    def abandon(self) -> None:
        """Drop this pass: gradients that were not reduced, and the unsharded parameters."""
        self._awaited.clear()
        self.awaits_backward_end = False
        self.gradients.delayed.forget()
        self.gradients.drop(self)
        self._holders.clear()
        self.reshard()


def _ahead(asked: Sequence[weakref.ref[FSDPState]], learned: Sequence[Member]) -> Sequence[Member]:
    """The units to gather ahead: those that a unit was told, or else those that an order says."""
    return [state.unit for ref in asked if (state := ref()) is not None] if asked else learned


def _gather_ahead(members: Sequence[Member], phase: str) -> None:
    for member in members:
        with label(f"{phase}_prefetch for {member.name}"):
            member.unshard(Direction.FORWARD if phase == "forward" else member.direction_in_backward)
