"""A caller's `extra` as JSON, and back: every value has the type and the bits that it had.

Note [Tagged values]
    JSON has no tuples, tensors or integer keys. A value without a form of its own is an object with the key `$lamella`,
    which names the type: `{"$lamella": "tuple", "items": [...]}`. A caller's dict with this key, or with keys that
    are no strings, is a tagged list of pairs. Bytes are in base64, little-endian. Data without any such value is
    plain JSON, and readable by releases without tags.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from torch import nn

from lamella_files._base.boxes import are_sizes
from lamella_files._base.text import short

Json: TypeAlias = Any
"""A value that `json` writes."""

_TAG: Final = "$lamella"
_MAX_NBYTES: Final = 16 << 20
_MAX_BITS: Final = 10_000  # Python reads no integer of more than 4300 digits back.
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_ARRAY: Final = re.compile(r"[<|][biufcmMSU]\d+(\[\w+\])?")
"""NumPy's dtypes of plain elements, little-endian."""

_RANDOM: Final = "`random_states()` has the states of all generators, as one value."


def encode_extra(extra: Mapping[str, object]) -> dict[str, Json]:
    """The JSON form of a caller's `extra`; a copy, with tensors on the host.

    A value of a subclass (a named tuple, a member of IntEnum, a defaultdict) comes back as the base type.

    Raises:
        TypeError: A value has no form, or is too large for a text file; the error names the value's key.

    Effects: copies tensors from an accelerator, with a host sync.
    """
    for key in extra:
        if not isinstance(key, str):
            raise TypeError(f"Expected the keys of `extra` to be strings, got {key!r}.")
    try:
        return {key: _encoded(value, f"extra[{key!r}]") for key, value in extra.items()}
    except RecursionError:
        raise TypeError(
            "Expected `extra` to hold finite values, got one that holds itself or nests too deeply."
        ) from None


def decode_extra(content: Mapping[str, Json]) -> dict[str, Any]:
    """The values of a JSON form.

    Raises:
        ValueError: The form is of no known type, or inconsistent.
    """
    try:
        return {key: _decoded(value) for key, value in content.items()}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError) as error:
        raise ValueError(f"expected values of `extra`, got {type(error).__name__}: {error}") from error


def has_tags(content: Json) -> bool:
    """Whether a JSON form has a value of Note [Tagged values]."""
    if isinstance(content, dict):
        return _TAG in content or any(map(has_tags, content.values()))
    return isinstance(content, list) and any(map(has_tags, content))


# -- to JSON ----------------------------------------------------------------------------------------------------------


def _encoded(value: object, name: str) -> Json:
    """The JSON form of one value; `name` leads to the value, for errors."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return _encoded_array(value, name)
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise _refusal(name, value, f"integers of up to {_MAX_BITS} bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    for kind, encode in _ENCODERS:
        if isinstance(value, kind):
            return encode(cast(Any, value), name)
    raise _refusal(name, value, "plain data, tensors or NumPy's arrays")


def _encoded_tensor(tensor: torch.Tensor, name: str) -> Json:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise _refusal(name, tensor, "plain dense tensors")
    if tensor.is_meta:
        raise _refusal(name, tensor, "tensors with memory")
    _check_nbytes(name, tensor, tensor.nbytes)
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = host.view(torch.uint8).numpy().tobytes()
    return _tagged("tensor", dtype=str(host.dtype).removeprefix("torch."), shape=[*tensor.shape], data=_text(content))


def _encoded_array(array: "np.generic | np.ndarray[Any, Any]", name: str) -> Json:
    little = np.asarray(array, dtype=array.dtype.newbyteorder("<"))
    if _ARRAY.fullmatch(little.dtype.str) is None:
        raise _refusal(name, array, "NumPy's arrays of numbers, text or times")
    _check_nbytes(name, array, little.nbytes)
    kind = "array" if isinstance(array, np.ndarray) else "scalar"
    return _tagged(kind, dtype=little.dtype.str, shape=[*little.shape], data=_text(little.tobytes()))


def _encoded_dict(value: Mapping[Any, object], name: str) -> Json:
    kind = "counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and _TAG not in value and all(isinstance(key, str) for key in value):
        return {str.__str__(key): _encoded(item, f"{name}[{key!r}]") for key, item in value.items()}
    pairs = [[_encoded(key, f"a key of {name}"), _encoded(item, f"{name}[{key!r}]")] for key, item in value.items()]
    return _tagged(kind, items=pairs)


def _encoded_list(value: "list[object] | tuple[object, ...]", name: str) -> list[Json]:
    return [_encoded(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _encoded_set(value: "set[object] | frozenset[object]", name: str) -> Json:
    # In one order on all ranks: equal values are recognised by their text.
    items = sorted((_encoded(item, f"an element of {name}") for item in value), key=json.dumps)
    return _tagged("frozenset" if isinstance(value, frozenset) else "set", items=items)


_ENCODERS: Final[tuple[tuple[type, Callable[[Any, str], Json]], ...]] = (
    (torch.Tensor, _encoded_tensor),
    (dict, _encoded_dict),
    (list, _encoded_list),
    (tuple, lambda value, name: _tagged("tuple", items=_encoded_list(value, name))),
    (set, _encoded_set),
    (frozenset, _encoded_set),
    (bytes, lambda value, name: _tagged("bytes", data=_text(_limited(value, name)))),
    (complex, lambda value, _: _tagged("complex", items=[value.real, value.imag])),
    (torch.dtype, lambda value, _: _tagged("dtype", name=str(value).removeprefix("torch."))),
)


def _tagged(kind: str, **fields: Json) -> Json:
    return {_TAG: kind, **fields}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _limited(content: bytes, name: str) -> bytes:
    _check_nbytes(name, content, len(content))
    return content


def _check_nbytes(name: str, value: object, nbytes: int) -> None:
    if nbytes > _MAX_NBYTES:
        raise TypeError(
            f"Expected at most {_MAX_NBYTES} bytes for {name}, which is kept as text, got {nbytes} in a "
            f"{type(value).__name__}. Register a tensor as a buffer of the model, or write a file of your own beside."
        )


def _refusal(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"Expected {name} to be {expected}, got {type(value).__name__}: {short(value)}. {_way_out(value)}")


def _way_out(value: object) -> str:
    if isinstance(value, torch.Generator):
        return f"Pass its get_state(). {_RANDOM}"
    if isinstance(value, torch.Tensor):
        return (
            "Pass full_tensor() of a DTensor, to_dense() of a sparse tensor; or register it as a buffer of the model."
        )
    if hasattr(value, "state_dict"):
        return "Pass its state_dict()."
    if callable(value):
        return "Leave it out, and make it anew after the load."
    return "Leave it out, or convert it: str() for a path, vars() for an object."


# -- from JSON --------------------------------------------------------------------------------------------------------


def _decoded(content: Json) -> Any:
    if isinstance(content, list):
        return [_decoded(item) for item in content]
    if not isinstance(content, dict):
        return content
    if _TAG not in content:
        return {key: _decoded(item) for key, item in content.items()}
    kind = content[_TAG]
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise ValueError(f"expected a type of value among {sorted(_DECODERS)}, got {short(kind)}")
    return _DECODERS[kind](content)


def _decoded_tensor(content: Json) -> torch.Tensor:
    dtype, data = _DTYPES[content["dtype"]], bytearray(_bytes(content))
    shape = _shape(content)
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"expected a tensor of shape {shape} in {dtype}, got {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _decoded_array(content: Json) -> "np.ndarray[Any, Any]":
    if _ARRAY.fullmatch(content["dtype"]) is None:
        raise ValueError(f"expected a dtype of NumPy's, got {short(content['dtype'])}")
    return np.frombuffer(bytearray(_bytes(content)), dtype=np.dtype(content["dtype"])).reshape(_shape(content))


def _items(content: Json) -> list[Any]:
    if not isinstance(content["items"], list):
        raise ValueError(f"expected a list of items, got {short(content['items'])}")
    return [_decoded(item) for item in content["items"]]


def _bytes(content: Json) -> bytes:
    return base64.b64decode(content["data"], validate=True)


def _shape(content: Json) -> list[int]:
    if not isinstance(content["shape"], list) or not are_sizes(content["shape"]):
        raise ValueError(f"expected a shape, got {short(content['shape'])}")
    return content["shape"]


_DECODERS: Final[Mapping[str, Callable[[Json], Any]]] = {
    "tensor": _decoded_tensor,
    "array": _decoded_array,
    "scalar": lambda content: _decoded_array(content)[()],
    "dict": lambda content: dict(_items(content)),
    "counter": lambda content: Counter(dict(_items(content))),
    "tuple": lambda content: tuple(_items(content)),
    "set": lambda content: set(_items(content)),
    "frozenset": lambda content: frozenset(_items(content)),
    "bytes": _bytes,
    "complex": lambda content: complex(*_items(content)),
    "dtype": lambda content: _DTYPES[content["name"]],
}
