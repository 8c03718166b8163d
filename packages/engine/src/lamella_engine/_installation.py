"""lamella in FSDP2's place: its functions under the names by which programs know torch's.

Classes stay. A unit is an `FSDPModule` of torch's, a handle is torch's `UnshardHandle`, and policies are torch's own or
taken where torch's are given, so that `isinstance` and construction mean what they did.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self

import torch.distributed.fsdp as fsdp2

from lamella_engine._fully_shard import fully_shard
from lamella_engine._functions import register_fsdp_forward_method, share_comm_ctx

Function = Callable[..., Any]


def _stand_in(function: Function) -> Function:
    """The function as another object, by which `undo` tells torch's names from imports of this package's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


# Of each function torch's and lamella's. Looked up when this package is imported, and therefore before any `install()`.
_PAIRS: Sequence[tuple[Function, Function]] = [
    (fsdp2.fully_shard, _stand_in(fully_shard)),
    (fsdp2.register_fsdp_forward_method, _stand_in(register_fsdp_forward_method)),
    (fsdp2.share_comm_ctx, _stand_in(share_comm_ctx)),
]
_FOR_TORCHS = {id(torchs): ours for torchs, ours in _PAIRS}
_FOR_OURS = {id(ours): torchs for torchs, ours in _PAIRS}


class Installation:
    """lamella in FSDP2's place, until `undo()` or the end of a `with` statement; `install` gives one.

    Attributes:
        replaced: The names that were torch's, sorted, such as "torch.distributed.fsdp.fully_shard"; none if lamella was
            in place before.
    """

    def __init__(self) -> None:
        self.replaced = tuple(sorted(_replace(_FOR_TORCHS)))
        self._is_undone = not self.replaced

    def undo(self) -> None:
        """Give torch's functions all their names back, also in modules that were imported since.

        Models that are sharded go on as they are. Nothing happens if this replaced nothing, or was undone.
        """
        if not self._is_undone:
            self._is_undone = True
            list(_replace(_FOR_OURS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def install() -> Installation:
    """Put lamella in FSDP2's place in this process: a program that shards with torch's functions shards with lamella's.

        with lamella_engine.install():
            trainer.train()     # shards with lamella

    For libraries that import torch's functions themselves. `fully_shard`, `register_fsdp_forward_method` and
    `share_comm_ctx` are replaced wherever a module has torch's as a global, under any name: in
    `torch.distributed.fsdp`, in torch's other modules that offer or use it, and in modules that imported it before.
    Modules that are imported later find lamella's under torch's names. Left alone are the file in which torch defines
    the function, and other references than globals: default arguments, attributes of objects, local variables.

    Returns:
        The installation, which lists the names, and whose `undo()`, or the end of a `with` statement, gives the names
        back to torch. A second call replaces nothing, and undoing the second changes nothing.

    Effects: none beyond this process. Call on every rank, before a model is sharded: lamella's `fully_shard` refuses a
        model that torch has sharded.
    """
    return Installation()


def _replace(functions: dict[int, Function]) -> Iterator[str]:
    """Replace functions, given by identity, in the globals of all modules; the names under which they were."""
    for title, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):  # some entries are no modules, or None
            if id(value) in functions and not _defines(module, value):
                setattr(module, name, functions[id(value)])
                yield f"{title}.{name}"


def _defines(module: ModuleType, function: Function) -> bool:
    """Whether the function's own code looks names up in the module: torch's asks there for its own state."""
    return vars(module) is inspect.unwrap(function).__globals__
