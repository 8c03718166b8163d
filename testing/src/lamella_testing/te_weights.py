"""Quantised weights and a linear layer as Transformer Engine's, in plain torch: classes, attributes, order of events.

The classes name Transformer Engine's modules as their own: detection goes by module names. Data is a byte an element;
 the copy for backward is made by the layer in backward, as on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import MethodType, SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

_MODULE = "transformer_engine.pytorch.tensor.stand_in"
_TILE = 128
_LENGTH = 32


class DType(Enum):
    """Formats of the data."""

    kFloat8E4M3 = torch.float8_e4m3fn  # noqa: N815  # Transformer Engine's names
    kFloat8E5M2 = torch.float8_e5m2  # noqa: N815


def quantised(
    values: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    power_of_two: bool = False,
    tile: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 data of a whole matrix, and the scales that dequantise it: one, or one for each square of `tile`.

    Independent of recipes: by loops over blocks, and in Transformer Engine's arithmetic.
    """
    rows, columns = values.shape
    height, width = tile or rows, tile or columns
    data = torch.empty(values.shape, dtype=dtype)
    scales = torch.zeros(-(-rows // height), -(-columns // width), dtype=torch.float32)
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            square = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            block = values[square].float()
            amax = block.abs().max()
            factor = largest / amax if amax > 0 else torch.ones_like(largest)
            if power_of_two:
                factor = torch.exp2(torch.log2(factor.double()).floor()).float()
            data[square] = (block * factor).clamp(-largest, largest).to(dtype)
            scales[i, j] = 1 / factor
    return data, scales


class _Quantizer:
    """Options of a quantisation."""

    def __init__(self, dtype: DType = DType.kFloat8E4M3, *, power_of_two: bool = False) -> None:
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = dtype, power_of_two, 0.0
        self.rowwise_usage = self.columnwise_usage = True
        self.block_scaling_dim = 2

    def copy(self) -> Self:
        quantizer = type(self)(self.dtype, power_of_two=self.force_pow_2_scales)
        vars(quantizer).update(vars(self))
        return quantizer

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise


class Float8CurrentScalingQuantizer(_Quantizer):
    """A scale a tensor."""

    def __call__(self, values: torch.Tensor) -> Float8Tensor:
        data, scale = quantised(values, self.dtype.value, power_of_two=self.force_pow_2_scales)
        return Float8Tensor(
            shape=values.shape,
            dtype=values.dtype,
            data=data.view(torch.uint8),
            fp8_scale_inv=scale.view(1),
            fp8_dtype=self.dtype,
            quantizer=self,
        )


class Float8Quantizer(Float8CurrentScalingQuantizer):
    """A scale a tensor, of earlier tensors: the first is of the tensor itself here."""


class Float8BlockQuantizer(_Quantizer):
    """A scale for 128 x 128 elements."""

    def __call__(self, values: torch.Tensor) -> Float8BlockwiseQTensor:
        data, scales = quantised(values, self.dtype.value, power_of_two=self.force_pow_2_scales, tile=_TILE)
        return Float8BlockwiseQTensor(
            shape=values.shape,
            dtype=values.dtype,
            rowwise_data=data.view(torch.uint8),
            rowwise_scale_inv=F.pad(scales, (0, -scales.shape[1] % 4)),
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=self.dtype,
            quantizer=self,
            is_2D_scaled=True,
        )


def in_mxfp8(values: torch.Tensor, *, by_columns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 data (e4m3) of a whole matrix, and a byte for 32 elements: the exponent of a power of two, rounded up.

    Independent of recipes: by logarithms, and in Transformer Engine's arithmetic, which multiplies amaxes by a rounded
    reciprocal and leaves tiny blocks unscaled.
    """
    if by_columns:
        data, bytes_of_blocks = in_mxfp8(values.t().contiguous())
        return data.t().contiguous(), bytes_of_blocks.t().contiguous()
    blocks = values.float().view(len(values), -1, _LENGTH)
    scales = (blocks.abs().amax(2) * torch.tensor(1 / 448, dtype=torch.float32)).double()
    exponents = (torch.log2(scales).ceil() + 127).clamp_min(0)  # of zero: minus infinity
    factors = torch.where(exponents == 0, 1.0, torch.exp2(127 - exponents))
    data = (blocks.double() * factors[:, :, None]).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return data.view(values.shape), exponents.to(torch.uint8)


class MXFP8Quantizer(_Quantizer):
    """A power of two for 32 elements, by rows and by columns. Sizes are multiples of 128: scales have no padding."""

    def __call__(self, values: torch.Tensor) -> MXFP8Tensor:
        by_rows, by_columns = in_mxfp8(values), in_mxfp8(values, by_columns=True)
        return MXFP8Tensor(
            shape=values.shape,
            dtype=values.dtype,
            rowwise_data=by_rows[0].view(torch.uint8),
            rowwise_scale_inv=by_rows[1],
            columnwise_data=by_columns[0].view(torch.uint8),
            columnwise_scale_inv=by_columns[1],
            fp8_dtype=self.dtype,
            quantizer=self,
        )


class NVFP4Quantizer(_Quantizer):
    """Four bits an element."""

    def __call__(self, values: torch.Tensor) -> NVFP4Tensor:
        return NVFP4Tensor(shape=values.shape, dtype=values.dtype, quantizer=self)


class _QuantizedTensor(torch.Tensor):
    """A wrapper: all operators but `detach` read dequantised values."""

    _names: tuple[str, ...] = ()
    _quantizer: Any

    @staticmethod
    def __new__(
        cls,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        quantizer: Any,
        device: torch.device | None = None,
        requires_grad: bool = False,
        **attributes: Any,
    ) -> Self:
        device = torch.device("cpu") if device is None else device
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        vars(tensor).update({f"_{name}": value for name, value in attributes.items()})
        tensor._quantizer = quantizer.copy()
        return tensor

    def get_metadata(self) -> dict[str, Any]:
        return {"quantizer": self._quantizer, **{name: getattr(self, f"_{name}") for name in self._names}}

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise NotImplementedError

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        raise NotImplementedError

    def transposed(self) -> torch.Tensor:
        """The copy for backward, dequantised: (columns, rows)."""
        raise NotImplementedError

    def detach(self) -> Self:
        return type(self)(shape=self.shape, dtype=self.dtype, device=self.device, **self.get_metadata())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        plain = tree_map(_values, (tuple(args), kwargs or {}))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # As the original's: Python runs for each attribute that torch reads, and then nothing but torch's own function.
        return torch._C._disabled_torch_function_impl(func, types, tuple(args), kwargs or {})


def _values(argument: object) -> object:
    return argument.dequantize() if isinstance(argument, _QuantizedTensor) else argument


class Float8Tensor(_QuantizedTensor):
    """Data with a scale, and perhaps the transposed data."""

    _names = ("data", "fp8_scale_inv", "fp8_dtype", "data_transpose")
    _data: torch.Tensor
    _fp8_dtype: DType
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None
    _transpose_invalid: bool

    @staticmethod
    def __new__(
        cls, *, fp8_scale_inv: torch.Tensor, data_transpose: torch.Tensor | None = None, **attributes: Any
    ) -> Self:
        tensor = _QuantizedTensor.__new__(cls, **attributes)
        tensor._scale_inv, tensor._transpose, tensor._transpose_invalid = (
            fp8_scale_inv,
            data_transpose,
            data_transpose is None,
        )
        return tensor

    def get_metadata(self) -> dict[str, Any]:
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "data_transpose": self._transpose,
            "quantizer": self._quantizer,
        }

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self._data.view(self._fp8_dtype.value).float() * self._scale_inv).to(dtype or self.dtype)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if columnwise_usage and (self._transpose is None or self._transpose_invalid):
            self._transpose, self._transpose_invalid = self._data.t().contiguous(), False

    def transposed(self) -> torch.Tensor:
        """The copy for backward, dequantised: (columns, rows)."""
        assert self._transpose is not None and not self._transpose_invalid
        return (self._transpose.view(self._fp8_dtype.value).float() * self._scale_inv).to(self.dtype)


class Float8BlockwiseQTensor(_QuantizedTensor):
    """Data with a scale for each square, and perhaps both transposed. Rows of scales are padded to multiples of 4."""

    _names = (
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
        "fp8_dtype",
        "is_2D_scaled",
    )
    _rowwise_data: torch.Tensor
    _rowwise_scale_inv: torch.Tensor
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _fp8_dtype: DType

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._times(self._rowwise_data, self._rowwise_scale_inv, dtype or self.dtype)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if columnwise_usage and self._columnwise_data is None:
            self._columnwise_data = self._rowwise_data.t().contiguous()
            scales = self._rowwise_scale_inv[:, : -(-self.shape[1] // _TILE)].t()
            self._columnwise_scale_inv = F.pad(scales, (0, -scales.shape[1] % 4))

    def transposed(self) -> torch.Tensor:
        """The copy for backward, dequantised: (columns, rows)."""
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        return self._times(self._columnwise_data, self._columnwise_scale_inv, self.dtype)

    def _times(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales_of_elements = scales.repeat_interleave(_TILE, 0).repeat_interleave(_TILE, 1)[
            : data.shape[0], : data.shape[1]
        ]
        return (data.view(self._fp8_dtype.value).float() * scales_of_elements).to(dtype)


class MXFP8Tensor(_QuantizedTensor):
    """Data and scales by rows and by columns, each of the matrix's shape; nothing is made later."""

    _names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype")
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor
    _fp8_dtype: DType

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        assert self._rowwise_data is not None
        powers = torch.exp2(self._rowwise_scale_inv.double() - 127).repeat_interleave(_LENGTH, 1)
        return (self._rowwise_data.view(self._fp8_dtype.value).double() * powers).to(dtype or self.dtype)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        for usage, data in ((rowwise_usage, self._rowwise_data), (columnwise_usage, self._columnwise_data)):
            if usage and data is None:
                raise RuntimeError("Requested usage, but MXFP8Tensor is missing the data")
        self._rowwise_data = None if rowwise_usage is False else self._rowwise_data
        self._columnwise_data = None if columnwise_usage is False else self._columnwise_data

    def transposed(self) -> torch.Tensor:
        """The data by columns, dequantised: (columns, rows)."""
        assert self._columnwise_data is not None
        powers = torch.exp2(self._columnwise_scale_inv.double() - 127).repeat_interleave(_LENGTH, 0)
        return (self._columnwise_data.view(self._fp8_dtype.value).double() * powers).to(self.dtype).t()


class NVFP4Tensor(_QuantizedTensor):
    """A format that no recipe serves; without data."""


for _kind in (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor):
    _kind.__module__ = _MODULE


class Linear(nn.Module):
    """A linear layer without bias, whose weight may be quantised; `is_first_microbatch` has no effect then.

    Args:
        in_features: Features of the input.
        out_features: Features of the output.
        quantizer: The quantizer that `quantized_model_init` chooses; None for a plain weight.
        preserves: Keep the values before quantisation on the CPU.
        delayed: Options of delayed scaling.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        quantizer: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        preserves: bool = True,
        delayed: object = None,
    ) -> None:
        super().__init__()
        self.primary_weights_in_fp8 = quantizer is not None
        self.fp8_meta = {"recipe": delayed}
        values = torch.randn(out_features, in_features) / in_features**0.5
        if quantizer is None:
            self.weight = nn.Parameter(values)
            return
        with torch.no_grad():
            self.weight = nn.Parameter(quantizer(values))
        if preserves:
            weight: Any = self.weight
            weight._high_precision_init_val = values
            weight.get_high_precision_init_val = MethodType(
                lambda parameter: parameter._high_precision_init_val, weight
            )
            weight.clear_high_precision_init_val = MethodType(
                lambda parameter: delattr(parameter, "_high_precision_init_val"), weight
            )

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None = None) -> torch.Tensor:
        output: torch.Tensor = _QuantisedProduct.apply(x, self.weight, True)  # type: ignore[no-untyped-call]
        return output


class LayerNormMLP(Linear):
    """A linear layer whose backward takes the copy of `fc1_weight` that forward left, and makes none."""

    def __init__(self, in_features: int, out_features: int, quantizer: Any = None, **options: Any) -> None:
        super().__init__(in_features, out_features, quantizer, **options)
        self.fc1_weight = self.weight
        del self.weight

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None = None) -> torch.Tensor:
        output: torch.Tensor = _QuantisedProduct.apply(x, self.fc1_weight, False)  # type: ignore[no-untyped-call]
        return output


def delayed_scaling(length: int, *, algorithm: object = "max", margin: int = 0) -> object:
    """Options as of Transformer Engine's `DelayedScaling`."""
    return SimpleNamespace(
        amax_history_len=length, amax_compute_algo=algorithm, margin=margin, scaling_factor_compute_algo=None
    )


class _QuantisedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, makes_copy: bool) -> torch.Tensor:
        ctx.makes_copy = makes_copy
        if isinstance(weight, _QuantizedTensor):
            # A layer makes in forward every copy that the weight's quantizer asks for.
            weight.update_usage(rowwise_usage=True, columnwise_usage=weight._quantizer.columnwise_usage or None)
        ctx.save_for_backward(x, weight)
        return x @ (weight.dequantize() if isinstance(weight, _QuantizedTensor) else weight.detach()).t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        if isinstance(weight, _QuantizedTensor):
            if ctx.makes_copy:
                weight.update_usage(columnwise_usage=True)
            values = weight.transposed().t()
        else:
            values = weight
        return gradient @ values, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None
