"""Tensors of random bits in any dtype, compared bit by bit."""

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal, NaNs included."""
    assert one.dtype == other.dtype and one.shape == other.shape
    return torch.equal(bits(one), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, (nbytes,) of uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bits that the dtype can hold."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8)
    return values.view(dtype).reshape(shape)
