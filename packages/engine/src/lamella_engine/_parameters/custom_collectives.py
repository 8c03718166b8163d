"""A user's own collectives, called as by FSDP2: one flat input, one flat output, in memory of the user's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist

from lamella_buffers import (
    Done,
    GlooTransport,
    NcclTransport,
    Payload,
    Pending,
    ReduceOp,
    Transport,
    by_dtype,
    of_one_dtype,
    pack,
    unpack,
)


class Collective(Protocol):
    """The common part of FSDP2's `AllGather` and `ReduceScatter`: both choose the memory for inputs and outputs."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of `size`, new or reused from an earlier call."""
        ...


class AllGather(Collective, Protocol):
    """FSDP2's interface of a gather."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` with every rank's `input_tensor`, this rank's part of the output."""
        ...


class ReduceScatter(Collective, Protocol):
    """FSDP2's interface of a reduction."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with this rank's part of the sum of every rank's `input_tensor`."""
        ...


class _Delegating:
    """A transport with one collective of its own; `plain` does the rest."""

    comm: object

    def __init__(self, plain: GlooTransport | NcclTransport) -> None:
        self.plain = plain

    @property
    def rank(self) -> int:
        """This process's place on the axis."""
        return self.plain.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks on the axis."""
        return self.plain.num_ranks

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather as the plain transport does."""
        return self.plain.all_gather(payloads)

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Reduce and scatter as the plain transport does."""
        return self.plain.reduce_scatter(payloads, op)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Reduce as the plain transport does."""
        return self.plain.all_reduce(tensors, op)


class CustomAllGather(_Delegating):
    """A transport whose gathers are a user's.

    Args:
        plain: The axis.
        comm: Called once a gather.
    """

    def __init__(self, plain: GlooTransport | NcclTransport, comm: AllGather) -> None:
        super().__init__(plain)
        self.comm: AllGather = comm

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads in one call, as bytes if their dtypes differ.

        Effects: one collective on the axis, on the current stream; a copy of every payload on both sides. Blocks the
            host if the user's collective does.
        """
        shards, fulls = zip(*of_one_dtype(payloads), strict=True)
        # Memory of the user's choice, maybe that of the call before: earlier contents were copied out on the same
        # stream.
        gathered = _allocate(self.comm, sum(full.numel() for full in fulls), shards[0])
        # This rank's part of the output is the input: FSDP2's collectives gather in place.
        mine = pack(shards, gathered.view(self.num_ranks, -1)[self.rank])
        _wait(self.comm(output_tensor=gathered, input_tensor=mine, group=self.plain.process_group, async_op=False))
        unpack(gathered, fulls, self.num_ranks)  # at once: the next `allocate` may return the same memory
        return Done()


class CustomReduceScatter(_Delegating):
    """A transport whose reductions are a user's.

    Args:
        plain: The axis.
        comm: Called once a reduction and pair of dtypes (gradients', sums'), with tensors in the sums' dtype.
    """

    def __init__(self, plain: GlooTransport | NcclTransport, comm: ReduceScatter) -> None:
        super().__init__(plain)
        self.comm: ReduceScatter = comm

    def on(self, plain: Transport) -> CustomReduceScatter:
        """The same reductions, on another communicator."""
        return CustomReduceScatter(cast("GlooTransport | NcclTransport", plain), self.comm)

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Reduce and scatter all payloads of the same dtypes in one call, in the dtype of their sum.

        Effects: one collective for each pair of dtypes on the axis, on the current stream; a copy of every payload on
            both sides, which also casts to the sums' dtype. Blocks the host if the user's collective does.
        """
        for payloads_of_dtype in by_dtype(payloads):
            shards, fulls = zip(*payloads_of_dtype, strict=True)
            packed = _allocate(self.comm, sum(full.numel() for full in fulls), shards[0])
            pack(fulls, packed, self.num_ranks)  # and cast
            mine = _allocate(self.comm, sum(shard.numel() for shard in shards), shards[0])
            group = self.plain.process_group
            _wait(self.comm(output_tensor=mine, input_tensor=packed, group=group, op=op, async_op=False))
            unpack(mine, shards)  # at once, as in `all_gather`
        return Done()


def plain_of(transport: Transport) -> Transport:
    """The transport below a user's collectives, or the transport itself."""
    return transport.plain if isinstance(transport, _Delegating) else transport


def custom_of(transport: Transport | None) -> object | None:
    """The user's collective over a transport, or None."""
    return transport.comm if isinstance(transport, _Delegating) else None


def with_all_gather(transport: Transport, comm: AllGather) -> Transport:
    """A transport with a user's gathers in place of its own; unchanged on a single rank, which gathers nothing."""
    # The plain transport again: a second call replaces the user's first collective, and does not wrap it.
    plain = plain_of(transport)
    return CustomAllGather(plain, comm) if isinstance(plain, GlooTransport | NcclTransport) else plain


def with_reduce_scatter(transport: Transport, comm: ReduceScatter) -> Transport:
    """A transport with a user's reductions in place of its own; unchanged on a single rank, which reduces nothing."""
    # As above: the last call's collective counts.
    plain = plain_of(transport)
    return CustomReduceScatter(plain, comm) if isinstance(plain, GlooTransport | NcclTransport) else plain


def check_collective(comm: object) -> None:
    """Refuse an object without the interface of FSDP2's collectives.

    Raises:
        TypeError: The object has no `allocate`, or is not callable.
    """
    if not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"Expected `comm` to be callable and to have a method `allocate`, got {type(comm).__name__}. FSDP2's "
            "interfaces AllGather and ReduceScatter say what they are given."
        )


def _allocate(comm: Collective, numel: int, like: torch.Tensor) -> torch.Tensor:
    return comm.allocate((numel,), dtype=like.dtype, device=like.device)


def _wait(work: dist.Work | None) -> None:
    """Order the current stream after a collective that runs asynchronously in spite of `async_op=False`."""
    if isinstance(work, dist.Work):
        work.wait()
