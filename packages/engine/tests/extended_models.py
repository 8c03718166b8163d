"""Tensors that choose their gathered form by FSDP2's two methods."""

from __future__ import annotations

import operator
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """An fp32 tensor kept in tensors of narrower dtypes. Every operator runs on the fp32 values."""

    names: ClassVar[list[str]]

    @classmethod
    def encode(cls, values: torch.Tensor) -> Self:
        raise NotImplementedError

    def decode(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def over(cls, *parts: torch.Tensor) -> Self:
        shape, device = parts[0].shape, parts[0].device
        wrapper = torch.Tensor._make_wrapper_subclass(cls, shape, parts[0].stride(), dtype=torch.float32, device=device)
        vars(wrapper).update(zip(cls.names, parts, strict=True))
        return wrapper

    @property
    def parts(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.names]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BY_PART:  # views, and operators without values: on each part, to keep views views
            return cls._by_part(func, args, kwargs)
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda t: t.decode(), (args, kwargs))
        if func._schema.name.endswith("_") or func is aten.copy_.default:
            # The first argument is written: the decoded values, and then the parts.
            result = func(*plain_args, **plain_kwargs)
            if not isinstance(args[0], cls):
                return args[0]
            for part, new in zip(args[0].parts, cls.encode(result).parts, strict=True):
                part.copy_(new)
            return args[0]
        result = func(*plain_args, **plain_kwargs)
        return pytree.tree_map_only(torch.Tensor, cls.encode, result) if func in _KEEP else result

    @classmethod
    def _by_part(cls, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
        arguments_by_part = [pytree.tree_map_only(cls, operator.attrgetter(name), args) for name in cls.names]
        results = [func(*arguments, **kwargs) for arguments in arguments_by_part]
        if isinstance(results[0], torch.Tensor):
            return cls.over(*results)
        return [cls.over(*parts) for parts in zip(*results, strict=True)]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return self.names, None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Self:
        return cls.over(*(inner[name] for name in cls.names))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({[tuple(part.shape) for part in self.parts]})"


_BY_PART = {
    *(aten.detach.default, aten.alias.default, aten.view.default, aten.slice.Tensor, aten.split.Tensor),
    *(aten.new_zeros.default, aten.empty_like.default, aten._to_copy.default, aten.clone.default),
}
_KEEP = {aten.mul.Tensor, aten.add.Tensor}


class Halves(Wrapper):
    """Two bf16 tensors, whose sum is the value; both travel."""

    names: ClassVar[list[str]] = ["high", "low"]
    seen: ClassVar[list[tuple[Any, ...]]] = []  # of this process: ranks are processes

    @classmethod
    def encode(cls, values: torch.Tensor) -> Self:
        high = values.bfloat16()
        return cls.over(high, (values - high).bfloat16())

    def decode(self) -> torch.Tensor:
        high, low = self.parts
        return high.float() + low.float()

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        self.seen.append((mesh.ndim, mesh.size(), outer_size, outer_stride, type(module), mp_policy.param_dtype))
        return tuple(padded(part, -(-outer_size[0] // mesh.size())) for part in self.parts), len(self)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        assert metadata == len(self)
        high, low = all_gather_outputs
        weight = high.to(param_dtype) + low.to(param_dtype)
        return give(weight, all_gather_outputs, out)


class Quantised(Wrapper):
    """fp32, sent as int8 with a scale a row. The short signature, and rows divisible by the ranks."""

    names: ClassVar[list[str]] = ["values"]

    @classmethod
    def encode(cls, values: torch.Tensor) -> Self:
        return cls.over(values)

    def decode(self) -> torch.Tensor:
        (values,) = self.parts
        return values

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        values = self.decode()
        scale = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 127
        return ((values / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        data, scale = all_gather_outputs
        return give((data * scale).to(param_dtype), all_gather_outputs, out)


class QuantisedUneven(Quantised):
    """The same with padding. FSDP2 refuses the scales, whose size is not the parameter's."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        (data, scale), metadata = super().fsdp_pre_all_gather(mesh)
        num_rows = -(-outer_size[0] // mesh.size())
        return (padded(data, num_rows), padded(scale, num_rows)), metadata


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


def give(weight: torch.Tensor, gathered: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Any:
    if out is None:
        return weight, (*gathered, weight)
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(out):
        out.copy_(weight[: len(out)])
    return None
