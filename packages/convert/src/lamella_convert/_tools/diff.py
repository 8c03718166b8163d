"""Comparison of two checkpoints: names, shapes, dtypes, and values box by box."""

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from lamella_convert._formats.open import open_checkpoint
from lamella_convert._tools.plan import section_name
from lamella_files import CheckpointUntrusted, Place, Source, Wanted, pieces, printable, short

OnProgress = Callable[[int, int], None]
"""Called with the bytes compared so far, and the total."""

_BUFFER_NBYTES: Final = 64 << 20
_LINES_SHOWN: Final = 20


class Difference(NamedTuple):
    """A name that differs between two checkpoints: each side as text, None for a side without the name."""

    name: str
    a: str | None
    b: str | None
    what: str

    def __str__(self) -> str:
        if self.a is None or self.b is None:
            return printable(f"{self.name}: only in {'b' if self.a is None else 'a'}, {self.a or self.b}")
        return printable(f"{self.name}: {self.what}: {self.a} in a, {self.b} in b")


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The differences of two checkpoints; false when they are equal.

    Attributes:
        a: The first path.
        b: The second path.
        differences: Names in the order of `a`, then the names of `b` alone. `what` is "name", "shape", "dtype", "value"
            or "object"; a tensor of another dtype is compared by value, too.
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
        """The same for programs: plain data for JSON."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "num_equal": self.num_equal,
            "differences": [difference._asdict() for difference in self.differences],
        }


def diff(
    a: str | os.PathLike[str] | Source,
    b: str | os.PathLike[str] | Source,
    *,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
    trust: bool = False,
    verify: bool = True,
    on_progress: OnProgress = lambda done, total: None,
) -> Diff:
    """Compare two checkpoints of any formats, under native names.

    Values of `extra`, as a step, are not compared. Objects beside the model and the optimizer, as a step in a file of
    `torch.save`, are compared where both checkpoints have them.

    Args:
        a: A checkpoint: its path, or a source with the names to compare by, `translate(open_checkpoint(path), ...)`.
        b: The other checkpoint.
        values: Compare values of tensors and objects. False reads no values.
        rtol: The tolerance relative to the values of `b`, for integers too. With 0, values must be equal.
        atol: The absolute tolerance, added to the relative one. Not-a-number equals itself.
        trust: Allow unpickling of types beyond plain data and torch's own. **Unsafe: can execute code.** Without trust,
            objects of such types are compared by name alone.
        verify: Verify checksums while reading, if there are any.
        on_progress: Called with the bytes compared so far, and the total.

    Raises:
        CheckpointDamaged: The conditions of `open_checkpoint`, or a tensor cannot be read.
        FileNotFoundError: A path does not exist.

    Effects: holds 64 MiB of each at most; no collective, no accelerator.
    """
    sources = [_opened(path, trust=trust, verify=verify) for path in (a, b)]
    comparison = _Comparison(*sources, values=values, rtol=rtol, atol=atol, on_progress=on_progress)
    differences = tuple(comparison.run())
    return Diff(a=sources[0].path, b=sources[1].path, differences=differences, num_equal=comparison.num_equal)


class _Comparison:
    def __init__(
        self, a: Source, b: Source, *, values: bool, rtol: float, atol: float, on_progress: OnProgress
    ) -> None:
        self._a, self._b = a, b
        self._with_values = values
        self._rtol, self._atol = rtol, atol
        self._on_progress = on_progress
        self.num_equal = 0

    def run(self) -> Iterator[Difference]:
        names_in_a, names_in_b = ({*source.tensors, *source.objects} for source in (self._a, self._b))
        names = self._a.tensors if self._with_values else ()
        values = self._values([name for name in names if name in names_in_b and self._are_comparable(name)])
        for name in (*self._a.tensors, *self._a.objects):
            if name not in names_in_b:
                if _counts_alone(self._a, name):
                    yield Difference(name, _description(self._a, name), None, "name")
                continue
            differences = [*self._named_differences(name), *([values[name]] if name in values else [])]
            self.num_equal += not differences
            yield from differences
        for name in (*self._b.tensors, *self._b.objects):
            if name not in names_in_a and _counts_alone(self._b, name):
                yield Difference(name, None, _description(self._b, name), "name")

    def _are_comparable(self, name: str) -> bool:
        a, b = self._a.tensors.get(name), self._b.tensors.get(name)
        return a is not None and b is not None and tuple(a.shape) == tuple(b.shape)

    def _named_differences(self, name: str) -> Iterator[Difference]:
        """Differences of a name except in values."""
        a, b = self._a.tensors.get(name), self._b.tensors.get(name)
        if a is None and b is None:
            yield from self._object_differences(name) if self._with_values else ()
        elif a is None or b is None:
            yield Difference(name, _description(self._a, name), _description(self._b, name), "object")
        elif tuple(a.shape) != tuple(b.shape):
            yield Difference(name, str(list(a.shape)), str(list(b.shape)), "shape")
        elif a.dtype != b.dtype:
            yield Difference(name, str(a.dtype), str(b.dtype), "dtype")

    def _object_differences(self, name: str) -> Iterator[Difference]:
        try:
            a, b = self._a.read_object(name), self._b.read_object(name)
        except CheckpointUntrusted:
            return
        if not _are_equal(a, b):
            yield Difference(name, short(a), short(b), "object")

    def _values(self, names: Sequence[str]) -> dict[str, Difference]:
        """The number of differing elements and the first of them, by name."""
        num_different: dict[str, int] = {}
        firsts: dict[str, Difference] = {}
        total = sum(prod(self._a.tensors[name].shape) * self._a.tensors[name].dtype.itemsize for name in names)
        done = 0
        for batch in self._batches(names):
            for (name, piece), a, b in zip(batch, _read(self._a, batch), _read(self._b, batch), strict=True):
                done += a.nbytes
                if a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)):
                    continue
                differ = _different(a, b, self._rtol, self._atol)
                num_different[name] = num_different.get(name, 0) + int(differ.sum())
                if name not in firsts and bool(differ.any()):
                    at = tuple(differ.nonzero()[0].tolist())
                    place = [offset + index for offset, index in zip(piece.offsets, at, strict=True)]
                    firsts[name] = Difference(name, repr(a[at].item()), repr(b[at].item()), f"first at {place}")
            self._on_progress(done, total)
        return {
            name: first._replace(
                what=f"{num_different[name]} of {prod(self._a.tensors[name].shape)} values, {first.what}"
            )
            for name, first in firsts.items()
        }

    def _batches(self, names: Iterable[str]) -> Iterator[list[Place]]:
        """Boxes read together, along the chunks of `a`."""
        batch: list[Place] = []
        num_free = _BUFFER_NBYTES
        for name in names:
            itemsize = max(source.tensors[name].dtype.itemsize for source in (self._a, self._b))
            for chunk in self._a.tensors[name].chunks:
                for piece in pieces(chunk, _BUFFER_NBYTES // itemsize):
                    if batch and piece.numel * itemsize > num_free:
                        yield batch
                        batch, num_free = [], _BUFFER_NBYTES
                    batch.append(Place(name, piece))
                    num_free -= piece.numel * itemsize
        if batch:
            yield batch


def _counts_alone(source: Source, name: str) -> bool:
    """Whether a name of one side alone is a difference: a tensor's, or an object's of the model or the optimizer."""
    # Every conversion lacks the step and the like beside the sections: it drops them, or moves them into `extra`.
    return name in source.tensors or section_name(name) is not None


def _are_equal(a: object, b: object) -> bool:
    """Whether two values are equal, at any nesting: `==` of tensors gives a tensor."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_are_equal, a, b))
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001  Arrays and foreign objects may refuse `==`: their pickles are compared.
        return pickle.dumps(a) == pickle.dumps(b)


def _opened(path_or_source: str | os.PathLike[str] | Source, *, trust: bool, verify: bool) -> Source:
    if isinstance(path_or_source, str | os.PathLike):
        return open_checkpoint(path_or_source, trust=trust, verify=verify).source
    return path_or_source


def _read(source: Source, boxes: Sequence[Place]) -> list[torch.Tensor]:
    into = [torch.empty(box.chunk.sizes, dtype=source.tensors[box.name].dtype) for box in boxes]
    source.read([Wanted(box.name, box.chunk, memory) for box, memory in zip(boxes, into, strict=True)])
    return into


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _different(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    a, b = _comparable(a, exact=a.dtype == b.dtype), _comparable(b, exact=a.dtype == b.dtype)
    equal = a == b if rtol == atol == 0.0 else _are_close(a, b, rtol, atol)
    if a.is_floating_point() or a.is_complex():
        equal |= a.isnan() & b.isnan()
    return ~equal


def _are_close(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    close = torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=atol)
    if a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64):  # float64 holds integers up to 2**53 alone.
        # The difference of close numbers fits in int64, also of unsigned ones, which torch does not subtract.
        close &= (a.view(torch.int64) - b.view(torch.int64)).abs() <= atol + rtol * b.double().abs()
    return close


def _comparable(values: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """The values in a dtype that torch can compare: wide enough for both if the dtypes differ."""
    if values.dtype.is_floating_point and (values.dtype.itemsize == 1 or not exact):
        return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    if values.dtype in (torch.uint16, torch.uint32):
        return values.long()
    return values


def _description(source: Source, name: str) -> str:
    info = source.tensors.get(name)
    return "an object" if info is None else f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
