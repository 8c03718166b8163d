"""lamella in FSDP2's place: lamella's functions under the names of torch's functions.

Classes stay. A unit is an `FSDPModule` of torch's, a handle is torch's `UnshardHandle`, and lamella takes torch's
policies, so `isinstance` and constructors work as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, cast

import torch.distributed.fsdp as fsdp2

from lamella_engine._api.fully_shard import fully_shard
from lamella_engine._api.functions import register_fsdp_forward_method, share_comm_ctx
from lamella_engine._common.installation import Installation

Function = Callable[..., Any]


def _stand_in(function: Function) -> Function:
    """The function as another object: `undo` must tell replaced names from imports of the package's functions."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


# Each of torch's functions with lamella's. Looked up at import, before any `install()` rebinds torch's names.
_PAIRS: Sequence[tuple[Function, Function]] = [
    (fsdp2.fully_shard, _stand_in(fully_shard)),
    (fsdp2.register_fsdp_forward_method, _stand_in(register_fsdp_forward_method)),
    (fsdp2.share_comm_ctx, _stand_in(share_comm_ctx)),
]


def install() -> Installation:
    """Put lamella in FSDP2's place in this process: torch's functions then shard with lamella.

        with lamella_engine.install():
            trainer.train()     # shards with lamella

    For libraries that import torch's functions. `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx`
    are replaced in the globals of all modules, under any name: in `torch.distributed.fsdp`, in torch's further modules
    with the function, and in modules with an earlier import. Modules imported later find lamella's functions under
    torch's names. The file with torch's definition is left alone, and references outside of globals too: default
    arguments, attributes of objects, local variables.

    Returns:
        The installation, with a list of the names; `undo()`, or the end of a `with` statement, gives the names back to
        torch. A second call replaces nothing, and undoing the second changes nothing.

    Effects: none beyond this process. Call on every rank, before a model is sharded: lamella's `fully_shard` refuses a
        model sharded by torch.
    """
    return Installation(_PAIRS, keeps=_defines)


def _defines(module: ModuleType, function: object) -> bool:
    """Whether the function's own globals are the module's: torch's function looks state up by name in the globals."""
    return vars(module) is inspect.unwrap(cast(FunctionType, function)).__globals__
