"""What moves between the ranks of one axis, and what moves it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
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
from lamella_buffers._payload import Payload, Payloads, by_dtype, of_one_dtype, unpack

ReduceOp = dist.ReduceOp.RedOpType
"""How a reduction combines the ranks' numbers: torch's `SUM`, `AVG` and so on."""

# torch 2.13 renamed them.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

Options = TypeVar("Options", AllgatherOptions, AllreduceCoalescedOptions, AllToAllOptions, ReduceScatterOptions)


class Pending(Protocol):
    """A collective that was started."""

    def wait(self) -> None:
        """Order what follows after the collective.

        Effects: NCCL: none, the call was already put on the current stream. gloo: blocks the host until it is done.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Collectives on one axis, whose unit is a list of payloads: one call, one collective, however many payloads.

    (Sums of several dtypes are one collective a dtype.)

    A plain parameter is one payload; a quantised one is its data and its scales. Every rank of the axis must make the
    same calls with payloads of the same sizes and dtypes in the same order, and with one at least. Calls are put on the
    current stream, and the tensors must stay alive until that stream has passed them.
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

        A `full` of a narrower dtype than its `shard` is added up in the dtype of `shard`. `op` is SUM or AVG.
        """
        ...

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce each tensor over the ranks, in place."""
        ...


FillAndGather = Callable[[Payloads], Pending]
"""A method that a transport may have too: gathers shards of which some still have to be written by their filling."""


class Done:
    """The handle of a collective that is over, or whose order the stream already keeps."""

    def wait(self) -> None:
        """Return at once."""


class LocalTransport:
    """The transport of an axis with one rank: what is gathered or reduced is already there, or one copy away."""

    rank = 0
    num_ranks = 1

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Copy each shard, unless it already lies in its place.

        Effects: one multi-tensor copy at most, on the current stream.
        """
        copy_missing([full for _, full in payloads], [shard for shard, _ in payloads])
        return Done()

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Copy each whole, cast if it must be: the sum and the mean over one rank are the thing itself.

        Effects: one multi-tensor copy at most, on the current stream.
        """
        copy_missing([shard for shard, _ in payloads], [full for _, full in payloads])
        return Done()

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Leave the tensors as they are."""
        return Done()


class _GroupTransport(ABC):
    """What the transports of both backends know of their process group.

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
        """The group itself, for whoever moves something on the same ranks in another way."""
        return self._group

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Reduce and scatter all payloads of the same dtypes in one call.

        Effects: one collective for each pair of dtypes on the group, on the current stream: an exchange for those that
            are added up in a wider dtype than they travel in, which allocates what arrives. See the two ways below.
        """
        for same in by_dtype(payloads):
            (self._exchange if same[0].widens else self._reduce)(same, op)
        return Done()

    @abstractmethod
    def _reduce(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Reduce and scatter payloads of one dtype."""

    @abstractmethod
    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Send each rank its pieces, and add up those that arrive. The payloads have the same two dtypes."""


class NcclTransport(_GroupTransport):
    """NCCL. Grouping per-parameter calls costs nothing against one flat call, and nothing has to be packed for it."""

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads in one call, of whatever dtypes.

        Effects: one collective on the group, on the current stream; in place where `shard` is a slice of `full`.
        """
        same = of_one_dtype(payloads)  # as a grouped call must be
        columns = same if isinstance(same, Payloads) else Payloads(same)
        self._group.allgather_into_tensor_coalesced(columns.wholes, columns.shards, _GATHER)
        return Done()

    def _reduce(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Reduce straight from where payloads lie to where they go."""
        shards, full = [shard for shard, _ in payloads], [full for _, full in payloads]
        self._group.reduce_scatter_tensor_coalesced(shards, full, _reduce_options(op))

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Send pieces straight from where payloads lie, as one group of calls.

        Between hosts a piece for each rank of another host would cross, where a ring's sum crosses once: there the wire
        is widened instead, which costs a cast of every payload.
        """
        if not self._is_on_one_host:
            self._reduce(widened(payloads), op)
            return
        options = on_current_stream(AllToAllOptions())
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
        """Reduce all tensors in one call.

        Effects: one collective on the group, on the current stream.
        """
        options = on_current_stream(AllreduceCoalescedOptions())
        options.reduceOp = dist.ReduceOp(op)
        self._group.allreduce_coalesced(list(tensors), options)
        return Done()


class GlooTransport(_GroupTransport):
    """gloo, on threads of its own, or any backend that has plain collectives. A call's payloads are packed into one.

    gloo's grouped calls pack too, but on its threads, and two of its grouped gathers in flight corrupt the heap (torch
    2.13; `docs/design/0001-engine.md`). Here its threads see nothing but the packed tensors.
    """

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads in one call, as bytes.

        Effects: one collective on the group, whose result is copied into place when it is waited for.
        """
        shards, wholes = zip(*(payload.as_bytes() for payload in payloads), strict=True)
        with record_function("gloo::all_gather"):
            packed = torch.cat([shard.view(-1) for shard in shards])
            gathered = packed.new_empty(self.num_ranks * packed.numel())
        work = _all_gather(gathered, packed, group=self._group, async_op=True)
        return _GlooGather(work, lambda: unpack(gathered, wholes, self.num_ranks))

    def _reduce(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Reduce one tensor: a copy of every payload on both sides; blocks the host."""
        shards, wholes = zip(*payloads, strict=True)
        with record_function("gloo::reduce_scatter"):
            packed = torch.cat([whole.view(self.num_ranks, -1) for whole in wholes], dim=1)
            mine = packed.new_empty(packed.shape[1])
            _reduce_scatter(mine, packed.view(-1), op, self._group)
            unpack(mine, shards)

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Exchange one tensor: a copy of every payload before it; blocks the host."""
        shards, wholes = zip(*payloads, strict=True)
        with record_function("gloo::all_to_all"):
            packed = torch.cat([whole.view(self.num_ranks, -1) for whole in wholes], dim=1)
            received = torch.empty_like(packed)
            dist.all_to_all_single(received, packed, group=self._group)
            add_up(torch.split(received, [shard.numel() for shard in shards], dim=1), shards, op)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce all tensors.

        Effects: one collective a dtype on the group; a copy of every tensor on both sides; blocks the host.
        """
        for same in by_dtype([Payload(tensor, tensor) for tensor in tensors]):
            with record_function("gloo::all_reduce"):
                packed = torch.cat([tensor.view(-1) for tensor, _ in same])
                dist.all_reduce(packed, op, self._group)
                unpack(packed, [tensor for tensor, _ in same])
        return Done()


class _GlooGather:
    """Waits on the host, once, and unpacks."""

    def __init__(self, work: dist.Work, unpack: Callable[[], None]) -> None:
        self._work: dist.Work | None = work
        self._unpack = unpack

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        with record_function("gloo::all_gather"):
            self._unpack()


def transport_for(group: dist.ProcessGroup, device_type: str) -> Transport:
    """The transport of a process group: local for a single rank, else of the backend that it has for a device.

    Args:
        group: The axis's process group.
        device_type: Where the tensors lie that are moved, as a mesh has it: one group may serve CPUs by gloo and GPUs
            by NCCL, and NCCL's calls on the tensors of a CPU go to gloo, which nobody would wait for.

    Effects: none.
    """
    if group.size() == 1:
        return LocalTransport()
    # Not `get_backend`: of a group for which torch chose the backend, that is "undefined".
    has_nccl = device_type != "cpu" and "nccl" in dist.get_backend_config(group)
    return NcclTransport(group) if has_nccl else GlooTransport(group)


def on_current_stream(options: Options) -> Options:
    """The options of a call that the current stream keeps in order, with no handle to wait for."""
    options.asyncOp = False
    return options


_GATHER = on_current_stream(AllgatherOptions())


@cache
def _reduce_options(op: ReduceOp) -> ReduceScatterOptions:
    options = on_current_stream(ReduceScatterOptions())
    options.reduceOp = dist.ReduceOp(op)
    return options


def _is_one_host(ranks: Sequence[int], rank: int) -> bool:
    """Whether ranks of the world, this one among them, run on one host: the same answer on each of them.

    torchrun says which ranks a host has. Without it hosts are taken to have one a GPU and equally many, counted through
    one after another, as torch's meshes take them to.
    """
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        first, num = rank - int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        num = max(1, torch.cuda.device_count())
        first = rank // num * num
    return set(ranks) <= set(range(first, first + num))


def copy_missing(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Copy tensors to where they do not lie already.

    Effects: one multi-tensor copy at most, on the current stream.
    """
    moves = [(a, b) for a, b in zip(into, source, strict=True) if a.data_ptr() != b.data_ptr() and a.numel() > 0]
    if moves:
        torch._foreach_copy_([a.view(-1) for a, _ in moves], [b.view(-1) for _, b in moves])
