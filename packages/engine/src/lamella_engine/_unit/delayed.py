"""Delayed weight gradients, computed after their unit's backward, and the count of the missing gradients.

A layer may delay a weight gradient, to overlap the computation with a collective. Autograd's part of the backward then
ends without the gradient. The counts here follow from the program alone, so ranks agree when a unit's gradients are
complete.
"""

from __future__ import annotations

import torch

from lamella_engine._parameters.sharded_parameter import ShardedParameter


class DelayedGradients:
    """A unit's parameters with delayed gradients, and the backwards still waiting for gradients.

    Several backwards may wait: a schedule can delay weight gradients of a microbatch until after the next backward.
    Backwards become complete in the order of their ends.

    Attributes:
        are_expected: Whether any gradient is delayed.
        num_due: Ended backwards of the unit whose delayed gradients have not all come.
    """

    def __init__(self) -> None:
        self.are_expected = False
        self.num_due = 0
        # By parameter: gradients that came for backwards not complete yet, also before the end of their backward.
        self._num_arrived: dict[ShardedParameter, int] = {}
        # The moments at which gradients were made, until `join` has ordered their reader.
        self._ready_events: list[tuple[torch.Stream, torch.Event]] = []
        # The makers' streams since then, until `take_streams`: memory of gradients goes back to these streams. A dict,
        # as a set without an order: equal on every rank.
        self._streams: dict[torch.Stream, None] = {}

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        """The parameters with delayed gradients."""
        return tuple(self._num_arrived)

    @property
    def missing(self) -> list[str]:
        """The names of parameters whose gradients a backward waits for."""
        return [p.name for p, num in self._num_arrived.items() if num == 0] if self.num_due else []

    def add(self, parameter: ShardedParameter) -> None:
        """Expect a delayed gradient of a parameter from now on."""
        self.are_expected = True
        self._num_arrived[parameter] = 0
        # A layer that puts the gradient on `.grad` late would write over the sum of earlier microbatches.
        parameter.keeps_grad_clear = True

    def take_over(self, other: DelayedGradients) -> None:
        """Expect the delayed gradients of another unit; no gradient may be due."""
        for parameter in other.parameters:
            self.add(parameter)

    def end(self, stream: torch.Stream) -> bool:
        """Note the end of a backward of the unit on `stream`.

        Returns:
            Whether all gradients of the backward are complete.
        """
        self.num_due += 1
        self._note_made_on(stream)
        return self._complete()

    def arrive(self, parameter: ShardedParameter, stream: torch.Stream) -> bool:
        """Note that a parameter's gradient was made on `stream`.

        Returns:
            Whether the last missing gradient of a backward has come.

        Raises:
            RuntimeError: The gradient came already, for every backward that has begun.
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
            # Recorded now: an event of a later moment would make the reduction wait for unrelated work of the stream.
            self._ready_events.append((stream, stream.record_event()))

    def _complete(self) -> bool:
        # Counts, not flags: two microbatches' gradients may come before the first backward is complete.
        is_complete = self.num_due > 0 and all(self._num_arrived.values())
        if is_complete:
            self.num_due -= 1
            for parameter in self._num_arrived:
                self._num_arrived[parameter] -= 1
        return is_complete

    def join(self, stream: torch.Stream) -> None:
        """Order a stream after the kernels that made gradients.

        `release`, or the record of the reduction, orders the next users of the memory after the stream.

        Effects: waits between streams on CUDA, none if all gradients were made on `stream`.
        """
        for other, event in self._ready_events:
            self._streams[other] = None
            if other != stream:
                stream.wait_event(event)
        self._ready_events.clear()

    def release(self, stream: torch.Stream) -> None:
        """Order the makers' streams after the reading stream."""
        # A freed gradient's memory goes back to the stream that made the gradient: without the wait, the next kernel of
        # the maker writes over gradients still read by `stream`.
        for other in self._streams:
            if other != stream:
                other.wait_stream(stream)

    def take_streams(self) -> tuple[torch.Stream, ...]:
        """The streams awaited by `join` since the last call."""
        streams, self._streams = tuple(self._streams), {}
        return streams

    def forget(self) -> None:
        """Wait for no gradient: a step was dropped, or is over."""
        self.num_due = 0
        self._ready_events.clear()
        self._streams.clear()
        self._num_arrived = dict.fromkeys(self._num_arrived, 0)
