"""Tensors that say themselves what is gathered: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
import torch.utils._pytree as pytree
from fsdp2_models import (
    DIM,
    Api,
    Block,
    Stack,
    assert_all_sharded,
    assert_close,
    average,
    grid,
    inputs,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh

from lamella_integration.collectives import CollectiveCounter

Gathered = tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None


class Rounded(torch.Tensor):
    """An fp32 tensor that travels as bf16."""

    seen: list[tuple[Any, ...]] = []  # noqa: RUF012  of this process: ranks are processes

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        Rounded.seen.append((mesh.ndim, mesh.size(), outer_size, outer_stride, type(module), mp_policy))
        num_rows = -(-outer_size[0] // mesh.size())
        padded = self._data.new_zeros(num_rows, *outer_size[1:], dtype=torch.bfloat16)
        padded[: self._data.shape[0]] = self._data
        return (padded,), "what the second gets"

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Gathered:
        assert metadata == "what the second gets"
        (gathered,) = all_gather_outputs
        assert gathered.dtype == torch.bfloat16
        if out is not None:
            with _unsafe_preserve_version_counter(out):
                out.copy_(gathered)
            return None
        whole = gathered.to(param_dtype)
        return whole, (gathered, whole)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*pytree.tree_map_only(cls, lambda t: t._data, args),
                   **pytree.tree_map_only(cls, lambda t: t._data, kwargs or {}))  # fmt: skip
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Rounded:
        return Rounded(inner["_data"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Rounded({self._data})"


class Releasing(Rounded):
    """Says that what it makes of the gathered bytes has memory of its own; torch before 2.15 does not ask."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Halved(Rounded):
    """Says what is gathered, and not what is made of it."""

    fsdp_post_all_gather = property()  # type: ignore[assignment]  # `hasattr` is False of it


class Misread(Rounded):
    """Is told neither only the mesh nor everything."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh, module: nn.Module) -> Any:  # type: ignore[override]
        raise NotImplementedError


def _round_weights(model: nn.Module, kind: type[Rounded] = Rounded) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))


def _assert_trains_on_rounded_weights(expected: nn.Module, model: nn.Module) -> None:
    """The twin computes with weights rounded by hand."""
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if "weight" in name:
                parameter.copy_(parameter.bfloat16())
    for each in (expected, model):
        each(inputs()).square().sum().backward()
    average(expected)
    for (name, a), b in zip(expected.named_parameters(), model.named_parameters(), strict=True):
        gradient = b[1].grad.to_local()
        gradient = gradient._data if isinstance(gradient, Rounded) else gradient
        chunks = a.grad.chunk(2)
        wanted = chunks[torch.distributed.get_rank()] if torch.distributed.get_rank() < len(chunks) else a.grad[:0]
        assert_close(gradient, wanted, name)


def test_a_tensor_that_says_half_of_it_is_refused_in_fsdp2s_words(api: Api) -> None:
    def scenario(kind: type[Rounded], words: str) -> None:
        _, model = twins()
        _round_weights(model, kind)
        with pytest.raises(AssertionError, match=words):
            shard(api, model)(inputs())

    missing = "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions"
    on_ranks(scenario, cases=[(Halved, missing), (Misread, "Invalid fsdp_pre_all_gather: ")])


def test_a_tensor_subclass_decides_what_travels(api: Api) -> None:
    def scenario(hidden: int) -> None:
        Rounded.seen.clear()
        expected, model = twins(lambda: Stack(hidden=hidden))
        _round_weights(model)
        shard(api, model, reshard_after_forward=False)
        assert_all_sharded(model.parameters())
        _assert_trains_on_rounded_weights(expected, model)
        assert {ndim for ndim, *_ in Rounded.seen} == {1}
        assert {size for _, size, *_ in Rounded.seen} == {2}
        shapes = {outer for _, _, outer, *_ in Rounded.seen}
        assert shapes == {torch.Size(s) for s in ((DIM, DIM), (hidden, DIM), (DIM, hidden), (3, DIM))}
        assert {stride for _, _, _, stride, *_ in Rounded.seen} == {(DIM, 1), (hidden, 1)}
        assert all(isinstance(policy, api.MixedPrecisionPolicy) for *_, policy in Rounded.seen)

    on_ranks(scenario, cases=(8, 9))


def test_what_was_gathered_may_go_when_the_parameter_is_made(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins(lambda: Block(hidden=8))
        _round_weights(model, Releasing)
        api.fully_shard(model, reshard_after_forward=reshard)
        _assert_trains_on_rounded_weights(expected, model)

    on_ranks(scenario, cases=(True, False))


def _attach(model: nn.Module, log: list[DeviceMesh]) -> None:
    """Give plain local tensors the two methods: no subclass is needed."""

    def before(self: torch.Tensor, mesh: DeviceMesh, *_: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        log.append(mesh)
        return (self.to(torch.bfloat16),), None

    def after(
        self: torch.Tensor, outputs: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> Gathered:
        if out is not None:
            with _unsafe_preserve_version_counter(out), torch.no_grad():
                out.copy_(outputs[0])
            return None
        whole = outputs[0].to(dtype)
        return whole, (outputs[0], whole)

    for name, parameter in model.named_parameters():
        if "weight" in name:
            local = parameter._local_tensor
            local.fsdp_pre_all_gather = _five_arguments(before, local)
            local.fsdp_post_all_gather = after.__get__(local)


def _five_arguments(function: Any, tensor: torch.Tensor) -> Any:
    def bound(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return function(tensor, mesh, outer_size, outer_stride, module, mp_policy)

    return bound


def test_methods_on_a_plain_local_tensor_decide_what_travels(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins(lambda: nn.Sequential(Block(hidden=8), Block(hidden=8)))
        for module in (*model, model):
            api.fully_shard(module, reshard_after_forward=reshard)
        log: list[DeviceMesh] = []
        _attach(model, log)
        with CollectiveCounter() as counter:
            _assert_trains_on_rounded_weights(expected, model)
        assert len(log) == 4 * (2 if reshard else 1)
        num_weights = 4 * DIM * 8
        num_biases = 2 * (DIM + 8)
        assert counter.nbytes("all_gather") == (2 * num_weights + 4 * num_biases) * (2 if reshard else 1)

    on_ranks(scenario, cases=(True, False))


def test_the_mesh_that_a_tensor_is_told_is_the_one_it_is_gathered_over(api: Api) -> None:
    def scenario() -> None:
        model = nn.Sequential(Block(hidden=8))
        api.fully_shard(model, mesh=grid("outer", "inner"))
        log: list[DeviceMesh] = []
        _attach(model, log)
        with torch.no_grad():
            model(inputs())
        assert {(mesh.ndim, mesh.size()) for mesh in log} == {(1, 2)}

    on_ranks(scenario, 4)
