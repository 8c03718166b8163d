"""Gradients that come after their unit's backward: which ones, and whether all of them are there.

A layer may put its weight gradient off, to compute it while something else is communicated. Autograd's part of the
backward then ends without it. What is counted here follows from the program alone, so ranks agree when a unit's
gradients are complete.
"""

from __future__ import annotations

import weakref

import torch
from torch.optim import Optimizer

from lamella_engine._sharded_parameter import ShardedParameter
from lamella_engine._step_hooks import held_by

# Those that somebody waits for: an optimizer must not step without them.
_unfinished: weakref.WeakSet[DelayedGradients] = weakref.WeakSet()


class DelayedGradients:
    """A unit's parameters whose gradients come late, and the backwards that still wait for some.

    Several backwards may wait: a schedule can put the weight gradients of one microbatch off until after the next
    one's backward. They are complete in the order in which they ended.

    Attributes:
        num_due: Backwards of the unit that ended, and whose delayed gradients have not all come.
    """

    def __init__(self) -> None:
        self.num_due = 0
        self._num_arrived: dict[ShardedParameter, int] = {}
        self._made: list[tuple[torch.Stream, torch.Event]] = []
        self._streams: dict[torch.Stream, None] = {}

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        """Whose gradients come late."""
        return tuple(self._num_arrived)

    @property
    def are_expected(self) -> bool:
        """Whether any gradient comes late."""
        return bool(self._num_arrived)

    @property
    def missing(self) -> list[str]:
        """The names of those that a backward waits for."""
        return [p.name for p, num in self._num_arrived.items() if num == 0] if self.num_due else []

    def add(self, parameter: ShardedParameter) -> None:
        """Expect a parameter's gradient late from now on."""
        self._num_arrived[parameter] = 0
        parameter.keeps_grad_clear = True

    def take_over(self, other: DelayedGradients) -> None:
        """Expect what another unit expected, which nothing is due in."""
        for parameter in other.parameters:
            self.add(parameter)

    def end(self, stream: torch.Stream) -> bool:
        """Note that a backward of the unit ended on `stream`.

        Returns:
            Whether all of its gradients are there.
        """
        self.num_due += 1
        self._note_made_on(stream)
        return self._complete()

    def arrive(self, parameter: ShardedParameter, stream: torch.Stream) -> bool:
        """Note that a parameter's gradient was put on `stream`.

        Returns:
            Whether it was the last that a backward waited for.

        Raises:
            RuntimeError: It came already, for every backward that has begun.
        """
        if self._num_arrived[parameter] > self.num_due:
            raise RuntimeError(
                f"Expected one delayed gradient of {parameter.name!r} for each backward of its unit, got another. Call "
                "reduce_gradients() after each backward that no hook ends, and the callback once for it."
            )
        self._num_arrived[parameter] += 1
        self._note_made_on(stream)
        return self._complete()

    def _note_made_on(self, stream: torch.Stream) -> None:
        if self._num_arrived:
            self._made.append((stream, stream.record_event()))

    def _complete(self) -> bool:
        is_complete = self.num_due > 0 and all(self._num_arrived.values())
        if is_complete:
            self.num_due -= 1
            for parameter in self._num_arrived:
                self._num_arrived[parameter] -= 1
        if self.num_due:
            _unfinished.add(self)
        else:
            _unfinished.discard(self)
        return is_complete

    def join(self, stream: torch.Stream) -> None:
        """Order a stream after all that made gradients, and their memory's next users after that stream.

        Effects: on CUDA waits between streams, none if all of it was on `stream`.
        """
        for other, event in self._made:
            self._streams[other] = None
            if other != stream:
                stream.wait_event(event)
        self._made.clear()

    def release(self, stream: torch.Stream) -> None:
        """Order the streams that made gradients after one that read them: what it let go of is their memory."""
        for other in self._streams:
            if other != stream:
                other.wait_stream(stream)

    def take_streams(self) -> tuple[torch.Stream, ...]:
        """The streams on which gradients were made that `join` has seen since this was last called."""
        streams, self._streams = tuple(self._streams), {}
        return streams

    def forget(self) -> None:
        """Wait for nothing: a step was dropped, or is over."""
        self.num_due = 0
        self._made.clear()
        self._streams.clear()
        self._num_arrived = dict.fromkeys(self._num_arrived, 0)
        _unfinished.discard(self)


def refuse_without_delayed_gradients(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step while delayed gradients of the optimizer's parameters are missing."""
    if not _unfinished:
        return
    held = set(map(id, held_by(optimizer)))
    missing = [
        name for each in _unfinished if any(id(p.sharded) in held for p in each.parameters) for name in each.missing
    ]
    if missing:
        raise RuntimeError(
            f"Expected every delayed gradient before the optimizer's step, got none yet for {sorted(missing)}. Compute "
            "them, and call the callback that `delay_gradient` gave for each."
        )
