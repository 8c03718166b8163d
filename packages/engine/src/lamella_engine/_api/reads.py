"""Parameters that a module reads without calling the modules that hold them: declared, and gathered with the reader.

Note [Takeover]. A fused kernel is given `conv1d.weight`; the forward of `conv1d` never runs. With both modules in one
unit nothing special is needed. With `conv1d` as a separate unit, the hooks of `conv1d` do not fire, so the unit around
the reader takes over the whole inner unit: `fully_shard` makes inner units first. From then on the two units are a
single unit: one gather, one reduction, one place in the order.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch.nn as nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor

from lamella_engine._common.text import clean_name
from lamella_engine._modules.state import FSDPState, find_state
from lamella_engine._options.placements import Strategy
from lamella_engine._parameters.sharded_parameter import is_sharded
from lamella_engine._unit.parameters import UnitParameters

_READS = "_lamella_reads"
_IS_IN_UNIT = "_lamella_is_in_unit"
_READS_OF_TORCHS = {nn.MultiheadAttention: ("out_proj.*",)}  # handed to one function with the reader's own
_NUM_SUGGESTIONS = 6


def declare_reads(reader: nn.Module, *names: str) -> None:
    """Declare the parameters below a module that its code reads without calling the modules that hold them.

        declare_reads(mixer, "conv1d.*")

    The parameters are gathered, freed and reduced with the unit around the reader, forward and backward. An inner unit
    with declared parameters becomes part of the outer unit as a whole: the inner modules then answer for the outer
    unit, whose settings count; only casts of inputs and outputs stay the inner unit's. Names in checkpoints stay.
    `fully_shard_model` makes no unit of a module whose parameters are read from outside.

    Args:
        reader: A module in no unit yet. The reader may become a unit or stay a part of a unit.
        names: Names of parameters, from the reader on; or patterns (`fnmatch`). `fully_shard` looks the names up again.

    Raises:
        TypeError: Not a module, no names, or a name is no string.
        ValueError: A name matches no parameter below a child, or the reader is in a unit already.

    Effects: a note on the module.
    """
    if not isinstance(reader, nn.Module):
        raise TypeError(f"Expected `reader` to be an nn.Module, got {type(reader).__name__}.")
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"Expected `names` to be names of parameters below {type(reader).__name__}, got {names!r}.")
    for name in names:
        _check_name(reader, name)
    if _IS_IN_UNIT in reader.__dict__:
        raise ValueError(
            f"Expected a {type(reader).__name__} that is in no unit yet, got one in a unit: which parameters are "
            "gathered with it is settled. Declare its reads before fully_shard of the module around it."
        )
    # In the dict itself, past a model's own `__setattr__` and `__getattr__`.
    declared = reader.__dict__.get(_READS, ())
    reader.__dict__[_READS] = (*declared, *(name for name in names if name not in declared))


def note_in_unit(modules: Iterable[nn.Module]) -> None:
    """Mark the modules of a new unit."""
    for module in modules:
        module.__dict__[_IS_IN_UNIT] = True


def reads_of(reader: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters below a module that its code reads directly, by name from the module on.

    Raises:
        ValueError: A declared name matches no parameter any more.
    """
    declared = reader.__dict__.get(_READS, ())
    for name in declared:
        _check_name(reader, name)
    torch_reads = [name for cls, names in _READS_OF_TORCHS.items() if isinstance(reader, cls) for name in names]
    patterns = (*declared, *torch_reads)
    if not patterns:
        return {}
    return {name: p for name, p in _parameters_below(reader) if any(_matches(name, pattern) for pattern in patterns)}


def _parameters_below(reader: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in reader.named_parameters(remove_duplicate=False) if "." in name)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(clean_name(name), pattern)


def _check_name(reader: nn.Module, pattern: str) -> None:
    names = [name for name, _ in _parameters_below(reader)]
    if not any(_matches(name, pattern) for name in names):
        inner_names = [name for name in names if name.startswith(f"{pattern}.")]
        suggestions = inner_names or difflib.get_close_matches(pattern, names, n=_NUM_SUGGESTIONS, cutoff=0.4) or names
        raise ValueError(
            f"Expected {pattern!r} to name a parameter below a child of {type(reader).__name__}, got none. There are "
            f"{', '.join(map(repr, suggestions[:_NUM_SUGGESTIONS])) or 'none'}."
        )


# -- takeover of inner units ----------------------------------------------------------------------------------------


def units_read(
    modules: Iterable[tuple[str, nn.Module]],
    inner: Mapping[FSDPState, str],
    *,
    module_ids: set[int],
    strategy: Strategy,
    num_neighbours: int | None,
) -> list[FSDPState]:
    """The inner units whose parameters some modules of a new unit read directly.

    Args:
        modules: The new unit's modules, with dotted prefixes.
        inner: The inner units, at rest, and their names.
        module_ids: Ids of all modules in the new unit.
        strategy: The new unit's ZeRO stage.
        num_neighbours: The new unit's number in `reshard_after_forward`, or None.

    Raises:
        ValueError: An inner unit cannot become a part of the new unit.
    """
    # By the sharded form, which modules of inner units at rest hold.
    holders = {
        id(p.sharded): inner_state
        for inner_state in inner
        for g in inner_state.unit.parameters.groups
        for p in g.parameters
    }
    # A dict as a set in order: units must be taken over in the same order on every rank.
    read: dict[FSDPState, None] = {}
    for prefix, reader in modules:
        for name, parameter in reads_of(reader).items():
            state = holders.get(id(parameter))
            if is_sharded(parameter) and (state is None or not state.unit.parameters.module_ids <= module_ids):
                raise ValueError(
                    f"Expected {prefix + name!r}, which {type(reader).__name__} reads without calling its module, in "
                    "the same unit or in one inside it, got one that is gathered with modules elsewhere. Declare it on "
                    "a module around all that use it, and not on this one."
                )
            if state is not None and state not in read:
                _check_alike(prefix + name, state.unit.parameters, strategy, num_neighbours)
                read[state] = None
    return list(read)


def _check_alike(name: str, read: UnitParameters, strategy: Strategy, num_neighbours: int | None) -> None:
    for group in read.groups:
        is_factor = num_neighbours not in (None, 1, group.axes.num_shards)
        expected = num_neighbours if is_factor else None
        got = None if group.transports.neighbours is None else group.transports.neighbours.num_ranks
        if read.strategy != strategy or expected != got:
            raise ValueError(
                f"Expected the unit of {name!r}, which is read without calling its module, to have the `placements` "
                "and the number in `reshard_after_forward` of the unit that reads it, got others. Give both calls the "
                "same."
            )


# -- undeclared reads -----------------------------------------------------------------------------------------------


@_disable_dynamo
def explain_undeclared(module: nn.Module, *_: object) -> None:
    """Add the sharded parameters of the failing module to an exception on its way out of the outermost unit.

    A forward hook of outermost units, which torch calls after an exception too.
    """
    error, state = sys.exc_info()[1], find_state(module)
    if error is None or state is None or "mixed torch.Tensor and DTensor" not in str(error):
        return
    parameters = state.acting.unit.parameters
    freed = [
        clean_name(name) for name, p in module.named_parameters() if _is_at_rest(p) and parameters.holds_any({id(p)})
    ]
    reader, names = _undeclared(module, _running_modules(error))
    if freed:
        error.add_note(
            f"{type(module).__name__}'s forward was running, and a backward inside it has freed its unit's parameters: "
            f"{_listed(freed)}. Shard the modules that hold them as units of their own (fully_shard), which are "
            "gathered when they are called, or run the backward after the forward."
        )
    elif names:
        error.add_note(
            f"{type(reader).__name__}'s forward was running, and below it these parameters were sharded: "
            f"{_listed(names)}. They are in units of their own, which are gathered when their modules are called. One "
            "that is read without that has to be declared, before fully_shard: "
            f"lamella_engine.declare_reads(module, {names[0]!r})."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_SUGGESTIONS]) + ", ..." * (len(names) > _NUM_SUGGESTIONS)


def _undeclared(outermost: nn.Module, running: Sequence[nn.Module]) -> tuple[nn.Module, list[str]]:
    """The module that has to declare a read, and the names below the module of the parameters it may have read.

    Args:
        outermost: The outermost of the units.
        running: The modules with a method running, the innermost first.
    """
    innermost = running[0] if running else outermost
    called = {id(p) for p in innermost.parameters(recurse=False) if _is_at_rest(p)}
    if not called:  # the innermost module has read a parameter of a module below
        return innermost, [clean_name(name) for name, p in _parameters_below(innermost) if _is_at_rest(p)]
    # A part of a unit was called, and the unit's module was not: the reader is outside the unit.
    called_ids = {id(module) for unit in _units_with(outermost, called) for module in unit.modules()}
    reader = next((module for module in running if id(module) not in called_ids), outermost)
    return reader, [clean_name(name) for name, p in _parameters_below(reader) if id(p) in called]


def _units_with(outermost: nn.Module, parameters: Container[int]) -> Iterator[nn.Module]:
    """The modules of the units that hold some parameters, by the parameters' ids."""
    for module in outermost.modules():
        state = find_state(module)
        if state is not None and state.acting.unit.parameters.holds_any(parameters):
            yield module


def _is_at_rest(parameter: nn.Parameter) -> bool:
    return is_sharded(parameter) and isinstance(parameter, DTensor)


def _running_modules(error: BaseException) -> list[nn.Module]:
    """The modules with a method running at the raise, the innermost first."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [candidate for candidate in reversed(selves) if isinstance(candidate, nn.Module)]
