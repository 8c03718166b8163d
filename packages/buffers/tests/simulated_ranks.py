"""Ranks as threads of this process, and between the ranks the least transport possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
import torch.distributed as dist

from lamella_buffers import Done, Payload, Pending, ReduceOp

Result = TypeVar("Result")


class SimulatedTransport:
    """A rank's end of an axis: ranks lay their payloads on one table."""

    def __init__(self, rank: int, table: list[Sequence[torch.Tensor]], barrier: Barrier) -> None:
        self.rank, self.num_ranks = rank, len(table)
        self._table = table
        self._barrier = barrier

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Put every rank's shards side by side."""
        assert all(shard.dtype == full.dtype for shard, full in payloads)
        sent = self._sent([shard for shard, _ in payloads])
        for (_, full), shards in zip(payloads, zip(*sent, strict=True), strict=True):
            full.view(-1).copy_(torch.cat(shards))
        return Done()

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        """Add up in float64, and keep this rank's part."""
        sent = self._sent([full for _, full in payloads])
        for (shard, _), wholes in zip(payloads, zip(*sent, strict=True), strict=True):
            shard.view(-1).copy_(self._reduced(wholes, op).view(self.num_ranks, -1)[self.rank])
        return Done()

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        """Add up in float64."""
        sent = self._sent(tensors)
        for tensor, pieces in zip(tensors, zip(*sent, strict=True), strict=True):
            tensor.copy_(self._reduced(pieces, op).view(tensor.shape))
        return Done()

    def _sent(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Each rank's payloads, from before any write."""
        assert all(tensor.is_contiguous() for tensor in tensors)
        self._table[self.rank] = [tensor.view(-1).clone() for tensor in tensors]
        self._barrier.wait()
        sent = [list(row) for row in self._table]
        self._barrier.wait()
        kinds = [[(tensor.dtype, tensor.numel()) for tensor in row] for row in sent]
        assert all(row == kinds[0] for row in kinds), kinds
        return sent

    def _reduced(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
        total = torch.stack([tensor.to(torch.promote_types(tensor.dtype, torch.float64)) for tensor in tensors]).sum(0)
        return total / self.num_ranks if op == dist.ReduceOp.AVG else total


def on_simulated_ranks(num_ranks: int, run: Callable[[SimulatedTransport], Result]) -> list[Result]:
    """Results of a function by rank; a rank's error is raised here, and ends the remaining ranks' waits."""
    barrier, table = Barrier(num_ranks), [()] * num_ranks  # type: tuple[Barrier, list[Sequence[torch.Tensor]]]

    def guarded(rank: int) -> Result:
        try:
            return run(SimulatedTransport(rank, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as ranks:
        running = [ranks.submit(guarded, rank) for rank in range(num_ranks)]
    errors = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):  # broken by an error
        raise error
    return [future.result() for future in running]
