"""Which units' main weights an optimizer's step may have changed: unsharded copies from before the step are stale.

Version counters cannot tell (fused optimizers and DTensor writes leave them alone), so the rule is explicit: a unit is
stale after the step of any `torch.optim` optimizer that holds one of the unit's parameters, and after
`FSDPModule.mark_updated()`. Both happen on every rank alike, as the gathers that follow from them must. Staleness
matters only to unsharded weights and copies that outlive a pass: all others are gathered anew each time.
"""

from __future__ import annotations

from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lamella_engine._context import trees
from lamella_engine._sharded_parameter import is_sharded
from lamella_engine._step_hooks import held_by


@_disable_dynamo
def note_step(optimizer: Optimizer, *_: object) -> None:
    """Note that an optimizer's step may have changed the main weights of every unit that has some of its parameters."""
    updated = {id(p): p for p in held_by(optimizer) if isinstance(p, DTensor)}
    if not updated:
        return
    # A DTensor that no unit made may be another over the memory of one that a unit made.
    is_known = all(isinstance(parameter, nn.Parameter) and is_sharded(parameter) for parameter in updated.values())
    for tree in tuple(trees):
        for member in tree.states:
            if not is_known or member.holds_any(updated):
                member.note_update()
