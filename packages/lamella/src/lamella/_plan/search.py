"""The fastest fitting stage and mesh of a run: each candidate is recorded, planned and estimated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lamella._plan.cluster import Cluster
from lamella._plan.run_plan import RunPlan, plan_run
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sizes import sufficient_size


@dataclass(frozen=True, kw_only=True)
class SearchedPlan:
    """A stage on a mesh.

    Attributes:
        flags: The options in the spelling of the command line.
        plan: The plan.
    """

    flags: str
    plan: RunPlan


def search(config: Config, cluster: Cluster) -> list[SearchedPlan]:
    """Plan the stages on the meshes suggested by the cluster, the fastest fitting plan first.

    Args:
        config: The run's settings. Choices of stage, resharding and replicas are replaced.
        cluster: The description.

    Raises:
        ConfigError: No plan fits into the memory of a GPU. Names the least sufficient memory.

    Effects: as `plan_run`, for each candidate.
    """
    candidates = [
        SearchedPlan(flags=flags, plan=plan_run(settings, cluster)) for flags, settings in _settings(config, cluster)
    ]
    fitting = [candidate for candidate in candidates if candidate.plan.fits]
    if not fitting:
        leanest = min(candidates, key=lambda candidate: candidate.plan.estimate.total_nbytes)
        needed = sufficient_size(leanest.plan.estimate.total_nbytes)
        raise ConfigError(
            f"Expected gpu_memory of at least {needed} for the leanest stage and mesh ({leanest.flags}), got "
            f"{cluster.gpu_memory}. Pass more --ranks, --recompute full, or a smaller --batch-size."
        )
    return sorted(candidates, key=lambda candidate: (not candidate.plan.fits, candidate.plan.step.seconds))


def instances_of(num_ranks: int, gpus_a_host: int) -> list[int]:
    """Return the numbers of instances to try: 1, and an instance for every 1, 2, 4 or 8 hosts."""
    hosts = num_ranks // gpus_a_host if num_ranks % gpus_a_host == 0 else 1
    return sorted({1, *(hosts // size for size in (1, 2, 4, 8) if hosts % size == 0)})


def _settings(config: Config, cluster: Cluster) -> Iterator[tuple[str, Config]]:
    for instances in instances_of(config.parallel.ranks or 1, cluster.gpus_a_host):
        for stage, reshards in ((3, True), (3, False), (2, True), (1, True)):
            changes = {"stage": stage, "reshard_after_forward": reshards, "replicate": instances, "keep_budget": None}
            if instances == 1:
                changes["spread_states"] = False
            try:
                parallel = replace(config.parallel, **changes)  # type: ignore[arg-type]  # by the fields' names
                yield _flags(stage, reshards, instances), replace(config, parallel=parallel)
            except ConfigError:  # Contradicts an option of the run.
                continue


def _flags(stage: int, reshards: bool, instances: int) -> str:
    parts: Sequence[str] = [f"--stage {stage}"]
    parts = [*parts, *(["--no-reshard-after-forward"] if not reshards else [])]
    return " ".join([*parts, *([f"--replicate {instances}"] if instances > 1 else [])])
