"""One unit: its parameters, their weights and gradients, and its place in the pass under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lamella_engine._common.labels import label, log
from lamella_engine._options.placements import Strategy
from lamella_engine._parameters.group import ParameterGroup
from lamella_engine._parameters.sharded_parameter import ShardedParameter
from lamella_engine._streams.context import Context
from lamella_engine._unit.gradients import Ended, Gradients
from lamella_engine._unit.parameters import UnitParameters
from lamella_engine._unit.weights import Contents, Residency, UnitWeights, refuse_holds
from lamella_precision import Direction

FSDP2_STRATEGY = Strategy()


class Unit:
    """A unit in the passes of its tree.

    The tree (`_tree`) begins and ends the unit's forwards and backwards; `weights` gathers and frees the parameters,
    `gradients` reduces.

    Args:
        groups: The unit's parameters.
        context: Shared with the rest of the tree.
        reshard_after_forward: FSDP2's flag; None means True for all units but the outermost.
        strategy: The consequences of the unit's ZeRO stage.

    Attributes:
        parameters: Shared by the weights and the gradients.
        weights: The unsharded form of the parameters.
        gradients: Gradients on the way to the sharded parameters' `.grad`.
        index: Among the units of the tree, in the order of `fully_shard` calls; equal on every rank.
        forward_prefetch: Units that the user named for prefetch in forward; weak, as two units may name each other.
        backward_prefetch: Units that the user named for prefetch in backward; weak.
        direction_in_backward: The direction of backward's payloads: both after a forward was recomputed inside
            backward.
        is_in_backward: Whether a backward of the unit is under way, which a hook will end.
        awaited: Ids of modules that the forward under way has yet to run.
        view: The unit as torch's tools see a unit; weak, as the view holds the unit.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        context: Context,
        reshard_after_forward: bool | None,
        strategy: Strategy = FSDP2_STRATEGY,
    ) -> None:
        self.parameters = UnitParameters(groups, context, strategy)
        self.weights = UnitWeights(self.parameters)
        self.gradients = Gradients(self.parameters)
        self.index = -1  # until `Tree.add`
        self.is_outermost = True  # until an outer `fully_shard` takes the tree's units over
        # Choices of the caller, by `set_...` methods, which count from the next pass on. Every rank must choose alike.
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.max_reductions_in_flight = 1
        self.forward_prefetch: tuple[Callable[[], Unit | None], ...] = ()
        self.backward_prefetch: tuple[Callable[[], Unit | None], ...] = ()
        # Never back to BACKWARD: a unit that recomputes does so in every step, and a second gather costs more than the
        # payloads of forward in the first.
        self.direction_in_backward = Direction.BACKWARD
        self.is_in_backward = False  # `abandon` clears it after an exception
        self.awaited: set[int] = set()  # filled by `begin_forward`; empty again when the forward is over
        self.has_inner_call = False  # of the forward under way
        self.view: Callable[[], object] = lambda: None
        self._forward_is_watched = True  # of the forward under way: every module of the unit must be

    def take_over(self, other: Unit) -> None:
        """Communicate another unit's parameters together with this unit's from now on. Both must be at rest."""
        other.weights.drop_copy()  # the other unit's buffers get bytes from this unit's gathers from now on
        self.gradients.take_over(other.gradients)
        mine, theirs = self.parameters, other.parameters
        for parameter in (p for group in theirs.groups for p in group.parameters):
            parameter.name, parameter.prefix = f"{theirs.name}.{parameter.name}", ""
        mine.main_grads += theirs.main_grads
        mine.replace_groups(mine.groups + theirs.groups)
        theirs.replace_groups(())
        theirs.main_grads = ()
        self.weights.contents = Contents.NONE  # of the parameters that came in

    @property
    def is_transient(self) -> bool:
        """Whether parameters go after forward. The outermost unit's stay, since backward begins with them."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return not (self.is_outermost and torch.is_grad_enabled())

    @property
    def is_regathered(self) -> bool:
        """Whether the parameters are freed after forward, and gathered again for backward."""
        return self.is_transient and self.unshards_in_backward and not self.parameters.strategy.keeps_copy

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Prepare for another forward pass of the tree: forget a pass after an exception, take shards back.

        Parts left from a forward without a backward go too: main weights may have been written since.

        Raises:
            RuntimeError: The conditions of `UnitWeights.renew_written` and `ParameterGroup.adopt_replaced_shards`.

        Effects: see `ParameterGroup.adopt_replaced_shards`.
        """
        self.awaited.clear()  # of a forward that an exception ended
        weights = self.weights
        self.parameters.drop_parts()
        # Before shards are taken back: the checks compare versions of the shards of before.
        if weights.early is not None:
            self._check_not_captured()
            weights.drop_stale_weights()
        elif weights.versions_at_rest is not None:
            weights.renew_written()
        elif weights.residency is not Residency.SHARDED:
            weights.expect_update()  # Gathered in a pass that an exception ended: no write since would be seen.
        weights.adopt_replaced_shards()

    def _check_not_captured(self) -> None:
        if self.parameters.context.streams.is_captured:
            raise RuntimeError(
                "Expected nothing to be gathered yet when a CUDA graph of a forward is captured, got "
                f"{self.parameters.title}, which an optimizer's step has gathered before (overlap_optimizer). A "
                "captured step cannot gather for the next one. Use capture_step(), or remove() what overlap_optimizer "
                "returned before the capture."
            )

    def begin_forward(self, module_id: int) -> None:
        """Note that the unit's forward begins with a module; the forward ends when each of the unit's modules has run.

        Args:
            module_id: The id of a module of the unit, or of a module whose parameters were taken over.
        """
        module_ids = self.parameters.module_ids
        self.awaited = set(module_ids) if module_id in module_ids else {module_id}
        self._forward_is_watched = True
        self.has_inner_call = False  # of a forward that an exception ended

    def end_forward(self, module_id: int, *, is_watched: bool) -> None:
        """Note that a module's forward ended.

        Args:
            module_id: The id of the module.
            is_watched: Whether output hooks will begin the unit's backward; else the parameters must stay.
        """
        self.awaited.discard(module_id)
        self._forward_is_watched &= is_watched
        self.has_inner_call = False

    def end_inner_call(self, *, is_watched: bool) -> None:
        """Note that a call inside the module's own forward ended, as `end_forward` does for the forward."""
        self._forward_is_watched &= is_watched

    def recompute_forward(self) -> None:
        """Gather forward's payloads for a part of the unit that runs again inside backward.

        Later backwards gather both directions from the start.

        Effects: none if the payloads are gathered; else those of `unshard` and `wait_for_unshard`.
        """
        self.direction_in_backward = Direction.BOTH
        self.weights.recompute_forward()

    @property
    def may_free(self) -> bool:
        """Whether parameters go after the forward that ends: output hooks will gather again for backward."""
        return self._forward_is_watched and self.is_transient

    # -- gathers inside an optimizer's step ---------------------------------------------------------------------------

    @property
    def may_gather_early(self) -> bool:
        """Whether a gather may begin before the next forward: unit at rest, no holders, shards on the device."""
        weights, parameters = self.weights, self.parameters
        at_rest = parameters.context.is_resting and weights.residency in (Residency.SHARDED, Residency.KEPT)
        return at_rest and not (weights.num_holds or parameters.is_offloaded)

    def gather_early(self) -> None:
        """Start gathering for the next forward: the optimizer has updated the unit's parameters.

        Effects: those of `UnitWeights.unshard` between passes. The bytes stay until the forward.
        """
        self.weights.unshard(Direction.FORWARD)
        # Noted behind `unshard`, which may take replaced shards back: versions from before are of other tensors.
        self.weights.early = self.parameters.versions

    def drop_early(self) -> None:
        """Free an early gather; nothing once a forward uses the weights.

        Effects: those of `UnitWeights.reshard`.
        """
        if self.weights.early is not None:
            self.weights.reshard()

    # -- backward ---------------------------------------------------------------------------------------------------

    def check_not_begun(self) -> None:
        """Refuse a backward of which a part ran already, with parameters not gathered yet.

        Raises:
            RuntimeError: The unit has gradients while a gather is in flight.
        """
        is_early = self.weights.residency is Residency.UNSHARDING and not self.gradients.has_sums
        if is_early and self.parameters.has_gradients:
            raise RuntimeError(
                f"Expected no gradient of {self.parameters.title} before its backward begins, got some, made with "
                "parameters that were still being gathered. A tensor that it computed reaches the loss past its "
                "outputs: by an object that it was given, an attribute, or a hook. Return the tensor from forward, or "
                "shard the unit with reshard_after_forward=False. Gradients of this pass are wrong: call "
                "reset_iter_state()."
            )

    def end_backward(self) -> Ended:
        """Reshard, and reduce the gradients or keep them for a later microbatch, once delayed gradients came.

        Raises:
            RuntimeError: No hook began the backward, which ran with parameters not gathered yet.
        """
        name = self.parameters.name
        log("post_backward", name)
        if not self.is_in_backward:
            self.check_not_begun()
        self.is_in_backward = False
        self.awaited.clear()
        is_complete = not self.gradients.delayed.are_expected or self._note_end()
        # Before the reduction, which makes the compute stream wait for the unit reduced before: the gather stream,
        # which waits for compute when weights go, would wait for that reduction too.
        if self.reshard_after_backward:
            with label("post_backward_reshard", name):
                self.weights.reshard()
        return self.gradients.end() if is_complete else Ended()

    def end_backward_by_hand(self) -> Ended:
        """The same for a backward without hooks; the caller of the unit's verbs reshards.

        Raises:
            RuntimeError: A hook will end the backward, or the unit has no gradient.

        Effects: those of `Gradients.reduce`, unless gradients are kept or still to come.
        """
        title, gradients = self.parameters.title, self.gradients
        if self.is_in_backward:
            raise RuntimeError(
                f"Expected a unit whose backward no hook ends, got {title} in the middle of one. It is reduced when "
                "that is over."
            )
        # Sums in main-grad buffers count as gradients from here on, or the check below would find none.
        gradients.settle(self.parameters.context.streams.compute_stream)
        may_have_none = gradients.delayed.are_expected or gradients.reduces_unused_parameters
        if self.parameters.is_trainable and not (self.parameters.has_gradients or may_have_none):
            raise RuntimeError(
                f"Expected gradients to reduce in {title}, got none. Run its backward first; where some ranks have "
                "none, call set_reduce_scatter_unused_params(True)."
            )
        is_complete = not gradients.delayed.are_expected or self._note_end()
        return gradients.end() if is_complete else Ended()

    def note_gradient(self, parameter: ShardedParameter) -> Ended | None:
        """Note that a delayed gradient came, made on the current stream.

        Returns:
            The end of the backward, if the gradient was the last missing.

        Raises:
            RuntimeError: The gradient came before.

        Effects: with the last gradient of a backward, the effects of the delayed end.
        """
        delayed = self.gradients.delayed
        if not delayed.arrive(parameter, self.parameters.context.streams.compute_stream):
            return None
        if not delayed.num_due:  # a later backward that ended may wait for gradients of its own
            self.weights.reshard(holder=delayed)
        return self.gradients.end()

    def _note_end(self) -> bool:
        """Whether all delayed gradients have come. If not, the modules hold the unsharded parameters until then."""
        delayed = self.gradients.delayed
        # The stream of the end is noted even for an incomplete backward: `join` orders the reduction after it.
        if delayed.end(self.parameters.context.streams.compute_stream):
            return True
        self.weights.keep_for(delayed)
        return False

    def finish_backward(self) -> Ended:
        """End a backward that autograd left open: inputs without gradients, a forward with unused outputs.

        The last backward also reduces sums of earlier microbatches in a unit without a use of its own. A unit with
        holders or missing delayed gradients is left alone: its backward is not over.

        Raises:
            RuntimeError: No hook began the backward, which ran with parameters not gathered yet.

        Effects: those of `end_backward`; a collective on the outer axis for gradients not reduced over the axis yet.
        """
        ended = Ended()
        if self.is_in_backward:
            ended = self.end_backward()
        else:
            if self.weights.residency is Residency.UNSHARDING:
                self.check_not_begun()
            if self.reshard_after_backward:  # gathered ahead, or by a forward without a backward
                self.weights.reshard()
        finished = self.gradients.finish(is_held=self.weights.num_holds > 0)
        return Ended(ended.installed_on + finished.installed_on, ended.is_final or finished.is_final)

    def check_ended(self) -> None:
        """Refuse to end a step while the unit has a holder or misses a delayed gradient.

        Raises:
            RuntimeError: A delayed gradient has not come, or the unit has a holder.
        """
        if missing := self.gradients.delayed.missing:
            raise RuntimeError(
                f"Expected every delayed gradient of {self.parameters.title} at the end of a step, got none yet for "
                f"{missing}. Compute them, and call the callback that `delay_gradient` gave for each."
            )
        # A hold that outlives the step would keep the weights of before the optimizer's update.
        refuse_holds(self.weights)

    def abandon(self) -> None:
        """Drop the pass under way: unreduced gradients, and the unsharded parameters."""
        self.awaited.clear()
        self.is_in_backward = False
        self.gradients.delayed.forget()
        self.gradients.drop()
        self.weights.abandon()
