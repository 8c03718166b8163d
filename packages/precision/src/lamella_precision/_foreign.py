"""Weights that another library has quantised: recognised by the class's module, which is never imported here."""

from __future__ import annotations

import torch

_WAYS_OUT = {
    "transformer_engine": (
        "Call `lamella_precision.te.replace_quantized_weights(model)` before fully_shard, and give its result as "
        "`recipe` to MixedPrecisionPolicy."
    )
}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class of such a library."""
    return _library(tensor) in _WAYS_OUT


def refuse_quantized(name: str, tensor: torch.Tensor) -> None:
    """Refuse a weight in another library's format: its shards would be of the quantised values.

    Raises:
        TypeError: The tensor is of such a class.
    """
    if is_quantized(tensor):
        raise TypeError(
            f"Expected {name!r} to be a plain tensor, got a {type(tensor).__name__} of {_library(tensor)}, which was "
            f"quantised when it was built. {_WAYS_OUT[_library(tensor)]}"
        )


def _library(tensor: torch.Tensor) -> str:
    return type(tensor).__module__.partition(".")[0]
