"""Pickles read as data: what is in one is told, and nothing in it runs.

Note [Nothing runs]
    A pickle is a program: it names callables, calls them, and writes attributes of what lies on its stack, classes
    included. So here it gets two kinds of types. Some of Python's and torch's own, in C, that only hold data and cannot
    be changed: they are found by their exact module and name, so that no dotted name and no attribute leads further.
    And stand-ins for all others: an `Inert` remembers what it was made of and does nothing. The class of a stand-in is
    made anew for each file, and what a pickle tells it to become ends in `__setstate__`, which a class cannot answer.
    A caller says which of the others it knows; the first that it does not is refused by name.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO, Final, Self

import torch

_DTYPES: Final = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_DATA_TYPES: Final[dict[tuple[str, str], object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("__builtin__", "set"): set,
    ("torch", "Size"): torch.Size,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


class UnknownType(Exception):
    """A type in a pickle that the reader does not know; `name` is its full name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Inert:
    """An object of a pickle, not made: what its type was called with, and the state that it was given.

    `kind` is the type's full name. Whatever is put into it (as a subclass of list or dict would be) is in `items`.
    """

    kind = ""

    def __new__(cls, *args: object, **_: object) -> Self:
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        self.items.append((key, value))

    def append(self, value: object) -> None:
        self.items.append(value)

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes by name; empty if its state is something else."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickle(file: BinaryIO, *, knows: Callable[[str, str], bool], trust: bool = False) -> Any:
    """Read one pickle, with stand-ins for the types that the caller knows.

    Args:
        file: At the pickle's beginning.
        knows: Whether the type of a module and a name may be in it. It becomes a stand-in.
        trust: Whether types that are neither known nor plain data are imported and made, which can run anything.

    Raises:
        UnknownType: Such a type, without `trust`.
        Exception: Anything, where the file is no pickle.

    Effects: none without `trust`, see Note [Nothing runs].
    """
    return _Unpickler(file, knows, trust).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, knows: Callable[[str, str], bool], trust: bool) -> None:
        super().__init__(file)
        self._knows = knows
        self._trust = trust
        self._stand_ins: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        place = (module, name)
        if place in _DATA_TYPES:
            return _DATA_TYPES[place]
        if place not in self._stand_ins:
            full = f"{module}.{name}"
            if not self._knows(module, name):
                if self._trust:
                    return super().find_class(module, name)
                raise UnknownType(full)
            self._stand_ins[place] = type(name, (Inert,), {"kind": full})
        return self._stand_ins[place]

    def persistent_load(self, pid: object) -> object:
        """torch.save's reference to a storage: the tuple that says which."""
        return pid
