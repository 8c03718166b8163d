"""Where a step's time goes: on the device by a profile, on the host with a model that keeps no device waiting."""

import statistics
import time
from dataclasses import replace

import torch

from lamella.overlap import Kind, breakdown
from lamella_integration.backends import Backend, Training, Workload
from lamella_integration.profile import NUM_STEPS, profile_steps
from lamella_integration.report import Phases

THIN_HEAD_DIM = 16
THIN_NUM_TOKENS = 64
NUM_HOST_STEPS = 40
NUM_HOST_WARMUP_STEPS = 4  # In the first step units learn their order, and libraries load; in the fourth some capture.


def phases_of(training: Training, tokens: torch.Tensor, labels: torch.Tensor) -> Phases:
    """What this rank's device does in a step, from a profile of `NUM_STEPS` after one more; operators on a CPU.

    Every rank must call it.

    Raises:
        RuntimeError: The profiler saw no kernel.
    """
    found = breakdown(profile_steps(training, tokens, labels, num_warmup_steps=1, has_operators=False))

    def ms(*kinds: Kind) -> float:
        return sum(found.by_kind[kind] for kind in kinds) / NUM_STEPS

    return Phases(
        span_ms=found.span / NUM_STEPS,
        compute_ms=ms(Kind.MATMUL, Kind.ATTENTION, Kind.ELEMENTWISE),
        collectives_ms=found.collectives / NUM_STEPS,
        exposed_ms=found.exposed / NUM_STEPS,
        copies_ms=ms(Kind.COPY, Kind.FILL, Kind.TRANSFER),
        optimizer_ms=ms(Kind.OPTIMIZER),
        idle_ms=found.idle / NUM_STEPS,
    )


def host_seconds(backend: Backend, workload: Workload) -> float:
    """How long this rank's host takes over forward and backward of a microbatch when it waits for nothing.

    What it does for each unit (hooks, launches) does not depend on sizes, so it is timed on a thin model: the same
    layers and parameters, each so small that the device is done sooner than the host, from an idle device until
    backward has returned. The mean of the fastest tenth of `NUM_HOST_STEPS` steps, since what else a host does only
    adds to them. The optimizer's part is not counted, unless the step is captured: then all of it is one launch.
    Budgets in bytes hold more units of a thin model. On a CPU it is the whole time, computing included.

    Every rank must call it.
    """
    thin = _thin(workload)
    training = backend(thin)
    tokens, labels = thin.batch(THIN_NUM_TOKENS)
    launch = training.step if training.is_captured else training.accumulate
    seconds = []
    for _ in range(NUM_HOST_WARMUP_STEPS + NUM_HOST_STEPS):
        if workload.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        launch(tokens, labels)
        seconds.append(time.perf_counter() - begin)
        if not training.is_captured:
            training.optimizer_step()
            training.zero_grad()
    return statistics.mean(sorted(seconds[NUM_HOST_WARMUP_STEPS:])[: NUM_HOST_STEPS // 10])


def _thin(workload: Workload) -> Workload:
    dim = THIN_HEAD_DIM * workload.config.num_heads
    return replace(workload, config=replace(workload.config, dim=dim, ffn_dim=dim, vocab_size=dim), num_microbatches=1)
