"""Two checkpoints held against each other: names, shapes, dtypes, and values box by box."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from lamella_checkpoint._errors import CheckpointUntrusted
from lamella_checkpoint._file_boxes import pieces
from lamella_checkpoint._open import Translate, open_checkpoint
from lamella_checkpoint._source import Source, Wanted
from lamella_layout import Chunk

OnProgress = Callable[[int, int], None]
"""Is told how many bytes have been compared, and how many there are."""

_BUFFER_NBYTES: Final = 32 << 20
_LINES_SHOWN: Final = 20


class Difference(NamedTuple):
    """One name that two checkpoints do not have alike. A side is None where it lacks the name, else told as text."""

    name: str
    a: str | None
    b: str | None
    what: str

    def __str__(self) -> str:
        if self.a is None or self.b is None:
            return f"{self.name}: only in {'b' if self.a is None else 'a'}, {self.a or self.b}"
        return f"{self.name}: {self.what}: {self.a} in a, {self.b} in b"


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What two checkpoints do not share; false when they are equal.

    Attributes:
        a: The one path.
        b: The other.
        differences: In the order of `a`, then what only `b` has. `what` is "name", "shape", "dtype", "value" or
            "object"; a tensor of another dtype is compared by value, too.
        num_equal: Names with equal values on both sides.
    """

    a: Path
    b: Path
    differences: tuple[Difference, ...]
    num_equal: int

    def __bool__(self) -> bool:
        return bool(self.differences)

    def lines(self) -> Iterator[str]:
        """The differences as text, first differences first."""
        yield from map(str, self.differences)

    def __str__(self) -> str:
        shown = [*islice(self.lines(), _LINES_SHOWN)]
        num_hidden = len(self.differences) - len(shown)
        equal = f"{self.num_equal} names are equal"
        return "\n".join([*shown, *([f"and {num_hidden} more"] if num_hidden else []), equal])

    def as_json(self) -> dict[str, Any]:
        """The same for programs: plain data that JSON can hold."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "num_equal": self.num_equal,
            "differences": [each._asdict() for each in self.differences],
        }


def diff(
    a: str | os.PathLike[str] | Source,
    b: str | os.PathLike[str] | Source,
    *,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
    translate_a: Translate | None = None,
    translate_b: Translate | None = None,
    trust: bool = False,
    verify: bool = True,
    on_progress: OnProgress = lambda done, total: None,
) -> Diff:
    """Compare two checkpoints of any formats, under native names.

    Args:
        a: The one checkpoint: its path, or what has been made of it.
        b: The other.
        values: Whether values are compared, too: of tensors and objects. Else nothing is read of them.
        rtol: How far apart values may be in relation to those of `b`. Integers too, where it is not 0.
        atol: How far apart values may be besides. Not-a-number equals itself.
        translate_a: Makes of `a`'s names those to compare by: an adapter's rules.
        translate_b: The same of `b`'s.
        trust: As for `open_checkpoint`. Objects that would need it are compared by name alone without.
        verify: As for `open_checkpoint`.
        on_progress: Is told how far it is.

    Raises:
        CheckpointDamaged: As for `open_checkpoint`, or a tensor cannot be read.
        FileNotFoundError: There is nothing.

    Effects: holds 64 MiB of tensors at most, unless a single row is more; no collective, no accelerator.
    """
    sources = []
    for given, translate in ((a, translate_a), (b, translate_b)):
        source = _opened(given, trust=trust, verify=verify)
        sources.append(source if translate is None else translate(source))
    comparison = _Comparison(*sources, values=values, rtol=rtol, atol=atol, on_progress=on_progress)
    differences = tuple(comparison.run())
    return Diff(a=sources[0].path, b=sources[1].path, differences=differences, num_equal=comparison.num_equal)


class _Comparison:
    def __init__(
        self, a: Source, b: Source, *, values: bool, rtol: float, atol: float, on_progress: OnProgress
    ) -> None:
        self._a, self._b = a, b
        self._values = values
        self._rtol, self._atol = rtol, atol
        self._on_progress = on_progress
        self._total = sum(prod(info.shape) * info.dtype.itemsize for info in a.tensors.values())
        self._done = 0
        self.num_equal = 0

    def run(self) -> Iterator[Difference]:
        of_b = {*self._b.tensors, *self._b.objects}
        for name in (*self._a.tensors, *self._a.objects):
            if name not in of_b:
                yield Difference(name, _told(self._a, name), None, "name")
                continue
            found = list(self._of_name(name))
            self.num_equal += not found
            yield from found
        of_a = {*self._a.tensors, *self._a.objects}
        for name in (*self._b.tensors, *self._b.objects):
            if name not in of_a:
                yield Difference(name, None, _told(self._b, name), "name")

    def _of_name(self, name: str) -> Iterator[Difference]:
        a, b = self._a.tensors.get(name), self._b.tensors.get(name)
        if a is None and b is None:
            yield from self._of_object(name) if self._values else ()
        elif a is None or b is None:
            yield Difference(name, _told(self._a, name), _told(self._b, name), "object")
        elif tuple(a.shape) != tuple(b.shape):
            yield Difference(name, str(list(a.shape)), str(list(b.shape)), "shape")
        else:
            if a.dtype != b.dtype:
                yield Difference(name, str(a.dtype), str(b.dtype), "dtype")
            if self._values:
                yield from self._of_values(name)

    def _of_object(self, name: str) -> Iterator[Difference]:
        try:
            a, b = self._a.read_object(name), self._b.read_object(name)
        except CheckpointUntrusted:
            return
        if a != b:
            yield Difference(name, repr(a), repr(b), "object")

    def _of_values(self, name: str) -> Iterator[Difference]:
        """One difference a tensor: how many elements, and the first of them."""
        num_different, first = 0, None
        info = self._a.tensors[name]
        for chunk in info.chunks:
            for piece in pieces(
                chunk, _BUFFER_NBYTES // max(info.dtype.itemsize, self._b.tensors[name].dtype.itemsize)
            ):
                a, b = (_read(source, name, piece) for source in (self._a, self._b))
                differ = _different(a, b, self._rtol, self._atol)
                num_here = int(differ.sum())
                num_different += num_here
                if num_here and first is None:
                    at = tuple(differ.nonzero()[0].tolist())
                    place = [offset + index for offset, index in zip(piece.offsets, at, strict=True)]
                    first = (place, a[at].item(), b[at].item())
                self._done += a.nbytes
                self._on_progress(self._done, self._total)
        if first is not None:
            what = f"{num_different} of {prod(info.shape)} values, first at {first[0]}"
            yield Difference(name, repr(first[1]), repr(first[2]), what)


def _opened(given: str | os.PathLike[str] | Source, *, trust: bool, verify: bool) -> Source:
    if isinstance(given, str | os.PathLike):
        return open_checkpoint(given, trust=trust, verify=verify).source
    return given


def _read(source: Source, name: str, box: Chunk) -> torch.Tensor:
    into = torch.empty(box.sizes, dtype=source.tensors[name].dtype)
    source.read([Wanted(name, box, into)])
    return into


def _different(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    a, b = _comparable(a, exact=a.dtype == b.dtype), _comparable(b, exact=a.dtype == b.dtype)
    if rtol == atol == 0.0:
        equal = a == b
    else:
        a, b = (each if each.is_complex() else each.double() for each in (a, b))
        equal = torch.isclose(a, b, rtol=rtol, atol=atol)
    if a.is_floating_point() or a.is_complex():
        equal |= a.isnan() & b.isnan()
    return ~equal


def _comparable(values: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """In a dtype that torch compares: wide enough for both where they differ."""
    if values.dtype.is_floating_point and (values.dtype.itemsize == 1 or not exact):
        return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    if values.dtype in (torch.uint16, torch.uint32):
        return values.long()
    return values


def _told(source: Source, name: str) -> str:
    info = source.tensors.get(name)
    return "an object" if info is None else f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
