"""The work of a step, and the time that an assumed GPU and a host take for it.

Note [Assumed rates]
    The rates order the options of a run, and promise no time: those of an H100 SXM in a host of eight. Products are in
    bf16; copies to and from the host are pinned; the optimizer's step in the host's memory is a rank's. A forward or a
    backward takes as long as the slower one of GPU and host: of a step on two H100s whose host was slow, 163 ms without
    recomputation, 226 with full and 250 with selective, the last is the host's.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lamella._estimate.host_times import HostTimes
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
from lamella._estimate.recorded_step import BACKWARD, FORWARD_BEGINS, RecordedStep, forwards_of_units
from lamella._settings.config import Config
from lamella._settings.sizes import budget_nbytes

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
        forward_operators: Operators with a kernel of a microbatch's forward.
        backward_operators: Operators with a kernel of its backward, with recomputed forwards.
        layer_operators: Operators with a kernel of the forward of each unit but the root, in the order of forward.
        num_units: Units that gather weights.
        gathered_nbytes: Bytes of all weights, unsharded.
        updated_nbytes: Bytes of main weights and optimizer state.
        gradient_nbytes: Bytes of sharded gradients.
        offloaded_nbytes: Bytes of saved tensors that a microbatch's forward copies to the host.
    """

    forward_seconds: float
    backward_seconds: float
    forward_operators: float
    backward_operators: float
    layer_operators: tuple[float, ...]
    num_units: int
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
    num_operators: Counter[str] = Counter()
    for operator in log.operators:
        if operator.moment >= first:
            moment = log.moments[operator.moment]
            phase = moment.partition(" ")[0]
            seconds[phase] += _seconds(operator)
            num_operators.update((moment, phase))
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
        forward_operators=num_operators[FORWARD] / num_microbatches,
        backward_operators=num_operators[BACKWARD] / num_microbatches,
        layer_operators=tuple(
            num_operators[moment] / num_microbatches for moment in forwards_of_units(log.moments[first:])
        ),
        num_units=len(gathered),
        gathered_nbytes=sum(gathered.values()),
        updated_nbytes=at_rest.get(MAIN_WEIGHTS, 0) + at_rest.get(OPTIMIZER_STATE, 0),
        gradient_nbytes=births[GRADIENTS],
        offloaded_nbytes=births[HOST_ACTIVATIONS] // num_microbatches,
    )


def _seconds(operator: OperatorWork) -> float:
    return max(operator.flops / _FLOPS, operator.nbytes / _MEMORY, _KERNEL_S)


def step_seconds(work: StepWork, config: Config, host: HostTimes) -> float:
    """Return the time of an optimizer step of a run, by the assumed rates and a host's times.

    Gathers and reductions hide behind kernels as far as these last; copies of saved tensors do not.

    Args:
        work: The work with the recomputation of the run.
        config: The run's settings, with ranks.
        host: The host's times.
    """
    parallel, num_microbatches = config.parallel, config.optim.accumulation
    num_shards = (parallel.ranks or 1) // parallel.replicate
    gather = work.gathered_nbytes * (1 - 1 / num_shards) / (_WIRE if num_shards <= _GPUS_A_HOST else _NETWORK)
    collectives, hooks = work.num_units * host.collective_seconds, _hook_seconds(work, config, host) / 2
    forward_host = work.forward_operators * host.operator_seconds + hooks
    backward_host = work.backward_operators * host.operator_seconds + hooks

    def backward(num_collectives: float) -> float:
        kernels = _overlapped(work.backward_seconds, num_collectives * gather)
        return max(kernels, backward_host + num_collectives * collectives)

    first = max(_overlapped(work.forward_seconds, gather), forward_host + collectives)
    if parallel.stage < 3:
        forwards, again = first + (num_microbatches - 1) * max(work.forward_seconds, forward_host), 0.0
    else:
        forwards, again = num_microbatches * first, 1 - _kept_share(work, config)
    backwards = (num_microbatches - 1) * backward(again) + backward(again + 1)  # a reduction has a gather's bytes
    copies = 2 * num_microbatches * work.offloaded_nbytes / _HOST_LINK
    return forwards + backwards + copies + _optimizer_seconds(work, is_on_host=parallel.rest == "cpu")


def _hook_seconds(work: StepWork, config: Config, host: HostTimes) -> float:
    """Return the host's time for hooks in a microbatch; tensors are saved on the host by hooks like those of "full"."""
    parallel = config.parallel
    hooks = sum(work.layer_operators[: parallel.recompute_layers]) * host.hook_seconds[parallel.recompute]
    return hooks + parallel.offload_activations * sum(work.layer_operators) * host.hook_seconds["full"]


def _kept_share(work: StepWork, config: Config) -> float:
    """Return the share of the weights that stays from forward to backward in stage 3."""
    if not config.parallel.reshard_after_forward:
        return 1.0
    return min(1.0, budget_nbytes(config.parallel.keep_budget) / max(1, work.gathered_nbytes))


def _optimizer_seconds(work: StepWork, *, is_on_host: bool) -> float:
    moved = 2 * work.updated_nbytes + work.gradient_nbytes
    return moved / _HOST_STEP + 2 * work.gradient_nbytes / _HOST_LINK if is_on_host else moved / _MEMORY


def _overlapped(kernels: float, communication: float) -> float:
    return max(kernels, communication) + _FELT * min(kernels, communication)
