"""Parameters of state-space layers that compute in fp32 beside bf16 weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

# exp(A_log) and softplus(dt_bias) enter every time step as a decay: a rounding to 8 bits grows with the length.
_FP32_NAMES = frozenset({"A_log", "D", "dt_bias"})


def keep_fp32(model: nn.Module) -> Callable[[nn.Parameter], torch.dtype | None]:
    """Return a `param_dtype_override_fn` that exempts `A_log`, `D` and `dt_bias` from a policy's `param_dtype`.

        MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=keep_fp32(model))

    Such parameters are gathered, and compute, in fp32 then; all others as the policy says. torch's own policy takes the
    function too, since torch 2.15.

    Args:
        model: Before `fully_shard`, with the parameters in fp32. A layer counts by two of the three names at least.

    Returns:
        Of a parameter: fp32, or None for the policy's dtype. A parameter counts that is, or was when the function was
        made, in one of the model's places: `to_empty` replaces Parameters. A copy of the model needs a function of its
        own. The function holds neither parameters nor modules. It raises ValueError as below.

    Raises:
        ValueError: Such a parameter is in another dtype: a policy can keep a parameter's own dtype only.

    Effects: none.
    """
    names_and_references: dict[int, tuple[str, weakref.ref[nn.Parameter]]] = {}
    layers: list[tuple[str, weakref.ref[nn.Module]]] = []
    for prefix, module in _state_space_layers(model):
        layers.append((prefix, weakref.ref(module)))
        for name, parameter in _fp32_parameters(prefix, module):
            _check_dtype(name, parameter)
            names_and_references[id(parameter)] = name, weakref.ref(parameter)

    def find(parameter: nn.Parameter) -> str | None:
        # An id may be that of a later parameter, whose weak reference is another.
        name, parameter_reference = names_and_references.get(id(parameter), ("", None))
        if parameter_reference is not None and parameter_reference() is parameter:
            return name
        current_parameters = (
            _fp32_parameters(prefix, layer) for prefix, reference in layers if (layer := reference()) is not None
        )
        return next((name for pairs in current_parameters for name, candidate in pairs if candidate is parameter), None)

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        name = find(parameter)
        if name is None:
            return None
        _check_dtype(name, parameter)
        return torch.float32

    return override


def _check_dtype(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype != torch.float32:
        raise ValueError(
            f"Expected {name!r} in torch.float32, got {parameter.dtype}: a policy can keep a parameter's own dtype "
            f"only. Build the model in fp32, or cast the parameter before: parameter.data = parameter.data.float()"
        )


def _state_space_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if len(list(_fp32_parameters(prefix, module))) > 1:
            yield prefix, module


def _fp32_parameters(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(prefix, recurse=False):
        if name.rpartition(".")[2] in _FP32_NAMES:
            yield name, parameter
