"""The work of a step, and the time that an assumed GPU takes for it.

Note [Assumed rates]
    The rates order the options of a run, and promise no time: those of an H100 SXM in a host of eight. Products are in
    bf16; copies to and from the host are pinned; the optimizer's step in the host's memory is a rank's.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lamella._estimate.kinds import (
    FORWARD,
    GATHERED,
    GRADIENTS,
    HOST_ACTIVATIONS,
    MAIN_WEIGHTS,
    OPTIMIZER_STATE,
)
from lamella._estimate.live_bytes import TrackedStorage
from lamella._estimate.operator_work import OperatorWork
from lamella._estimate.recorded_step import BACKWARD, FORWARD_BEGINS, RecordedStep
from lamella._settings.config import Config
from lamella._settings.fit import budget_nbytes

_FLOPS, _MEMORY = 640e12, 2.4e12
_KERNEL_S: Final = 4e-6
_WIRE, _NETWORK, _GPUS_A_HOST = 270e9, 40e9, 8
_HOST_LINK, _HOST_STEP = 25e9, 20e9
"""Operations and bytes a second; see Note [Assumed rates]."""

_FELT: Final = 0.1
"""Share of hidden communication that slows the kernels beside it."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a rank in an optimizer step.

    Attributes:
        forward_seconds: Time of the kernels of a microbatch's forward.
        backward_seconds: Time of the kernels of its backward, with recomputed forwards.
        gathered_nbytes: Bytes of all weights, unsharded.
        updated_nbytes: Bytes of main weights and optimizer state.
        gradient_nbytes: Bytes of sharded gradients.
        offloaded_nbytes: Bytes of saved tensors that a microbatch's forward copies to the host.
    """

    forward_seconds: float
    backward_seconds: float
    gathered_nbytes: int
    updated_nbytes: int
    gradient_nbytes: int
    offloaded_nbytes: int


def work_of(recorded: RecordedStep, at_rest: Mapping[str, int]) -> StepWork:
    """Return the work of a recorded step.

    Args:
        recorded: The step.
        at_rest: Bytes between steps by kind, the host's too.
    """
    log, first = recorded.log, recorded.first_moment
    seconds: defaultdict[str, float] = defaultdict(float)
    for operator in log.operators:
        if operator.moment >= first:
            seconds[log.moments[operator.moment].partition(" ")[0]] += _seconds(operator)
    num_microbatches = max(1, log.moments[first:].count(FORWARD_BEGINS))
    gathered: dict[TrackedStorage, int] = {}
    births: Counter[str] = Counter()
    for change in log.changes:
        if change.storage.kind == GATHERED:
            gathered[change.storage] = max(change.nbytes, gathered.get(change.storage, 0))
        if change.moment >= first:
            births[change.storage.kind] += max(0, change.nbytes)
    return StepWork(
        forward_seconds=seconds[FORWARD] / num_microbatches,
        backward_seconds=seconds[BACKWARD] / num_microbatches,
        gathered_nbytes=sum(gathered.values()),
        updated_nbytes=at_rest.get(MAIN_WEIGHTS, 0) + at_rest.get(OPTIMIZER_STATE, 0),
        gradient_nbytes=births[GRADIENTS],
        offloaded_nbytes=births[HOST_ACTIVATIONS] // num_microbatches,
    )


def _seconds(operator: OperatorWork) -> float:
    return max(operator.flops / _FLOPS, operator.nbytes / _MEMORY, _KERNEL_S)


def step_seconds(work: StepWork, config: Config) -> float:
    """Return the time of an optimizer step of a run, by the assumed rates.

    Gathers and reductions hide behind kernels as far as these last; copies of saved tensors do not.

    Args:
        work: The work with the recomputation of the run.
        config: The run's settings, with ranks.
    """
    parallel, num_microbatches = config.parallel, config.optim.accumulation
    num_shards = (parallel.ranks or 1) // parallel.replicate
    gather = work.gathered_nbytes * (1 - 1 / num_shards) / (_WIRE if num_shards <= _GPUS_A_HOST else _NETWORK)
    first = _overlapped(work.forward_seconds, gather)
    if parallel.stage < 3:
        forwards, gather_again = first + (num_microbatches - 1) * work.forward_seconds, 0.0
    else:
        forwards, gather_again = num_microbatches * first, gather * (1 - _kept(work, config))
    backwards = (num_microbatches - 1) * _overlapped(work.backward_seconds, gather_again)
    backwards += _overlapped(work.backward_seconds, gather_again + gather)  # a reduction has a gather's bytes
    copies = 2 * num_microbatches * work.offloaded_nbytes / _HOST_LINK
    return forwards + backwards + copies + _optimizer_seconds(work, is_on_host=parallel.rest == "cpu")


def _kept(work: StepWork, config: Config) -> float:
    """Return the share of the weights that stays from forward to backward in stage 3."""
    if not config.parallel.reshard_after_forward:
        return 1.0
    return min(1.0, budget_nbytes(config.parallel.keep_budget) / max(1, work.gathered_nbytes))


def _optimizer_seconds(work: StepWork, *, is_on_host: bool) -> float:
    moved = 2 * work.updated_nbytes + work.gradient_nbytes
    return moved / _HOST_STEP + 2 * work.gradient_nbytes / _HOST_LINK if is_on_host else moved / _MEMORY


def _overlapped(kernels: float, communication: float) -> float:
    return max(kernels, communication) + _FELT * min(kernels, communication)
