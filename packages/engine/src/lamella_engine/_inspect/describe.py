"""The contents of units as text, with the owning ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn as nn
from torch.distributed.tensor import DTensor

from lamella_engine._common.text import clean_name, range_text, size_text, table
from lamella_engine._modules.state import find_state
from lamella_engine._parameters.group import ParameterGroup, dtypes_of
from lamella_engine._parameters.sharded_parameter import ShardedParameter
from lamella_engine._unit.unit import Unit
from lamella_layout import mesh_region, picture


def describe(module: nn.Module) -> str:
    """The parameters of a module's units, on this rank.

    For each parameter: name, whole shape, placements, this rank's part (as slices of the whole) and the part's bytes.
    For each group of parameters communicated together: dtypes at rest, in compute and in reductions, and a picture of
    the owning ranks. Equal units are described once.

    Args:
        module: A unit, or a module with units in it.

    Returns:
        Text of many lines.

    Raises:
        ValueError: The module has no unit.

    Effects: not a collective. Offsets and sizes are this rank's.
    """
    alike: dict[str, list[str]] = {}
    for name, inner in module.named_modules():
        if (state := find_state(inner)) is not None and id(inner) in state.unit.parameters.module_ids:
            alike.setdefault("\n".join(_unit(inner, state.unit)), []).append(clean_name(name) or "(the module)")
    if not alike:
        raise ValueError(
            f"Expected a unit or a module with units in it, got {type(module).__name__}. Call fully_shard first."
        )
    return "\n\n\n".join(f"{range_text(names)}: {text}" for text, names in alike.items())


def _unit(module: nn.Module, unit: Unit) -> Iterator[str]:
    """A unit without a name: equal units give equal text."""
    num_groups, residency = len(unit.parameters.groups), unit.weights.residency
    yield f"{type(module).__name__}, {num_groups} group{'s' * (num_groups != 1)}, {residency.name.lower()} now"
    for group in unit.parameters.groups:
        yield ""
        yield from _group(group)


def _group(group: ParameterGroup) -> Iterator[str]:
    dtypes = dtypes_of(group.parameters[0].sharded, group.policy)
    main, _, reduced = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    payloads = group.payload_layouts(group.layout, dtypes[0])
    wire = ", ".join(str(payload_format.dtype).removeprefix("torch.") for payload_format in payloads.formats)
    home = "" if group.offload is None else ", on the CPU"
    yield f"at rest     {main}, {size_text(group.main_weight.flat.nbytes)} a rank with padding{home}"
    yield f"unsharded   {wire}, {size_text(payloads.nbytes)} with padding"
    yield f"gradients   {f'reduced in {reduced}' if group.is_trainable else 'none: frozen'}"
    yield f"mesh        {_mesh(dtensor_for(group.parameters[0]))}"
    yield ""
    header = ("parameter", "shape", "placements", "this rank owns", "bytes")
    yield table([header, *(_row(parameter) for parameter in group.parameters)], right=("bytes",))
    yield ""
    yield picture(group.layout, names=[clean_name(parameter.name) for parameter in group.parameters])


def _row(parameter: ShardedParameter) -> Sequence[str]:
    sharded = dtensor_for(parameter)
    placements = ", ".join(str(placement) for placement in sharded.placements)
    return (clean_name(parameter.name), str(tuple(sharded.shape)), placements, _owned(sharded), _nbytes(parameter))


def dtensor_for(parameter: ShardedParameter) -> DTensor:
    assert isinstance(parameter.sharded, DTensor)
    return parameter.sharded


def _nbytes(parameter: ShardedParameter) -> str:
    return f"{parameter.shard.numel() * parameter.shard.element_size():,}"


def _mesh(sharded: DTensor) -> str:
    mesh = sharded.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = [
        f"{name}={num_ranks}" if name else str(num_ranks) for name, num_ranks in zip(names, mesh.shape, strict=True)
    ]
    return f"{' x '.join(axes)} on {mesh.device_type}"


def _owned(sharded: DTensor) -> str:
    """This rank's part as slices of the whole; a dim cut in several runs lists all runs."""
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # ranks outside the mesh have no shards
    region = mesh_region(sharded.shape, mesh.shape, sharded.placements, coordinate)
    if 0 in region.shape:
        return "nothing"
    runs = ("+".join(f"{run.start}:{run.stop}" for run in dim) for dim in region.runs)
    return f"[{', '.join(runs)}]"
