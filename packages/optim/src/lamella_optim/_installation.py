"""This package's part in every `torch.optim` step: functions for entries of the engine's written order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from lamella_engine.extending import StepHook, replace_step_hook

Hook = TypeVar("Hook", bound=StepHook)

STEP_HOOKS: Final[dict[str, StepHook]] = {}
"""Name of the engine's entry -> the function of this package that takes its place. Modules add theirs."""


def step_hook(name: str) -> Callable[[Hook], Hook]:
    """Mark the function in place of an entry of the engine's order, from `install` on."""

    def add(hook: Hook) -> Hook:
        STEP_HOOKS[name] = hook
        return hook

    return add


def install() -> None:
    """Have every `torch.optim` step of the process use this package.

    From then on torch's elementwise optimizers step on plain tensors over the shards, and an optimizer that was built
    before `fully_shard` goes on with the shards. `overlap_optimizer`, `capture_step`, `step_on_local_shards` and
    `shard_optimizer` call this function first. A second call changes nothing.

    Effects: replaces five entries of the engine's order of step hooks, for all optimizers of the process; none on
        programs that shard nothing.
    """
    for name, hook in STEP_HOOKS.items():
        replace_step_hook(name, hook)
