"""What hooks around an optimizer's step ask: what it holds, who else is called, and whether a compiler traces it."""

from __future__ import annotations

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_other_hooks(optimizer: Optimizer, *, than: int = 0) -> bool:
    """Whether something is called before the step that may change what it finds, or look at it.

    Args:
        optimizer: Whose.
        than: How many hooks of its own are this package's.
    """
    hooks = _global_optimizer_pre_hooks.values()
    foreign = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith(f"{__package__}.")]
    own = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if not only_waits(hook)]
    return not all(map(only_waits, foreign)) or len(own) > than


def only_waits(hook: object) -> bool:
    """Whether a hook before an optimizer's step says that it changes nothing which the step finds.

    Such a hook has an attribute of this name, that is true. It lets the current stream or the host wait until something
    else has read the parameters: a copy for a checkpoint, say. It has to be called before every update of some of them.
    """
    return getattr(hook, "only_waits", False) is True


def wait_before_update(optimizer: Optimizer) -> None:
    """Call those of an optimizer's hooks that only wait. Effects: theirs, on the current stream or the host."""
    for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
        if only_waits(hook):
            hook(optimizer, (optimizer,), {})


def is_compiled() -> bool:
    """Whether a compiler traces what asks this, or what comes after it. Not to be asked where Dynamo is disabled."""
    # Dynamo answers the first question itself where it traces this. It leaves out a frame that has no operators, and is
    # then still there for the step's.
    return is_dynamo_compiling() or get_eval_frame_callback() is not None
