"""`--memory`: the fastest options with which a run fits, by estimated bytes and an assumed cost of each option."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

from lamella._estimate.api import estimate_run
from lamella._estimate.estimated_bytes import Estimate
from lamella._estimate.text import size
from lamella._settings.config import Config
from lamella._settings.fit import budget_nbytes
from lamella._settings.options import ConfigError

_RECOMPUTED: Final = {"no": 1.0, "selective": 1.08, "full": 1.33}
"""Time of a step by `--recompute`: a forward is a third of a step's operations, and selective saves the products."""

_STAYING: Final = {"reshard": 1.04, "keep": 1.0, "stage 2": 1.0}
"""Time of a step by the weights that stay: gathers before backward are mostly hidden."""

_ON_HOST: Final = {"offload_activations": 1.5, "rest": 2.5}
"""Time of a step with activations, or with main weights and optimizer state, in the host's memory."""


class MemoryOptions(NamedTuple):
    """Options that trade memory for time. In each field the later choice takes less memory.

    Attributes:
        weights: "stage 2", "keep" or "reshard": the weights kept from forward to backward.
        recompute: "no", "selective" or "full".
        offload_activations: False or True.
        rest: "gpu" or "cpu".
    """

    weights: str
    recompute: str
    offload_activations: bool
    rest: str

    @property
    def cost(self) -> float:
        """Time of a step over that of the fastest fields."""
        activations = _ON_HOST["offload_activations"] if self.offload_activations else 1.0
        rest = _ON_HOST["rest"] if self.rest == "cpu" else 1.0
        return _RECOMPUTED[self.recompute] * _STAYING[self.weights] * activations * rest

    def is_leaner_than(self, other: "MemoryOptions") -> bool:
        """True if no field takes more memory than the same field of the other choice."""
        return all(
            choices.index(mine) >= choices.index(its) for choices, mine, its in zip(_CHOICES, self, other, strict=True)
        )

    def applied(self, config: Config) -> Config:
        """Return the settings with these options.

        Raises:
            ConfigError: The options contradict further settings.
        """
        changes: dict[str, Any] = {
            "stage": 2 if self.weights == "stage 2" else 3,
            "reshard_after_forward": self.weights != "keep",
            "recompute": self.recompute,
            "offload_activations": self.offload_activations,
            "rest": self.rest,
            "keep_budget": None,
        }
        return replace(config, parallel=replace(config.parallel, **changes))

    def flags(self) -> str:
        """Return the options in the spelling of the command line."""
        flags = {"stage 2": "--stage 2", "keep": "--no-reshard-after-forward", "reshard": ""}[self.weights]
        flags += f" --recompute {self.recompute}" if self.recompute != "no" else ""
        flags += " --offload-activations" if self.offload_activations else ""
        return (flags + (" --rest cpu" if self.rest == "cpu" else "")).strip() or "(no options)"


_CHOICES: Final[tuple[tuple[Any, ...], ...]] = (
    ("stage 2", "keep", "reshard"),
    ("no", "selective", "full"),
    (False, True),
    ("gpu", "cpu"),
)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Options with their estimate.

    Attributes:
        fields: The options.
        estimate: The bytes of rank 0.
    """

    fields: MemoryOptions
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class FittingOptions:
    """The options of a run within a size of memory.

    Attributes:
        config: The settings with the options.
        chosen: The options, and their bytes.
        alternatives: All estimated options, the fastest first.
        memory_nbytes: The memory of a GPU.
    """

    config: Config
    chosen: Alternative
    alternatives: Sequence[Alternative]
    memory_nbytes: int

    def lines(self) -> Iterator[str]:
        """Yield a table of the alternatives."""
        yield f"options for {size(self.memory_nbytes)} a GPU; time is an assumption, over that without any of them:"
        for alternative in self.alternatives:
            is_fit = alternative.estimate.total_nbytes <= self.memory_nbytes
            mark = "->" if alternative is self.chosen else "  " if is_fit else " x"
            host = f", {size(alternative.estimate.host_nbytes)} of the host" if alternative.estimate.host_nbytes else ""
            total = size(alternative.estimate.total_nbytes)
            yield f" {mark} {total:>12s}  time x {alternative.fields.cost:.2f}  {alternative.fields.flags()}{host}"


def fit_options(config: Config, memory: str) -> FittingOptions:
    """Choose the fastest recomputation, stage, resharding and offloading with which a run fits.

    Args:
        config: The run's settings, with ranks, device and precision. Choices of these options are replaced.
        memory: The memory of a GPU, for example "78GiB".

    Raises:
        ConfigError: No options fit. Names the least sufficient memory.

    Effects: as `estimate_run`, for some of the options.
    """
    nbytes = budget_nbytes(memory, "--memory")
    candidates = sorted(_candidates(config), key=lambda fields: fields.cost)
    leanest = Alternative(fields=(lean := _leanest(candidates)), estimate=estimate_run(lean.applied(config)))
    if leanest.estimate.total_nbytes > nbytes:
        raise ConfigError(_refusal(leanest, nbytes))
    alternatives = [leanest]
    chosen = leanest
    for fields in candidates:
        if fields == leanest.fields:
            break
        if any(too_large.fields.is_leaner_than(fields) for too_large in alternatives if _is_over(too_large, nbytes)):
            continue
        alternatives.append(Alternative(fields=fields, estimate=estimate_run(fields.applied(config))))
        if not _is_over(alternatives[-1], nbytes):
            chosen = alternatives[-1]
            break
    return FittingOptions(
        config=chosen.fields.applied(config),
        chosen=chosen,
        alternatives=sorted(alternatives, key=lambda alternative: alternative.fields.cost),
        memory_nbytes=nbytes,
    )


def leaner_options(config: Config, count: int = 2) -> list[Alternative]:
    """Return the fastest options with less memory than the settings' options, with their bytes.

    Effects: as `estimate_run`, for each.
    """
    parallel = config.parallel
    weights = "stage 2" if parallel.stage < 3 else "reshard" if parallel.reshard_after_forward else "keep"
    present = MemoryOptions(weights, parallel.recompute, parallel.offload_activations, parallel.rest)
    leaner = [fields for fields in _candidates(config) if fields != present and fields.is_leaner_than(present)]
    leaner.sort(key=lambda fields: fields.cost)
    return [Alternative(fields=fields, estimate=estimate_run(fields.applied(config))) for fields in leaner[:count]]


def _is_over(alternative: Alternative, nbytes: int) -> bool:
    return alternative.estimate.total_nbytes > nbytes


def _candidates(config: Config) -> Iterator[MemoryOptions]:
    for choices in product(*_CHOICES):
        fields = MemoryOptions(*choices)
        try:
            fields.applied(config)
        except ConfigError:  # Contradicts an option of the run, for example --compile.
            continue
        yield fields


def _leanest(candidates: Sequence[MemoryOptions]) -> MemoryOptions:
    return max(candidates, key=lambda fields: [choices.index(c) for choices, c in zip(_CHOICES, fields, strict=True)])


def _refusal(leanest: Alternative, nbytes: int) -> str:
    estimate = leanest.estimate
    at_rest, peak = sum(estimate.at_rest.values()), estimate.peak
    needed = math.ceil(estimate.total_nbytes / (1 << 30))
    largest = max(peak.kinds, key=lambda kind: peak.kinds[kind])
    return (
        f"Expected --memory of at least {needed}GiB, which {leanest.fields.flags()} needs ({size(at_rest)} at rest; "
        f"most of the peak are {largest}, {size(peak.kinds[largest])}), got {size(nbytes)}. Pass more --ranks, or a "
        "smaller --sequence-length, or a smaller --batch-size or more --accumulation if a rank has several sequences."
    )
