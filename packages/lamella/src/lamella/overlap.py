"""`lamella.overlap` is deprecated and will be removed in lamella 0.2: import from `lamella_trace`."""

from typing import TYPE_CHECKING
from warnings import warn

import lamella_trace

if TYPE_CHECKING:
    from lamella_trace import *  # noqa: F403  All of its names, for type checkers.

__all__ = [name for name in vars(lamella_trace) if not name.startswith("_")]

if not TYPE_CHECKING:  # Hidden from type checkers: a module `__getattr__` makes every misspelt name type-check.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warn(
            f"lamella.overlap is deprecated and will be removed in lamella 0.2: import {name} from lamella_trace.",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(lamella_trace, name)
