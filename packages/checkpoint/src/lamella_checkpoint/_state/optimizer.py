"""A live optimizer as named values: each parameter's state and options under the parameter's name.

The names are those of torch's flattened optimizer state dict: `state.<parameter>.<slot>` and
`param_groups.<parameter>.<option>`. Options belong to a parameter and not to a group's number, so that groups can be
regrouped and reordered between a save and a load.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from lamella_checkpoint._base.manifest import OptimizerKind
from lamella_checkpoint._state.model import LiveModel
from lamella_files import is_plain


@dataclass(frozen=True, kw_only=True)
class LiveOptimizer:
    """An optimizer and its parameters by name, group by group."""

    optimizer: torch.optim.Optimizer
    groups: tuple[Mapping[str, torch.Tensor], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: LiveModel) -> "LiveOptimizer":
        """Name an optimizer's parameters.

        Raises:
            ValueError: A parameter is not the model's.
        """
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            names = [model.names.get(id(param)) for param in group["params"]]
            if None in names:
                position = names.index(None)
                raise ValueError(
                    f"Expected the optimizer's parameters to be the model's, got a stranger of shape "
                    f"{tuple(group['params'][position].shape)} at position {position} of parameter group {index}. "
                    f"Create the optimizer after `fully_shard`, over the model that you save."
                )
            groups.append(dict(zip((name for name in names if name is not None), group["params"], strict=True)))
        return cls(optimizer=optimizer, groups=tuple(groups))

    def params(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Each parameter with its name and its group."""
        for named, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name, param in named.items():
                yield name, param, group

    @property
    def group_sizes(self) -> list[int]:
        """The numbers of parameters of the groups."""
        return [len(named) for named in self.groups]

    def slots(self, param: torch.Tensor) -> dict[str, Any]:
        """A parameter's state; empty before the first step."""
        return cast(dict[str, Any], self.optimizer.state.get(param, {}))  # Indexing a defaultdict would create state.

    def entries(self) -> tuple[dict[str, object], dict[str, str]]:
        """The values to write, by name; and aliases, under which further parameters find their group's options.

        Raises:
            NotImplementedError: A slot is neither a tensor nor plain data, or state belongs to no parameter.
            TypeError: An option is no plain data.
        """
        _check_of_params(self.optimizer)
        values: dict[str, object] = {}
        aliases: dict[str, str] = {}
        for named, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for option, value in options(group).items() if named else ():
                first, *other_names = [f"param_groups.{name}.{option}" for name in named]
                values[first] = _plain_option(option, value)
                aliases.update(dict.fromkeys(other_names, first))
        for name, param, _ in self.params():
            for slot, value in self.slots(param).items():
                values[f"state.{name}.{slot}"] = _storable_slot(name, slot, value)
        return values, aliases


class ClassSlots(NamedTuple):
    """The slots of a stepped parameter by an optimizer's class: always there, and there by options or by shape.

    `is_torchs` tells that the class is one of torch's, whose slots have known shapes.
    """

    always: tuple[str, ...]
    by_options: tuple[str, ...] = ()
    is_torchs: bool = True

    @property
    def elementwise(self) -> frozenset[str]:
        """The slots that surely have the parameter's shape."""
        return frozenset((*self.always, *self.by_options) if self.is_torchs else ()) - _OF_OTHER_SHAPES


# Slots of torch's optimizers with one number for a parameter, or with one for a row or a column.
_OF_OTHER_SHAPES: Final = frozenset({"step", "eta", "mu", "mu_product", "row_var", "col_var"})

# A step would tell the slots too, but may communicate, and changes what hooks have counted.
_CLASS_SLOTS: Final[Mapping[type[optim.Optimizer], ClassSlots]] = {
    optim.Adadelta: ClassSlots(("step", "square_avg", "acc_delta")),
    optim.Adafactor: ClassSlots(("step",), ("row_var", "col_var", "variance")),
    optim.Adagrad: ClassSlots(("step", "sum")),
    optim.Adam: ClassSlots(("step", "exp_avg", "exp_avg_sq"), ("max_exp_avg_sq",)),
    optim.Adamax: ClassSlots(("step", "exp_avg", "exp_inf")),
    optim.AdamW: ClassSlots(("step", "exp_avg", "exp_avg_sq"), ("max_exp_avg_sq",)),
    optim.ASGD: ClassSlots(("step", "eta", "mu", "ax")),
    optim.Muon: ClassSlots(("momentum_buffer",)),
    optim.NAdam: ClassSlots(("step", "mu_product", "exp_avg", "exp_avg_sq")),
    optim.RAdam: ClassSlots(("step", "exp_avg", "exp_avg_sq")),
    optim.RMSprop: ClassSlots(("step", "square_avg"), ("momentum_buffer", "grad_avg")),
    optim.Rprop: ClassSlots(("step", "prev", "step_size")),
    optim.SGD: ClassSlots((), ("momentum_buffer",)),
}


def class_slots(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> ClassSlots | None:
    """The slots of a group's parameters in one of torch's optimizers.

    An optimizer with `parts`, a list of optimizers over its groups, steps each group by one of them: its parameters
    have the slots of the part. A part of another class than torch's may declare its slots as `state_slots`.

    Returns:
        None for another class without such a declaration, also a subclass, which may have slots of its own.
    """
    parts = getattr(optimizer, "parts", None)
    for part in parts if isinstance(parts, list | tuple) else ():
        if isinstance(part, optim.Optimizer) and any(group is part_group for part_group in part.param_groups):
            declared = getattr(part, "state_slots", None)
            return _CLASS_SLOTS.get(type(part)) if declared is None else ClassSlots(declared, is_torchs=False)
    return _CLASS_SLOTS.get(type(optimizer))


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, without the parameters (and their names, which must be the live names)."""
    return {option: value for option, value in group.items() if option not in ("params", "param_names")}


def _plain_option(option: str, value: object) -> object:
    """An option as plain data: a tensor `lr` (for capturable steps) or a scalar of NumPy is stored as a number."""
    if getattr(value, "ndim", None) == 0:
        value = cast(Any, value).item()
    elif isinstance(value, list | tuple):
        value = type(value)([_plain_option(option, element) for element in value])
    if not is_plain(value):
        raise TypeError(f"Expected the optimizer's options to be plain data, got {value!r} for {option!r}.")
    return value


def _check_of_params(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state beside the parameters': no name of the model is the state's, and a resumed run would lack it."""
    for key, value in cast(Mapping[object, Any], optimizer.state).items():
        if not isinstance(key, torch.Tensor) and value:
            raise NotImplementedError(
                f"Expected optimizer state of parameters, got {key!r} in the state of {type(optimizer).__name__}. Keep "
                f"plain data in `param_groups`, or save it in `extra` and remove it from the state meanwhile."
            )


def _storable_slot(name: str, slot: object, value: object) -> object:
    if not isinstance(slot, str) or not (isinstance(value, torch.Tensor) or is_plain(value)):
        raise NotImplementedError(
            f"Expected optimizer state of tensors and plain data by name, got {type(value).__name__} for slot "
            f"{slot!r} of {name!r}. State that spans parameters, as LBFGS keeps it, cannot be resharded."
        )
    return value


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """The class and the declared options of a live optimizer."""
    kind = type(optimizer)
    return OptimizerKind(
        class_name=f"{kind.__module__}.{kind.__qualname__}",
        options=frozenset(optimizer.defaults),
        local_slots=frozenset(_local_slots(optimizer)),
    )


def _local_slots(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    for param, slots in optimizer.state.items():
        if not isinstance(param, DTensor):
            continue
        has_all = param._local_tensor.shape == param.shape  # Then the shape does not distinguish local from global.
        for slot, value in slots.items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_plain and value.ndim and (has_all or value.shape != param.shape):
                yield str(slot)
