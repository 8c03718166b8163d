"""The time of a step: on the device from a profile, on the host from a model too small to keep the host waiting."""

import statistics
import time
from dataclasses import replace

import torch

from lamella_integration.backends import Backend, Training, Workload
from lamella_integration.profile import NUM_STEPS, profile_steps
from lamella_integration.report import Phases
from lamella_trace import KernelKind, breakdown

THIN_HEAD_DIM = 16
THIN_NUM_TOKENS = 64
NUM_HOST_STEPS = 40
NUM_HOST_WARMUP_STEPS = 4  # Step 1 records the order of units and loads libraries; step 4 captures CUDA graphs.


def phases_of(training: Training, tokens: torch.Tensor, labels: torch.Tensor) -> Phases:
    """Profile `NUM_STEPS` steps, after one warm-up step; return this device's time by phase. On a CPU, of operators.

    Raises:
        RuntimeError: The profiler recorded no kernel.

    Effects: collective over all ranks: trains for `NUM_STEPS` + 1 steps.
    """
    kernels = breakdown(profile_steps(training, tokens, labels, num_warmup_steps=1, has_operators=False))

    def ms(*kinds: KernelKind) -> float:
        return sum(kernels.by_kind[kind] for kind in kinds) / NUM_STEPS

    return Phases(
        span_ms=kernels.span / NUM_STEPS,
        compute_ms=ms(KernelKind.MATMUL, KernelKind.ATTENTION, KernelKind.ELEMENTWISE),
        collectives_ms=kernels.collectives / NUM_STEPS,
        exposed_ms=kernels.exposed / NUM_STEPS,
        copies_ms=ms(KernelKind.COPY, KernelKind.FILL, KernelKind.TRANSFER),
        optimizer_ms=ms(KernelKind.OPTIMIZER),
        idle_ms=kernels.idle / NUM_STEPS,
    )


def host_seconds(backend: Backend, workload: Workload) -> float:
    """Measure this rank's host time in seconds for forward and backward of a microbatch, without waits for the device.

    The host's work per unit (hooks, launches) does not depend on sizes. A thin model is therefore timed: the same
    layers and parameters, so small that the device finishes before the host, from an idle device to the return of
    backward. The result is the mean of the fastest tenth of `NUM_HOST_STEPS` steps, since other work on the host only
    adds time. The optimizer is excluded, unless the step is captured: then the whole step is one launch. Budgets in
    bytes hold more units of a thin model. On a CPU the time includes the computation.

    Effects: collective over all ranks.
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
