"""When main weights may have changed: what was gathered before that is stale.

Version counters cannot tell (fused optimizers and DTensor writes leave them alone), so the rule is explicit: the step
of any `torch.optim` optimizer that has sharded parameters, and `FSDPModule.mark_updated()`. Both happen on every rank
alike, as what follows from them (another gather) must; the step of some other optimizer may be one rank's own. It
matters only for what outlives a pass, unsharded weights and copies: everything else is gathered anew each time.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

count = 0


def note() -> None:
    """Count an update."""
    global count
    count += 1


def _note_step(optimizer: Optimizer, *_: object) -> None:
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        note()


register_optimizer_step_post_hook(_note_step)
