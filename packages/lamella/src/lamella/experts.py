"""`lamella.experts` is deprecated and will be removed in lamella 0.2: import from `lamella_transformers.experts`."""

from importlib import import_module
from typing import TYPE_CHECKING, Final
from warnings import warn

if TYPE_CHECKING:
    from lamella_transformers.experts import chunk as chunk
    from lamella_transformers.experts import shard_with_experts as shard_with_experts
    from lamella_transformers.experts import spread_experts as spread_experts

_REPLACEMENT: Final = "lamella_transformers.experts"
__all__ = ["chunk", "shard_with_experts", "spread_experts"]

if not TYPE_CHECKING:  # Hidden from type checkers: a module `__getattr__` makes every misspelt name type-check.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warn(
            f"lamella.experts is deprecated and will be removed in lamella 0.2: import {name} from {_REPLACEMENT}.",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(import_module(_REPLACEMENT), name)
