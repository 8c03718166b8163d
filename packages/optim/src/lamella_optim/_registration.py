"""This package's part in every `torch.optim` step: functions at places that the engine's written order has for them."""

from __future__ import annotations

from lamella_engine.extending import StepHook, replace_step_hook
from lamella_optim._local_shards import refuse_unprepared_kernels
from lamella_optim._originals import exchange_originals
from lamella_optim._overlap import finish_late_reductions, note_overlapped_step
from lamella_optim._plain import step_on_plain_tensors

STEP_HOOKS: dict[str, StepHook] = {
    "originals": exchange_originals,
    "kernels": refuse_unprepared_kernels,
    "gradients": finish_late_reductions,
    "view": step_on_plain_tensors,
    "staleness": note_overlapped_step,
}


def register() -> None:
    """Put this package's hooks in place of the engine's; a second call changes nothing."""
    for name, hook in STEP_HOOKS.items():
        replace_step_hook(name, hook)
