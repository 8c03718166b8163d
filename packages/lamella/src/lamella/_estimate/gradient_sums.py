"""Sums of gradients in autograd's engine: in place, as in a step without modes.

Note [Sums in place]
    Where a tensor has several users, the engine adds their gradients up: into the first gradient if nothing else refers
    to it, else into a new tensor. Under a mode of torch the engine always takes a new tensor: of a tied embedding,
    memory that no run needs. The engine's sums into sole gradients are known by their references: a sum that a layer's
    Python code makes, or a gradient that waits for another sum too, has more.
"""

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

_ADD: Final = torch.ops.aten.add.Tensor


class _References(NamedTuple):
    """References to a gradient, of Python and of C++, and to its storage."""

    python: int
    tensor: int
    storage: int


class GradientSums:
    """Makes the engine's sums in place, for the `__torch_dispatch__` of a mode."""

    def __init__(self) -> None:
        self._is_learning = False
        self._references: _References | None = None

    def learn(self) -> None:
        """Note the references to a sole gradient. Before, all sums are new tensors.

        To be called under all modes of the step: the frame of each mode refers to the gradient too.
        """
        tensor = torch.ones(1, requires_grad=True)
        outputs = torch.sin(tensor), torch.cos(tensor)
        self._is_learning = True
        torch.autograd.backward(outputs, [torch.ones(1), torch.ones(1)])
        self._is_learning = False

    def sum_of(self, function: Any, arguments: Sequence[Any], options: Any) -> torch.Tensor | None:
        """Add up two gradients in place if the engine would; None for any other operator."""
        if function is not _ADD or options or torch.is_grad_enabled() or not _are_alike(*arguments):
            return None
        if self._is_learning:
            self._references = _references_to(arguments)
            return None
        if _references_to(arguments) != self._references:
            return None
        output: torch.Tensor = torch.ops.aten.add_.Tensor(*arguments)
        return output


def _are_alike(first: Any, second: Any) -> bool:
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    return first.shape == second.shape and first.dtype == second.dtype and _is_dense(first)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _references_to(arguments: Sequence[Any]) -> _References:
    count = torch._C._storage_Use_Count(arguments[0].untyped_storage()._cdata)
    return _References(sys.getrefcount(arguments[0]), arguments[0]._use_count(), count)
