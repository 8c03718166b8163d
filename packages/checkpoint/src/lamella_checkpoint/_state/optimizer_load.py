"""A checkpoint's optimizer state compared with a live optimizer, and loaded without a step."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from lamella_checkpoint._base.live_boxes import boxes_beside, is_placed_by, local_boxes
from lamella_checkpoint._state.optimizer import LiveOptimizer, class_slots, options
from lamella_files import (
    OPTIONS,
    STATE,
    NameDifference,
    OptionConflict,
    Source,
    TensorInfo,
    Wanted,
    group_sizes,
    short,
    split_section,
    whole_box,
)

# Options that select a step's implementation, not its result: kept from the live run, for this machine.
_LIVE_OPTIONS: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Options of which a group's parameters may lack one: of learning rate schedulers, which a later group has not met, and
# of the user's own names of groups.
_LABELS: Final = frozenset({"initial_lr", "name"})


class _NoValue:
    """The stored option of a parameter without the option: None may be the value of one."""

    def __repr__(self) -> str:
        return "no value"


_NO_VALUE: Final = _NoValue()

_WAY_OUT_OF_NUMBERS: Final = (
    "The checkpoint numbers the optimizer's parameters, through its groups: load it into an optimizer with the saved "
    "run's groups. A `save` from there, or one of `optimizer.state_dict()` with `param_names`, keeps names."
)

ByParam = Mapping[str, Mapping[str, str]]
"""Full names in a checkpoint by slot (or by option), by the live parameter's name."""


@dataclass(frozen=True, kw_only=True)
class OptimizerLoad:
    """A checkpoint's values for a live optimizer's parameters, found by name.

    `strangers` are parameters of the checkpoint's optimizer alone. `values` holds the options, read. `params` are
    the checkpoint's parameters, by the live name. `local_slots` are slots kept by the saved optimizer as
    plain tensors of a rank's elements. `is_kind_known` tells that the checkpoint names the saved optimizer's class:
    slots beyond the class's are then a user's own. `group_sizes` are those of a checkpoint that numbers parameters.
    """

    live: LiveOptimizer
    source: Source
    slots: ByParam
    options: ByParam
    strangers: tuple[str, ...]
    values: Mapping[str, Any]
    params: Mapping[str, TensorInfo]
    local_slots: Container[str] = ()
    is_kind_known: bool = False
    group_sizes: Sequence[int] | None = None

    @classmethod
    def find(
        cls,
        source: Source,
        live: LiveOptimizer,
        names: Mapping[str, list[str]],
        local_slots: Container[str] = (),
        *,
        is_kind_known: bool = False,
    ) -> "OptimizerLoad":
        """Find the parameters of `live` in a checkpoint, by any of their `names`.

        Names in the checkpoint are native names; or numbers, of parameters in the order of the groups, where the
        checkpoint keeps the groups' sizes. Numbers of groups of other sizes are nobody's.

        Raises:
            CheckpointDamaged: The condition of `group_sizes`.

        Effects: reads the options from the checkpoint's files; no collective.
        """
        sizes = group_sizes(source)
        if sizes is None:
            firsts = {name: first for first, _, _ in live.params() for name in names[first]}
        elif sizes == live.group_sizes:
            firsts = {str(number): first for number, (first, _, _) in enumerate(live.params())}
        else:
            firsts = {}
        names_by_section: dict[str, dict[str, dict[str, str]]] = {STATE: {}, OPTIONS: {}}
        strangers: dict[str, str] = {}
        for full in (*source.tensors, *source.objects):
            section, suffix = split_section(full)
            if section not in names_by_section:
                continue
            name, tail = _split(suffix, firsts)
            if name is None:
                strangers.setdefault(tail, f"{section}{tail}")
            else:
                names_by_section[section].setdefault(name, {}).setdefault(tail, full)
        option_names = [full for param_options in names_by_section[OPTIONS].values() for full in param_options.values()]
        return cls(
            live=live,
            source=source,
            slots=names_by_section[STATE] if is_kind_known else _without_steps_alone(names_by_section[STATE], live),
            options=names_by_section[OPTIONS],
            strangers=tuple(strangers.values()),
            values=_read_options(source, option_names),
            params={
                name: source.tensors[full]
                for name, _, _ in live.params()
                for full in (f"model.{alias}" for alias in names[name])
                if full in source.tensors
            },
            local_slots=local_slots,
            is_kind_known=is_kind_known,
            group_sizes=sizes,
        )

    @property
    def way_out(self) -> str:
        """A sentence for the error if the checkpoint's numbers are of other groups than the live optimizer's."""
        return "" if self.group_sizes in (None, self.live.group_sizes) else _WAY_OUT_OF_NUMBERS

    def differences(self) -> Iterator[NameDifference]:
        """Parameters missing on one side, live slots missing in the checkpoint, and slots of another optimizer class.

        Further, groups of other sizes in a checkpoint that numbers parameters, and slots of another parameter's shape.
        A parameter with options and without state had not been stepped: nothing is missing.
        """
        if self.way_out:
            sizes = f"groups of {short(self.group_sizes)} numbered parameters"
            yield NameDifference("optimizer.param_groups", sizes, f"groups of {short(self.live.group_sizes)}")
        for name, param, group in self.live.params():
            if not self._knows(name) and options(group):
                yield NameDifference(f"optimizer.param_groups.{name}", None, str(tuple(param.shape)))
            missing, foreign = self._differing_slots(name, param, group)
            for slot in dict.fromkeys((*self.live.slots(param), *missing)) if name in self.slots else ():
                if slot not in self.slots[name]:
                    yield NameDifference(f"optimizer.state.{name}.{slot}", None, "a slot")
            for slot in foreign:
                yield NameDifference(f"optimizer.state.{name}.{slot}", "a slot", None)
            for slot, info in self._slots_of_other_shapes(name, param, group):
                yield NameDifference(f"optimizer.state.{name}.{slot}", str(info.shape), str(tuple(param.shape)))
        for stranger in self.strangers:
            yield NameDifference(stranger, "a parameter", None)

    def unchanged_options(self) -> Iterator[str]:
        """Live options missing in the checkpoint, of parameters known to the checkpoint."""
        for name, _, group in self.live.params():
            for option in options(group) if name in self.options else ():
                if option not in self.options[name] and option not in _LIVE_OPTIONS:
                    yield f"optimizer.param_groups.{name}.{option}"

    def conflicts(self) -> Iterator[OptionConflict]:
        """Options with two values for the parameters of one live group, or with one that not all of them have."""
        for index, named in enumerate(self.live.groups):
            known = [name for name in named if name in self.options]
            conflicting = set(_LIVE_OPTIONS)
            for name in known[1:]:
                for option in {**self.options[known[0]], **self.options[name]}:
                    values = [self._stored_option(owner, option) for owner in (known[0], name)]
                    lacks_label = option in _LABELS and any(value is _NO_VALUE for value in values)
                    if option not in conflicting and not lacks_label and _differ(*values):
                        conflicting.add(option)
                        yield OptionConflict(option, index, known[0], values[0], name, values[1])

    def targets(self) -> dict[str, torch.Tensor]:
        """Destination of each tensor slot, by full name: the live slot if it fits, else new memory.

        Slots of fractions are of the live slot's dtype. Without a live slot they keep the stored dtype, unless it is
        the stored parameter's: then they follow the live parameter, beside which a step needs its dtype.

        Raises:
            ValueError: A live slot that is no DTensor has another number of elements than its parameter and than this
                rank's part of the parameter.

        Effects: allocates optimizer state where none exists yet.
        """
        return {
            full: self._target(name, param, group, slot, full) for name, param, group, slot, full in self._tensors()
        }

    def reads(self, targets: Mapping[str, torch.Tensor]) -> Iterator[Wanted]:
        """The reads into the targets: each in the target's own boxes, or in the parameter's."""
        for _, param, _, _, full in self._tensors():
            target = targets[full]
            if isinstance(param, DTensor) and is_placed_by(param, target, full):
                boxes = boxes_beside(param, target)
            else:
                boxes = local_boxes(target)
            yield from (Wanted(full, *box) for box in boxes)

    def assign(self, slots: Mapping[str, object]) -> None:
        """Give each parameter its slots (from `slots`, and the stored plain values), and each group its options.

        Options with conflicting values in one group stay unchanged.

        Effects: replaces the state of every parameter known to the checkpoint: without stored state, a parameter is as
            before its first step.
        """
        optimizer = self.live.optimizer
        disputed = {(conflict.group, conflict.option) for conflict in self.conflicts()}
        filled: dict[int, torch.Tensor] = {}
        for index, (named, group) in enumerate(zip(self.live.groups, optimizer.param_groups, strict=True)):
            for option, value in self._options_of(named).items():
                if option not in _LIVE_OPTIONS and (index, option) not in disputed:
                    group[option] = _like(group.get(option), value, filled)
        for name, param, _ in self.live.params():
            if self._knows(name):
                optimizer.state.pop(param, None)  # Slots missing in the checkpoint must not survive beside loaded ones.
                if name in self.slots:
                    optimizer.state[param] = {
                        slot: slots[full] if full in slots else self.source.read_object(full)
                        for slot, full in self.slots[name].items()
                    }
        # Optimizer classes upgrade state from older releases in `__setstate__`, as `load_state_dict` would.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    def without(self, names: frozenset[str]) -> "OptimizerLoad":
        """This load without some parameters, and without slots of another optimizer class.

        Nor does it have parameters whose stored state the live optimizer's class could not step with, or is another
        parameter's by its shape. The live state of all these parameters stays.
        """
        fitting = {name: self.slots[name] for name in self.slots if name not in names}
        dropped = set(names)
        for name, param, group in self.live.params():
            missing, foreign = self._differing_slots(name, param, group)
            has_other_shapes = any(self._slots_of_other_shapes(name, param, group))
            if missing or has_other_shapes or (foreign and len(foreign) == len(self.slots[name])):
                fitting.pop(name, None)
                dropped.add(name)
            elif foreign and name in fitting:
                fitting[name] = {slot: full for slot, full in fitting[name].items() if slot not in foreign}
        options = {name: options for name, options in self.options.items() if name not in dropped}
        return replace(self, slots=fitting, options=options)

    def _differing_slots(self, name: str, param: torch.Tensor, group: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Slots of the live optimizer's class that a parameter's stored state lacks, and stored slots of another."""
        expected = class_slots(self.live.optimizer, group)
        if expected is None or name not in self.slots:
            return [], []
        stored = self.slots[name]
        known_slots = {
            *expected.always,
            *expected.by_options,
            *self.live.slots(param),
            *(stored if self.is_kind_known else ()),
        }
        missing = [slot for slot in expected.always if slot not in stored]
        return missing, [slot for slot in stored if slot not in known_slots]

    def _slots_of_other_shapes(
        self, name: str, param: torch.Tensor, group: Mapping[str, Any]
    ) -> Iterator[tuple[str, TensorInfo]]:
        """Stored slots that hold a number for each element of a parameter, and not of this one.

        A parameter of another shape in the checkpoint is a difference itself, and its slots are no more.
        """
        expected, shape = class_slots(self.live.optimizer, group), tuple(param.shape)
        if expected is None or (name in self.params and self.params[name].shape != shape):
            return
        for slot, full in self.slots.get(name, {}).items():
            info = self.source.tensors.get(full)
            if slot in expected.elementwise and info is not None and info.shape != shape:
                yield slot, info

    def _stored_option(self, name: str, option: str) -> object:
        full = self.options[name].get(option)
        return _NO_VALUE if full is None else self.values[full]

    def _knows(self, name: str) -> bool:
        return name in self.slots or name in self.options

    def _options_of(self, names: Mapping[str, object]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for name in names:
            for option, full in self.options.get(name, {}).items():
                options.setdefault(option, self.values[full])
        return options

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, Any], str, str]]:
        """Slots stored as tensors: the parameter's name, the parameter, its group, the slot and the full name."""
        for name, param, group in self.live.params():
            for slot, full in self.slots.get(name, {}).items():
                if full in self.source.tensors:
                    yield name, param, group, slot, full

    def _target(self, name: str, param: torch.Tensor, group: Mapping[str, Any], slot: str, full: str) -> torch.Tensor:
        stored = self.source.tensors[full]
        live = self.live.slots(param).get(slot)
        # A cast step would stop counting, at 256 in bf16.
        dtype = stored.dtype if slot == "step" else self._dtype(name, param, stored, live)
        has_params_shape = stored.shape == tuple(param.shape)
        if isinstance(live, torch.Tensor):
            if has_params_shape and is_placed_by(param, live, full):
                return live if live.dtype == dtype else torch.zeros_like(live, dtype=dtype)
            if tuple(live.shape) == stored.shape and live.dtype == dtype:
                return live
        elif has_params_shape and slot in self.local_slots and isinstance(param, DTensor):
            return torch.zeros_like(param._local_tensor.detach(), dtype=dtype)
        return _new_slot(param.detach(), group, slot, torch.Size(stored.shape), dtype)

    def _dtype(self, name: str, param: torch.Tensor, stored: TensorInfo, live: object) -> torch.dtype:
        """The dtype of a slot to come, as `targets` describes."""
        dtype = stored.dtype
        is_of_params_dtype = name in self.params and stored.dtype == self.params[name].dtype
        if isinstance(live, torch.Tensor):
            dtype = live.dtype
        # A number beside a matrix (NAdam's `mu_product`) has a dtype of its own.
        elif is_of_params_dtype and len(stored.shape) >= min(param.ndim, 1):
            dtype = param.dtype
        # Integers and float8 are codes, which a cast does not decode.
        return dtype if _holds_values(stored.dtype) and _holds_values(dtype) else stored.dtype


def _holds_values(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _differ(value: Any, other: Any) -> bool:
    """Whether two options differ; NaN does not differ from NaN."""
    return bool(value != other) and not (value != value and other != other)


def _read_options(source: Source, names: Iterable[str]) -> dict[str, Any]:
    """Options by name. A tensor `lr` comes as a tensor."""
    values: dict[str, Any] = {}
    for name in names:
        info = source.tensors.get(name)
        if info is None:
            values[name] = source.read_object(name)
        else:
            values[name] = torch.empty(info.shape, dtype=info.dtype)
            source.read([Wanted(name, whole_box(info.shape), values[name])])
    return values


def _split(suffix: str, firsts: Mapping[str, str]) -> tuple[str | None, str]:
    """`<parameter>.<slot>` as the live parameter's first name and the slot; or None and the stranger's name.

    No parameter's name continues another's with a dot, so the shortest known prefix is the parameter.
    """
    end = suffix.find(".")
    while end != -1:
        if suffix[:end] in firsts:
            return firsts[suffix[:end]], suffix[end + 1 :]
        end = suffix.find(".", end + 1)
    return None, suffix.rpartition(".")[0]


def _new_slot(
    param: torch.Tensor, group: Mapping[str, Any], slot: str, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Memory for a slot, as an optimizer's first step would allocate it."""
    if slot == "step" and not shape:
        # Counted on the host, unless the step cannot read host values: torch.optim's own rule.
        on_device = bool(group.get("capturable") or group.get("fused"))
        return torch.zeros(
            shape, dtype=torch.float32 if on_device else dtype, device=param.device if on_device else "cpu"
        )
    if shape == param.shape:
        return torch.zeros_like(param, dtype=dtype)
    if not shape:
        return torch.zeros(shape, dtype=dtype, device=param.device)
    # Factored second moments and the like. A DTensor parameter gives a replicated slot, as in a step.
    return param.new_zeros(shape, dtype=dtype)


def _like(live: object, value: object, filled: dict[int, torch.Tensor]) -> object:
    """A stored option in the live option's form: a tensor is filled in place: a compiled step holds it.

    Args:
        live: The live option.
        value: The stored option.
        filled: The tensors filled so far, by id. torch gives every group the one tensor of a common `lr=`: filled
            twice, the tensor would hold the last group's value for all of them.
    """
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(live, torch.Tensor) and isinstance(value, int | float):
        with torch.no_grad():
            if id(live) in filled and live.item() != torch.full_like(live, value).item():
                live = live.clone()
            filled[id(live)] = live
            return live.fill_(value)
    if isinstance(live, tuple | list) and isinstance(value, tuple | list) and len(live) == len(value):
        return type(value)(_like(*pair, filled) for pair in zip(live, value, strict=True))
    return value


def _without_steps_alone(slots: ByParam, live: LiveOptimizer) -> ByParam:
    """Stored slots without those of parameters that were never stepped, in groups that count for all parameters."""
    unstepped = {
        name
        for name, _, group in live.params()
        if slots.get(name, {}).keys() == {"step"}
        and (expected := class_slots(live.optimizer, group)) is not None
        and expected.always != ("step",)
    }
    return {name: stored for name, stored in slots.items() if name not in unstepped}
