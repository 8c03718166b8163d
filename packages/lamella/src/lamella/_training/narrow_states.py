"""`--states`: AdamW with states in bf16 or 8 bits, by torchao, and the states in fp32 for checkpoints.

Note [Narrow states in checkpoints]
    8-bit states are codes with a scale for each 256 elements of a rank's shard. Other ranks have other blocks, so
    checkpoints hold the states in fp32, as AdamW's own. A run resumes on any ranks and with any `--states`. States in
    bf16 come back exactly. 8-bit states are rounded once more where the largest magnitude of a block is negative: the
    table of codes has 1 and no -1.
"""

import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lamella._settings.options import ConfigError
from lamella._settings.sections import OptimConfig
from lamella_engine.extending import dtensor_over, local_of
from lamella_optim import step_on_local_shards

_AVERAGES: Final = ("exp_avg", "exp_avg_sq")


def check_states(optim: OptimConfig) -> None:
    """Refuse `--states` if torchao is not installed.

    Raises:
        ConfigError: Names the option and the way out.
    """
    if optim.states == "fp32":
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"Expected torchao to be installed for --states {optim.states}, got none. Pass --states fp32, or install "
            "it from a clone: uv pip install './packages/lamella[torchao]'"
        )


def narrow_adamw(groups: list[dict[str, Any]], optim: OptimConfig) -> Optimizer:
    """Make torchao's AdamW over local shards, with states as `--states` says.

    Effects: on GPUs, the first step compiles a kernel for each shape of a shard. On CPUs nothing is compiled.
    """
    kind = _adamw_class(optim.states)
    optimizer: Optimizer = kind(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    return step_on_local_shards(optimizer)


@cache
def _adamw_class(states: str) -> Any:
    """Return torchao's AdamW, with a learning rate that may be set as a number, like torch's optimizers."""
    from torchao.optim import AdamW8bit, _AdamW

    base: Any = AdamW8bit if states == "int8" else _AdamW

    class NarrowAdamW(base):  # type: ignore[misc]
        has_narrow_states = True

        def step(self, closure: None = None) -> None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
            is_on_cpu = any(parameter.device.type == "cpu" for parameter in parameters)
            with torch.compiler.set_stance("force_eager") if is_on_cpu else nullcontext():
                super().step(closure)

        def _new_buffer(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
            if states == "bf16":
                return torch.zeros_like(parameter, dtype=torch.bfloat16)
            buffer: torch.Tensor = super()._new_buffer(parameter, signed)
            return buffer

    return NarrowAdamW


class _Fp32States(Optimizer):
    """An optimizer's state in fp32, under its parameters and in its groups; `narrow` gives loaded state back."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._narrow = optimizer
        self.defaults = dict(optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict, _widened(optimizer))

    def narrow(self) -> None:
        """Set the optimizer's state to this state, in the optimizer's own form."""
        new_buffer = self._narrow._new_buffer  # type: ignore[attr-defined]
        for parameter, slots in self.state.items():
            state = self._narrow.state[parameter]
            state["step"] = slots["step"]
            for name in _AVERAGES:
                state[name] = new_buffer(local_of(parameter).detach(), signed=name == "exp_avg")
                state[name].copy_(local_of(slots[name]))


def _widened(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield the state of each parameter in fp32, on the host: a GPU may lack the room beside the narrow state.

    A rank without an element of a parameter yields an empty state: all ranks yield the same parameters.
    """
    steps = [slots["step"] for slots in optimizer.state.values() if "step" in slots]
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        slots = optimizer.state.get(parameter, {})
        if steps and (slots or not local_of(parameter).numel()):
            averages = {name: _in_fp32(slots.get(name), parameter) for name in _AVERAGES}
            yield parameter, {"step": slots.get("step", steps[0]), **averages}


def _in_fp32(average: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    local: Any = local_of(parameter if average is None else average).detach()
    codes_or_plain = local if type(local) is torch.Tensor else local.dequantize()
    plain = codes_or_plain.to("cpu", torch.float32)
    return dtensor_over(plain, parameter._spec) if isinstance(parameter, DTensor) else plain


def stored_states(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer as a checkpoint holds it; see Note [Narrow states in checkpoints]."""
    return _Fp32States(optimizer) if _is_narrow(optimizer) else optimizer


def stored_slots(optimizer: Optimizer) -> Iterator[object]:
    """Yield tensors of the sizes of an optimizer's state in checkpoints, for a reader without the optimizer."""
    if not _is_narrow(optimizer):
        yield from (slot for slots in optimizer.state.values() for slot in slots.values())
        return
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] for _ in _AVERAGES)


def take_states(optimizer: Optimizer, stored: Optimizer) -> None:
    """Give an optimizer the states read from a checkpoint: `stored_states`."""
    if isinstance(stored, _Fp32States):
        stored.narrow()


def _is_narrow(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "has_narrow_states", False)
