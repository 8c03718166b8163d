"""lamella in FSDP2's place: lamella's functions under the names of torch's functions.

Classes stay. A unit is an `FSDPModule` of torch's, a handle is torch's `UnshardHandle`, and lamella takes torch's
policies, so `isinstance` and constructors work as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self

import torch.distributed.fsdp as fsdp2

from lamella_engine._api.fully_shard import fully_shard
from lamella_engine._api.functions import register_fsdp_forward_method, share_comm_ctx

Function = Callable[..., Any]


def _stand_in(function: Function) -> Function:
    """The function as another object: `undo` must tell replaced names from imports of this package's functions."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


# Each of torch's functions with lamella's. Looked up at import, and so before any `install()` rebinds torch's names.
_PAIRS: Sequence[tuple[Function, Function]] = [
    (fsdp2.fully_shard, _stand_in(fully_shard)),
    (fsdp2.register_fsdp_forward_method, _stand_in(register_fsdp_forward_method)),
    (fsdp2.share_comm_ctx, _stand_in(share_comm_ctx)),
]
_FOR_TORCHS = {id(torchs): ours for torchs, ours in _PAIRS}
_FOR_OURS = {id(ours): torchs for torchs, ours in _PAIRS}


class Installation:
    """lamella in FSDP2's place, until `undo()` or the end of a `with` statement; made by `install`.

    Attributes:
        replaced: The replaced names, sorted, such as "torch.distributed.fsdp.fully_shard"; none if lamella was in place
            before.
    """

    def __init__(self) -> None:
        self.replaced = tuple(sorted(_replace(_FOR_TORCHS)))
        self._is_undone = not self.replaced

    def undo(self) -> None:
        """Give all names back to torch's functions, also in modules imported since.

        Sharded models stay sharded. Nothing happens if no name was replaced, or after an earlier `undo()`.
        """
        if not self._is_undone:
            self._is_undone = True
            # Listed for the effect: a generator by itself replaces nothing.
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

    For libraries that import torch's functions. `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx` are
    replaced in the globals of all modules, under any name: in `torch.distributed.fsdp`, in torch's other modules with
    the function, and in modules that imported the function before. Modules imported later find lamella's functions
    under torch's names. The file with torch's definition is left alone, and so are references other than globals:
    default arguments, attributes of objects, local variables.

    Returns:
        The installation, which lists the names; `undo()`, or the end of a `with` statement, gives the names back to
        torch. A second call replaces nothing, and undoing the second changes nothing.

    Effects: none beyond this process. Call on every rank, before a model is sharded: lamella's `fully_shard` refuses a
        model that torch has sharded.
    """
    return Installation()


def _replace(functions: dict[int, Function]) -> Iterator[str]:
    """Replace functions, given by identity, in the globals of all modules, and list the replaced names."""
    for title, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):  # some entries are no modules, or None
            if id(value) in functions and not _defines(module, value):
                setattr(module, name, functions[id(value)])
                yield f"{title}.{name}"


def _defines(module: ModuleType, function: Function) -> bool:
    """Whether the function's own globals are the module's: torch's function looks its state up by name there."""
    return vars(module) is inspect.unwrap(function).__globals__
