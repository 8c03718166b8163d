"""Rates of a cluster from a profile of one step: the times of its kernels, over the works of the same step.

Note [What a profile tells]
    Kernels run slower beside collectives, and the host runs slower under a profiler. A rate is that of a kernel alone:
    the time of kernels beside work on other streams is divided by the cluster's slowdown first. The host's times are
    divided by an assumed factor, unless the time of a step without a profiler is given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lamella._plan.cluster import Cluster
from lamella._plan.profiled_host import with_host
from lamella._plan.profiled_kernels import kernel_seconds, with_rates, with_wires
from lamella._plan.step_plan import plan_of
from lamella._plan.works import Work
from lamella._settings.options import ConfigError
from lamella_trace import Trace, overlap_report

_CLEARLY_LESS, _ABOUT_AS_LONG = 0.90, 0.85
"""Shares of a step: of kernels alone that are clearly less, and of a host that takes about as long. Where kernels took
0.95 their rates may be 5 % too high: as the host's, such a step made plans that wait for the host 20 % too long."""
_NUM_HALVINGS: Final = 12


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates fitted to a step.

    Attributes:
        cluster: The description with the fitted rates.
        predicted_seconds: The plan of the profiled step with them.
        measured_seconds: The step without a profiler, where it was given; else the profiled step.
        kernel_seconds: Time of the kernels of a step in the profile, by kind.
    """

    cluster: Cluster
    predicted_seconds: float
    measured_seconds: float
    kernel_seconds: Mapping[str, float]


def calibrate(
    trace: Trace,
    works: Sequence[Work],
    cluster: Cluster,
    *,
    step_seconds: float | None = None,
    source: str = "the trace",
) -> Calibration:
    """Fit a cluster's rates to a profile of a run's steps.

    Args:
        trace: A profile by `torch.profiler` of full steps on one rank.
        works: The works of a step of the same run.
        cluster: Gives the rates that the profile does not tell.
        step_seconds: The median step without a profiler.
        source: The name of the trace in errors.

    Raises:
        ConfigError: The profile has no kernels of a GPU.
        TraceError: The trace has no kernels, or no ranges of units.
    """
    report = overlap_report(trace, source)
    if not report.on_gpu:
        raise ConfigError(f"Expected a profile of steps on GPUs in {source!r}, got one of a CPU.")
    fitted = with_rates(report, works, cluster)
    fitted = with_wires(trace, report, fitted)
    fitted = with_host(trace, report, works, fitted)
    measured = step_seconds or report.total.span / len(report.steps) / 1e3
    fitted = _met(works, fitted, measured)
    return Calibration(
        cluster=fitted,
        predicted_seconds=plan_of(works, fitted).seconds,
        measured_seconds=measured,
        kernel_seconds={kind.value: seconds for kind, seconds in kernel_seconds(report, 1.0)[0].items()},
    )


def _met(works: Sequence[Work], cluster: Cluster, measured: float) -> Cluster:
    """Scale the host's times, or else the kernels' rates, until the plan of the step is the measured step.

    The host decides where its launches take about as long as the step, and the kernels alone would take clearly less.
    """
    without_host = plan_of(works, _scaled_host(cluster, 0.0)).seconds
    host_seconds = plan_of(works, cluster).host_seconds
    if without_host < _CLEARLY_LESS * measured and host_seconds > _ABOUT_AS_LONG * measured:
        return _bisected(works, cluster, measured, _scaled_host, (0.0, 1.5))
    return _bisected(works, cluster, measured, _scaled_kernels, (0.5, 2.0))


def _bisected(
    works: Sequence[Work],
    cluster: Cluster,
    measured: float,
    scaled: Callable[[Cluster, float], Cluster],
    factors: tuple[float, float],
) -> Cluster:
    low, high = factors
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if plan_of(works, scaled(cluster, middle)).seconds > measured:
            high = middle
        else:
            low = middle
    return scaled(cluster, (low + high) / 2)


def _scaled_host(cluster: Cluster, factor: float) -> Cluster:
    names = ("launch_us", "view_us", "collective_launch_us")
    return cluster.with_rates({name: getattr(cluster, name) * factor for name in names})


def _scaled_kernels(cluster: Cluster, factor: float) -> Cluster:
    names = ("matmul_tflops", "attention_tflops", "memory_gb_s", "copy_gb_s", "softmax_gb_s", "optimizer_gb_s")
    changes = {name: getattr(cluster, name) / factor for name in names}
    return cluster.with_rates({"kernel_us": cluster.kernel_us * factor, **changes})
