"""Parameters that were tied, untied or moved after `fully_shard`: one tensor in several places is one parameter.

    assigned after fully_shard                         becomes
    head.weight = embed.weight, in one unit            one parameter; the second one's shards are freed
    head.weight = embed.weight, in two units           RuntimeError with both names
    head.weight = another DTensor, where it was tied   RuntimeError with both places
    weight = a Parameter with the same placements      the parameter (`ParameterGroup.adopt_replaced_shards`)
    weight = anything else                             TypeError (`ShardedParameter.replacement`)
    any of these while the unit is unsharded           RuntimeError (`install`)

No hook sees an assignment. A unit at rest finds the assignment while looking for replaced shards: when the next forward
begins, before the first gather.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella_engine._parameters.group import ParameterGroup
from lamella_engine._parameters.sharded_parameter import ShardedParameter, living_parameters

_WAY_OUT = "Tie parameters before fully_shard, and leave the modules that hold them to one unit."


def merge_tied(groups: Sequence[ParameterGroup], *, keep_parameters: bool) -> tuple[ParameterGroup, ...]:
    """Merge parameters whose places hold the same tensor now.

    Args:
        groups: The groups of a unit at rest.
        keep_parameters: Whether a state dict was loaded, which may give the places of a tied parameter different
            tensors. (As for `ParameterGroup.adopt_replaced_shards`.)

    Returns:
        The groups with members left.

    Raises:
        RuntimeError: A place holds a parameter of another unit, a tied parameter was replaced in some places only, or
            parameters were tied in the middle of a step, or after `set_main_grads` or `delay_gradient` on them.
        NotImplementedError: A tied parameter lies in the flat layout.

    Effects: copies the shards of groups that lose a member. Not a collective.
    """
    tied: dict[int, list[ShardedParameter]] = {}
    for group in groups:
        for parameter in group.parameters:
            if not (keep_parameters or group.is_meta):
                _check_alike(parameter)
            if (form := parameter.current_form()) is not None:
                tied.setdefault(id(form), []).append(parameter)
    _check_of_one_unit([parameter for members in tied.values() for parameter in members])
    tied_members = [members for members in tied.values() if len(members) > 1]
    if not tied_members or any(group.on_meta() for group in groups):
        return tuple(groups)  # a meta tensor has no rows to move, and a gather refuses meta tensors
    survivors = {parameter: _survivor_of(members) for members in tied_members for parameter in members}
    gone = [parameter for parameter, by in survivors.items() if by is not parameter]
    _check_between_steps(groups, gone)
    for parameter in gone:
        survivors[parameter].owners += parameter.owners
        # Without owners `install` can put no form of the freed parameter over the survivor's.
        parameter.owners = []
    return tuple(group for group in groups if _remove_members(group, gone, keep_parameters=keep_parameters))


def _survivor_of(members: Sequence[ShardedParameter]) -> ShardedParameter:
    """The parameter whose own form is in all places; the first parameter, if all places got a new tensor."""
    return next((parameter for parameter in members if parameter.current_form() is parameter.sharded), members[0])


def _remove_members(group: ParameterGroup, gone: Sequence[ShardedParameter], *, keep_parameters: bool) -> bool:
    """Whether the group has members left."""
    lost = [parameter for parameter in group.parameters if parameter in gone]
    if lost and len(lost) < len(group.parameters):
        group.remove_members(lost, keep_parameters=keep_parameters)
        return True
    return not lost


def _check_alike(parameter: ShardedParameter) -> None:
    tensor_ids = {id(tensor) for tensor in parameter.in_places()}
    if len(tensor_ids) > 1:
        raise RuntimeError(
            f"Expected the {len(parameter.owners)} places that hold {parameter.full_name!r} to hold one tensor, as "
            f"they did when it was sharded, got {len(tensor_ids)} different ones. Assign one tensor in all of them; "
            "parameters that are to be trained apart must be untied before fully_shard."
        )


def _check_of_one_unit(mine: Sequence[ShardedParameter]) -> None:
    replaced = {
        id(form): parameter for parameter in mine if (form := parameter.current_form()) is not parameter.sharded
    }
    if not replaced:
        return
    # Of all living units, not of the tree alone: the tensor may be another model's parameter.
    for other in set(living_parameters()) - set(mine):
        for form in (other.sharded, *other.in_places()):
            if (parameter := replaced.get(id(form))) is not None and other.is_in_place(form):
                raise RuntimeError(
                    f"Expected {parameter.full_name!r} to stay in its unit after fully_shard, got {other.full_name!r}, "
                    f"a parameter of another unit, in its place. {_WAY_OUT}"
                )


def _check_between_steps(groups: Sequence[ParameterGroup], gone: Sequence[ShardedParameter]) -> None:
    names = [parameter.full_name for parameter in gone]
    if any(group.has_gradients or group.partial is not None for group in groups):
        raise RuntimeError(
            f"Expected {names} to be tied between steps, got some between the microbatches of one. {_WAY_OUT}"
        )
    if any(parameter.keeps_grad_clear for parameter in gone):
        raise RuntimeError(
            f"Expected {names} to be tied before set_main_grads, delay_gradient and UnitResidence, got some that were "
            f"given to them. {_WAY_OUT}"
        )
    if any(parameter.sharding.keep is not None for parameter in gone):
        raise NotImplementedError(
            f"Expected {names} to be tied before fully_shard, as `keep_together` packs them, got some tied after it. "
            f"{_WAY_OUT}"
        )
