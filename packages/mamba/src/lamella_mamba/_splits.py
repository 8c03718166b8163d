"""Tensors cut for tensor-parallel ranks, section by section.

A fused tensor joins sections of different sizes along a dim, and a rank holds its share of each section, not a share of
the whole. For [z, x, B, C, dt] on two ranks:

    whole    z0 z1 x0 x1 B0 B1 C0 C1 dt0 dt1
    rank 0   z0 x0 B0 C0 dt0
    rank 1   z1 x1 B1 C1 dt1

lamella-convert has the same sections as rules between the names in files, with sizes from a config. It lies below this
package, and works without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

Kind: TypeAlias = Literal["column", "row", "replicated"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """How tensor-parallel ranks share a parameter.

    Attributes:
        dim: The dim along which ranks hold different parts, counted from 0; None if every rank holds the whole.
        sizes: Sizes of the sections along `dim`, in elements; their sum is the tensor's size. Empty without a dim.
        blocks: The smallest part of each section that a single rank must hold, in elements: a head, a group of B and C.
            Empty means single elements.

    Raises:
        ValueError: The dim is negative, the sizes do not fit the dim, or the blocks are below 1 or do not divide the
            sizes.
    """

    dim: int | None
    sizes: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dim is not None and self.dim < 0:
            raise ValueError(f"Expected `dim` from 0 on, or None, got {self.dim}. Count the dim from the first.")
        if (self.dim is None) != (not self.sizes) or any(size < 1 for size in self.sizes):
            raise ValueError(f"Expected `sizes` of at least 1 with a `dim`, and none without, got {self!r}.")
        if self.dim is not None and not self.blocks:
            object.__setattr__(self, "blocks", (1,) * len(self.sizes))
        if any(block < 1 for block in self.blocks):
            raise ValueError(f"Expected `blocks` of at least 1 element, got {self.blocks}. Leave blocks out for 1.")
        if len(self.blocks) != len(self.sizes) or any(
            n % block for n, block in zip(self.sizes, self.blocks, strict=True)
        ):
            raise ValueError(f"Expected one block for each section, which divides it, got {self!r}.")

    @property
    def kind(self) -> Kind:
        """Of output features (dim 0, "column"), of input features (another dim, "row"), or "replicated"."""
        if self.dim is None:
            return "replicated"
        return "column" if self.dim == 0 else "row"

    def part(self, num_ranks: int) -> Split:
        """The split of the tensor that each of `num_ranks` ranks holds.

        Raises:
            ValueError: A section has no whole number of blocks for each rank.
        """
        for size, block in zip(self.sizes, self.blocks, strict=True):
            if num_ranks < 1 or size // block % num_ranks:
                raise ValueError(
                    f"Expected a number of ranks that divides the {size // block} blocks (heads, groups) of each "
                    f"section, got {num_ranks} for a section of {size} elements in blocks of {block}. Choose a "
                    "tensor-parallel size that divides the numbers of heads and groups."
                )
        return replace(self, sizes=tuple(size // num_ranks for size in self.sizes))

    def whole(self, num_ranks: int) -> Split:
        """The split of the whole tensor, of which each of `num_ranks` ranks holds a part with this split."""
        return replace(self, sizes=tuple(size * num_ranks for size in self.sizes))


def split(tensor: torch.Tensor, by: Split, rank: int, num_ranks: int) -> torch.Tensor:
    """Return the part of a tensor that a tensor-parallel rank holds.

    Args:
        tensor: Whole: of any shape with `sum(by.sizes)` elements along `by.dim`.
        by: The split of the whole tensor, see `Split.whole` for a part's.
        rank: The rank among the tensor-parallel ranks.
        num_ranks: The tensor-parallel size.

    Returns:
        The rank's share of every section, one after another: a copy; `tensor` itself if ranks hold the whole.

    Raises:
        ValueError: The shape does not fit, `rank` is not below `num_ranks`, or a section cannot be divided.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"Expected `rank` from 0 to {num_ranks - 1}, got {rank}.")
    if by.dim is None:
        return tensor
    _check_size(tensor, by)
    shares = by.part(num_ranks).sizes
    sections = torch.split(tensor, list(by.sizes), dim=by.dim)
    return torch.cat([s.narrow(by.dim, rank * n, n) for s, n in zip(sections, shares, strict=True)], dim=by.dim)


def merge(parts: Sequence[torch.Tensor], by: Split) -> torch.Tensor:
    """Return the whole tensor of which tensor-parallel ranks hold parts: the reverse of `split`.

    Args:
        parts: The parts of all ranks, in the ranks' order.
        by: The split of the whole tensor, see `Split.whole` for a part's.

    Returns:
        A copy; the first part if ranks hold the whole.

    Raises:
        ValueError: No parts; a part's shape does not fit, a section cannot be divided by the number of parts, parts
            have different dtypes or sizes along other dims, or differ though ranks hold the whole.

    Effects: waits for the device to compare parts, if ranks hold the whole.
    """
    if not parts:
        raise ValueError("Expected the parts of all tensor-parallel ranks, got none.")
    if by.dim is None:
        for rank, part in enumerate(parts):
            _check_equal(parts[0], part, rank)
        return parts[0]
    rank_split = by.part(len(parts))
    for rank, part in enumerate(parts):
        _check_size(part, rank_split)
        _check_alike(parts[0], part, rank, "parts of one dtype and shape")
    sections = zip(*(torch.split(part, list(rank_split.sizes), dim=by.dim) for part in parts), strict=True)
    return torch.cat([share for section in sections for share in section], dim=by.dim)


def _check_equal(first: torch.Tensor, part: torch.Tensor, rank: int) -> None:
    if part is first:
        return
    _check_alike(first, part, rank, _EQUAL)
    if not torch.allclose(first, part.to(first.device), rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            f"Expected {_EQUAL}, got the values from rank 0 and other values from rank {rank}. Give parts of one step, "
            "or the dim along which ranks hold different parts."
        )


_EQUAL = "equal parts, as every rank holds the whole (dim None)"


def _check_alike(first: torch.Tensor, part: torch.Tensor, rank: int, expected: str) -> None:
    """Refuse what concatenation would widen: a dtype would change without a word."""
    if part.shape != first.shape or part.dtype != first.dtype:
        raise ValueError(
            f"Expected {expected}, got {first.dtype} of shape {tuple(first.shape)} from rank 0 and {part.dtype} of "
            f"shape {tuple(part.shape)} from rank {rank}. Give the parts of one tensor, as one step left them."
        )


def _check_size(tensor: torch.Tensor, by: Split) -> None:
    assert by.dim is not None
    if tensor.ndim <= by.dim or tensor.shape[by.dim] != sum(by.sizes):
        raise ValueError(
            f"Expected a tensor of {sum(by.sizes)} elements along dim {by.dim}, the sum of {by.sizes}, got shape "
            f"{tuple(tensor.shape)}. A rank's part has `Split.part`, the whole tensor `Split.whole`."
        )
