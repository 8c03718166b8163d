"""How `torch.nn.functional.linear` takes its arguments, for layers that multiply otherwise: dims and autocast."""

from __future__ import annotations

import torch


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(..., features) as (tokens, features); a vector is one token."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is enabled for a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which a linear layer takes a floating-point tensor: autocast's where enabled, else its own."""
    if dtype == torch.float64 or not is_autocast(device):
        return dtype
    return torch.get_autocast_dtype(device.type)


def as_operand(tensor: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor in `autocast_dtype`."""
    return tensor.to(autocast_dtype(tensor.dtype, tensor.device))
