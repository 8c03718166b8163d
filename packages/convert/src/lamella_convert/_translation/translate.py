"""A checkpoint under other names and in other cuts: a `Source` over a `Source` that reads the same files.

Note [Translation of optimizer state]
    Correspondences concern parameters. A slot with its parameter's shape is cut as the parameter. A scalar (`step`)
    and an option belong to all parts: each gets a copy, and on the way back the copies must agree. A slot of another
    shape goes with a renamed parameter, and is left over for a cut parameter. No value is
    invented: a slot missing for some of the parts is left over.
    A shift changes weights, so it applies to slots with weights (`WEIGHT_SLOTS`), and not to moments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import prod
from typing import Final, Literal, NamedTuple

import torch

from lamella_files import (
    MODEL,
    OPTIONS,
    STATE,
    Correspondence,
    Piece,
    Place,
    Renamed,
    Side,
    Source,
    TensorInfo,
    Wanted,
    box_of,
    carried,
    in_model,
    is_of_model,
    longest_known,
    meetings,
    own_name,
    pieces,
    two_names,
)
from lamella_layout import Chunk

_PIECE_NUMEL: Final = 1 << 22

WEIGHT_SLOTS: Final = frozenset({"master_param", "master_weight", "main_param", "fp32_param", "param"})
"""Optimizer slots with a wider copy of the parameter."""


class _Same(NamedTuple):
    """A tensor or object taken over from the source; several names must agree."""

    names: tuple[str, ...]


class _Cut(NamedTuple):
    """A tensor composed of the source's boxes (the pieces' left), with zeros outside the pieces."""

    pieces: tuple[Piece, ...]
    shift: float
    padding: Chunk | None = None


@dataclass(frozen=True)
class _TranslationPlan:
    """The origins of the target's names, and the used names of the source."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    made_of: dict[str, _Same | _Cut] = field(default_factory=dict)
    objects: dict[str, _Same] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    mixed: dict[str, str] = field(default_factory=dict)
    cut_off: dict[str, Place] = field(default_factory=dict)


def translate(
    source: Source,
    correspondences: Iterable[Correspondence],
    *,
    to: Side,
    options: Iterable[Correspondence] | None = None,
    rest: Literal["keep", "drop"] = "keep",
    originals: Source | None = None,
) -> "Translated":
    """A checkpoint with the names and cuts of one side, over a source with the other side's.

    Args:
        source: Names as `model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups.<name>.<option>`.
        correspondences: The correspondences of parameters and buffers, by `<name>`. A correspondence with a
            tensor missing in the source does not apply: its present tensors are left over.
        to: The side of the result; the source has the other.
        options: Correspondences for the options of parameter groups instead, where a format names options by other
            parameters than the tensors. None for the same.
        rest: Whether to keep or drop left-over names (`Translated.left_over`).
        originals: Values of some tensors of the result's side, from before an earlier translation. A shifted element
            returns to the original value, if the source still has the value's shifted form.

    Raises:
        ValueError: A tensor's shape is not the correspondence's, or two names would become one.

    Effects: reads nothing. A renamed tensor costs nothing more, now or on a read.
    """
    plan = _TranslationPlan()
    turned = _turned(correspondences, to)
    _plan_model(source, turned, plan)
    _plan_entries(source, turned, STATE, plan)
    _plan_entries(source, turned if options is None else _turned(options, to), OPTIONS, plan)
    left_over = tuple(name for name in [*source.tensors, *source.objects] if name not in plan.used)
    if rest == "keep":
        for name in left_over:
            _add(plan, name, _Same((name,)), source)
    return Translated(source, _in_stored_order(plan, source), left_over, originals)


class Translated(Renamed):
    """A `Source` over another with other names and cuts; made by `translate`.

    The chunks of its tensors are the stored chunks, carried over.

    Attributes:
        source: The source below.
        left_over: Unused names of the source below, in order. Present here under
            their own names, unless dropped.
        inexact: Reasons, by name, for tensors without an exact way back. Known at once for mixed
            dtypes (the parts come back in the widest), on the read for shifted values, for padding by
            `read_cut_off`.
    """

    def __init__(
        self, source: Source, plan: _TranslationPlan, left_over: tuple[str, ...], originals: Source | None = None
    ) -> None:
        made_of = (*plan.made_of.items(), *plan.objects.items())
        sources = {
            name: origin.names[0] for name, origin in made_of if isinstance(origin, _Same) and len(origin.names) == 1
        }
        super().__init__(source, sources, left_over)
        self._originals = originals
        self._plan = plan
        self.inexact: dict[str, str] = dict(plan.mixed)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The target's tensors."""
        return self._plan.tensors

    @property
    def objects(self) -> Sequence[str]:
        """The target's objects."""
        return tuple(self._plan.objects)

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`, in one read of the source below.

        Raises:
            ValueError: Values that should agree do not; the error gives both names.
        """
        source_requests: list[Wanted] = []
        checks: list[Callable[[], None]] = []
        for want in requests:
            made_of = self._plan.made_of[want.name]
            if isinstance(made_of, _Cut):
                self._ask_for_pieces(want, made_of, source_requests, checks)
            elif len(made_of.names) == 1:
                source_requests.append(Wanted(made_of.names[0], want.chunk, want.into))
            else:
                copies = [torch.empty_like(want.into, device="cpu") for _ in made_of.names]
                source_requests += [
                    Wanted(name, want.chunk, copy) for name, copy in zip(made_of.names, copies, strict=True)
                ]
                checks.append(partial(_fill_alike, want, made_of.names, copies))
        self.source.read(source_requests)
        for check in checks:
            check()

    def read_object(self, name: str) -> object:
        """The value of an object.

        Raises:
            ValueError: Values that should agree do not; the error gives both names.
        """
        first, *aliases = self._plan.objects[name].names
        value = self.source.read_object(first)
        for other in aliases:
            if self.source.read_object(other) != value:
                raise _disagree(name, first, value, other, self.source.read_object(other))
        return value

    def read_cut_off(self) -> None:
        """Read the dropped padding, and note nonzero rows in `inexact`. Holds a row at least."""
        for name, (stored, rows) in self._plan.cut_off.items():
            info, num_lost = self.source.tensors[stored], 0
            for piece in pieces(rows, _PIECE_NUMEL):
                values = torch.empty(piece.sizes, dtype=info.dtype)
                self.source.read([Wanted(stored, piece, values)])
                num_lost += int((values != 0).reshape(len(values), -1).any(1).sum())
            if num_lost:
                self.inexact[name] = f"{num_lost} of {rows.sizes[0]} rows of padding that are cut off are not zero"

    def take_lost(self) -> tuple[str, ...]:
        """Names, in the source, of tensors read so far that lost bits in a shift; removes them from `inexact`."""
        lost = [
            (name, {piece.left.name for piece in made_of.pieces})
            for name in self.inexact
            if isinstance(made_of := self._plan.made_of.get(name), _Cut) and made_of.shift
        ]
        for name, _ in lost:
            del self.inexact[name]
        return tuple(sorted({origin for _, origins in lost for origin in origins}))

    def _ask_for_pieces(
        self, want: Wanted, cut: _Cut, requests: list[Wanted], checks: list[Callable[[], None]]
    ) -> None:
        if cut.padding and (rows := want.chunk.intersection(cut.padding)).numel:
            box_of(want.into.detach(), rows.relative_to(want.chunk)).zero_()
        boxes = [piece.right.chunk for piece in cut.pieces]
        for index, _, shared in meetings(boxes, [want.chunk]):
            origin, target = cut.pieces[index]
            chunk = carried(shared, target.chunk, origin.chunk)
            # `view`, not `reshape`: a read into a copy would not reach the caller's memory.
            into = box_of(want.into, shared.relative_to(want.chunk)).view(chunk.sizes)
            if not cut.shift:
                requests.append(Wanted(origin.name, chunk, into))
                continue
            stored = torch.empty(chunk.sizes, dtype=self.source.tensors[origin.name].dtype)
            requests.append(Wanted(origin.name, chunk, stored))
            checks.append(partial(self._put_shifted, want.name, shared, into, stored, cut.shift))

    def _put_shifted(self, name: str, chunk: Chunk, into: torch.Tensor, stored: torch.Tensor, shift: float) -> None:
        values, lost = shifted(stored, shift, into.dtype), not_undone(stored, shift, into.dtype)
        if self._originals is not None and name in self._originals.tensors:
            original = torch.empty(chunk.sizes, dtype=self._originals.tensors[name].dtype)
            self._originals.read([Wanted(name, chunk, original)])
            original = original.view(stored.shape)
            # An element equal to the shifted original is unchanged since: the exact original is restored.
            is_unchanged = shifted(original, -shift, stored.dtype) == stored
            values = torch.where(is_unchanged, original.to(into.dtype), values)
            lost &= ~is_unchanged
        into.copy_(values)
        if num_lost := int(lost.sum()):
            self.inexact[name] = (
                f"{shift:+g} in {_short(into.dtype)} cannot be undone to {_short(stored.dtype)} for {num_lost} "
                f"of the elements read"
            )


def shifted(values: torch.Tensor, shift: float, dtype: torch.dtype) -> torch.Tensor:
    """Values plus a shift, rounded once: to `dtype`, from float64."""
    return (values.double() + shift).to(dtype)


def not_undone(values: torch.Tensor, shift: float, dtype: torch.dtype) -> torch.Tensor:
    """Which values `dtype` can hold before the shift, but not exactly after: undoing the shift gives others."""
    back = shifted(shifted(values, shift, dtype), -shift, values.dtype)
    rounded = values.to(dtype).to(values.dtype)
    return (rounded == values) & (back != values)


def parameter_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors by parameter name: the argument of `Rules.match`.

    Empty for a checkpoint of an optimizer alone.
    """
    return {own_name(name): tuple(info.shape) for name, info in source.tensors.items() if is_of_model(name)}


def _turned(correspondences: Iterable[Correspondence], to: Side) -> list[Correspondence]:
    """The correspondences, from left to right."""
    return [correspondence if to == "right" else correspondence.inverse for correspondence in correspondences]


def _plan_model(source: Source, turned: Sequence[Correspondence], plan: _TranslationPlan) -> None:
    for correspondence in turned:
        names = [in_model(name) for name in correspondence.left]
        if all(name in source.tensors for name in names):
            _check_shapes(source, correspondence)
            _cut(plan, source, correspondence, MODEL, "", correspondence.shift)


def _plan_entries(source: Source, turned: Sequence[Correspondence], section: str, plan: _TranslationPlan) -> None:
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
    source: Source, correspondence: Correspondence, section: str, entry: str, plan: _TranslationPlan
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
            _add(plan, f"{section}{name}{entry}", _Same(names), source)


def _cut(
    plan: _TranslationPlan, source: Source, correspondence: Correspondence, prefix: str, suffix: str, shift: float
) -> None:
    """Compose each tensor of the right side from boxes of the left side's."""
    pieces_by_name: dict[str, list[Piece]] = {name: [] for name in correspondence.right}
    for left_box, right in correspondence.pieces:
        left_box = left_box._replace(name=f"{prefix}{left_box.name}{suffix}")
        pieces_by_name[right.name].append(Piece(left_box, right))
    for name, shape in correspondence.right.items():
        if correspondence.is_rename and not shift:
            _add(plan, f"{prefix}{name}{suffix}", _Same((pieces_by_name[name][0].left.name,)), source)
        else:
            cut = _Cut(tuple(pieces_by_name[name]), shift, correspondence.padding(name, shape))
            _add_cut(plan, f"{prefix}{name}{suffix}", shape, cut, source)
    for name, shape in correspondence.left.items():
        if rows := correspondence.padding(name, shape):
            for target in correspondence.right:
                plan.cut_off[f"{prefix}{target}{suffix}"] = Place(f"{prefix}{name}{suffix}", rows)


def _add_cut(plan: _TranslationPlan, name: str, shape: Sequence[int], cut: _Cut, source: Source) -> None:
    infos = {piece.left.name: source.tensors[piece.left.name] for piece in cut.pieces}
    dtypes = {part: info.dtype for part, info in infos.items()}
    if len(set(dtypes.values())) > 1:
        plan.mixed[name] = "made of " + " and ".join(f"{_short(dtype)} {part}" for part, dtype in dtypes.items())
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


def _add(plan: _TranslationPlan, name: str, origin: _Same, source: Source) -> None:
    _claim(plan, name, origin.names)
    first = origin.names[0]
    if first in source.tensors:
        plan.tensors[name], plan.made_of[name] = source.tensors[first], origin
    else:
        plan.objects[name] = origin


def _claim(plan: _TranslationPlan, name: str, made_of: Iterable[str]) -> None:
    if name in plan.tensors or name in plan.objects:
        raise ValueError(two_names(name, made_of))
    plan.used.update(made_of)


def _in_stored_order(plan: _TranslationPlan, source: Source) -> _TranslationPlan:
    """The plan in the order of the source's tensors, so that reads along the names run along the files."""
    positions = {name: position for position, name in enumerate([*source.tensors, *source.objects])}

    def first(made_of: _Same | _Cut) -> int:
        names = made_of.names if isinstance(made_of, _Same) else [piece.left.name for piece in made_of.pieces]
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


def _fill_alike(want: Wanted, names: Sequence[str], copies: Sequence[torch.Tensor]) -> None:
    for name, copy in zip(names, copies, strict=True):
        if not torch.equal(copies[0], copy):
            raise _disagree(want.name, names[0], copies[0].tolist(), name, copy.tolist())
    want.into.copy_(copies[0])


def _disagree(name: str, first: str, value: object, second: str, other: object) -> ValueError:
    return ValueError(
        f"Expected one value for {name!r}, got {value!r} of {first!r} and {other!r} of {second!r}. One parameter has "
        f"one step and one set of options."
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
