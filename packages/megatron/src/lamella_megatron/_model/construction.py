"""Calls at the end of constructors: layers are sharded as soon as each is built."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def after_construction(classes: tuple[type[nn.Module], ...], callback: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `callback` with each new object of some classes and of their subclasses, once all constructors are done."""
    under_construction: set[int] = set()

    def watched(construct: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(construct)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(self) in under_construction:  # called by a subclass's
                construct(self, *args, **kwargs)
                return
            under_construction.add(id(self))
            try:
                construct(self, *args, **kwargs)
            finally:
                under_construction.remove(id(self))
            callback(self)

        return init

    originals = {
        layer_class: vars(layer_class)["__init__"]
        for layer_class in _with_subclasses(classes)
        if "__init__" in vars(layer_class)
    }
    try:
        for layer_class, construct in originals.items():
            layer_class.__init__ = watched(construct)  # type: ignore[method-assign]
        yield
    finally:
        for layer_class, construct in originals.items():
            layer_class.__init__ = construct  # type: ignore[method-assign]


def _with_subclasses(classes: tuple[type[nn.Module], ...]) -> Iterator[type[nn.Module]]:
    for layer_class in classes:
        yield layer_class
        yield from _with_subclasses(tuple(layer_class.__subclasses__()))
