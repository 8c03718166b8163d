"""The largest loss of a profile, and what moves it, in plain words."""

from dataclasses import dataclass

from lamella.overlap._report import OverlapReport, Role, StepReport

_NOTHING = 0.02  # of a step: less than that is not worth a knob
_MOST = 0.5


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Milliseconds a step in which the GPU computed nothing of the model, what they were, and what moves them."""

    name: str
    ms: float
    advice: str


def losses(report: OverlapReport) -> list[Loss]:
    """What a step loses, the largest first. Empty without a GPU."""
    total, num_steps = report.total, len(report.steps)
    if not report.on_gpu:
        return []
    found = [
        Loss(name=name, ms=_exposed(total, role) / num_steps, advice=_advice(total, role))
        for role, name in (
            (Role.FORWARD_GATHER, "exposed gathers in forward"),
            (Role.BACKWARD_GATHER, "exposed gathers in backward"),
            (Role.REDUCE, "exposed reductions"),
            (Role.OTHER, "exposed collectives that are no unit's"),
        )
    ]
    found.append(Loss(name="waits for the host", ms=(total.whole.host_gaps or 0.0) / num_steps, advice=_HOST))
    found.append(
        Loss(name="copies of units that nothing else runs beside", ms=total.lone_copies / num_steps, advice=_COPIES)
    )
    return sorted(found, key=lambda loss: -loss.ms)


def verdict(report: OverlapReport) -> str:
    """One paragraph: the largest loss of a step, and which knob moves it."""
    if not report.on_gpu:
        return (
            "No GPU kernels: operators of the host's main thread stand in for them. What ran beside the threads that "
            "communicate is not known, so nothing is said of exposure; counts, copies and times on the host hold."
        )
    largest, span = losses(report)[0], report.total.span / len(report.steps)
    shown = f"{largest.ms:.2f} ms a step ({largest.ms / span:.1%}) of {largest.name}"
    if largest.ms < _NOTHING * span:
        return f"Nothing stands out: the largest loss is {shown}."
    return f"The largest loss is {shown}. {largest.advice}"


_HOST = (
    "The GPU had nothing to do because the host had not launched it: make units larger, compile them, give a step more "
    "tokens, or capture it in a CUDA graph. (A profiler slows the host too: compare with a step's time without one.)"
)
_COPIES = (
    "Parameters whose dim divides by the number of ranks are gathered and reduced in place; what is cast between main "
    "weights and a wire of another dtype remains."
)
_FEWER_BYTES = {
    Role.FORWARD_GATHER: "let a step have more tokens",
    Role.BACKWARD_GATHER: "keep units unsharded for backward, as many as memory allows (set_keep_budget)",
    Role.REDUCE: "reduce in bfloat16 (MixedPrecisionPolicy.reduce_dtype), or every few microbatches "
    "(set_requires_gradient_sync)",
}
_ENDS = {
    Role.FORWARD_GATHER: "If it runs first, nothing hides its gather: let it hold less, with the rest in others.",
    Role.BACKWARD_GATHER: "If backward begins with it, nothing hides its gather: keep it unsharded after forward "
    "(set_reshard_after_forward(False)).",
    Role.REDUCE: "If backward ends with it, nothing hides its reduction: let it hold less, with the rest in others.",
}
_LATE = {
    Role.FORWARD_GATHER: "There is compute to hide them behind: gather further ahead (set_prefetch_budget).",
    Role.BACKWARD_GATHER: "There is compute to hide them behind: gather further ahead (set_prefetch_budget), or keep "
    "units unsharded for backward (set_keep_budget).",
    Role.REDUCE: "There is compute to hide them behind: let more be in flight (set_reduce_scatter_max_input_buffers).",
}


def _advice(total: StepReport, role: Role) -> str:
    if role is Role.OTHER:
        return "They are norms, losses or the model's own: make fewer, or overlap them by hand."
    if total.collectives > total.compute:
        return f"Collectives take longer than all compute, so they cannot hide: {_FEWER_BYTES[role]}."
    exposed = _exposed(total, role)
    worst = max(total.units, key=lambda unit: unit.traffic[role].exposed or 0.0, default=None)
    if worst is not None and len(total.units) > 1 and (worst.traffic[role].exposed or 0.0) > _MOST * exposed:
        return f"Most of it is of {worst.unit!r}. {_ENDS[role]}"
    return _LATE[role]


def _exposed(total: StepReport, role: Role) -> float:
    return total.whole.traffic[role].exposed or 0.0
