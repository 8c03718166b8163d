"""Float8 weights and a linear layer as torchao's, in plain torch: classes, attributes, FSDP2's two methods.

The classes name torchao's modules as their own: detection goes by module names. Products are of dequantised values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map, tree_map_only

_MODULE = "torchao.float8.stand_in"
_EPSILON = 1e-12

aten = torch.ops.aten
_VIEWS = {aten.detach.default, aten.view.default, aten.slice.Tensor, aten.as_strided.default}
_KEEPS = {
    *_VIEWS,
    *(aten.empty_like.default, aten.new_zeros.default, aten.copy_.default),
    *(aten._to_copy.default, aten.split.Tensor, aten.clone.default),
}


class WeightWithDynamicFloat8CastTensor(torch.Tensor):
    """A weight in the main dtype that is gathered in float8, with a scale of the amax of all ranks."""

    _tensor: torch.Tensor
    _linear_mm_config: object
    _dtype: torch.dtype

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, linear_mm_config: object, dtype: torch.dtype) -> Self:
        weight = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, tensor.stride(), tensor.storage_offset(), dtype=tensor.dtype, device=tensor.device
        )
        weight._tensor, weight._linear_mm_config, weight._dtype = tensor, linear_mm_config, dtype
        return weight

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        (like,) = [argument for argument in args if isinstance(argument, cls)][:1]
        plain = tree_map_only(cls, lambda weight: weight._tensor, (tuple(args), kwargs or {}))
        output = func(*plain[0], **plain[1])
        if func not in _KEEPS:
            return output
        return tree_map_only(torch.Tensor, lambda tensor: cls(tensor, like._linear_mm_config, like._dtype), output)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh | None) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
        """Data and scale of this rank's rows; without a mesh, of a whole weight."""
        amax = self._tensor.abs().max()
        if mesh is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group())
        largest = torch.finfo(self._dtype).max
        scale = (largest / amax.double().clamp_min(_EPSILON)).float()
        return ((self._tensor.float() * scale).clamp(-largest, largest).to(self._dtype),), (scale,)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor],
        metadata: tuple[torch.Tensor],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Float8TrainingTensor, tuple[torch.Tensor]] | None:
        """The gathered tensor, made or with a new scale."""
        (scale,) = metadata
        if out is not None:
            out._scale = scale
            return None
        (data,) = all_gather_outputs
        return Float8TrainingTensor(data, scale, param_dtype, self._linear_mm_config), (data,)


class Float8TrainingTensor(torch.Tensor):
    """Float8 data with the scale of its values: all operators but views read dequantised values."""

    _data: torch.Tensor
    _scale: torch.Tensor
    _linear_mm_config: object

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, linear_mm_config: object) -> Self:
        gathered = torch.Tensor._make_wrapper_subclass(cls, data.shape, data.stride(), dtype=dtype, device=data.device)
        gathered._data, gathered._scale, gathered._linear_mm_config = data, scale, linear_mm_config
        return gathered

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VIEWS:
            source, *arguments = args
            return cls(func(source._data, *arguments), source._scale, source.dtype, source._linear_mm_config)
        plain = tree_map(_values, (tuple(args), kwargs or {}))
        return func(*plain[0], **plain[1])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _values(argument: object) -> object:
    return (
        argument._data.to(argument.dtype) / argument._scale if isinstance(argument, Float8TrainingTensor) else argument
    )


for _kind in (WeightWithDynamicFloat8CastTensor, Float8TrainingTensor):
    _kind.__module__ = _MODULE


class Float8Linear(nn.Linear):
    """A linear layer without bias, as converted with `enable_fsdp_float8_all_gather`."""

    def __init__(
        self, in_features: int, out_features: int, *, dtype: torch.dtype = torch.float8_e4m3fn, device: str = "cpu"
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device=device)
        self.weight = nn.Parameter(WeightWithDynamicFloat8CastTensor(self.weight, ("fast",), dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the dequantised weight."""
        output: torch.Tensor = _Float8Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return output


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient @ weight.detach(), gradient.flatten(0, -2).t() @ x.flatten(0, -2)
