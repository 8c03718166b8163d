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
        Of a parameter: fp32, or None for the policy's dtype. The function holds no parameter.

    Raises:
        ValueError: Such a parameter is in another dtype: a policy can keep a parameter's own dtype only.

    Effects: none.
    """
    kept: dict[int, weakref.ref[nn.Parameter]] = {}
    for name, parameter in _fp32_parameters(model):
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"Expected {name!r} in torch.float32, got {parameter.dtype}: a policy can keep a parameter's own dtype "
                f"only. Build the model in fp32, or cast the parameter before: parameter.data = parameter.data.float()"
            )
        kept[id(parameter)] = weakref.ref(parameter)

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        # An id may be that of a later parameter, whose weak reference is another.
        found = kept.get(id(parameter))
        return torch.float32 if found is not None and found() is parameter else None

    return override


def _fp32_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        found = {name: p for name, p in own.items() if name.rpartition(".")[2] in _FP32_NAMES}
        if len(found) > 1:
            yield from found.items()
