"""The largest loss of time in a profile, and the setting to change, in plain words."""

from dataclasses import dataclass

from lamella_trace._report import OverlapReport, Role, StepReport

_NEGLIGIBLE_SHARE = 0.02  # share of a step below which a loss is not worth a change of settings
_DOMINANT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Milliseconds per step without compute of the model, their cause, and advice on settings."""

    name: str
    ms: float
    advice: str


def losses(report: OverlapReport) -> list[Loss]:
    """Return the losses of a step, the largest first; an empty list without a GPU."""
    total, num_steps = report.total, len(report.steps)
    if not report.on_gpu:
        return []
    step_losses = [
        Loss(name=name, ms=_exposed(total, role) / num_steps, advice=_advice(total, role))
        for role, name in (
            (Role.FORWARD_GATHER, "exposed gathers in forward"),
            (Role.BACKWARD_GATHER, "exposed gathers in backward"),
            (Role.REDUCE, "exposed reductions"),
            (Role.EXCHANGE, "exposed exchanges of tokens"),
            (Role.OTHER, "exposed collectives that are no unit's"),
        )
    ]
    latencies = total.idle - (total.whole.host_gaps or 0.0)
    step_losses.append(Loss(name="idleness that is not the host's", ms=latencies / num_steps, advice=_LATENCIES))
    step_losses.append(Loss(name="waits for the host", ms=(total.whole.host_gaps or 0.0) / num_steps, advice=_HOST))
    step_losses.append(
        Loss(name="copies of units that nothing else runs beside", ms=total.lone_copies / num_steps, advice=_COPIES)
    )
    return sorted(step_losses, key=lambda loss: -loss.ms)


def verdict(report: OverlapReport) -> str:
    """Return one paragraph: the largest loss of a step, and the setting to change."""
    if not report.on_gpu:
        return (
            "No GPU kernels: operators of the host's main thread stand in for kernels. Overlap with the communicating "
            "threads is unknown, so exposure is not reported; counts, copies and times on the host are valid."
        )
    largest, span = losses(report)[0], report.total.span / len(report.steps)
    shown = f"{largest.ms:.2f} ms a step ({largest.ms / span:.1%}) of {largest.name}"
    if largest.ms < _NEGLIGIBLE_SHARE * span:
        return f"Nothing stands out: the largest loss is {shown}."
    return f"The largest loss is {shown}. {largest.advice}"


_HOST = (
    "The GPU was idle because the host had not launched the next kernel: make units larger, compile units, give a step "
    "more tokens, or capture a CUDA graph. (Profiling slows the host too: compare with the time of a step without it.)"
)
_LATENCIES = (
    "The next kernel had been launched. Many small kernels each need a few microseconds to begin: compile units. "
    "Where copy engines gather, waiting for the peers' copies is idle too: gather further ahead "
    "(set_options(prefetch_budget=...))."
)
_COPIES = (
    "Parameters whose dim divides by the number of ranks are gathered and reduced in place; casts between main weights "
    "and another communication dtype remain."
)
_EXCHANGES = (
    "The first forward and the last backward of a step have no compute of another microbatch beside: let a step have "
    "more microbatches. In between the compute beside is too short: let a microbatch have more tokens, or delay weight "
    "gradients (LayerSlots.delayed)."
)
_FEWER_BYTES = {
    Role.FORWARD_GATHER: "let a step have more tokens",
    Role.BACKWARD_GATHER: "keep units unsharded for backward, as many as memory allows (set_options(keep_budget=...))",
    Role.REDUCE: "reduce in bfloat16 (MixedPrecisionPolicy.reduce_dtype), or every few microbatches "
    "(set_requires_gradient_sync)",
}
_ENDS = {
    Role.FORWARD_GATHER: "If it runs first, nothing hides its gather: move parameters from it to other units.",
    Role.BACKWARD_GATHER: "If backward begins with it, nothing hides its gather: keep it unsharded after forward "
    "(set_reshard_after_forward(False)).",
    Role.REDUCE: "If backward ends with it, nothing hides its reduction: move parameters from it to other units.",
}
_LATE = {
    Role.FORWARD_GATHER: "There is compute to hide them behind: gather further ahead "
    "(set_options(prefetch_budget=...)).",
    Role.BACKWARD_GATHER: "There is compute to hide them behind: gather further ahead "
    "(set_options(prefetch_budget=...)), or keep units unsharded for backward (set_options(keep_budget=...)).",
    Role.REDUCE: "There is compute to hide them behind: let more be in flight (set_reduce_scatter_max_input_buffers).",
}


def _advice(total: StepReport, role: Role) -> str:
    if role is Role.OTHER:
        return "They are norms, losses or the model's own: make fewer, or overlap them by hand."
    if role is Role.EXCHANGE:
        return _EXCHANGES
    if total.collectives > total.compute:
        return f"Collectives take longer than all compute, so they cannot hide: {_FEWER_BYTES[role]}."
    exposed = _exposed(total, role)
    worst = max(total.units, key=lambda unit: unit.traffic[role].exposed or 0.0, default=None)
    if worst is not None and len(total.units) > 1 and (worst.traffic[role].exposed or 0.0) > _DOMINANT_SHARE * exposed:
        return f"Most of it is of {worst.unit!r}. {_ENDS[role]}"
    return _LATE[role]


def _exposed(total: StepReport, role: Role) -> float:
    return total.whole.traffic[role].exposed or 0.0
