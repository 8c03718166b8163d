"""`--memory`: the fastest options with which a run fits, by recorded steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from lamella._estimate.estimated_bytes import FRAGMENTATION, Estimate
from lamella._estimate.host_times import HostTimes, measured_host
from lamella._estimate.memory_options import MemoryOptions, all_options, coarse_options, options_of
from lamella._estimate.recorded_options import RecordedOptions
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sizes import nbytes_of, size, sufficient_size

_MOST_RECORDED: Final = 24
_EQUAL_TIMES: Final = 1.01
"""Ratio of times that assumed rates cannot tell apart."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Options with their estimate.

    Attributes:
        fields: The options.
        estimate: The bytes of rank 0.
        cost: Time of a step over that of the fastest options, by the rates of `step_work`.
    """

    fields: MemoryOptions
    estimate: Estimate
    cost: float


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
        room = f"{FRAGMENTATION:.0%} of it for fragmentation"
        yield f"options for {size(self.memory_nbytes)} a GPU, {room}; times over the fastest's, at assumed rates:"
        for alternative in self.alternatives:
            is_fit = alternative.estimate.needed_nbytes <= self.memory_nbytes
            mark = "->" if alternative is self.chosen else "  " if is_fit else " x"
            host = f", {size(alternative.estimate.host_nbytes)} of the host" if alternative.estimate.host_nbytes else ""
            total = size(alternative.estimate.needed_nbytes)
            yield f" {mark} {total:>12s}  time x {alternative.cost:.2f}  {alternative.fields.flags()}{host}"


def fit_options(config: Config, memory: str, host: HostTimes | None = None) -> FittingOptions:
    """Choose the fastest recomputation, stage, resharding and offloading with which a run fits.

    Options without recomputation and offloading come first. If none fits, all others follow in the order of their
    times; bytes and times between recorded options are interpolated, and the choice is recorded itself. Among options
    within 1 % of the fastest, the ones with the least memory are chosen: near its limit, the allocator of a GPU gives
    segments back and asks for them again in each step.

    Args:
        config: The run's settings, with ranks, device and precision. Choices of these options are replaced.
        memory: The memory of a GPU, for example "78GiB".
        host: The host's times; None measures this machine's, by `measured_host`.

    Raises:
        ConfigError: No options fit. Names the least sufficient memory.

    Effects: as `estimate_run`, for some of the options.
    """
    nbytes = nbytes_of(memory, "--memory")
    recorded = RecordedOptions(config, host or measured_host())
    chosen = _fastest(recorded, config, nbytes)
    alternatives = _alternatives(recorded)
    return FittingOptions(
        config=chosen.applied(config),
        chosen=next(alternative for alternative in alternatives if alternative.fields == chosen),
        alternatives=alternatives,
        memory_nbytes=nbytes,
    )


def leaner_options(config: Config, count: int = 2) -> list[Alternative]:
    """Return the fastest options with less memory than the settings' options, with their bytes.

    Effects: as `estimate_run`, for each, and for three more.
    """
    recorded, present = RecordedOptions(config, measured_host()), options_of(config)
    leaner = [options for options in coarse_options() if options != present and options.is_leaner_than(present)]
    leaner = sorted((options for options in leaner if options.is_allowed(config)), key=recorded.seconds)[:count]
    for options in leaner:
        recorded.estimate(options)
    return [alternative for alternative in _alternatives(recorded) if alternative.fields in leaner]


def _fastest(recorded: RecordedOptions, config: Config, nbytes: int) -> MemoryOptions:
    """Return the fastest options that fit, recorded."""
    combinations = all_options(recorded.num_layers, recorded.gathered_nbytes)
    allowed = [options for options in combinations if options.is_allowed(config)]
    if recorded.estimate(MemoryOptions()).needed_nbytes <= nbytes:
        # The other options take longer, and their times another two records.
        allowed = [options for options in allowed if options.is_plain]
    ranked = sorted(allowed, key=recorded.seconds)
    leanest = max(allowed, key=lambda options: options.memory_ranks)
    if all(recorded.needed_nbytes(options) > nbytes for options in ranked if not options.takes_host_memory):
        _check_leanest(recorded, leanest, nbytes)  # before a dozen records of options with the host's memory
    for _ in range(_MOST_RECORDED):
        candidate = _leanest_of_fastest(recorded, ranked, nbytes) or leanest
        if candidate in recorded:
            break
        recorded.estimate(candidate)
    ranked_records = sorted((options for options, _ in recorded), key=recorded.seconds)
    chosen = _leanest_of_fastest(recorded, ranked_records, nbytes)
    if chosen is None:
        _check_leanest(recorded, leanest, nbytes)
    return chosen or leanest


def _leanest_of_fastest(
    recorded: RecordedOptions, ranked: Sequence[MemoryOptions], nbytes: int
) -> MemoryOptions | None:
    """Return the options with the least memory among those that fit and take the time of the fastest that fit.

    Args:
        ranked: Options, the fastest first.
    """
    fitting = (options for options in ranked if recorded.needed_nbytes(options) <= nbytes)
    fastest = next(fitting, None)
    if fastest is None:
        return None
    longest = _EQUAL_TIMES * recorded.seconds(fastest)
    equals = [fastest, *takewhile(lambda options: recorded.seconds(options) <= longest, fitting)]
    return min(equals, key=recorded.needed_nbytes)


def _check_leanest(recorded: RecordedOptions, leanest: MemoryOptions, nbytes: int) -> None:
    """Refuse a memory that the options with the least bytes exceed."""
    if recorded.estimate(leanest).needed_nbytes > nbytes:
        raise ConfigError(_refusal(leanest, recorded.estimate(leanest), nbytes))


def _alternatives(recorded: RecordedOptions) -> list[Alternative]:
    """Return the recorded options, the fastest first."""
    seconds = {options: recorded.seconds(options) for options, _ in [*recorded]}
    least = min(seconds.values())
    alternatives = [
        Alternative(fields=options, estimate=estimate, cost=seconds[options] / least) for options, estimate in recorded
    ]
    return sorted(alternatives, key=lambda alternative: alternative.cost)


def _refusal(leanest: MemoryOptions, estimate: Estimate, nbytes: int) -> str:
    at_rest, peak = sum(estimate.at_rest.values()), estimate.peak
    needed = sufficient_size(estimate.needed_nbytes)
    largest = max(peak.kinds, key=lambda kind: peak.kinds[kind])
    return (
        f"Expected --memory of at least {needed}, which {leanest.flags()} needs ({size(at_rest)} at rest; "
        f"most of the peak are {largest}, {size(peak.kinds[largest])}), got {size(nbytes)}. Pass more --ranks, or a "
        "smaller --sequence-length, or a smaller --batch-size or more --accumulation if a rank has several sequences."
    )
