"""Backends with options, in the command line's form: `lamella:keep=4GiB,mesh=2x2`."""

import inspect
import re
from collections.abc import Callable
from functools import partial

from lamella_integration.backends import BACKENDS, FLOAT8, Backend

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_PLACEMENTS = ("DDP", "ZERO1", "ZERO2", "ZERO3", "HSDP", "HFSDP")
_ALLOCATORS = ("caching", "pool", "mempool")


def backend_of(text: str) -> Backend:
    """Return the named backend with the given options.

    Raises:
        ValueError: The backend or an option is unknown, or an option has an invalid value or appears twice.
    """
    name, _, listed = text.partition(":")
    if name not in BACKENDS:
        raise ValueError(f"Expected a backend among {', '.join(BACKENDS)}, got {name!r}.")
    names = options_of(name)
    options: dict[str, object] = {}
    for assignment in filter(None, listed.split(",")):
        key, _, value = assignment.partition("=")
        if key not in names or key in options:
            among = f"options of {name} among {', '.join(names)}, each once" if names else f"no options of {name}"
            raise ValueError(f"Expected {among}, got {key!r} in {text!r}.")
        options[key] = _read(key, value, text)
    return partial(BACKENDS[name], **options)


def options_of(name: str) -> list[str]:
    """Return the names of a backend's options."""
    parameters = inspect.signature(BACKENDS[name]).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]


def _read(key: str, value: str, text: str) -> object:
    expected, read = _READERS[key]
    try:
        return read(value)
    except (ValueError, KeyError) as error:
        raise ValueError(f"Expected {key}= with {expected}, got {value!r} in {text!r}.") from error


def _nbytes(value: str) -> int:
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", value)
    if match is None:
        raise ValueError(value)
    return int(float(match[1]) * _UNITS[match[2]])


def _flag(value: str) -> bool:
    return {"true": True, "false": False}[value]


def _flag_or_count(value: str) -> bool | int:
    return int(value) if value.isdecimal() else _flag(value)


def _sizes(value: str) -> tuple[int, ...]:
    return tuple(int(size) for size in value.split("x"))


def _names_among(*names: str) -> Callable[[str], tuple[str, ...]]:
    return lambda value: tuple(names[names.index(name)] for name in value.split("+"))


def _one_of(*names: str) -> Callable[[str], str]:
    return lambda value: names[names.index(value)]


_READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "keep": ("bytes, as 4GiB", _nbytes),
    "prefetch": ("bytes, as 4GiB", _nbytes),
    "allocator": (f"one of {', '.join(_ALLOCATORS)}", _one_of(*_ALLOCATORS)),
    "placements": (f"some of {', '.join(_PLACEMENTS)}, joined by +", _names_among(*_PLACEMENTS)),
    "mesh": ("replicas by shards, as 2x2", _sizes),
    "reshard": ("true, false or a number of ranks", _flag_or_count),
    "reductions": ("a number", int),
    "separate": ("true or false", _flag),
    "graph": ("true or false", _flag),
    "overlap_optimizer": ("true, false or late", _one_of("true", "false", "late")),
    "float8": (f"one of {', '.join(FLOAT8)}", _one_of(*FLOAT8)),
    "stage": ("a number", int),
    "symmetric": ("true or false", _flag),
}
