"""What a profile shows to have been copied: whole parameters, or casts of shards and activations only.

Pure functions on lists of kernels. `profile` runs the profiler, and `lamella.overlap` reads what it wrote.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamella.overlap import Kernel, Kind


@dataclass(frozen=True, kw_only=True)
class ParameterSizes:
    """What tells copies of parameters from casts of shards and from copies of activations.

    Args:
        full_numels: Of each matrix that divides. Vectors are as small as much else that is copied.
        largest_shard_numel: Of a unit: nothing cast at once is larger.
        cast_numel: Elements that casts between shards and wires may copy in the whole profile. None for any number.
        num_tokens: A prime: the sizes of activations are multiples of it, those of parameters are not.
    """

    full_numels: frozenset[int]
    largest_shard_numel: int
    cast_numel: int | None
    num_tokens: int


def parameter_copies(kernels: Iterable[Kernel], sizes: ParameterSizes) -> list[Kernel]:
    """Copies that a zero-copy step has no reason to make: whole parameters, or more than a unit's shard.

    A copy of unknown size is taken for one: a proof has no unknowns.
    """
    return [kernel for kernel in kernels if kernel.kind is Kind.COPY and _is_parameter_copy(kernel, sizes)]


def copied_numel(kernels: Iterable[Kernel], sizes: ParameterSizes) -> int:
    """Elements copied in all, activations left out: parameters copied piece by piece show here."""
    by_operator = {
        kernel.operator: sum(numel for numel in kernel.numels if not _is_activation(numel, sizes)) // 2
        for kernel in kernels
        if kernel.kind is Kind.COPY
    }
    return sum(by_operator.values())  # A copy names its source and its destination: half of the sum.


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
