"""Float8 products with a scale for every 128 elements that are added up, as DeepSeek-V3's.

product             operands           blocks
output              x, weight.T        1 x 128; 128 x 128
gradient of x       gradient, weight   1 x 128; 128 x 128: the transpose of the data, and of the scales
gradient of weight  gradient.T, x      1 x 128 along the tokens, of both
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lamella_precision._products.constant_results import assume_constant_result
from lamella_precision._products.operands import Operand, product
from lamella_precision._scales.assumed_kernels import assumes_float8_kernels

LENGTH = 128
_DTYPE = torch.float8_e4m3fn
_ALIGNMENT = 16  # rows of the first operand: a column of its scales is a whole number of vectors
_GRID_COLUMNS = 4  # kernels read rows of a square's scales padded to a multiple
_FIRST_CUDA = (12, 9)


def multiply(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    """`a @ b.T`, of (m, k) and (n, k), in `dtype`; `a` has scales of 1 x 128, `b` of 1 x 128 or 128 x 128."""
    assert a.data.shape[1] % LENGTH == 0, a.data.shape  # on every device, so that tests without a GPU see it
    if assumes_float8_kernels() or (a.data.is_cuda and _has_kernels(a.data.device.index)):
        return _by_kernel(a, b).to(dtype)
    return product(_dequantized(*a), _dequantized(*b)).to(dtype)


def _by_kernel(a: Operand, b: Operand) -> torch.Tensor:
    """The product in bf16. Scales of 1 x 128 are read column by column, those of squares row by row."""
    (data_a, scales_a), (data_b, scales_b) = a, b
    num_rows = len(data_a)
    if padding := -num_rows % _ALIGNMENT:
        data_a = F.pad(data_a.view(torch.uint8), (0, 0, 0, padding)).view(_DTYPE)
        scales_a = F.pad(scales_a, (0, 0, 0, padding))
    scaling_a = F.ScalingType.BlockWise1x128
    if len(scales_b) == len(data_b):
        scaling_b, scales_b = scaling_a, _by_columns(scales_b)
    else:
        scaling_b, scales_b = F.ScalingType.BlockWise128x128, _padded(scales_b).t()
    # The operator of `torch.nn.functional.scaled_mm`, a function that Dynamo cannot trace under torch 2.11.
    output: torch.Tensor = torch.ops.aten._scaled_mm_v2.default(
        data_a,
        data_b.t(),
        [_by_columns(scales_a)],
        [scaling_a.value],
        [],
        [scales_b],
        [scaling_b.value],
        [],
        None,
        torch.bfloat16,
    )
    return output[:num_rows]


def _by_columns(scales: torch.Tensor) -> torch.Tensor:
    return scales.t().contiguous().t()


def _padded(scales: torch.Tensor) -> torch.Tensor:
    padding = -scales.shape[1] % _GRID_COLUMNS
    return (F.pad(scales, (0, padding)) if padding else scales).contiguous()


def _dequantized(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    tiles = elements.float().view(len(scales), -1, scales.shape[1], LENGTH)
    return (tiles * scales[:, None, :, None]).view(elements.shape)


@assume_constant_result
def _has_kernels(index: int) -> bool:
    """Whether cuBLAS takes such scales: on compute capability 9 alone, from CUDA 12.9 on."""
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(index)[0] == 9 and cuda >= _FIRST_CUDA
