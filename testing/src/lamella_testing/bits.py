"""Tensors of random bits in any dtype, compared bit by bit."""

from collections.abc import Mapping

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal, NaNs included."""
    assert one.dtype == other.dtype and one.shape == other.shape
    return torch.equal(bits(one), bits(other))


def all_same_bits(tensors: Mapping[str, torch.Tensor], other_tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors of the same names are equal, NaNs included."""
    assert set(tensors) == set(other_tensors)
    return all(same_bits(tensors[name], other_tensors[name]) for name in tensors)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, (nbytes,) of uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bits that the dtype can hold."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8)
    return values.view(dtype).reshape(shape)


def tensors_of_each_kind() -> dict[str, torch.Tensor]:
    """Random bits in each of `DTYPES`, a scalar, and a tensor without elements, by name."""
    torch.manual_seed(0)
    tensors = {str(dtype).removeprefix("torch."): random_bits((7, 5, 3), dtype) for dtype in DTYPES}
    return {**tensors, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
