"""Writes to main weights behind a unit's back: found by version counters and by storages, and refused where unsafe."""

from __future__ import annotations

from lamella_engine._parameters.sharded_parameter import COPY
from lamella_engine._unit.parameters import UnitParameters


def refuse_assigned_data(parameters: UnitParameters) -> None:
    """Refuse `parameter.data = tensor` on either form, once; the unit must be sharded, without a kept copy.

    Raises:
        RuntimeError: `data` of a parameter was assigned. Both forms are as before the assignment.
    """
    names = [name for group in parameters.groups for name in group.undo_assigned_data()]
    if names:
        raise RuntimeError(
            f"Expected {names} to be written in place, got other tensors by `parameter.data = tensor`. A sharded "
            "parameter cannot take over another tensor's memory, and has the values from before the assignment. "
            f"Copy under torch.no_grad(), {COPY}; to tie parameters, give both modules one Parameter."
        )


def is_written_since(parameters: UnitParameters, before: list[tuple[int, int]]) -> bool:
    """Whether shards were written since an early gather, as far as torch's version counters can tell.

    A DTensor is written by every rank alike, so all ranks gather again. A local shard may be written by this rank
    alone, and a gather on this rank alone would never end.

    Args:
        parameters: The unit's.
        before: `UnitParameters.versions` at the gather.

    Raises:
        RuntimeError: A local shard was written, maybe on this rank alone.
    """
    # The versions from before are of other tensors.
    if parameters.is_replaced:
        return True
    now = parameters.versions
    if [version for version, _ in before] != [version for version, _ in now]:
        return True
    if before != now:
        raise RuntimeError(
            f"Expected mark_updated(), on every rank, after this rank's shards of {parameters.title} were written "
            "between optimizer.step() and the next forward, got none: the step has gathered them for that forward "
            "already (overlap_optimizer)."
        )
    return False
