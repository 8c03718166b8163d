"""Pickles read as data: what is in one is told, and nothing in it runs.

Note [Nothing runs]
    A pickle is a program: it names callables, calls them, and writes attributes of what lies on its stack, classes
    included. So here it gets two kinds of types. Some of Python's and torch's own, in C, that only hold data and cannot
    be changed: they are found by their exact module and name, so that no dotted name and no attribute leads further.
    And stand-ins for all others: an `Inert` remembers what it was made of and does nothing. The class of a stand-in is
    made anew for each file, and what a pickle tells it to become ends in `__setstate__`, which a class cannot answer.
    A caller says which of the others it knows; the first that it does not is refused by name.

Note [What is remembered]
    A pickle numbers values to name them again, and Python's unpickler has a table of as many entries as the largest
    number, twice: five bytes of a file can make it 64 GB. Whoever writes pickles counts from 0 on, so a number larger
    than the pickle has bytes is somebody's who means harm. Numbers are looked at before anything is unpickled, most
    opcodes by one match of a pattern: a tenth of the time that unpickling takes, where `pickletools.genops` takes half.

Note [What is named twice]
    A list that holds another one twice, and that another one twice, is forty short lines of a pickle and ends no walk
    through it. So what was read is walked through once, with an end: a value takes a byte at least, unless it is
    shared, and what is shared by many is a leaf.
"""

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Self

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


_PLAIN_TYPES: Final = (bool, int, float, complex, str, torch.dtype, type(None))


class UnknownType(Exception):
    """A type in a pickle that the reader does not know; `name` is its full name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class PickleTooLarge(Exception):
    """A pickle makes more than one of its length can need: Notes [What is remembered] and [What is named twice]."""


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


def read_pickle(content: bytes, *, knows: Callable[[str, str], bool], trust: bool = False) -> Any:
    """Read one pickle, with stand-ins for the types that the caller knows.

    Args:
        content: The pickle, and perhaps more behind it.
        knows: Whether the type of a module and a name may be in it. It becomes a stand-in.
        trust: Whether types that are neither known nor plain data are imported and made, which can run anything.

    Raises:
        PickleTooLarge: It would make the unpickler, or who walks through the result, do what no pickle of its length
            can need.
        UnknownType: Such a type, without `trust`.
        Exception: Anything, where the file is no pickle.

    Effects: with `trust`, imports and calls of whatever the pickle names; see Note [Nothing runs].
    """
    _check_memo(content)
    result = _Unpickler(content, knows, trust).load()
    check_size(result, len(content))
    return result


def is_plain(value: object) -> bool:
    """Whether a value is data that torch reads back without running anything."""
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in value)
    return isinstance(value, _PLAIN_TYPES)


def check_size(value: object, nbytes: int) -> None:
    """Note [What is named twice].

    Args:
        value: What was read.
        nbytes: From how many bytes.

    Raises:
        PickleTooLarge: A walk through it does not end, or takes too long.
    """
    most = left = _FEW_VALUES + 4 * nbytes
    unseen = [value]
    while unseen:
        node = unseen.pop()
        inside: list[object] = []
        if isinstance(node, dict):
            inside = [*node, *node.values()]
        elif isinstance(node, list | tuple | set | frozenset):
            inside = [*node]
        elif isinstance(node, Inert):
            inside = [node.args, node.state, node.items]
        left -= len(inside)
        if left < 0:
            raise PickleTooLarge(f"expected at most {most} values in {nbytes} bytes, got more: some hold one another")
        unseen += [each for each in inside if isinstance(each, _NESTS)]


_NESTS: Final = (dict, list, tuple, set, frozenset, Inert)
_FEW_VALUES: Final = 1 << 20  # Walked through in less than a second.
_OPCODES: Final = {op.code.encode("latin-1"): op for op in pickletools.opcodes}
_NUMBERS_A_VALUE: Final = frozenset({"PUT", "LONG_BINPUT"})  # A table of 256 entries, for `BINPUT`, harms nobody.


def _opcodes_of_fixed_length() -> re.Pattern[bytes]:
    """A run of opcodes that need no look: the length of each follows from its first byte, and it numbers no value."""
    lengths: dict[int, bytes] = {}
    for code, op in _OPCODES.items():
        length = 0 if op.arg is None else op.arg.n
        if length >= 0 and op.name not in ("STOP", *_NUMBERS_A_VALUE):
            lengths[length] = lengths.get(length, b"") + re.escape(code)
    of_length = (b"[%b].{%d}" % (codes, length) for length, codes in lengths.items())
    small = re.escape(pickle.LONG_BINPUT) + rb"..[\x00-\x0f]\x00"  # Numbers below 2**20: a table of 16 MB at most.
    return re.compile(b"(?:%b|%b)*+" % (b"|".join(of_length), small), re.DOTALL)


_OF_FIXED_LENGTH: Final = _opcodes_of_fixed_length()


def _check_memo(content: bytes) -> None:
    """Note [What is remembered]."""
    stream = io.BytesIO(content)
    while True:
        run = _OF_FIXED_LENGTH.match(content, stream.tell())
        assert run is not None
        stream.seek(run.end())
        if (code := stream.read(1)) not in _OPCODES:
            raise pickle.UnpicklingError(f"expected an opcode at {run.end()}, got {code!r}")
        op = _OPCODES[code]
        if op.arg is None:  # The end.
            return
        arg = op.arg.reader(stream)
        if op.name in _NUMBERS_A_VALUE and arg > len(content):
            raise PickleTooLarge(f"expected {len(content)} bytes to number as many values at most, got number {arg}")


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, knows: Callable[[str, str], bool], trust: bool) -> None:
        super().__init__(io.BytesIO(content))
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
