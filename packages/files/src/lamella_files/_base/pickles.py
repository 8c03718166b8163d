"""Pickles read as data: contents are listed, and no code of the pickle runs.

Note [Nothing runs]
    A pickle is a program: it names callables, calls them, and writes attributes of objects on its stack, classes
    included. The reader offers a pickle two kinds of types. First, some of Python's and torch's own types, in C, that
    only hold data and are immutable: looked up by exact module and name, so that no dotted name and no attribute leads
    further. Second, stand-ins for all other types: an `Inert` records its arguments and does nothing. Each file gets
    new stand-in classes, and any state that a pickle assigns ends in `__setstate__`, which a class cannot answer.
    The caller chooses the types that become stand-ins; the first type beyond is refused by name.

Note [Bounded memo]
    A pickle numbers values for later reference, and Python's unpickler allocates a table up to the largest
    number, doubled: five bytes of a file can demand 64 GB. A genuine writer counts from 0, so a number larger
    than the pickle's length in bytes is malicious. Numbers are checked before unpickling, most opcodes by one match
    of a pattern: a tenth of the unpickling time, where `pickletools.genops` takes half.

Note [Bounded walks]
    A list that holds a second list twice, which holds a third list twice, takes forty short lines of a pickle, and a
    walk over the lists never ends. So one walk with a limit follows the read: a value takes at least a byte, unless
    shared, and widely shared values are leaves.
"""

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, Self, cast

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
    """A type in a pickle that the reader does not know; `name` is the full name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class PickleTooLarge(Exception):
    """A pickle demands more than its length justifies: Notes [Bounded memo] and [Bounded walks]."""


class Inert:
    """An object of a pickle, not constructed: the arguments of the type's call, and the assigned state.

    `kind` is the type's full name. Inserted values (as for a subclass of list or dict) are in `items`.
    """

    kind = ""

    def __new__(cls, *args: object, **_: object) -> Self:
        inert = super().__new__(cls)
        inert.args, inert.state, inert.items = args, None, []
        return inert

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
        """The attributes by name; empty if the state is no dict."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickle(content: bytes, *, knows: Callable[[str, str], bool], trust: bool = False) -> Any:
    """Read one pickle, with stand-ins for the types that the caller knows.

    Args:
        content: The pickle, and perhaps more behind it.
        knows: Whether the type of a module and a name is accepted, as a stand-in.
        trust: Allow unpickling of all other types. **Unsafe: can execute code.**

    Raises:
        PickleTooLarge: Unpickling, or a walk over the result, would cost more than the pickle's length justifies.
        UnknownType: A type neither known nor plain data, without `trust`.
        Exception: Anything, where the file is no pickle.

    Effects: with `trust`, imports and calls any callable that the pickle names; see Note [Nothing runs].
    """
    _check_memo(content)
    result = _Unpickler(content, knows, trust).load()
    check_size(result, len(content))
    return result


def is_plain(value: object) -> bool:
    """Whether a value is data that torch reads back without running code.

    Exact types: a pickle names the class of an enum's member or of NumPy's float64, and no reader accepts the name.
    """
    if type(value) in (list, tuple, torch.Size):
        return all(is_plain(element) for element in cast(Iterable[object], value))
    return type(value) in _PLAIN_TYPES


def check_size(value: object, nbytes: int) -> None:
    """Refuse a value by Note [Bounded walks].

    Args:
        value: The unpickled value.
        nbytes: Length of the pickle.

    Raises:
        PickleTooLarge: A walk over the value does not end, or takes too long.
    """
    most = num_remaining = _FEW_VALUES + 4 * nbytes
    unseen = [value] if isinstance(value, _NESTS) else []
    while unseen:
        node = unseen.pop()
        if isinstance(node, Inert):
            children = [node.args, node.state, node.items]
        else:
            children = [*node, *node.values()] if isinstance(node, dict) else [*node]
        num_remaining -= len(children)
        if num_remaining < 0:
            raise PickleTooLarge(f"expected at most {most} values in {nbytes} bytes, got more: some hold one another")
        # Most values are names and numbers, and a stand-in's arguments and items are often empty: the metadata of
        # 300,000 tensors are walked through in half the time without a visit to each.
        unseen += [child for child in children if type(child) not in _LEAVES and isinstance(child, _NESTS) and child]


_LEAVES: Final = frozenset({str, int, float, bool, bytes, type(None)})
_NESTS: Final = (dict, list, tuple, set, frozenset, Inert)
_FEW_VALUES: Final = 1 << 20  # Walked through in less than a second.
_OPCODES: Final = {op.code.encode("latin-1"): op for op in pickletools.opcodes}
_NUMBERS_A_VALUE: Final = frozenset({"PUT", "LONG_BINPUT"})  # `BINPUT` is harmless: a table of 256 entries.


def _opcodes_of_fixed_length() -> re.Pattern[bytes]:
    """A run of opcodes that need no check: the first byte determines the length, and no value gets a large number."""
    lengths: dict[int, bytes] = {}
    for code, op in _OPCODES.items():
        length = 0 if op.arg is None else op.arg.n
        if length >= 0 and op.name not in ("STOP", *_NUMBERS_A_VALUE):
            lengths[length] = lengths.get(length, b"") + re.escape(code)
    patterns = (b"[%b].{%d}" % (codes, length) for length, codes in lengths.items())
    small = re.escape(pickle.LONG_BINPUT) + rb"..[\x00-\x0f]\x00"  # Numbers below 2**20: a table of 16 MB at most.
    return re.compile(b"(?:%b|%b)*+" % (b"|".join(patterns), small), re.DOTALL)


_OF_FIXED_LENGTH: Final = _opcodes_of_fixed_length()


def _check_memo(content: bytes) -> None:
    """Refuse a pickle by Note [Bounded memo]."""
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
        """torch.save's reference to a storage, kept as the stored tuple."""
        return pid
