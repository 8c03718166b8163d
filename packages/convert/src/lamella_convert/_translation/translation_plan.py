"""The plan of a translation: the origin of each name of the result, among the names of a source.

Note [Translation of optimizer state]
    Correspondences concern parameters. A slot with its parameter's shape is cut as the parameter. A scalar (`step`)
    and an option belong to all parts: each gets a copy, and on the way back the copies must agree. A slot of another
    shape goes with a renamed parameter, and is left over for a cut parameter. No value is invented: a slot missing for
    some of the parts is left over.
    A shift changes weights, so it applies to slots with weights (`WEIGHT_SLOTS`), and not to moments.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Final, Literal, NamedTuple

import torch

from lamella_convert._translation.rules import parameter_shapes
from lamella_files import (
    MODEL,
    OPTIONS,
    STATE,
    Correspondence,
    Piece,
    Place,
    Side,
    Source,
    TensorInfo,
    carried,
    in_model,
    longest_known,
    meetings,
    two_names,
)
from lamella_layout import Chunk

WEIGHT_SLOTS: Final = frozenset({"master_param", "master_weight", "main_param", "fp32_param", "param"})
"""Optimizer slots with a wider copy of the parameter."""


class SourceEntry(NamedTuple):
    """A tensor or object taken over from the source; several names must agree."""

    names: tuple[str, ...]


class RecutTensor(NamedTuple):
    """A tensor composed of the source's boxes (the pieces' left), with zeros outside the pieces."""

    pieces: tuple[Piece, ...]
    shift: float
    padding: Chunk | None = None


@dataclass(frozen=True)
class TranslationPlan:
    """The origins of the target's names, and the used names of the source.

    Attributes:
        tensors: The target's tensors.
        made_of: The origin of each tensor.
        objects: The origin of each object.
        used: The names of the source that the target takes.
        mixed: The reason, by name of the target, for tensors with parts of several dtypes.
        cut_off: The padding rows of the source that the target lacks, by name of the target.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    made_of: dict[str, SourceEntry | RecutTensor] = field(default_factory=dict)
    objects: dict[str, SourceEntry] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    mixed: dict[str, str] = field(default_factory=dict)
    cut_off: dict[str, Place] = field(default_factory=dict)


def plan_translation(
    source: Source,
    correspondences: Iterable[Correspondence],
    *,
    to: Side,
    options: Iterable[Correspondence] | None = None,
    rest: Literal["keep", "drop"] = "keep",
) -> tuple[TranslationPlan, tuple[str, ...]]:
    """Plan a translation, by the arguments of `translate`.

    Returns:
        The plan, and the left-over names of the source, which are in the plan unless dropped.

    Raises:
        ValueError: The conditions of `translate`.
    """
    plan = TranslationPlan()
    turned = _turned(correspondences, to)
    _plan_model(source, turned, plan)
    _plan_entries(source, turned, STATE, plan)
    _plan_entries(source, turned if options is None else _turned(options, to), OPTIONS, plan)
    left_over = tuple(name for name in [*source.tensors, *source.objects] if name not in plan.used)
    if rest == "keep":
        for name in left_over:
            _add(plan, name, SourceEntry((name,)), source)
    return _in_stored_order(plan, source), left_over


def _turned(correspondences: Iterable[Correspondence], to: Side) -> list[Correspondence]:
    """The correspondences, from left to right."""
    return [correspondence if to == "right" else correspondence.inverse for correspondence in correspondences]


def _plan_model(source: Source, turned: Sequence[Correspondence], plan: TranslationPlan) -> None:
    for correspondence in turned:
        names = [in_model(name) for name in correspondence.left]
        if all(name in source.tensors for name in names):
            _check_shapes(source, correspondence)
            _cut(plan, source, correspondence, MODEL, "", correspondence.shift)


def _plan_entries(source: Source, turned: Sequence[Correspondence], section: str, plan: TranslationPlan) -> None:
    """Plan parameters' entries: slots, or options."""
    if not turned:
        return
    belongs = {name: index for index, correspondence in enumerate(turned) for name in correspondence.left}
    known_names = {
        *belongs,
        *(name for correspondence in turned for name in correspondence.right),
        *parameter_shapes(source),
    }
    entries: dict[tuple[int, str], set[str]] = {}
    for name in [*source.tensors, *source.objects]:
        if name.startswith(section):
            parameter, entry = longest_known(name.removeprefix(section), known_names)
            if parameter in belongs:
                entries.setdefault((belongs[parameter], entry), set()).add(parameter)
    for (index, entry), parameters in entries.items():
        if len(parameters) == len(turned[index].left):
            _plan_entry(source, turned[index], section, f".{entry}", plan)


def _plan_entry(
    source: Source, correspondence: Correspondence, section: str, entry: str, plan: TranslationPlan
) -> None:
    """Plan one entry by Note [Translation of optimizer state]."""
    names = tuple(f"{section}{name}{entry}" for name in correspondence.left)
    are_tensors = [name in source.tensors for name in names]
    shapes = [tuple(source.tensors[name].shape) if name in source.tensors else () for name in names]
    if all(are_tensors) and shapes == [tuple(shape) for shape in correspondence.left.values()]:
        shift = correspondence.shift if entry.removeprefix(".") in WEIGHT_SLOTS else 0.0
        _cut(plan, source, correspondence, section, entry, shift)
        return
    are_alike = len(set(are_tensors)) == len(set(shapes)) == 1
    if are_alike and (correspondence.is_rename or prod(shapes[0]) == 1):
        for name in correspondence.right:
            _add(plan, f"{section}{name}{entry}", SourceEntry(names), source)


def _cut(
    plan: TranslationPlan, source: Source, correspondence: Correspondence, prefix: str, suffix: str, shift: float
) -> None:
    """Compose each tensor of the right side from boxes of the left side's."""
    pieces_by_name: dict[str, list[Piece]] = {name: [] for name in correspondence.right}
    for left_box, right in correspondence.pieces:
        left_box = left_box._replace(name=f"{prefix}{left_box.name}{suffix}")
        pieces_by_name[right.name].append(Piece(left_box, right))
    for name, shape in correspondence.right.items():
        if correspondence.is_rename and not shift:
            _add(plan, f"{prefix}{name}{suffix}", SourceEntry((pieces_by_name[name][0].left.name,)), source)
        else:
            cut = RecutTensor(tuple(pieces_by_name[name]), shift, correspondence.padding(name, shape))
            _add_cut(plan, f"{prefix}{name}{suffix}", shape, cut, source)
    for name, shape in correspondence.left.items():
        if rows := correspondence.padding(name, shape):
            for target in correspondence.right:
                plan.cut_off[f"{prefix}{target}{suffix}"] = Place(f"{prefix}{name}{suffix}", rows)


def _add_cut(plan: TranslationPlan, name: str, shape: Sequence[int], cut: RecutTensor, source: Source) -> None:
    infos = {piece.left.name: source.tensors[piece.left.name] for piece in cut.pieces}
    dtypes = {part: info.dtype for part, info in infos.items()}
    if len(set(dtypes.values())) > 1:
        plan.mixed[name] = "made of " + " and ".join(f"{short_dtype(dtype)} {part}" for part, dtype in dtypes.items())
    _claim(plan, name, infos)
    chunks = [*_carried_chunks(cut.pieces, infos), *([cut.padding] if cut.padding else [])]
    plan.tensors[name] = TensorInfo(tuple(shape), reduce(torch.promote_types, dtypes.values()), tuple(chunks))
    plan.made_of[name] = cut


def _carried_chunks(pieces: Sequence[Piece], infos: Mapping[str, TensorInfo]) -> Iterator[Chunk]:
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.left.name, []).append(piece)
    for name, cut_pieces in by_name.items():
        boxes = [piece.left.chunk for piece in cut_pieces]
        for index, _, shared in meetings(boxes, infos[name].chunks):
            yield carried(shared, boxes[index], cut_pieces[index].right.chunk)


def _add(plan: TranslationPlan, name: str, origin: SourceEntry, source: Source) -> None:
    _claim(plan, name, origin.names)
    first = origin.names[0]
    if first in source.tensors:
        plan.tensors[name], plan.made_of[name] = source.tensors[first], origin
    else:
        plan.objects[name] = origin


def _claim(plan: TranslationPlan, name: str, made_of: Iterable[str]) -> None:
    if name in plan.tensors or name in plan.objects:
        raise ValueError(two_names(name, made_of))
    plan.used.update(made_of)


def _in_stored_order(plan: TranslationPlan, source: Source) -> TranslationPlan:
    """The plan in the order of the source's tensors, so that reads along the names run along the files."""
    positions = {name: position for position, name in enumerate([*source.tensors, *source.objects])}

    def first(made_of: SourceEntry | RecutTensor) -> int:
        names = made_of.names if isinstance(made_of, SourceEntry) else [piece.left.name for piece in made_of.pieces]
        return min((positions[name] for name in names), default=-1)

    tensors = sorted(plan.tensors, key=lambda name: first(plan.made_of[name]))
    objects = sorted(plan.objects, key=lambda name: first(plan.objects[name]))
    return replace(
        plan,
        tensors={name: plan.tensors[name] for name in tensors},
        objects={name: plan.objects[name] for name in objects},
    )


def _check_shapes(source: Source, correspondence: Correspondence) -> None:
    for name, shape in correspondence.left.items():
        stored = tuple(source.tensors[in_model(name)].shape)
        if stored != tuple(shape):
            raise ValueError(f"Expected {name!r} of shape {tuple(shape)!r}, as the rules have it, got {stored!r}.")


def short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
