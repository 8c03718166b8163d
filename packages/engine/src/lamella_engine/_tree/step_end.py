"""The end of a step: from the end of each unit's backward to the moment at which gradients may be read.

    OPEN          a backward begins, to be finalized by hand     UNFINALIZED
    DEFERRED      a backward begins, to be finalized by hand     REOPENED
    any           the step's last backward is over               ENDED
    ENDED         no delayed gradient is missing                 OPEN, or DEFERRED if a later reader waits
    DEFERRED      a reader of gradients waits                    OPEN
    REOPENED      a reader of gradients waits                    UNFINALIZED
    any           an exception dropped the step (`reset`)        OPEN

Phases follow from the program alone, so ranks agree; the reductions in flight are the business of `Streams`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

import torch

from lamella_engine._parameters.sharded_parameter import ShardedParameter
from lamella_engine._streams.context import Context, PassPhase
from lamella_engine._unit.gradients import Ended
from lamella_engine._unit.unit import Unit
from lamella_engine._unit.weights import Residency


class StepPhase(Enum):
    """The gradients of a step, and the wait that remains."""

    OPEN = "backwards may come, and every gradient that had to be waited for was"
    UNFINALIZED = "a backward came whose gradients wait for finalize_backward()"
    ENDED = "the last backward is over, and delayed gradients are missing"
    DEFERRED = "reductions are in flight, for which the next reader of gradients waits"
    REOPENED = "reductions are in flight, and a further backward waits for finalize_backward()"

    __hash__ = object.__hash__  # by identity, as members are compared; an enum's own hash runs in Python


_LEGAL = {
    StepPhase.OPEN: {StepPhase.OPEN, StepPhase.UNFINALIZED, StepPhase.ENDED},
    StepPhase.UNFINALIZED: {StepPhase.OPEN, StepPhase.UNFINALIZED, StepPhase.ENDED},
    StepPhase.ENDED: {StepPhase.OPEN, StepPhase.ENDED, StepPhase.DEFERRED},
    StepPhase.DEFERRED: {StepPhase.OPEN, StepPhase.REOPENED, StepPhase.ENDED},
    StepPhase.REOPENED: {StepPhase.OPEN, StepPhase.REOPENED, StepPhase.UNFINALIZED, StepPhase.ENDED},
}
_BY_BACKWARD = {StepPhase.DEFERRED: StepPhase.REOPENED, StepPhase.REOPENED: StepPhase.REOPENED}
_BY_WAIT = {StepPhase.DEFERRED: StepPhase.OPEN, StepPhase.REOPENED: StepPhase.UNFINALIZED}


class EndListeners(Protocol):
    """The listeners of a tree, by the moments of a step's end."""

    @property
    def references(self) -> Sequence[object]:
        """Empty without listeners."""

    def gradients_ended(self, unit: Unit, ended: Ended) -> None:
        """A unit's backward has ended."""

    def reductions_finished(self) -> None:
        """The compute stream was ordered after all reductions."""


class StepEnd:
    """Ends units' backwards, a tree's backward and a step, and keeps the wait for reductions.

    Args:
        units: The tree's, in the order of their `fully_shard` calls; the tree adds to the list.
        context: Shared with the units.
        listeners: The tree's.

    Attributes:
        phase: Changed by the verbs alone, along `_LEGAL`.
        defers_wait: Whether the optimizer's step waits for the reductions of this backward. A listener sets it, at
            `gradients_final`; the end of the backward and `finish_reductions` clear it.
        num_resets: The number of passes or steps dropped by `reset`.
    """

    def __init__(self, units: Sequence[weakref.ref[Unit]], context: Context, listeners: EndListeners) -> None:
        self._units = units  # weak: modules own units
        self._context = context
        self._streams = context.streams
        self._listeners = listeners
        self.phase = StepPhase.OPEN
        self.defers_wait = False
        self.num_resets = 0
        # The stream of the last backward, in the phase ENDED: a delayed gradient may come on another stream, which
        # waits for the reductions then, and the optimizer steps behind the backward's.
        self._ended_on: torch.Stream | None = None
        self._is_last_announced = True  # `set_is_last_backward`, which counts unless finalized by hand
        self._finalizes_by_hand = False

    def _become(self, to: StepPhase) -> None:
        if to not in _LEGAL[self.phase]:
            expected = ", ".join(phase.name for phase in _LEGAL[self.phase])
            raise RuntimeError(
                f"Expected a step in the phase {self.phase.name} ({self.phase.value}) to go on to {expected}, got "
                f"{to.name} ({to.value}). Let the step end, or call reset_iter_state() on the outermost unit."
            )
        self.phase = to

    @property
    def units(self) -> list[Unit]:
        """The living units."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    @property
    def is_deferred(self) -> bool:
        """Whether reductions are in flight, and no stream has waited for all."""
        return self.phase is StepPhase.DEFERRED or self.phase is StepPhase.REOPENED

    @property
    def is_unfinalized(self) -> bool:
        """Whether a backward still has to be finalized by hand."""
        return self.phase is StepPhase.UNFINALIZED or self.phase is StepPhase.REOPENED

    @property
    def is_last_backward(self) -> bool:
        """Whether the next backward is the step's last, as announced; counts only if hooks end backwards."""
        return self._is_last_announced

    @is_last_backward.setter
    def is_last_backward(self, is_last: bool) -> None:
        self._is_last_announced = is_last
        self._context.is_last_backward = is_last and not self._finalizes_by_hand

    @property
    def finalizes_by_hand(self) -> bool:
        """Whether the user ends a step's backward (`end_step(finalizes=True)`), and no hook."""
        return self._finalizes_by_hand

    @finalizes_by_hand.setter
    def finalizes_by_hand(self, enabled: bool) -> None:
        may_change = self.phase is StepPhase.OPEN or self.phase is StepPhase.DEFERRED
        if enabled != self._finalizes_by_hand and (self._context.is_in_backward or not may_change):
            raise RuntimeError(
                "Expected the mode to stay until the backward is finalized, got a change: "
                "set_manual_backward_finalization cannot change mode during backward, or after backward starts. Call "
                "finalize_backward() before, or reset_iter_state() after an exception."
            )
        self._finalizes_by_hand = enabled
        self.is_last_backward = self._is_last_announced

    # -- verbs ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward that hooks drive."""
        self._limit_reductions()
        if self._finalizes_by_hand:
            self._become(_BY_BACKWARD.get(self.phase, StepPhase.UNFINALIZED))

    def end_backward(self, unit: Unit, *, is_by_hand: bool = False) -> None:
        """End a unit's backward: reduce its gradients, or keep them for a later microbatch.

        Args:
            unit: The unit, which a hook's end reshards too.
            is_by_hand: No hook ends the backward: the caller of the unit's verbs reshards.

        Raises:
            RuntimeError: By hand, and a hook will end the backward, or the unit has no gradient.

        Effects: those of `Unit.end_backward` or `Unit.end_backward_by_hand`.
        """
        if not is_by_hand:
            self._note_end(unit, unit.end_backward())
            return
        if self._context.phase is not PassPhase.BACKWARD:
            self._limit_reductions()
        self._note_end(unit, unit.end_backward_by_hand())

    def note_gradient(self, unit: Unit, parameter: ShardedParameter) -> None:
        """Note that a delayed gradient came, made on the current stream.

        Raises:
            RuntimeError: The gradient came before.

        Effects: with the last gradient of a backward, the effects of the delayed end.
        """
        if self._context.phase is not PassPhase.BACKWARD:
            self._limit_reductions()
        if (ended := unit.note_gradient(parameter)) is not None:
            self._note_end(unit, ended)
            self._finish_ended()

    def finish_backward(self, *, defers: bool = False) -> None:
        """Leave every unit at rest, reached by autograd or not, and reduce kept gradients that are due.

        Args:
            defers: Defer the wait for reductions to `finish_deferred`.

        Effects: those of `Gradients.reduce`, unit by unit; after the step's last backward, or with the last delayed
            gradient, the compute stream waits for all reductions.
        """
        units = self.units
        for unit in units:
            self._note_end(unit, unit.finish_backward())
        settle_weights(units)
        if self._context.is_last_backward:
            # Also from ENDED: with delayed gradients still missing, the later backward's stream is the one that waits.
            self._become(StepPhase.ENDED)
            self._ended_on = self._streams.compute_stream
            self._finish_ended(defers=defers)
        elif self._streams.has_arrival_hooks:
            self.finish_reductions()  # hooks of this microbatch's gradients run once the CPU has these gradients

    def end_step(self, *, defers: bool = False, finalizes: bool = False) -> None:
        """End a backward that was driven by hand, of any microbatch; or backwards that hooks have left open.

        Args:
            defers: Whether the wait for reductions is deferred to `finish_deferred`.
            finalizes: Hooks drove the step's backwards, and have left the end to the caller.

        Raises:
            RuntimeError: A pass is under way; or, in the step's last backward, a unit has a holder or misses a delayed
                gradient; or hooks end the backwards that the caller finalizes.

        Effects: those of `finish_backward`.
        """
        self._check_may_end(finalizes=finalizes)
        if not finalizes:
            self._end_backward_by_hand(defers=defers)
            return
        self._context.is_last_backward = True
        try:
            self._end_backward_by_hand(defers=defers)
        finally:
            # Also after an error: finalized by hand, no later backward is the last until the next call.
            self._context.is_last_backward = False

    def finish_reductions(self) -> None:
        """Order the compute stream after every reduction, release the unreduced gradients, and tell listeners.

        Effects: where gradients go to the CPU, the host waits for the compute stream.
        """
        # First: an interrupt in the waits below leaves reductions in flight, which `reset` finishes in any phase.
        self.phase = _BY_WAIT.get(self.phase, self.phase)
        self.defers_wait = False
        self._streams.finish_reductions()
        if self._listeners.references:
            self._listeners.reductions_finished()

    def finish_deferred(self) -> None:
        """Wait for reductions whose wait the last backward has deferred, if any.

        Effects: those of `finish_reductions`.
        """
        if self.phase in _BY_WAIT:
            self.finish_reductions()

    def reset(self) -> None:
        """Return to rest after an exception, also one between any two lines of a pass; may be called again."""
        self.num_resets += 1
        self._become(StepPhase.OPEN)
        self.is_last_backward = self._is_last_announced  # `end_step` may have been interrupted
        for unit in self.units:
            unit.abandon()
        self._ended_on = None
        self._streams.forget_arrivals()
        # Reductions in flight still read gradients: their memory may go only behind the reductions' events.
        self.finish_reductions()
        if self._context.order_check is not None:
            self._context.order_check.forget()
        self._context.phase = PassPhase.RESTING

    # -- parts of the verbs -----------------------------------------------------------------------------------------

    def _limit_reductions(self) -> None:
        self._context.max_reductions_in_flight = max([unit.max_reductions_in_flight for unit in self.units])

    def _note_end(self, unit: Unit, ended: Ended) -> None:
        """Tell listeners of a unit's gradients; after the final ones, renew weight copies at the next use."""
        if ended.is_final and unit.parameters.keeps_copies:
            unit.weights.expect_update()
        if self._listeners.references:
            self._listeners.gradients_ended(unit, ended)

    def _finish_ended(self, *, defers: bool = False) -> None:
        """Make the last backward's stream wait for all reductions, unless delayed gradients are missing.

        An optimizer step that waits itself, or the caller of `end_step`, may take the wait over.
        """
        stream = self._ended_on
        if stream is None or any([unit.gradients.delayed.num_due for unit in self.units]):
            return
        self._ended_on = None
        # Gradients on their way to the CPU are waited for by the host: an optimizer's step there cannot order itself.
        defers_to_step = self.defers_wait and not self._streams.are_gradients_arriving
        if (defers_to_step and self._context.is_in_backward) or defers:
            self.defers_wait = False
            self._become(StepPhase.DEFERRED)
            return
        self._become(StepPhase.OPEN)
        self.finish_reductions()
        if stream != self._streams.compute_stream:  # the last delayed gradient came on another stream
            stream.wait_stream(self._streams.compute_stream)

    def _check_may_end(self, *, finalizes: bool) -> None:
        under_way = None if self._context.is_resting else self._context.phase.value
        if finalizes and not self._finalizes_by_hand:
            raise RuntimeError(
                "Expected backwards that are finalized by hand, got ones that hooks end: finalize_backward requires "
                "manual backward finalization. Call set_manual_backward_finalization(True) before forward."
            )
        if finalizes and under_way:
            raise RuntimeError(
                f"Expected no pass under way, got one ({under_way}): finalize_backward must be called after backward "
                "completes. Call it after the step's last, or reset_iter_state() after an exception."
            )
        if under_way:
            raise RuntimeError(
                f"Expected no pass under way, got one ({under_way}) that hooks end. Call wait_for_gradients() after "
                "it, or reset_iter_state() after an exception."
            )

    def _end_backward_by_hand(self, *, defers: bool) -> None:
        self.finish_deferred()  # of the step before: its unreduced gradients are held until then
        if self._context.is_last_backward:
            for unit in self.units:
                unit.check_ended()
        self._limit_reductions()  # no hook has begun the backward
        self.finish_backward(defers=defers)


def settle_weights(units: Iterable[Unit]) -> None:
    """Free weights that a pass gathered and did not use, and note the versions of weights that outlive the pass."""
    for unit in units:
        # Prefetched, and the pass took another way: kept bytes would outlive the pass, and an optimizer step.
        if unit.weights.residency is Residency.UNSHARDING:
            unit.weights.reshard()
        elif unit.weights.residency is not Residency.SHARDED or unit.parameters.keeps_copies:
            unit.weights.keep_until_next_pass()
