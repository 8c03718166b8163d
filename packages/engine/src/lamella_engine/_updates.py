"""When main weights may have changed: what was gathered before that is stale.

Version counters cannot tell (fused optimizers and DTensor writes leave them alone), so the rule is explicit: the step
of any `torch.optim` optimizer that has sharded parameters, and `FSDPModule.mark_updated()`. Both happen on every rank
alike, as what follows from them (another gather) must; the step of some other optimizer may be one rank's own. It
matters only for what outlives a pass, unsharded weights and copies: everything else is gathered anew each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Protocol

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lamella_engine._step_hooks import held_by


class Early(Protocol):
    """A unit that was gathered for the next forward already."""

    def outlives(self, updated: Container[int]) -> bool:
        """Whether it is current, and still is when the parameters of these ids are updated."""
        ...

    def confirm(self) -> None:
        """Be current: what was noted was of others."""
        ...


count = 0
_early: weakref.WeakSet[Early] = weakref.WeakSet()
_begun: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def note() -> None:
    """Count an update."""
    global count
    count += 1


def note_early(unit: Early) -> None:
    """Let a unit be current after the steps of optimizers that hold none of its parameters."""
    _early.add(unit)


def begin_step(optimizer: Optimizer) -> None:
    """Count an optimizer's step now, and not at its end: what is gathered between its parts is new."""
    _note_step_of(optimizer)
    _begun.add(optimizer)


def forget_step(optimizer: Optimizer) -> None:
    """Count the optimizer's next step at its end, also if one was begun that raised."""
    _begun.discard(optimizer)


def note_step(optimizer: Optimizer, *_: object) -> None:
    """Count an optimizer's step, unless its first part was counted."""
    if optimizer in _begun:
        _begun.discard(optimizer)
    else:
        _note_step_of(optimizer)


def _note_step_of(optimizer: Optimizer) -> None:
    updated = {id(p) for p in held_by(optimizer) if isinstance(p, DTensor)}
    if not updated:
        return
    untouched = [unit for unit in _early if unit.outlives(updated)]
    note()
    for unit in untouched:
        unit.confirm()
