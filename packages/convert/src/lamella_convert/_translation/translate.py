"""A checkpoint under other names and in other cuts: a `Source` over a `Source` that reads the same files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

import torch

from lamella_convert._translation.translation_plan import (
    RecutTensor,
    SourceEntry,
    TranslationPlan,
    plan_translation,
    short_dtype,
)
from lamella_files import Correspondence, Renamed, Side, Source, TensorInfo, Wanted, box_of, carried, meetings, pieces
from lamella_layout import Chunk

_PIECE_NUMEL: Final = 1 << 22


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
    plan, left_over = plan_translation(source, correspondences, to=to, options=options, rest=rest)
    return Translated(source, plan, left_over, originals)


class Translated(Renamed):
    """A `Source` over another with other names and cuts; made by `translate`.

    The chunks of its tensors are the stored chunks, carried over.

    Attributes:
        source: The source below.
        left_over: Unused names of the source below, in order. Present here under their own names, unless dropped.
        inexact: Reasons, by name, for tensors without an exact way back. Known at once for mixed
            dtypes (the parts come back in the widest), on the read for shifted values, for padding by
            `read_cut_off`.
    """

    def __init__(
        self, source: Source, plan: TranslationPlan, left_over: tuple[str, ...], originals: Source | None = None
    ) -> None:
        made_of = (*plan.made_of.items(), *plan.objects.items())
        sources = {
            name: origin.names[0]
            for name, origin in made_of
            if isinstance(origin, SourceEntry) and len(origin.names) == 1
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
            if isinstance(made_of, RecutTensor):
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
            if isinstance(made_of := self._plan.made_of.get(name), RecutTensor) and made_of.shift
        ]
        for name, _ in lost:
            del self.inexact[name]
        return tuple(sorted({origin for _, origins in lost for origin in origins}))

    def _ask_for_pieces(
        self, want: Wanted, cut: RecutTensor, requests: list[Wanted], checks: list[Callable[[], None]]
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
                f"{shift:+g} in {short_dtype(into.dtype)} cannot be undone to {short_dtype(stored.dtype)} for "
                f"{num_lost} of the elements read"
            )


def shifted(values: torch.Tensor, shift: float, dtype: torch.dtype) -> torch.Tensor:
    """Values plus a shift, rounded once: to `dtype`, from float64."""
    return (values.double() + shift).to(dtype)


def not_undone(values: torch.Tensor, shift: float, dtype: torch.dtype) -> torch.Tensor:
    """Which values `dtype` can hold before the shift, but not exactly after: undoing the shift gives others."""
    back = shifted(shifted(values, shift, dtype), -shift, values.dtype)
    rounded = values.to(dtype).to(values.dtype)
    return (rounded == values) & (back != values)


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
