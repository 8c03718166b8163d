"""The collectives of a step on ranks that do not exist: announced to a listener, in place of moving bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class FakeCollective(NamedTuple):
    """A collective of a group of `FAKE_GPUS`.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", or "exchange": pieces travel, and their owner adds them up.
        whole_nbytes: Bytes of the whole tensors, on the wire: a gather's output, a reduction's input.
        ranks: The group's ranks in the world.
        sum_nbytes: Bytes that the owner's sums of an exchange read and write in its own memory.
    """

    kind: str
    whole_nbytes: int
    ranks: tuple[int, ...]
    sum_nbytes: int = 0

    @property
    def sent_nbytes(self) -> float:
        """Bytes that a rank sends: (N - 1) / N of the whole tensors among N ranks, twice as many in an all-reduce."""
        num_ranks = len(self.ranks)
        return (2 if self.kind == "all_reduce" else 1) * self.whole_nbytes * (num_ranks - 1) / num_ranks


_listeners: list[Callable[[FakeCollective], None]] = []


@contextmanager
def fake_collectives(listener: Callable[[FakeCollective], None]) -> Iterator[None]:
    """Call a listener at each collective of a group of `FAKE_GPUS`, in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def announce(collective: FakeCollective) -> None:
    """Tell the listeners of a collective."""
    for listener in _listeners:
        listener(collective)
