"""Pre-hooks of an optimizer's step: hooks that may change gradients or parameters, and pure waits."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lamella_engine.extending import before_step


def has_other_hooks(optimizer: Optimizer, *, than: int = 0) -> bool:
    """Whether foreign pre-hooks may change or read gradients, parameters or the step's arguments.

    Args:
        optimizer: The optimizer about to step.
        than: Number of this package's pre-hooks on the optimizer.
    """
    foreign = [hook for hook in _global_optimizer_pre_hooks.values() if hook is not before_step]
    acting_hooks = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if not only_waits(hook)]
    return not all(map(only_waits, foreign)) or len(acting_hooks) > than


def only_waits(hook: object) -> bool:
    """Whether a pre-hook promises, by a true attribute `only_waits`, to change nothing.

    Such a hook makes the current stream or the host wait for the end of another read of the parameters: a copy
    for a checkpoint, for one. The hook must run before every update of parameters.
    """
    return getattr(hook, "only_waits", False) is True


def wait_before_update(optimizer: Optimizer) -> None:
    """Call the waiting pre-hooks of an optimizer.

    Effects: waits of the hooks, on the current stream or the host.
    """
    for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
        if only_waits(hook):
            hook(optimizer, (optimizer,), {})
