"""A whole model in one call: the choice of modules that become units, and `fully_shard` on each.

Note [Outermost wins]
    Of two modules that match and lie in each other, the outer module becomes a unit and the inner module stays in it.
    `fnmatch`'s `*` matches dots too: "layers.*" means the layers, and would otherwise make a unit of every leaf.
    Units inside units are made by hand: `fully_shard` the inner modules first. A module that is a unit already stays as
    it is, and matches around it still become units.

Note [Modules that are passed over]
    Not every match can be a unit. A module without a forward never runs, so its hooks never fire: the modules inside
    stand in. A module that shares a parameter with a module outside would split the parameter over two units: the
    module is left to the unit around both, which is the model's, and matches inside are looked at in turn. A module
    with a parameter that an outer module reads without a call is left to the model's unit too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, SupportsIndex, TypeVar

import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.nn as nn

from lamella_engine._api.candidates import ignored_parameters
from lamella_engine._api.fully_shard import as_policy, fully_shard
from lamella_engine._api.plan import PlannedParameter, PlannedUnit, ShardingPlan
from lamella_engine._api.reads import reads_of
from lamella_engine._common.text import clean_name, size_text
from lamella_engine._modules.attached import state_of
from lamella_engine._modules.state import find_state
from lamella_engine._parameters.group import dtypes_of
from lamella_engine._parameters.sharding import local_of
from lamella_engine._parameters.unsharded_weight import cached_nbytes
from lamella_precision import MixedPrecisionPolicy

M = TypeVar("M", bound=nn.Module)
Selector = type[nn.Module] | str
Policy = MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy

_NUM_SUGGESTIONS = 8


def fully_shard_model(
    model: M, *, units: Selector | Collection[Selector] | SupportsIndex, verbose: bool = True, **fully_shard_kwargs: Any
) -> M:
    """Shard a whole model: `fully_shard` on each of its units, then on the model, which takes the rest.

        fully_shard_model(model, units=DecoderLayer)           # every module of a class, or of several
        fully_shard_model(model, units=["layers.*", "head"])   # by name
        fully_shard_model(model, units="no_split")             # as a Hugging Face model says itself
        fully_shard_model(model, units=256 * 2**20)            # units of at most 256 MiB, unsharded

    Of matches inside each other the outermost wins. A module without a forward is replaced by the modules inside. A
    module that shares a parameter with the rest of the model is left to the model's own unit. `plan_units` tells
    beforehand.

    Args:
        model: The model to shard, in place. Units inside stay units.
        units: A module class or several; a pattern of dotted names (`fnmatch`) or several; "no_split" for the classes
            in `_no_split_modules` of the model and of its modules; or a number of bytes: the outermost modules whose
            unsharded parameters fit become units, and so do single modules that are larger.
        verbose: Print the plan, on rank 0.
        fully_shard_kwargs: Arguments of every `fully_shard` call; `options` too.

    Returns:
        `model`, changed.

    Raises:
        TypeError: `units` is of another kind, or `model` no module.
        ValueError: A class or a pattern matches no module that holds parameters, a byte budget is not positive, the
            model has no `_no_split_modules` for "no_split", has no forward, or is sharded already.
        The errors of `fully_shard`.

    Effects: as `fully_shard`, once a unit; prints.
    """
    # Once: an iterator would be empty for the units.
    fully_shard_kwargs["ignored_params"] = ignored = ignored_parameters(fully_shard_kwargs.get("ignored_params"))
    plan = plan_units(model, units=units, mp_policy=fully_shard_kwargs.get("mp_policy"), ignored_params=ignored)
    modules = [model.get_submodule(unit.name) for unit in plan.units]
    for module in modules:
        fully_shard(module, **fully_shard_kwargs)
    if verbose and dist.get_rank() == 0:
        print(replace(plan, num_ranks=_num_ranks(modules)))
    return model


def plan_units(
    model: nn.Module,
    *,
    units: Selector | Collection[Selector] | SupportsIndex,
    mp_policy: Policy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    num_ranks: int | None = None,
) -> ShardingPlan:
    """The plan of `fully_shard_model`, without sharding; a model on the meta device will do.

    Args:
        model: The model that `fully_shard_model` would shard.
        units: The choice of units, as `fully_shard_model` takes it.
        mp_policy: Number formats that sizes are counted in.
        ignored_params: Parameters that will be left alone.
        num_ranks: Ranks that will share each parameter, for the bytes that each rank holds. None leaves the bytes out.

    Returns:
        The plan.

    Raises:
        TypeError, ValueError: The conditions of `fully_shard_model`.
    """
    _check_model(model)
    tree = _ModuleTree(model, ignored_parameters(ignored_params), mp_policy)
    matched = _matched(tree, units)
    choice = _Choice(tree, matched)
    planned = [_planned(tree, name, module) for name, module in choice.chosen]
    planned.append(_remaining_unit(tree, choice.chosen))
    return ShardingPlan(units=tuple(planned), notes=tuple(choice.notes), num_ranks=num_ranks)


def _check_model(model: nn.Module) -> None:
    """Refuse a model that the last `fully_shard` call would refuse, before the first call changes anything."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` to be an nn.Module, got {type(model).__name__}.")
    if find_state(model) is not None:
        raise ValueError(f"Expected a model that is not sharded yet, got {type(model).__name__}. Call this once.")
    if not _has_forward(model):
        raise ValueError(
            f"Expected a model with a forward, got {type(model).__name__}, whose hooks would never fire. Shard the "
            "modules inside, one by one."
        )


def _num_ranks(units: list[nn.Module]) -> int | None:
    groups = [group for unit in units for group in state_of(unit).unit.parameters.groups]
    return groups[0].layout.num_shards if groups else None


# -- modules and parameters -----------------------------------------------------------------------------------------


class _ModuleTree:
    """The modules of a model that hold parameters, themselves or below, under all of their names.

    Attributes:
        entries: Every name with its module, but the model's own; a shared module has several names.
    """

    def __init__(self, model: nn.Module, ignored: set[nn.Parameter], policy: Policy | None) -> None:
        self.model = model
        self._policy = as_policy(policy)
        self._ignored = {id(parameter) for parameter in ignored}
        # By parameter: each of its names, with the modules on the way there. A name outside a module is a tie.
        self._places: dict[int, list[tuple[str, set[int]]]] = {}
        # By module: the parameters inside, each once; a dict as a set in order.
        self._parameter_ids: dict[int, dict[int, None]] = {}
        # By module read from outside without a call: the reader's class, and the name of the parameter.
        self._readers: dict[int, tuple[str, str]] = {}
        paths = list(_paths(model))
        for name, path in paths:
            self._note_parameters(name, path)
            self._note_reads(name, path[-1])
        self.entries = [(name, path[-1]) for name, path in paths if name and self.holds(path[-1])]

    def _note_parameters(self, name: str, path: tuple[nn.Module, ...]) -> None:
        for own_name, parameter in path[-1]._parameters.items():
            if parameter is None or id(parameter) in self._ignored:
                continue
            through = {id(module) for module in path}
            self._places.setdefault(id(parameter), []).append((_join(name, own_name), through))
            for module in through:
                self._parameter_ids.setdefault(module, {})[id(parameter)] = None

    def _note_reads(self, name: str, reader: nn.Module) -> None:
        for read in reads_of(reader):
            inner = reader
            for child in read.split(".")[:-1]:
                inner = inner.get_submodule(child)
                self._readers.setdefault(id(inner), (type(reader).__name__, _join(name, read)))

    def holds(self, module: nn.Module) -> bool:
        """Whether a module holds parameters to shard."""
        return id(module) in self._parameter_ids

    def planned_parameters(self, module: nn.Module, *, excluded: Collection[nn.Module] = ()) -> list[PlannedParameter]:
        """The parameters of a module, each once, without the parameters of the modules in `excluded`."""
        parameter_ids = set(self._parameter_ids.get(id(module), ())).difference(
            *(self._parameter_ids[id(other)] for other in excluded)
        )
        return [self._described(name, p) for name, p in module.named_parameters() if id(p) in parameter_ids]

    def _described(self, name: str, parameter: nn.Parameter) -> PlannedParameter:
        policy, shape = self._policy.resolved_for(parameter), tuple(local_of(parameter).shape)
        main, compute, _ = dtypes_of(parameter, policy)
        recipe = policy.recipe_of(main)
        nbytes = sum(
            prod(payload_format.shape) * payload_format.dtype.itemsize
            for payload_format in recipe.payloads(shape, main)
        )
        return PlannedParameter(name, shape, main, compute, nbytes + cached_nbytes(recipe, [shape]))

    def nbytes(self, module: nn.Module) -> int:
        """Bytes of a module's unsharded parameters."""
        return PlannedUnit(name="", class_name="", parameters=tuple(self.planned_parameters(module))).unsharded_nbytes

    def is_leaf(self, module: nn.Module) -> bool:
        """Whether no module inside can be a unit."""
        inner_modules = (inner for inner in module.modules() if inner is not module)
        return not any(self.holds(inner) and self.reader(inner) is None for inner in inner_modules)

    def reader(self, module: nn.Module) -> tuple[str, str] | None:
        """The class of an outer module which reads a parameter inside without a call, and the parameter's name."""
        return self._readers.get(id(module))

    def tie(self, module: nn.Module) -> tuple[str, str] | None:
        """The names, in a module and outside, of a parameter shared with the rest of the model."""
        for parameter in self._parameter_ids[id(module)]:
            places = self._places[parameter]
            outside = [name for name, through in places if id(module) not in through]
            if outside:
                return next(name for name, through in places if id(module) in through), outside[0]
        return None


def _paths(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Every path from the model to a module outside units; a shared module comes once a path."""

    def walk(name: str, path: tuple[nn.Module, ...]) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
        yield name, path
        for child_name, child in path[-1]._modules.items():
            if child is None or find_state(child) is not None or any(child is module for module in path):
                continue
            yield from walk(_join(name, child_name), (*path, child))

    return walk("", (model,))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# -- matches of `units` ---------------------------------------------------------------------------------------------


def _matched(tree: _ModuleTree, units: Selector | Collection[Selector] | SupportsIndex) -> set[int]:
    """The ids of matching modules, including modules that cannot be units."""
    if isinstance(units, SupportsIndex) and not isinstance(units, bool | type):
        return _within(tree, units.__index__())
    if isinstance(units, str) and units == "no_split":
        return _no_split(tree)
    selectors = [units] if isinstance(units, str | type) else units
    if not isinstance(selectors, Collection) or not all(isinstance(s, str) or _is_class(s) for s in selectors):
        raise TypeError(
            f"Expected `units` to be module classes, name patterns, 'no_split' or a number of bytes, got {units!r}."
        )
    if not selectors:
        raise ValueError("Expected `units` to name at least one class or pattern, got none. For one unit: fully_shard.")
    return set().union(*(_matching(tree, selector) for selector in selectors))


def _is_class(selector: object) -> bool:
    return isinstance(selector, type) and issubclass(selector, nn.Module)


def _within(tree: _ModuleTree, budget: int) -> set[int]:
    if budget <= 0:
        raise ValueError(f"Expected a byte budget of at least 1, got {budget}.")
    if tree.nbytes(tree.model) <= budget:
        return set()  # the model fits, and is a unit anyway
    return {id(m) for _, m in tree.entries if tree.is_leaf(m) or tree.nbytes(m) <= budget}


def _no_split(tree: _ModuleTree) -> set[int]:
    class_names = [getattr(module, "_no_split_modules", None) or () for module in tree.model.modules()]
    names = {name for names in class_names for name in names}
    if not names:
        raise ValueError(
            f"Expected a model with `_no_split_modules`, as Hugging Face's have, got {type(tree.model).__name__}. "
            f"Name classes or patterns instead; there are {_classes_in(tree)}."
        )
    # Some names may match no module: the list names the classes of all variants of a model.
    matched = {id(m) for _, m in tree.entries if names & {cls.__name__ for cls in type(m).__mro__}}
    if not matched:
        raise ValueError(
            f"Expected modules of the classes in `_no_split_modules` ({', '.join(sorted(names))}), got none. Name "
            f"classes or patterns instead; there are {_classes_in(tree)}."
        )
    return matched


def _matching(tree: _ModuleTree, selector: Selector) -> set[int]:
    if isinstance(selector, str):
        matched = {id(m) for name, m in tree.entries if _matches(selector, name)}
    else:
        matched = {id(m) for _, m in tree.entries if isinstance(m, selector)}
    if matched:
        return matched
    selector_text = f"the pattern {selector!r}" if isinstance(selector, str) else f"the class {_full_name(selector)}"
    there_are = _names_like(tree, selector) if isinstance(selector, str) else _classes_in(tree, selector)
    raise ValueError(
        f"Expected `units` to match modules with parameters below the model, got {selector_text}, which matches none. "
        f"There are {there_are}."
    )


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(clean_name(name), pattern)


def _names_like(tree: _ModuleTree, pattern: str) -> str:
    """The names nearest to a pattern without a match, numbers as `*`."""
    names = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name, _ in tree.entries))
    suggestions = difflib.get_close_matches(re.sub(r"\d+", "*", pattern), names, n=_NUM_SUGGESTIONS, cutoff=0.5)
    return _listed([repr(name) for name in suggestions or names])


def _classes_in(tree: _ModuleTree, instead_of: type | None = None) -> str:
    """The classes to choose from; classes with the wanted name come first, in full."""
    classes = list(dict.fromkeys(type(module) for _, module in tree.entries if _has_forward(module)))
    name = instead_of.__name__ if instead_of else ""
    full_names = [_full_name(cls) for cls in classes if cls.__name__ == name]
    return _listed(full_names + sorted({cls.__name__ for cls in classes} - {name}))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - _NUM_SUGGESTIONS} more"] if len(names) > _NUM_SUGGESTIONS else []
    return ", ".join(names[:_NUM_SUGGESTIONS] + more) or "none"


# -- the choice of units ---------------------------------------------------------------------------------------------


class _Choice:
    """The outermost matches that can be units, and notes on the other matches.

    A class: two nested functions with calls of each other are a reference cycle, which would hold the model.
    """

    def __init__(self, tree: _ModuleTree, matched: set[int]) -> None:
        self.chosen: list[tuple[str, nn.Module]] = []
        self.notes: list[str] = []
        self._tree = tree
        self._matched = matched
        self._seen: set[int] = set()  # by id: a module under two names is visited under the first alone
        self._walk("", tree.model, stands_for_all=False)

    def _walk(self, name: str, module: nn.Module, *, stands_for_all: bool) -> None:
        for child_name, child in module.named_children():
            if id(child) in self._seen or not self._tree.holds(child):
                continue
            self._seen.add(id(child))
            self._visit(_join(name, child_name), child, is_match=stands_for_all or id(child) in self._matched)

    def _visit(self, name: str, module: nn.Module, *, is_match: bool) -> None:
        if not is_match or not _has_forward(module):
            self._walk(name, module, stands_for_all=is_match)
        elif tie := self._tree.tie(module):
            self.notes.append(_tie_note(self._tree, name, module, tie))
            self._walk(name, module, stands_for_all=False)
        elif reader := self._tree.reader(module):
            self.notes.append(_read_note(name, module, reader))
            self._walk(name, module, stands_for_all=False)
        else:
            self.chosen.append((name, module))


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _tie_note(tree: _ModuleTree, name: str, module: nn.Module, tie: tuple[str, str]) -> str:
    return (
        f"{name} ({type(module).__name__}, {size_text(tree.nbytes(module))}) is no unit: {tie[0]} is tied to {tie[1]}, "
        "and a parameter is in one unit. Both are left to the model's."
    )


def _read_note(name: str, module: nn.Module, reader: tuple[str, str]) -> str:
    return (
        f"{name} ({type(module).__name__}) is no unit: a {reader[0]} around it reads {reader[1]} without calling its "
        "module. It is left to that one's unit."
    )


def _planned(tree: _ModuleTree, name: str, module: nn.Module) -> PlannedUnit:
    return PlannedUnit(name=name, class_name=type(module).__name__, parameters=tuple(tree.planned_parameters(module)))


def _remaining_unit(tree: _ModuleTree, chosen: list[tuple[str, nn.Module]]) -> PlannedUnit:
    parameters = tree.planned_parameters(tree.model, excluded=[module for _, module in chosen])
    return PlannedUnit(name="", class_name=type(tree.model).__name__, parameters=tuple(parameters))
