"""Argument checks at the public edge: every layout refuses the same input with the same message."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Shape = tuple[int, ...]


def as_shapes(shapes: Iterable[Sequence[int]]) -> tuple[Shape, ...]:
    """Freeze shapes (lists, `torch.Size`) into tuples of int: layouts compare and hash by value."""
    return tuple(tuple(int(size) for size in shape) for shape in shapes)


def check_shapes(shapes: Sequence[Shape]) -> None:
    """Refuse 0-D tensors, which have no dim to cut, and negative sizes."""
    for index, shape in enumerate(shapes):
        if not shape:
            raise ValueError(
                f"Expected tensors with at least one dim, got a 0-D tensor at index {index}. "
                "Reshape it to (1,), or keep it replicated outside the layout."
            )
        if min(shape) < 0:
            raise ValueError(f"Expected sizes of 0 or more, got shape {shape!r} at index {index}.")


def check_at_least_one(name: str, value: int) -> None:
    """Refuse counts below one."""
    if value < 1:
        raise ValueError(f"Expected {name} of at least 1, got {value!r}.")


def check_rank(rank: int, num_shards: int) -> None:
    """Refuse ranks outside `0..num_shards - 1`: a negative rank would silently count from the end."""
    if not 0 <= rank < num_shards:
        raise ValueError(f"Expected a rank in 0..{num_shards - 1} (num_shards={num_shards}), got {rank!r}.")


def check_dim(dim: int, shape: Sequence[int]) -> None:
    """Refuse dims outside `0..len(shape) - 1`."""
    if not 0 <= dim < len(shape):
        raise ValueError(f"Expected a dim of a tensor of shape {tuple(shape)!r}, got {dim!r}.")


def per_tensor(name: str, values: Sequence[T], num_tensors: int) -> tuple[T, ...]:
    """Refuse any number of values but one per tensor: a short list would silently drop tensors."""
    if len(values) != num_tensors:
        raise ValueError(f"Expected one {name} a tensor ({num_tensors} tensors), got {len(values)}.")
    return tuple(values)


def normal_dim(dim: int, num_dims: int) -> int:
    """Count negative dims from the last. Dims out of range stay unchanged, for `check_dim` to name."""
    return dim + num_dims if -num_dims <= dim < 0 else dim
