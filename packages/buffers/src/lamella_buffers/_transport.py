"""Transports: collectives on payloads between the ranks of an axis."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)
from torch.profiler import record_function

from lamella_buffers._exchange import add_up, arrivals_numel, places_for, widened
from lamella_buffers._fake_collectives import FakeCollective, announce
from lamella_buffers._payload import Payload, Payloads, by_dtype, flat_bytes, unpack

ReduceOp = dist.ReduceOp.RedOpType
"""A reduction's operator: torch's `SUM`, `AVG` and so on."""

# Renamed in torch 2.13.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

FAKE_GPUS = "cpu:fake,cuda:fake"
"""The backend of a process group for estimates: no rank but this one exists, and collectives take NCCL's memory."""

_FAKE_GPUS_A_HOST = 8

Options = TypeVar("Options", AllgatherOptions, AllreduceCoalescedOptions, AllToAllOptions, ReduceScatterOptions)


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Order later work after the collective.

        Effects: NCCL: none, the call is already on the current stream. gloo: blocks the host until completion.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Collectives on an axis over lists of payloads: each call is a single collective, for any number of payloads.

    (Sums of several dtypes are a collective for each dtype.)

    A plain parameter is a single payload; a quantised parameter is its data and its scales. Every rank of the axis must
    make the same calls with payloads of the same sizes and dtypes in the same order, and at least one payload. Calls go
    on the current stream, and the tensors must stay alive until the stream has passed the call.
    `lamella_buffers.testing.check_transport` tests any implementation.
    """

    @property
    def rank(self) -> int:
        """This process's place on the axis."""
        ...

    @property
    def num_ranks(self) -> int:
        """Processes on the axis."""
        ...

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Fill each payload's `full` with every rank's `shard`, in rank order."""
        ...

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Fill each payload's `shard` with this rank's piece of `full`, reduced over the ranks; `full` is not kept.

        Sums are made in the dtype of `shard`, even where `full` is narrower. `op` is SUM or AVG.
        """
        ...

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce each tensor over the ranks, in place."""
        ...


FillAndGather = Callable[[Payloads], Pending]
"""An optional method of a transport: gathers shards, after their fillings have written the missing shards."""


class Done:
    """The handle of a finished collective, or of a collective already ordered by the stream."""

    def wait(self) -> None:
        """Return at once."""


class LocalTransport:
    """The transport of an axis with a single rank: gathers and reductions are at most a local copy."""

    rank = 0
    num_ranks = 1

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Copy each shard not already in place.

        Effects: a multi-tensor copy at most, on the current stream.
        """
        copy_missing([full for _, full in payloads], [shard for shard, _ in payloads])
        return Done()

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Copy each whole, cast if necessary: sum and mean over a single rank are the identity.

        Effects: a multi-tensor copy at most, on the current stream.
        """
        copy_missing([shard for shard, _ in payloads], [full for _, full in payloads])
        return Done()

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Leave the tensors unchanged."""
        return Done()


class _GroupTransport(ABC):
    """Common part of both backends' transports: the process group.

    Args:
        group: The axis's process group.

    Attributes:
        rank: This process's place in the group.
        num_ranks: The group's size.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.num_ranks = group.rank(), group.size()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself, for further collectives on the same ranks."""
        return self._group

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Reduce and scatter all payloads of the same dtypes in a single call.

        Effects: a collective for each pair of dtypes on the group, on the current stream. Payloads with a sum wider
            than the wire are an exchange, which allocates a buffer for the arriving pieces: see `_exchange`.
        """
        for payloads_of_dtype in by_dtype(payloads):
            (self._exchange if payloads_of_dtype[0].widens else self._reduce)(payloads_of_dtype, op)
        return Done()

    @abstractmethod
    def _reduce(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Reduce and scatter payloads of equal dtype."""

    @abstractmethod
    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Send each rank its pieces, and add up the arriving pieces. The payloads have the same two dtypes."""


class NcclTransport(_GroupTransport):
    """NCCL. Grouped calls for each parameter are as fast as a single flat call, and need no packing."""

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads, of any dtypes, in a single call.

        Effects: a collective on the group, on the current stream; in place where `shard` is a slice of `full`.
        """
        columns = payloads if isinstance(payloads, Payloads) else Payloads(payloads)
        # Grouped calls have one dtype.
        shards, wholes = (columns.shards, columns.wholes) if len(columns.dtypes) == 1 else columns.flat_bytes
        self._group.allgather_into_tensor_coalesced(wholes, shards, _GATHER)
        return Done()

    def _reduce(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Reduce straight from `full` into `shard`."""
        shards, full = [shard for shard, _ in payloads], [full for _, full in payloads]
        self._group.reduce_scatter_tensor_coalesced(shards, full, _reduce_options(op))

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Send pieces straight from the payloads' memory, as a single group of calls.

        Between hosts an exchange sends a piece to each remote rank, a ring only a sum: the wire is widened instead, at
        the cost of casting every payload.
        """
        if not self._is_on_one_host:
            self._reduce(widened(payloads), op)
            return
        options = on_current_stream(AllToAllOptions())
        # From the current stream's pool, freed at return: the sum below precedes any reuse of the bytes on this stream.
        arrivals = payloads[0].full.new_empty(arrivals_numel(payloads, self.num_ranks))
        places = places_for(payloads, self.num_ranks, arrivals)
        device = places[0].device
        self._group._start_coalescing(device)
        for place, (_, full) in zip(places, payloads, strict=True):
            self._group.alltoall(list(place.unbind()), list(full.view(self.num_ranks, -1).unbind()), options)
        self._group._end_coalescing(device)
        add_up(places, [shard for shard, _ in payloads], op)

    @cached_property
    def _is_on_one_host(self) -> bool:
        return _is_one_host(dist.get_process_group_ranks(self._group), dist.get_rank())

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce all tensors in a single call.

        Effects: a collective on the group, on the current stream.
        """
        options = on_current_stream(AllreduceCoalescedOptions())
        options.reduceOp = dist.ReduceOp(op)
        self._group.allreduce_coalesced(list(tensors), options)
        return Done()


class GlooTransport(_GroupTransport):
    """gloo, on its own threads, or any backend with plain collectives. A call's payloads are packed into a tensor.

    gloo's grouped calls pack too, but on gloo's threads, and two grouped gathers in flight corrupt the heap (torch
    2.13; `docs/design/0001-engine.md`). Here gloo's threads see only packed tensors.
    """

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads in a single call, as bytes.

        Effects: a collective on the group; `wait` copies the result into place.
        """
        shards, wholes = payloads.flat_bytes if isinstance(payloads, Payloads) else flat_bytes(payloads)
        with record_function("gloo::all_gather"):
            # A copy on this thread: the caller may write the shards again while gloo's threads still send.
            packed = torch.cat(shards)
            gathered = packed.new_empty(self.num_ranks * packed.numel())
        work = _all_gather(gathered, packed, group=self._group, async_op=True)
        return _GlooGather(work, packed, partial(unpack, gathered, wholes, self.num_ranks))

    def _reduce(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Reduce a packed tensor: a copy of every payload on both sides; blocks the host."""
        shards, wholes = zip(*payloads, strict=True)
        with record_function("gloo::reduce_scatter"):
            packed = torch.cat([tensor.view(self.num_ranks, -1) for tensor in wholes], dim=1)
            mine = packed.new_empty(packed.shape[1])
            _reduce_scatter(mine, packed.view(-1), op, self._group)
            unpack(mine, shards)

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Exchange a packed tensor: a copy of every payload beforehand; blocks the host."""
        shards, wholes = zip(*payloads, strict=True)
        with record_function("gloo::all_to_all"):
            # Side by side by receiving rank: gloo sends row r to rank r.
            packed = torch.cat([tensor.view(self.num_ranks, -1) for tensor in wholes], dim=1)
            received = torch.empty_like(packed)
            dist.all_to_all_single(received, packed, group=self._group)
            add_up(torch.split(received, [shard.numel() for shard in shards], dim=1), shards, op)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce all tensors.

        Effects: a collective for each dtype on the group; a copy of every tensor on both sides; blocks the host.
        """
        for payloads_of_dtype in by_dtype([Payload(tensor, tensor) for tensor in tensors]):
            with record_function("gloo::all_reduce"):
                packed = torch.cat([tensor.view(-1) for tensor, _ in payloads_of_dtype])
                dist.all_reduce(packed, op, self._group)
                unpack(packed, [tensor for tensor, _ in payloads_of_dtype])
        return Done()


class FakeTransport(_GroupTransport):
    """A group of `FAKE_GPUS`, whose other ranks do not exist: takes NCCL's memory, and moves nothing.

    A step on fake tensors then allocates on one process as a step on GPUs does. The listener of `fake_collectives`
    hears each call.
    """

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Leave the payloads as they are: NCCL gathers in place."""
        self._announce("all_gather", [full for _, full in payloads])
        return Done()

    def _reduce(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Leave the payloads as they are: NCCL reduces straight from `full` into `shard`."""
        self._announce("reduce_scatter", [full for _, full in payloads])

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Allocate the memory of `NcclTransport`'s exchange, and free it: wider payloads between hosts, else arrivals.

        Effects: allocates about the bytes of the payloads' `full`, in the sum's dtype between hosts.
        """
        if spans_fake_hosts(self._group):
            self._reduce(widened(payloads), op)
            return
        payloads[0].full.new_empty(arrivals_numel(payloads, self.num_ranks))
        self._announce_exchange(payloads)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Leave the tensors as they are."""
        self._announce("all_reduce", tensors)
        return Done()

    def _announce_exchange(self, payloads: Sequence[Payload]) -> None:
        # Each piece of this rank's shards is read once, its own too, and the sum written once.
        pieces_nbytes = sum(shard.numel() * full.itemsize * self.num_ranks for shard, full in payloads)
        sums_nbytes = pieces_nbytes + sum(shard.nbytes for shard, _ in payloads)
        self._announce("exchange", [full for _, full in payloads], sums_nbytes)

    def _announce(self, kind: str, wholes: Sequence[torch.Tensor], sum_nbytes: int = 0) -> None:
        ranks = tuple(dist.get_process_group_ranks(self._group))
        announce(FakeCollective(kind, sum(full.nbytes for full in wholes), ranks, sum_nbytes))


class _GlooGather:
    """Waits on the host, once, and unpacks. Holds the packed shards until then, as gloo's work does."""

    def __init__(self, work: dist.Work, packed: torch.Tensor, unpack: Callable[[], None]) -> None:
        self._work: dist.Work | None = work  # None once unpacked
        self._packed: torch.Tensor | None = packed  # read by gloo's threads until the work is done
        self._unpack = unpack

    def wait(self) -> None:
        # Unpacked a second time, the result would overwrite later writes, or memory freed since.
        if self._work is None:
            return
        self._work.wait()
        with record_function("gloo::all_gather"):
            self._unpack()
        self._work = self._packed = None  # last: an interrupted wait may be repeated


def transport_for(group: dist.ProcessGroup, device_type: str) -> Transport:
    """The transport of a process group: local for a single rank, else by the group's backend for a device.

    Args:
        group: The axis's process group.
        device_type: Device of the moved tensors, as in a mesh. A group may serve CPUs by gloo and GPUs by NCCL; NCCL's
            calls on CPU tensors would go to gloo, without a wait for the result. A group of `FAKE_GPUS` gets a
            transport that moves nothing; hosts are taken to have 8 GPUs, ranks in their order.
    """
    if group.size() == 1:
        return LocalTransport()
    # Not `get_backend`: for a group with a backend chosen by torch, the answer is "undefined".
    backends = dist.get_backend_config(group)
    if backends == FAKE_GPUS:  # Also for a CPU mesh: fake tensors need no GPU.
        return FakeTransport(group)
    has_nccl = device_type != "cpu" and "nccl" in backends
    return NcclTransport(group) if has_nccl else GlooTransport(group)


def spans_fake_hosts(group: dist.ProcessGroup) -> bool:
    """Whether a group of `FAKE_GPUS` is on several hosts."""
    if group.size() > _FAKE_GPUS_A_HOST:  # Without a list of the ranks, which each unit's call would make.
        return True
    return len({rank // _FAKE_GPUS_A_HOST for rank in dist.get_process_group_ranks(group)}) > 1


def on_current_stream(options: Options) -> Options:
    """The options of a call ordered by the current stream, without a handle to wait for."""
    # Asynchronous, NCCL would run on its own stream, and later work on the current stream would not wait for the call.
    options.asyncOp = False
    return options


_GATHER = on_current_stream(AllgatherOptions())


@cache
def _reduce_options(op: ReduceOp) -> ReduceScatterOptions:
    options = on_current_stream(ReduceScatterOptions())
    options.reduceOp = dist.ReduceOp(op)
    return options


def _is_one_host(ranks: Sequence[int], rank: int) -> bool:
    """Whether ranks of the world, including `rank`, share a host: the same answer on each.

    torchrun gives the ranks of a host. Without torchrun each host is assumed to have a rank for each GPU, equally many,
    in consecutive order, as torch's meshes assume.
    """
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        first, num = rank - int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        num = max(1, torch.cuda.device_count())
        first = rank // num * num
    return set(ranks) <= set(range(first, first + num))


def copy_missing(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Copy tensors into their destinations, except tensors already in place.

    Effects: a multi-tensor copy at most, on the current stream.
    """
    # An equal address means in place: the shard is a piece of the unsharded buffer.
    moves = [(a, b) for a, b in zip(into, source, strict=True) if a.data_ptr() != b.data_ptr() and a.numel() > 0]
    if moves:
        torch._foreach_copy_([a.view(-1) for a, _ in moves], [b.view(-1) for _, b in moves])
