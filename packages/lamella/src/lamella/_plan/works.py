"""The works of a step: operators and collectives, each with stream, waits, bytes and floating-point operations."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from lamella_buffers import FakeCollective


class WorkKind(StrEnum):
    """The kinds of works with separate rates."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    SOFTMAX = "softmax"
    COPY = "copy"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    GATHER = "gather"
    REDUCE = "reduce"

    @property
    def communicates(self) -> bool:
        """Whether the work is a collective."""
        return self in (WorkKind.GATHER, WorkKind.REDUCE)


class Work(NamedTuple):
    """A kernel or a collective of a step.

    Attributes:
        kind: The kind.
        name: The operator, or the collective.
        stream: The number of the stream; 0 is the compute stream.
        after: Indices of awaited earlier works, of other streams.
        flops: Floating-point operations.
        nbytes: Bytes read and written by the work in the GPU's memory; for a collective, by the sums.
        moment: The moment of the step, such as "forward model.layers.3".
        unit: The unit of a collective; empty for a kernel.
        collective: The collective; None for a kernel.
        num_views: Operators since the work before, with time on the host alone.
        dtype: The dtype of products, such as "bfloat16"; empty for other kinds.
        hooks: Further time of the host, beside the operator's: of hooks and modes of a recomputed layer.
    """

    kind: WorkKind
    name: str
    stream: int
    after: tuple[int, ...]
    flops: float
    nbytes: float
    moment: str
    unit: str = ""
    collective: FakeCollective | None = None
    num_views: int = 0
    dtype: str = ""
    hooks: float = 0.0


def part_of(works: Sequence[Work], first: int) -> list[Work]:
    """Return the works from an index on, without waits for earlier works."""
    return [work._replace(after=_shifted(work.after, first)) for work in works[first:]]


def repeated(works: Sequence[Work], begin: int, end: int, count: int) -> list[Work]:
    """Return works with the part from `begin` to `end` several times in place of once.

    Args:
        works: The works of a step, in the order of the host.
        begin: Index of the part's first work.
        end: Index behind the part's last work.
        count: The number of times, from 1 on.
    """
    length = end - begin
    output = [*works[:end]]
    for index in range(1, count):
        output += [_moved(work, begin, index * length) for work in works[begin:end]]
    return output + [_moved(work, begin, (count - 1) * length) for work in works[end:]]


def _moved(work: Work, begin: int, distance: int) -> Work:
    """Return a work that waits for the latest copy of the works from `begin` on."""
    return work._replace(after=tuple(other + distance if other >= begin else other for other in work.after))


def _shifted(indices: Iterable[int], first: int) -> tuple[int, ...]:
    return tuple(index - first for index in indices if index >= first)
