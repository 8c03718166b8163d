"""Native names for other programs' checkpoints: finds the model, the optimizer, and wrappers' additions.

Note [Locating sections]
    Training programs save a dict: the model's state dict under some key, the optimizer's under another, often inside a
    third (`{"app": {"model": ..., "optim": ...}}`); or a model's state dict and nothing else. The keys on the path to
    a value identify the section: sections are searched among the keys, from the outermost inwards, past keys
    shared by all values but plain ones (`{"app": ..., "step": 3}`). A key without a tensor below is a section only
    if no other key is: configurations are saved as `model` too. Inside a section, parts of names that only wrappers
    add (FSDP, DDP, torch.compile, activation checkpointing) are left out.

Note [Optimizers by group]
    An optimizer's own state dict numbers parameters and keeps options by group; torch's `get_state_dict` names the
    parameters and keeps groups. Both become options by parameter. A numbered parameter gets the name from
    the group's `param_names`, or keeps the number: a place among the groups, whose sizes `GROUP_SIZES` keeps.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard, cast

import torch

from lamella_files import (
    GROUP_SIZES,
    MODEL,
    OPTIONS,
    CheckpointDamaged,
    Source,
    Wanted,
    WithObjects,
    in_model,
    rename,
    short,
    whole_box,
)

Keys = tuple[str | int, ...]

_MODEL_KEYS: Final = ("model", "model_state_dict", "model_state", "state_dict", "module")
_OPTIMIZER_KEYS: Final = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
_WRAPPER_PARTS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_GROUP: Final = re.compile(r"param_groups\.(\d{1,9})\.(.+)")


@dataclass(frozen=True, kw_only=True)
class Native:
    """A checkpoint under native names, and the removed parts of stored names: shared keys and prefixes, as text."""

    source: Source
    stripped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LiveNames:
    """The names of a live model to look for."""

    model: Collection[str]


def to_native(source: Source, paths: Mapping[str, Keys], live: LiveNames | None = None) -> Native:
    """Find the model and the optimizer in a checkpoint: Note [Locating sections], Note [Optimizers by group].

    Args:
        source: With the stored names.
        paths: The keys on the path to a value, by name; an absent name is a single key.
        live: Names to find. With live names, any prefix common to all of the model's stored names and to no live name
            is removed; otherwise only `module`, which DDP adds.

    Returns:
        `model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups.<name>.<option>`; other entries under
        their own names, without plain values of a dict whose key is like a section's.

    Raises:
        ValueError: Two names would become one.

    Effects: reads the options of an optimizer that keeps them by group, and nothing else.
    """
    all_keys = {name: paths.get(name) or _keys(name) for name in (*source.tensors, *source.objects)}
    sections = _find(all_keys, source)
    depth = len(sections.outer)
    rest_of = {name: keys[depth:] for name, keys in all_keys.items() if keys[:depth] == sections.outer and keys[depth:]}
    model = {
        name: _unwrapped(".".join(map(str, suffix if sections.is_bare else suffix[1:])))
        for name, suffix in rest_of.items()
        if (sections.is_bare and name in source.tensors) or (not sections.is_bare and suffix[0] == sections.model)
    }
    prefix = _shared_prefix(list(model.values()), live)
    names = {name: in_model(inner.removeprefix(prefix)) for name, inner in model.items()}
    optimizer = {
        name: ".".join(map(str, suffix[1:]))
        for name, suffix in rest_of.items()
        if sections.optimizer is not None and suffix[0] == sections.optimizer
    }
    optimizer_names, options = _optimizer(source, optimizer, prefix)
    names |= {name: f"optimizer.{inner}" for name, inner in optimizer_names.items()}
    # A configuration's names would be taken for the section's.
    configured = {name for name in source.objects if len(all_keys[name]) > 1 and name.startswith((MODEL, "optimizer."))}
    dropped = (configured | set(optimizer)) - set(names)
    if not (options or dropped) and all(name == new for name, new in names.items()):
        return Native(source=source, stripped=())
    renamed = rename(source, lambda name: None if name in dropped else names.get(name, name))
    return Native(
        source=WithObjects(renamed, options) if options else renamed,
        stripped=(*map(str, sections.outer), *([prefix.removesuffix(".")] if prefix else [])),
    )


@dataclass(frozen=True, kw_only=True)
class _Sections:
    """The keys around the sections, and the sections' keys; `is_bare` for a model's values without a section."""

    outer: Keys
    model: str | int | None
    optimizer: str | int | None
    is_bare: bool = False


def _keys(name: str) -> Keys:
    """The keys of a name without recorded keys."""
    first, _, suffix = name.partition(".")
    return (first, suffix) if suffix and first in (*_MODEL_KEYS, *_OPTIMIZER_KEYS) else (name,)


def _find(all_keys: Mapping[str, Keys], source: Source) -> _Sections:
    """The innermost level with a section and all tensors inside; else the outermost level's contents."""
    sections: _Sections | None = None
    level, outer = dict(all_keys), Keys()
    while level:
        nested = dict.fromkeys(keys[0] for keys in level.values() if len(keys) > 1)
        with_tensors = {keys[0] for name, keys in level.items() if len(keys) > 1 and name in source.tensors}
        # A configuration may lie under a section's key, and an optimizer without state holds no tensor.
        model, optimizer = (
            next((key for candidates in (with_tensors, nested) for key in keys if key in candidates), None)
            for keys in (_MODEL_KEYS, _OPTIMIZER_KEYS)
        )
        if model is not None or optimizer is not None:
            sections = _Sections(outer=outer, model=model, optimizer=optimizer)
        if len(nested) != 1 or any(len(keys) == 1 and name in source.tensors for name, keys in level.items()):
            break
        outer = (*outer, *nested)
        level = {name: keys[1:] for name, keys in level.items() if len(keys) > 1}  # A counter may lie beside.
    if sections is not None:
        return sections
    if outer:
        return _Sections(outer=(), model=outer[0], optimizer=None)
    return _Sections(
        outer=(), model=None, optimizer=None, is_bare=any(len(all_keys[name]) == 1 for name in source.tensors)
    )


def _unwrapped(name: str) -> str:
    parts = name.split(".")
    return name if _WRAPPER_PARTS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPER_PARTS)


def _shared_prefix(names: Sequence[str], live: LiveNames | None) -> str:
    """The common prefix of all names, up to a dot, absent from live names; empty if no live name matches without it."""
    prefix = ""
    while names:
        part = names[0].removeprefix(prefix).partition(".")[0]
        longer = f"{prefix}{part}."
        if not all(name.startswith(longer) for name in names):
            break
        if live is None and part != "module":
            break
        if live is not None and any(name.startswith(part + ".") for name in live.model):
            break
        prefix = longer
    if live is not None and not any(name.removeprefix(prefix) in live.model for name in names):
        return ""
    return prefix


def _optimizer(source: Source, entries: Mapping[str, str], prefix: str) -> tuple[dict[str, str], dict[str, object]]:
    """The optimizer's native names by stored names, and the options of an optimizer with groups, with their sizes."""

    def parameter_name(name: str) -> str:
        return _unwrapped(name).removeprefix(prefix)

    groups = _groups(source, entries)
    counted = dict(_counted(groups))
    names: dict[str, str] = {}
    for name, entry in entries.items():
        section, _, suffix = entry.partition(".")
        key, _, slot = suffix.partition(".")
        if section == "state" and key in counted:
            names[name] = f"state.{parameter_name(counted[key])}.{slot}"
        elif suffix and not (groups and section == "param_groups"):
            names[name] = f"{section}.{parameter_name(suffix)}"
    options = {
        f"{OPTIONS}{parameter_name(counted.get(str(param), str(param)))}.{option}": value
        for group in groups
        for param in group["params"]
        for option, value in group.items()
        if option not in ("params", "param_names")
    }
    if any(isinstance(param, int) and str(param) not in counted for group in groups for param in group["params"]):
        options[GROUP_SIZES] = [len(group["params"]) for group in groups]
    return names, options


def _groups(source: Source, entries: Mapping[str, str]) -> list[dict[str, Any]]:
    """An optimizer's groups with options read; empty without groups."""
    slots: dict[int, dict[str, str]] = {}
    for name, entry in entries.items():
        if entry == "param_groups":  # torch before 2.4 saved the list as one object.
            return _checked(source, _value(source, name))
        if match := _GROUP.fullmatch(entry):
            slots.setdefault(int(match[1]), {})[match[2]] = name
    if not all("params" in group for group in slots.values()):
        return []
    groups = [{option: _value(source, name) for option, name in slots[index].items()} for index in sorted(slots)]
    return _checked(source, groups)


def _checked(source: Source, groups: object) -> list[dict[str, Any]]:
    """Check the form of an optimizer's groups: options, with a list of parameters, and optional names."""
    for group in groups if isinstance(groups, list) else [groups]:
        params = group.get("params") if isinstance(group, dict) else None
        names = group.get("param_names", params) if isinstance(group, dict) else None
        if not (_are_keys(params) and _are_keys(names)) or len(params) != len(names):
            raise CheckpointDamaged(str(source.path), f"expected a list of the optimizer's groups, got {short(group)}")
    return cast(list[dict[str, Any]], groups)


def _are_keys(value: object) -> TypeGuard[list[int | str]]:
    return isinstance(value, list) and all(isinstance(key, int | str) for key in value)


def _counted(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The numbers of numbered parameters, with their names in the groups' `param_names`."""
    for group in groups:
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
            if isinstance(param, int):
                yield str(param), name


def _value(source: Source, name: str) -> Any:
    info = source.tensors.get(name)
    if info is None:
        return source.read_object(name)
    value = torch.empty(info.shape, dtype=info.dtype)
    source.read([Wanted(name, whole_box(info.shape), value)])
    return value
