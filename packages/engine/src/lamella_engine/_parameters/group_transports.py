"""The axes of a parameter group's communication, each as a transport."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from lamella_buffers import FAKE_GPUS, Allocator, CopyEngines, LocalTransport, Transport, copy_engines_of, transport_for
from lamella_engine._parameters.sharding import DataAxes


@dataclass(eq=False, kw_only=True)
class GroupTransports:
    """The transports of a group; a caller's choices replace some after sharding.

    Attributes:
        shard: The shard axis. `set_custom_all_gather` puts a user's collective here.
        reduce: The shard axis on a separate communicator for reductions, or with a user's reductions; None for `shard`.
        replicas: The replicate axis, or None.
        outer: The axis over which each shard's main weights are sharded, or None.
        neighbours: Ranks that share a larger part of each parameter between forward and backward, or None.
            `set_reshard_after_forward` clears the field.
        rank: This process's place on the shard axis.
        windows: The allocator of memory for gathers by copy engines, or None.
    """

    shard: Transport
    reduce: Transport | None = None
    replicas: Transport | None = None
    outer: Transport | None = None
    neighbours: Transport | None = None
    rank: int = 0
    windows: Allocator | None = None

    @classmethod
    def of(cls, axes: DataAxes, *, uses_windows: bool, neighbours: Transport | None) -> GroupTransports:
        """The transports of some axes.

        Args:
            axes: The group's.
            uses_windows: Gather by copy engines if the ranks have some: no other allocator was asked for.
            neighbours: See `neighbours`.

        Effects: on GPUs the first call with `uses_windows` on an axis is a collective (`copy_engines_of`).
        """
        # Windows and transport of copy engines come together: a gather by engines needs memory mapped by peers.
        engines = _engines(axes) if uses_windows else None
        return cls(
            shard=engines.transport if engines else _transport(axes, axes.shard_group) or LocalTransport(),
            replicas=_transport(axes, axes.replicate_group),
            outer=_transport(axes, axes.outer_group),
            neighbours=neighbours,
            rank=axes.shard_rank,
            windows=engines.allocator if engines else None,
        )


def _engines(axes: DataAxes) -> CopyEngines | None:
    """Copy engines for gathers over the shard axis; None on a CPU mesh, even if the process group has NCCL too.

    A mesh of `FAKE_GPUS` is a CPU mesh, with stand-ins for GPUs' tensors.
    """
    group = axes.shard_group
    if group is None or (axes.mesh.device_type == "cpu" and dist.get_backend_config(group) != FAKE_GPUS):
        return None
    return copy_engines_of(group)


def _transport(axes: DataAxes, group: dist.ProcessGroup | None) -> Transport | None:
    return None if group is None else transport_for(group, axes.mesh.device_type)
