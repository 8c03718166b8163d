"""Works with a price: operations on streams for `lamella_schedule.simulate_streams`."""

from collections.abc import Mapping, Sequence
from typing import Final

from lamella._plan.cluster import Cluster
from lamella._plan.works import Work, WorkKind
from lamella_schedule import StreamOperation

_US: Final = 1e-6
_OF_BF16: Final[Mapping[str, float]] = {"float32": 0.08, "float64": 0.06, "float8_e4m3fn": 1.6, "float8_e5m2": 1.6}
"""Rate of products by the factors' dtype, over that of bf16. Products in fp32 leave TF32 off, as torch does."""


def operations_of(works: Sequence[Work], cluster: Cluster) -> list[StreamOperation]:
    """Return the operations of a step on a cluster."""
    return [
        StreamOperation(
            stream=work.stream,
            seconds=seconds_of(work, cluster),
            after=work.after,
            launch_seconds=launch_seconds(work, cluster),
            is_slowed=not work.kind.communicates,
        )
        for work in works
    ]


def seconds_of(work: Work, cluster: Cluster) -> float:
    """Return the time of a work without other work beside it."""
    if work.collective is not None:
        sums = work.nbytes / (cluster.memory_gb_s * 1e9)
        return cluster.collective_seconds(work.collective) + sums + cluster.kernel_us * _US
    moved = work.nbytes / bytes_rate(work.kind, cluster)
    return max(moved, work.flops / flops_rate(work, cluster)) + cluster.kernel_us * _US


def launch_seconds(work: Work, cluster: Cluster) -> float:
    """Return the time of the host for a work, with the views before it."""
    own_us = cluster.launch_us * (1 + work.hooks) if work.collective is None else cluster.collective_launch_us
    return (own_us + work.num_views * cluster.view_us) * _US


def bytes_rate(kind: WorkKind, cluster: Cluster) -> float:
    """Return the bytes a second of kernels of a kind."""
    rates = {
        WorkKind.COPY: cluster.copy_gb_s,
        WorkKind.SOFTMAX: cluster.softmax_gb_s,
        WorkKind.OPTIMIZER: cluster.optimizer_gb_s,
    }
    return rates.get(kind, cluster.memory_gb_s) * 1e9


def flops_rate(work: Work, cluster: Cluster) -> float:
    """Return the operations a second of a kernel."""
    if work.kind is WorkKind.ATTENTION:
        return cluster.attention_tflops * 1e12
    return cluster.matmul_tflops * 1e12 * _OF_BF16.get(work.dtype, 1.0)
