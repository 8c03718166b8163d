"""The collectives that a unit's gathers and reductions are made of: a user's, or over a separate communicator."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from lamella_buffers import CopyEngineTransport, Transport, transport_for
from lamella_engine._common.errors import MisuseError
from lamella_engine._parameters.custom_collectives import (
    AllGather,
    CustomReduceScatter,
    ReduceScatter,
    check_collective,
    custom_of,
    plain_of,
    with_all_gather,
    with_reduce_scatter,
)
from lamella_engine._parameters.group import ParameterGroup
from lamella_engine._unit.parameters import UnitParameters


def gather_by(unit: UnitParameters, comm: AllGather) -> None:
    """Let a user's collective do a unit's gathers.

    Raises:
        ValueError: The unit's parameters lie on several meshes.
        TypeError: Not a collective.
    """
    _check_custom(unit, "set_custom_all_gather", comm)
    for group in unit.groups:
        group.transports.shard = with_all_gather(group.transports.shard, comm)
        # Backward gathers over the neighbours, where a number as `reshard_after_forward` has chosen some.
        if group.transports.neighbours is not None:
            group.transports.neighbours = with_all_gather(group.transports.neighbours, comm)


def reduce_by(unit: UnitParameters, comm: ReduceScatter) -> None:
    """Let a user's collective do a unit's gradient reductions.

    Raises:
        ValueError: The unit's parameters lie on several meshes.
        TypeError: Not a collective.
    """
    _check_custom(unit, "set_custom_reduce_scatter", comm)
    for group in unit.groups:
        # Beside the gathers' transport, not in its place: gathers stay as they are.
        group.transports.reduce = with_reduce_scatter(group.transports.reduce or group.transports.shard, comm)


def _check_custom(unit: UnitParameters, method: str, comm: object) -> None:
    check_collective(comm)
    check_one_mesh(unit, method, "the group that `comm` is called with")


def check_one_mesh(unit: UnitParameters, method: str, subject: str) -> None:
    """Refuse a call that would mean different things for parts of a unit.

    Raises:
        ValueError: The unit's parameters lie on several meshes.
    """
    if len({group.axes for group in unit.groups}) > 1:
        raise ValueError(
            f"Expected a unit whose parameters lie on one mesh, got several: {method} is not supported with multiple "
            f"param groups, as {subject} would be ambiguous. Give parameters on other meshes (`shard_placement_fn`) "
            "units of their own."
        )


def separate_reductions(units: Iterable[UnitParameters], enable: bool) -> None:
    """Give the units' reductions a communicator of their own, one for each set of ranks, or take theirs away.

    Effects: creates a process group for each set of ranks that has none, which is a collective on the ranks.
    """
    transports_by_ranks: dict[tuple[int, ...], Transport] = {}
    for group in (group for unit in units for group in unit.groups):
        shared, separate = group.axes.shard_group, _separate_reduce_transport(group)
        if enable and shared is not None and shared.size() > 1:
            separate = _separate_transport(shared, group.axes.mesh.device_type, separate, transports_by_ranks)
        elif not enable:
            separate = None
        # A user's reductions stay, and are called with the other communicator.
        if isinstance(group.transports.reduce, CustomReduceScatter):
            separate = group.transports.reduce.on(separate or plain_of(group.transports.shard))
        group.transports.reduce = separate


def _separate_reduce_transport(group: ParameterGroup) -> Transport | None:
    """The group's separate communicator for reductions, or None."""
    plain = None if group.transports.reduce is None else plain_of(group.transports.reduce)
    # The gathers' own communicator below a user's reductions is no separate one.
    return None if plain is plain_of(group.transports.shard) else plain


def _separate_transport(
    shared: dist.ProcessGroup,
    device_type: str,
    existing: Transport | None,
    transports_by_ranks: dict[tuple[int, ...], Transport],
) -> Transport:
    """A transport over the same ranks with a separate communicator, one for each set of ranks."""
    ranks = tuple(dist.get_process_group_ranks(shared))
    if existing is not None:
        transports_by_ranks.setdefault(ranks, existing)
        return existing
    if ranks not in transports_by_ranks:
        # Local: ranks outside (other hosts of HSDP, model-parallel ranks) make groups of their own, at their own time.
        separate_group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter")
        transports_by_ranks[ranks] = transport_for(separate_group, device_type)
    return transports_by_ranks[ranks]


def check_takes_group_memory(unit: UnitParameters) -> None:
    """Refuse memory of the process group for a unit with custom collectives.

    Raises:
        MisuseError: The unit has a custom collective.
    """
    if (custom := _custom_collective(unit)) is not None:
        raise MisuseError(
            "Expected `enable` to be False for a unit with custom collectives, got True: cannot call "
            f"set_allocate_memory_from_process_group() when {custom}. It allocates its own memory; leave one of the "
            "two calls out."
        )


def check_shares_memory(unit: UnitParameters, backend: str) -> None:
    """Refuse a unit whose gathers do not go through memory that the ranks of a host share.

    Raises:
        MisuseError: The unit has a custom collective, or gathers by rings.
    """
    if (custom := _custom_collective(unit)) is not None:
        raise MisuseError(
            f"Expected no custom collectives for {backend!r}, got one: cannot call set_symm_mem() when {custom}. "
            "It allocates its own memory; leave one of the two calls out."
        )
    for group in unit.groups:
        if group.transports.shard.num_ranks > 1 and not isinstance(group.transports.shard, CopyEngineTransport):
            raise MisuseError(
                "Expected GPUs of one host over NCCL that map one another's memory (without expandable_segments in "
                "PYTORCH_CUDA_ALLOC_CONF), and neither an `allocator` in `options` nor custom collectives, for "
                f"{backend!r}, got gathers by {type(group.transports.shard).__name__}. Leave the call out: they are in "
                "place, in ordinary memory."
            )


def _custom_collective(unit: UnitParameters) -> str | None:
    """A unit's collective that is a user's, in FSDP2's words; None if neither is."""
    for group in unit.groups:
        for kind, transport in (("all gather", group.transports.shard), ("reduce scatter", group.transports.reduce)):
            if (comm := custom_of(transport)) is not None:
                return f"{kind} comm is custom: {type(comm).__name__}"
    return None
