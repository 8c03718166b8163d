"""The plan of a run: the step's time on a cluster, beside the bytes of a GPU, from one recording."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamella._estimate.api import estimate_recorded
from lamella._estimate.estimated_bytes import Estimate
from lamella._plan.calibration import Calibration, calibrate
from lamella._plan.cluster import Cluster
from lamella._plan.recorded_works import RecordedWorks, record_works
from lamella._plan.step_plan import StepPlan, plan_of
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella_trace import Trace, read_trace


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run on a cluster.

    Attributes:
        config: The run's settings.
        cluster: The description.
        step: The step of rank 0.
        estimate: The bytes of rank 0.
    """

    config: Config
    cluster: Cluster
    step: StepPlan
    estimate: Estimate

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a GPU."""
        return self.estimate.total_nbytes <= self.cluster.gpu_nbytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in a second."""
        return self.config.optim.batch_size * self.config.data.sequence_length / self.step.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        step = self.step
        totals = {
            "sent_nbytes": step.sent_nbytes,
            "communication_seconds": step.communication_seconds,
            "exposed_seconds": step.exposed_seconds,
        }
        return {
            "ranks": self.config.parallel.ranks,
            "tokens_per_second": self.tokens_per_second,
            "step": asdict(step) | totals,
            "memory": {"total_nbytes": self.estimate.total_nbytes, "fits": self.fits},
            "cluster": asdict(self.cluster),
            "notes": [*self.estimate.notes],
        }


def plan_run(config: Config, cluster: Cluster) -> RunPlan:
    """Plan the step of `lamella train` on a cluster.

    Args:
        config: The run's settings, with ranks, device and precision.
        cluster: The description.

    Raises:
        ConfigError: The settings cannot be met, or have no price.

    Effects: none on the disk; allocates no memory for weights or activations.
    """
    return planned(config, cluster, record_works(config))


def planned(config: Config, cluster: Cluster, recorded: RecordedWorks) -> RunPlan:
    """Return the plan of a recorded step."""
    return RunPlan(
        config=config,
        cluster=cluster,
        step=plan_of(recorded.works, cluster),
        estimate=estimate_recorded(recorded.step, config, 0),
    )


def calibrate_run(config: Config, cluster: Cluster, trace: Path, step_seconds: float | None) -> Calibration:
    """Fit a cluster's rates to the profile of a run of `lamella train`.

    Args:
        config: The settings of the profiled run, with its ranks, device and precision.
        cluster: Gives the rates that the profile does not tell.
        trace: The profile of rank 0.
        step_seconds: The median step without a profiler.

    Raises:
        ConfigError: The settings cannot be met, or the profile is none of steps on GPUs, or of another number of ranks.
        TraceError: The file is no trace, or has no ranges of units.
    """
    if step_seconds is not None and not 0 < step_seconds < math.inf:
        raise ConfigError(f"Expected --step-time of more than 0 seconds, and finite, got {step_seconds!r}.")
    profile = read_trace(trace)  # first: a recording takes seconds
    _check_ranks(profile, config, trace)
    return calibrate(profile, record_works(config).works, cluster, step_seconds=step_seconds, source=str(trace))


def _check_ranks(profile: Trace, config: Config, trace: Path) -> None:
    """Refuse another number of ranks than the profile's: a rank's works would be others, and all rates be wrong."""
    num_ranks = profile.get("distributedInfo", {}).get("world_size")
    if isinstance(num_ranks, int) and num_ranks != config.parallel.ranks:
        raise ConfigError(
            f"Expected --ranks of the profiled run, which had {num_ranks} by {str(trace)!r}, got --ranks "
            f"{config.parallel.ranks}. Pass --ranks {num_ranks}."
        )
