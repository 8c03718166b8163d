"""What moves between the ranks of one axis, and what moves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions

ReduceOp = dist.ReduceOp.RedOpType
Options = TypeVar("Options", AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions)


class Payload(NamedTuple):
    """Two flat, contiguous tensors of one dtype: one rank's piece, and the pieces of all ranks in rank order.

    A gather reads `shard` and writes `full`; a reduction reads `full` and writes `shard`. In a gather `shard` may be
    this rank's own slice of `full`: then the gather is in place.
    """

    shard: torch.Tensor  # (numel,)
    full: torch.Tensor  # (num_ranks * numel,)


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
    same calls with payloads of the same sizes and dtypes in the same order. Calls are put on the current stream, and
    the tensors must stay alive until that stream has passed them.
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
        """Fill each payload's `shard` with this rank's piece of `full`, reduced over the ranks; `full` is not kept."""
        ...

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce each tensor over the ranks, in place."""
        ...


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
        _copy([full for _, full in payloads], [shard for shard, _ in payloads])
        return Done()

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Copy each whole: the sum and the mean over one rank are the thing itself.

        Effects: one multi-tensor copy at most, on the current stream.
        """
        _copy([shard for shard, _ in payloads], [full for _, full in payloads])
        return Done()

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Leave the tensors as they are."""
        return Done()


class _GroupTransport(ABC):
    """What both backends of `torch.distributed` share: one grouped (coalesced) collective a call.

    Args:
        group: The axis's process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._group.rank()

    @property
    def num_ranks(self) -> int:
        """The group's size."""
        return self._group.size()

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads in one call, of whatever dtypes.

        Effects: one collective on the group, on the current stream; in place where `shard` is a slice of `full`.
        """
        options = self._options(AllgatherOptions())
        full, shards = [full for _, full in payloads], [shard for shard, _ in payloads]
        if len({shard.dtype for shard in shards}) > 1:
            # A grouped call must be of one dtype. NCCL says so; gloo mixes up the bytes without a word.
            full, shards = [x.view(torch.uint8) for x in full], [x.view(torch.uint8) for x in shards]
        return self._started(self._group.allgather_into_tensor_coalesced(full, shards, options))

    @abstractmethod
    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Reduce and scatter all payloads."""

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce all tensors in one call.

        Effects: one collective on the group, on the current stream.
        """
        options = self._options(AllreduceCoalescedOptions())
        options.reduceOp = dist.ReduceOp(op)
        return self._started(self._group.allreduce_coalesced(list(tensors), options))

    @abstractmethod
    def _options(self, options: Options) -> Options: ...

    @abstractmethod
    def _started(self, work: dist.Work | None) -> Pending: ...


class NcclTransport(_GroupTransport):
    """NCCL. Grouping per-parameter calls costs nothing against one flat call, and nothing has to be packed for it."""

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Reduce and scatter all payloads of a dtype in one call.

        Effects: one collective a dtype on the group, on the current stream.
        """
        options = self._options(ReduceScatterOptions())
        options.reduceOp = dist.ReduceOp(op)
        for same in _by_dtype(payloads):
            full, shards = [full for _, full in same], [shard for shard, _ in same]
            self._group.reduce_scatter_tensor_coalesced(shards, full, options)
        return Done()

    def _options(self, options: Options) -> Options:
        options.asyncOp = False  # on the current stream, which keeps the order: there is no handle to wait for
        return options

    def _started(self, work: dist.Work | None) -> Pending:
        return Done()


class GlooTransport(_GroupTransport):
    """gloo, on threads of its own. Its grouped reduction takes tensors one by one, so reductions are packed instead."""

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Reduce and scatter all payloads.

        Effects: one collective a dtype on the group; a copy of every payload on both sides; blocks the host.
        """
        for same in _by_dtype(payloads):
            self._reduce_scatter_packed(same, op)
        return Done()

    def _reduce_scatter_packed(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        packed = torch.cat([full.view(self.num_ranks, -1) for _, full in payloads], dim=1)
        mine = packed.new_empty(packed.shape[1])
        options = self._options(ReduceScatterOptions())
        options.reduceOp = dist.ReduceOp(op)
        self._group._reduce_scatter_base(mine, packed.view(-1), options).wait()
        for (shard, _), piece in zip(
            payloads, torch.split(mine, [shard.numel() for shard, _ in payloads]), strict=True
        ):
            shard.copy_(piece)

    def _options(self, options: Options) -> Options:
        return options

    def _started(self, work: dist.Work | None) -> Pending:
        return Done() if work is None else _GlooWork(work)


class _GlooWork:
    """Waits on the host, once."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def transport_for(group: dist.ProcessGroup) -> Transport:
    """The transport of a process group: local for a single rank, else its backend's.

    Effects: none.
    """
    if group.size() == 1:
        return LocalTransport()
    return NcclTransport(group) if "nccl" in dist.get_backend(group) else GlooTransport(group)


def _by_dtype(payloads: Sequence[Payload]) -> list[list[Payload]]:
    groups: dict[torch.dtype, list[Payload]] = {}
    for payload in payloads:
        groups.setdefault(payload.shard.dtype, []).append(payload)
    return list(groups.values())


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    moves = [(a, b) for a, b in zip(into, source, strict=True) if a.data_ptr() != b.data_ptr() and a.numel() > 0]
    if moves:
        torch._foreach_copy_([a for a, _ in moves], [b for _, b in moves])
