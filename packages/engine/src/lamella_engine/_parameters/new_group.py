"""A group of parameters with the form that fits the parameters: even, flat, or with a class that defines the gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lamella_buffers import Allocator, Transport, standalone
from lamella_engine._parameters.extended_form import ExtendedForm, check_lies, check_policy, chunk, is_extended
from lamella_engine._parameters.flat_packing import pack
from lamella_engine._parameters.group import Layout, ParameterGroup, dtypes_of, even_layouts
from lamella_engine._parameters.group_transports import GroupTransports
from lamella_engine._parameters.offload import Offload
from lamella_engine._parameters.payload_form import PayloadForm, new_main_weight
from lamella_engine._parameters.sharded_parameter import Candidate, ShardedParameter, put, sharded_parameter
from lamella_engine._parameters.sharding import local_of
from lamella_precision import MixedPrecisionPolicy


def new_group(
    candidates: Sequence[Candidate],
    allocator: Allocator | None,
    *,
    neighbours: Transport | None = None,
    offload: Offload | None = None,
) -> ParameterGroup:
    """The group of parameters, all extended or all plain.

    Args:
        candidates: Parameters for one group, of one set of data axes and one policy, on the resting device of shards or
            on meta. The group does not keep their storage, and modules hold them until `replace_originals`.
        allocator: The source of the unsharded buffer's bytes. None: memory for the fastest gathers.
        neighbours: Ranks with a larger common part of each parameter between forward and backward, or None.
        offload: The offload of shards at rest on the CPU, or None.

    Raises:
        ValueError: A recipe's payloads cannot be cut as the parameters.
        NotImplementedError: The parameters are extended, in a placement unsupported for extended parameters.
        MisuseError: One method is missing, or the first method's signature is unsupported.

    Effects: allocates the shards on the current stream; not a collective, except for the first call on an axis of GPUs
        without an allocator (`GroupTransports.of`).
    """
    if is_extended(local_of(candidates[0].parameter)):
        for candidate in candidates:
            check_lies(candidate.name, candidate.sharding, neighbours)
            check_policy(candidate)
        return _extended_group(candidates, allocator, offload)
    layouts: tuple[Layout, Layout]
    if candidates[0].sharding.keep is None:
        shapes = [local_of(candidate.parameter).shape for candidate in candidates]
        layouts = even_layouts(
            candidates[0].sharding.axes, shapes, [candidate.sharding.dim for candidate in candidates]
        )
    else:
        candidates, *flat_layouts = pack(candidates)
        layouts = flat_layouts[0], flat_layouts[1]
    return _packed_group(candidates, layouts, allocator, neighbours, offload)


def split_extended(groups: Sequence[ParameterGroup]) -> tuple[ParameterGroup, ...]:
    """Split off parameters whose local tensors got the two methods after sharding, into groups of their own.

    The groups must be sharded.

    Raises:
        NotImplementedError, MisuseError: The conditions of `new_group`.

    Effects: copies the shards of groups with such parameters. Not a collective.
    """
    split: list[ParameterGroup] = []
    for group in groups:
        is_split = isinstance(group.form, ExtendedForm)
        members = [] if is_split else [p for p in group.parameters if is_extended(p.shard)]
        if not members:
            split.append(group)
            continue
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could never train
            # The new group first: it clones its shards out of the group's buffer, which `remove_members` replaces.
            split.append(_split_off(group, members))
            if len(members) < len(group.parameters):
                group.remove_members(members)
                split.append(group)
    return tuple(split)


def _packed_group(
    candidates: Sequence[Candidate],
    layouts: tuple[Layout, Layout],
    allocator: Allocator | None,
    neighbours: Transport | None,
    offload: Offload | None,
) -> ParameterGroup:
    layout, main_layout = layouts
    axes, policy = candidates[0].sharding.axes, candidates[0].policy
    transports = GroupTransports.of(axes, uses_windows=allocator is None, neighbours=neighbours)
    tensors = [local_of(candidate.parameter) for candidate in candidates]
    main_dtype, _, reduce_dtype = dtypes_of(candidates[0].parameter, policy)
    main_weight = new_main_weight(main_layout, axes.main_rank, main_dtype, tensors[0].device, offload)
    # The only copy of the values: originals go when the caller drops the candidates.
    main_weight.copy_from(tensors)
    # Views of the buffer would carry the whole buffer's storage into every pickle and deep copy of one shard.
    shards = [standalone(shard) for shard in main_weight.shards]
    group = ParameterGroup(
        [sharded_parameter(candidate, shard) for candidate, shard in zip(candidates, shards, strict=True)],
        layout,
        main_weight,
        reduce_dtype,
        policy=policy,
        form=PayloadForm(),
        transports=transports,
        allocator=allocator,
        offload=offload,
    )
    # Payloads that cannot be cut so are refused while modules still hold the originals.
    group.payload_layouts(layout, main_dtype).like(main_layout)
    return group


def _extended_group(
    candidates: Sequence[Candidate], allocator: Allocator | None, offload: Offload | None
) -> ParameterGroup:
    axes = candidates[0].sharding.axes
    tensors = [local_of(candidate.parameter) for candidate in candidates]
    parameters = [
        sharded_parameter(candidate, chunk(tensor, axes, offload))
        for candidate, tensor in zip(candidates, tensors, strict=True)
    ]
    # No windows of copy engines: the methods' tensors lie in no window.
    transports = GroupTransports.of(axes, uses_windows=False, neighbours=None)
    shapes = [tensor.shape for tensor in tensors]
    return _extended(parameters, shapes, candidates[0].policy, transports, allocator, offload)


def _extended(
    parameters: Sequence[ShardedParameter],
    shapes: Sequence[tuple[int, ...]],
    policy: MixedPrecisionPolicy,
    transports: GroupTransports,
    allocator: Allocator | None,
    offload: Offload | None,
) -> ParameterGroup:
    layout, main_layout = even_layouts(parameters[0].sharding.axes, shapes, [0] * len(shapes))
    form = ExtendedForm(parameters[0].sharding.axes)
    main_weight, reduce_dtype = form.describe(parameters, main_layout, policy)
    group = ParameterGroup(
        parameters,
        layout,
        main_weight,
        reduce_dtype,
        policy=policy,
        form=form,
        transports=transports,
        allocator=allocator,
        offload=offload,
    )
    group.build_unsharded()  # allocates nothing, and refuses a first method that takes other arguments
    return group


def _split_off(group: ParameterGroup, members: Sequence[ShardedParameter]) -> ParameterGroup:
    """A group of some of another group's parameters, with that group's transports and divisor."""
    for parameter in members:
        check_lies(parameter.name, parameter.sharding, group.transports.neighbours)
        # The same object, for the methods bound to it, in new memory: the other group's buffer is rebuilt.
        shard = parameter.shard.clone()
        parameter.shard.set_(shard if group.offload is None else group.offload.pinned(shard))  # type: ignore[call-overload]
    shapes = [group.layout.shapes[group.parameters.index(parameter)] for parameter in members]
    # A copy from now on: a custom collective set on one group is not set on the other.
    transports = replace(group.transports, windows=None)
    extended = _extended(members, shapes, group.policy, transports, group.allocator, group.offload)
    # The caller made these choices on the unit: left at their defaults, gradients of split members would be divided
    # otherwise.
    extended.divisor, extended.sums_only = group.divisor, group.sums_only
    extended.keeps_bytes = group.keeps_bytes
    put(members)
    return extended
