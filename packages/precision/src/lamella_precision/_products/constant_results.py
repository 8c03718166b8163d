"""Functions of constants, for `torch.compile`, without an import of Dynamo."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def assume_constant_result(function: Function) -> Function:
    """Mark a function as `torch.compiler.assume_constant_result` does: calls are folded into a compiled graph.

    torch's own decorator imports Dynamo, 1.3 s that every process of an eager run would pay.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
