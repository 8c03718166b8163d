"""Views recorded by a quantised weight, and taken of the values on demand of an operator.

`t`, transposes and permutations are recorded as permutations; chunks and splits as slices; `unbind` as selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_ATEN = torch.ops.aten
_OPERATORS = {"select": _ATEN.select.int, "slice": _ATEN.slice.Tensor, "permute": _ATEN.permute.default}


class RecordedView(NamedTuple):
    """A select, a slice or a permutation.

    Attributes:
        name: Name of ATen's operator.
        arguments: The operator's arguments after the tensor; the dim, or the order of all dims, is the first and
            counts from 0.
    """

    name: str  # and not the operator: compilers compare and store the views of a wrapper
    arguments: tuple[Any, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        viewed: torch.Tensor = _OPERATORS[self.name](tensor, *self.arguments)
        return viewed

    @property
    def is_part_of_stack(self) -> bool:
        """Whether the view is a run of neighbours along dim 0, or a single entry."""
        first, *further_arguments = self.arguments
        return first == 0 and (self.name == "select" or (self.name == "slice" and further_arguments[2:] in ([], [1])))

    @property
    def keeps_first_dim(self) -> bool:
        """Whether dim 0 is dim 0 of the view, in full."""
        first = self.arguments[0]
        return bool(first[0] == 0) if self.name == "permute" else first != 0

    def without_first_dim(self) -> RecordedView:
        """The same view of each entry along dim 0; for views without a change of dim 0."""
        first, *further_arguments = self.arguments
        return RecordedView(
            self.name,
            (tuple([dim - 1 for dim in first[1:]]) if self.name == "permute" else first - 1, *further_arguments),
        )


def views_by(func: object, arguments: Sequence[Any]) -> list[RecordedView] | None:
    """The views of its first argument that an operator takes, in the order of results; None for other operators.

    Args:
        func: An operator of ATen.
        arguments: The operator's arguments, a tensor first.
    """
    recorder = _VIEWS.get(func)
    return None if recorder is None else recorder(*arguments)


def is_single(func: object) -> bool:
    """Whether an operator of `views_by` returns a tensor in place of a list."""
    return func not in _LISTS


def _select(tensor: torch.Tensor, dim: int, index: int) -> list[RecordedView]:
    return [RecordedView("select", (dim % tensor.ndim, index))]


def _slice(tensor: torch.Tensor, dim: int = 0, *limits: int | None) -> list[RecordedView]:
    return [RecordedView("slice", (dim % tensor.ndim, *limits))]


def _permute(tensor: torch.Tensor, dims: Sequence[int]) -> list[RecordedView]:
    return [RecordedView("permute", (tuple([dim % tensor.ndim for dim in dims]),))]


def _transpose(tensor: torch.Tensor, one: int, other: int) -> list[RecordedView]:
    dims = list(range(tensor.ndim))
    dims[one], dims[other] = dims[other], dims[one]
    return _permute(tensor, dims)


def _t(tensor: torch.Tensor) -> list[RecordedView]:
    return _permute(tensor, tuple(reversed(range(tensor.ndim))))


def _unbind(tensor: torch.Tensor, dim: int = 0) -> list[RecordedView]:
    return [RecordedView("select", (dim % tensor.ndim, i)) for i in range(tensor.shape[dim])]


def _split(tensor: torch.Tensor, length: int, dim: int = 0) -> list[RecordedView]:
    numel = tensor.shape[dim]
    starts = range(0, numel, length)
    return [RecordedView("slice", (dim % tensor.ndim, start, min(start + length, numel))) for start in starts]


def _split_with_sizes(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[RecordedView]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    return [RecordedView("slice", (dim % tensor.ndim, *limits)) for limits in zip(starts, ends, strict=True)]


_LISTS: dict[object, Callable[..., list[RecordedView]]] = {
    _ATEN.unbind.int: _unbind,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split_with_sizes,
}
_VIEWS: dict[object, Callable[..., list[RecordedView]]] = {
    _ATEN.select.int: _select,
    _ATEN.slice.Tensor: _slice,
    _ATEN.permute.default: _permute,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: _t,
    **_LISTS,
}
