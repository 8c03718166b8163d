"""Attributes of parameters: megatron-core reads either form of a sharded parameter."""

from __future__ import annotations

from torch import nn

from lamella_engine.extending import ShardedParameter, living_trees


def mark(model: nn.Module, name: str, **attributes: object) -> None:
    """Set attributes of a parameter, on the sharded and on the unsharded form.

    Attributes from before `fully_shard_model` are on both forms. Afterwards `setattr` reaches only the form in the
    module at the moment: between steps the sharded form, never seen in forward.

        mark(model, "output_layer.weight", sequence_parallel=True)

    Args:
        model: The outermost unit, a unit, or a module below a unit.
        name: Name of the parameter below `model`.
        attributes: New values, by name.

    Raises:
        AttributeError: `model` has no parameter of the name.

    Effects: none on storage; not a collective.
    """
    visible_form = model.get_parameter(name)
    parameter = _sharded_parameter(visible_form)
    forms = [visible_form] if parameter is None else [parameter.sharded, parameter.unsharded]
    for form in forms:
        vars(form).update(attributes)
    if parameter is not None:
        parameter.marks.update(attributes)  # for forms to be made anew


def _sharded_parameter(form: nn.Parameter) -> ShardedParameter | None:
    """The parameter with a tensor as a form, or None."""
    for tree in living_trees():
        for unit in tree.units:
            for group in unit.parameters.groups:
                for parameter in group.parameters:
                    if form is parameter.sharded or form is parameter.unsharded:
                        return parameter
    return None
