"""Encodings of whole weights in float64, with float8 as a table of numbers: no cast of torch's, no tile, no shard."""

from __future__ import annotations

from bisect import bisect_left

import torch

Block = tuple[int | None, int | None]


def _numbers(dtype: torch.dtype) -> list[tuple[float, int]]:
    """The finite numbers of a float8 format from zero up, with their bytes, from the bits' definition."""
    mantissa, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    numbers = []
    for byte in range(128):
        exponent, fraction = byte >> mantissa, (byte & (1 << mantissa) - 1) / (1 << mantissa)
        value = (fraction * 2.0 ** (1 - bias)) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        if (dtype == torch.float8_e4m3fn and byte == 0x7F) or (dtype == torch.float8_e5m2 and byte >= 0x7C):
            break
        numbers.append((value, byte))
    return numbers


def _rounded(value: float, numbers: list[tuple[float, int]]) -> int:
    """The byte of the nearest number, ties to the even byte, saturated."""
    sign = 128 if value < 0 or str(value).startswith("-") else 0
    size = min(abs(value), numbers[-1][0])
    i = bisect_left(numbers, (size, -1))
    if i == 0 or numbers[i][0] == size:
        return numbers[i][1] | sign
    (low, byte), (high, next_byte) = numbers[i - 1], numbers[i]
    if size - low != high - size:
        return (byte if size - low < high - size else next_byte) | sign
    return (byte if byte % 2 == 0 else next_byte) | sign


def in_float8(
    weight: torch.Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a matrix, and the fp32 scales of its blocks, computed block by block.

    Quotients are rounded to fp32, as the recipes state: 53 bits are enough for a quotient rounded once to be the same.
    """
    rows, columns = weight.shape
    height, width = block[0] or max(rows, 1), block[1] or max(columns, 1)
    numbers = _numbers(dtype)
    data = torch.zeros(rows, columns, dtype=torch.uint8)
    scales = torch.zeros(-(-rows // height), -(-columns // width))
    exact = weight.double()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            cut = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale = torch.tensor(exact[cut].abs().max().item() / numbers[-1][0]).float().item()
            scale = max(scale, 2.0**-126)
            if power_of_two:
                power = 2.0**-126
                while power < scale:
                    power *= 2
                scale = power
            scales[i, j] = scale
            quotients = (exact[cut] / scale).float().double()
            rounded = [_rounded(value, numbers) for value in quotients.flatten().tolist()]
            data[cut] = torch.tensor(rounded, dtype=torch.uint8).view(quotients.shape)
    return data, scales
