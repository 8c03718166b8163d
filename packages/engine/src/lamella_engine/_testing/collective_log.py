"""Logs the collectives of a sharded model's units, and forward computations in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn as nn

from lamella_buffers import Payload, Pending, ReduceOp, Transport
from lamella_engine._testing.readers import named_units


@dataclass(frozen=True)
class LoggedCollective:
    """A collective of a unit, or a forward computation as kind "compute".

    Attributes:
        kind: "gather", "reduce", "all-reduce" or "compute".
        unit: Name of the unit's module in the model, or "root"; the last name for a unit of several modules.
        nbytes: Bytes of all ranks' side: a gather's output, a reduction's input.
        dtypes: The dtypes on the wire.
        sum_dtypes: The dtypes of a "reduce" collective's sums; empty for further kinds.
    """

    kind: str
    unit: str
    nbytes: int
    dtypes: frozenset[torch.dtype]
    sum_dtypes: frozenset[torch.dtype] = frozenset()


@dataclass
class CollectiveLog:
    """The collectives and computations of a model's units, in order.

    Attributes:
        events: Grows while the model runs, until `clear`.
    """

    events: list[LoggedCollective] = field(default_factory=list)

    def clear(self) -> None:
        """Drop the events so far."""
        self.events.clear()

    def units_of(self, kind: str) -> list[str]:
        """The units of the events of one kind, in order."""
        return [event.unit for event in self.events if event.kind == kind]

    def nbytes_of(self, kind: str) -> int:
        """Bytes of all events of one kind."""
        return sum(event.nbytes for event in self.events if event.kind == kind)

    @property
    def order(self) -> list[str]:
        """The events as text: "gather layers.0"."""
        return [f"{event.kind} {event.unit}" for event in self.events]


def record(model: nn.Module) -> CollectiveLog:
    """Log every unit's collectives on the sharded axis from now on, and forward computations.

    A second call starts a second log in place of the first.

    Args:
        model: The outermost unit.

    Returns:
        The log, which grows as the model runs.

    Effects: wraps the units' transports, and adds a forward pre-hook to each unit's module; no collective.
    """
    log = CollectiveLog()
    for name, unit in named_units(model):
        for group in unit.parameters.groups:
            # The last of a unit's modules names the unit.
            transport = group.transports.shard
            # Without an earlier log: nested logs would write each collective twice.
            inner = transport._inner if isinstance(transport, _LoggingTransport) else transport
            group.transports.shard = _LoggingTransport(name, inner, log)
        _log_computation(name, model if name == "root" else model.get_submodule(name), log)
    return log


def _log_computation(name: str, module: nn.Module, log: CollectiveLog) -> None:
    # A hook behind the unit's own: the unit's collectives are issued by then.
    module.register_forward_pre_hook(lambda *_: log.events.append(LoggedCollective("compute", name, 0, frozenset())))


# Has no `fill_and_gather`: `lamella_buffers.all_gather` then writes the shards and calls `all_gather` here.
class _LoggingTransport:
    """A transport with a record of all calls."""

    def __init__(self, name: str, inner: Transport, log: CollectiveLog) -> None:
        self._name, self._inner, self._log = name, inner, log

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def num_ranks(self) -> int:
        return self._inner.num_ranks

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        self._write("gather", payloads)
        return self._inner.all_gather(payloads)

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        self._write("reduce", payloads)
        return self._inner.reduce_scatter(payloads, op)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        dtypes = frozenset(tensor.dtype for tensor in tensors)
        self._log.events.append(LoggedCollective("all-reduce", self._name, nbytes, dtypes))
        return self._inner.all_reduce(tensors, op)

    def _write(self, kind: str, payloads: Sequence[Payload]) -> None:
        nbytes = sum(payload.full.nbytes for payload in payloads)
        dtypes = frozenset(payload.full.dtype for payload in payloads)
        sums = frozenset(payload.shard.dtype for payload in payloads) if kind == "reduce" else frozenset()
        self._log.events.append(LoggedCollective(kind, self._name, nbytes, dtypes, sums))
