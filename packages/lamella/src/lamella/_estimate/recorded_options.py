"""Bytes and times of a run's options: of recorded steps, and interpolated between them.

Note [Interpolated options]
    A step is recorded for each kind of recomputation, of all layers and of none. Work is linear in the number of
    recomputed layers. The peak is the largest of several moments, each linear in that number: a convex function, which
    a chord between two recorded numbers does not underestimate. Weights that stay add their bytes without
    recomputation, the most that they can add.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from lamella._estimate.api import estimate_run
from lamella._estimate.compiled_layers import compiles
from lamella._estimate.estimated_bytes import Estimate
from lamella._estimate.host_times import IDLE_HOST, HostTimes
from lamella._estimate.kinds import ACTIVATIONS
from lamella._estimate.memory_options import MemoryOptions
from lamella._estimate.step_work import StepWork, step_seconds
from lamella._model.capture import captures
from lamella._model.spec import load_spec, outline
from lamella._settings.config import Config
from lamella_transformers import sharding_units

_BASE = MemoryOptions()


class RecordedOptions:
    """Estimates of a run with options, each recorded once; see Note [Interpolated options].

    Args:
        config: The run's settings, with ranks, device and precision.
        host: The host's times; of no effect where graphs launch the operators.
    """

    def __init__(self, config: Config, host: HostTimes) -> None:
        self._config = config
        self._host = IDLE_HOST if compiles(config) or captures(config) else host
        self._estimates: dict[MemoryOptions, Estimate] = {}

    def __iter__(self) -> Iterator[tuple[MemoryOptions, Estimate]]:
        yield from self._estimates.items()

    def __contains__(self, options: MemoryOptions) -> bool:
        return options in self._estimates

    def __len__(self) -> int:
        return len(self._estimates)

    @cached_property
    def num_layers(self) -> int:
        """The units of the model but the root."""
        spec = load_spec(self._config.model.name, self._config.data.vocab_size)
        return len(sharding_units(outline(spec)))

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of all weights, unsharded."""
        return self.estimate(_BASE).work.gathered_nbytes

    def estimate(self, options: MemoryOptions) -> Estimate:
        """Return the estimate with options. Effects: as `estimate_run`, the first time."""
        if options not in self._estimates:
            self._estimates[options] = estimate_run(options.applied(self._config))
        return self._estimates[options]

    def seconds(self, options: MemoryOptions) -> float:
        """Return the time of a step with options, by assumed rates. Effects: may record up to three steps."""
        recorded = self._estimates.get(options)
        work = self._interpolated_work(options) if recorded is None else recorded.work
        return step_seconds(work, options.applied(self._config), self._host)

    def needed_nbytes(self, options: MemoryOptions) -> int:
        """Return the memory of a GPU with options, recorded or interpolated. Effects: may record a few steps."""
        if options in self._estimates:
            return self._estimates[options].needed_nbytes
        if options.num_recomputed is None:
            return self._end_nbytes(options)
        numbers = dict(self._curve(options))
        below = max(number for number in numbers if number <= options.num_recomputed)
        above = min(number for number in numbers if number >= options.num_recomputed)
        share = (options.num_recomputed - below) / (above - below)
        return round(numbers[below] + share * (numbers[above] - numbers[below]))

    def _curve(self, options: MemoryOptions) -> Iterator[tuple[int, int]]:
        """Yield the known numbers of recomputed layers, with the memory."""
        yield 0, self._end_nbytes(options._replace(recompute="no", num_recomputed=None))
        yield self.num_layers, self._end_nbytes(options._replace(num_recomputed=None))
        for recorded, estimate in self._estimates.items():
            number = recorded.num_recomputed
            if number is not None and recorded._replace(num_recomputed=options.num_recomputed) == options:
                yield number, estimate.needed_nbytes

    def _end_nbytes(self, options: MemoryOptions) -> int:
        """Return the memory with all layers recomputed, or none."""
        if options in self._estimates:
            return self._estimates[options].needed_nbytes
        resharded = options._replace(weights="reshard", keep_nbytes=0)
        return self.estimate(resharded).needed_nbytes + self._staying_nbytes(options)

    def _staying_nbytes(self, options: MemoryOptions) -> int:
        """Return the bytes that weights which stay add to a step without recomputation."""
        if options.weights == "reshard" and not options.keep_nbytes:
            return 0
        if options.keep_nbytes:
            share = options.keep_nbytes / self.gathered_nbytes
            return round(share * self._staying_nbytes(MemoryOptions(weights="keep")))
        staying = self.estimate(MemoryOptions(weights=options.weights)).needed_nbytes
        return staying - self.estimate(_BASE).needed_nbytes

    def _interpolated_work(self, options: MemoryOptions) -> StepWork:
        base = self.estimate(_BASE)
        if options.recompute == "no":
            work, offloaded = base.work, _saved_nbytes(base)
        else:
            full = self.estimate(MemoryOptions(recompute=options.recompute))
            share = 1.0 if options.num_recomputed is None else options.num_recomputed / self.num_layers
            work = replace(
                base.work,
                backward_seconds=_between(base.work.backward_seconds, full.work.backward_seconds, share),
                backward_operators=_between(base.work.backward_operators, full.work.backward_operators, share),
            )
            offloaded = round(_between(_saved_nbytes(base), _saved_nbytes(full), share))
        return replace(work, offloaded_nbytes=offloaded if options.offload_activations else 0)


def _saved_nbytes(estimate: Estimate) -> int:
    """Return the bytes that forward saves for backward."""
    return max(moment.kinds.get(ACTIVATIONS, 0) for moment in estimate.moments)


def _between(first: float, last: float, share: float) -> float:
    return first + share * (last - first)
