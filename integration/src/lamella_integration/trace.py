"""Copies in a profile: whole parameters, or only casts of shards and activations.

Pure functions on lists of kernels. `profile` runs the profiler, and `lamella_trace` reads the trace.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamella_trace import Kernel, KernelKind


@dataclass(frozen=True, kw_only=True)
class ParameterSizes:
    """Sizes to tell copies of parameters from casts of shards and copies of activations.

    Args:
        full_numels: Elements of each unsharded matrix with a dim 0 divisible by the number of ranks. Vectors are left
            out: other, legitimate copies are as small.
        largest_shard_numel: Elements of the largest unit's shard, the upper bound of a single cast.
        cast_numel: Limit on the elements copied by casts between shards and payloads in the whole profile. None for no
            limit.
        num_tokens: A prime that divides the sizes of activations and no size of a parameter.
    """

    full_numels: frozenset[int]
    largest_shard_numel: int
    cast_numel: int | None
    num_tokens: int


def parameter_copies(kernels: Iterable[Kernel], sizes: ParameterSizes) -> list[Kernel]:
    """Return the copies a zero-copy step must not make: whole parameters, or more than a unit's shard.

    Copies of unknown size are included: a proof has no unknowns.
    """
    return [kernel for kernel in kernels if kernel.kind is KernelKind.COPY and _is_parameter_copy(kernel, sizes)]


def copied_numel(kernels: Iterable[Kernel], sizes: ParameterSizes) -> int:
    """Sum the elements of all copies but activations: parameters copied piece by piece show in the sum."""
    by_operator = {
        kernel.operator: sum(numel for numel in kernel.numels if not _is_activation(numel, sizes)) // 2
        for kernel in kernels
        if kernel.kind is KernelKind.COPY
    }
    return sum(by_operator.values())  # Halved above: a copy's sizes list both source and destination.


def check_zero_copy(kernels: Sequence[Kernel], sizes: ParameterSizes) -> None:
    """Raise unless the only copies of parameters and gradients are casts of shards.

    Raises:
        RuntimeError: Names the offending kernels.
    """
    offenders = parameter_copies(kernels, sizes)
    if offenders:
        lines = [f"  {k.duration_us:8.1f} us  stream {k.stream}  {list(k.numels)}  {k.name[:100]}" for k in offenders]
        raise RuntimeError("Expected no copies of parameter size, got:\n" + "\n".join(lines))
    copied = copied_numel(kernels, sizes)
    if sizes.cast_numel is not None and copied > sizes.cast_numel:
        raise RuntimeError(f"Expected casts of at most {sizes.cast_numel} elements of shards, got {copied} copied.")


def _is_parameter_copy(kernel: Kernel, sizes: ParameterSizes) -> bool:
    return not kernel.numels or any(
        numel in sizes.full_numels or numel > sizes.largest_shard_numel
        for numel in kernel.numels
        if not _is_activation(numel, sizes)
    )


def _is_activation(numel: int, sizes: ParameterSizes) -> bool:
    return numel % sizes.num_tokens == 0
