"""Tensors with their own gather format: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

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
    assert_equal_models,
    average,
    descend,
    gradient_of,
    grid,
    inputs,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from lamella_integration.collectives import CollectiveCounter

Gathered = tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None


class Rounded(torch.Tensor):
    """An fp32 tensor that travels as bf16."""

    seen: list[tuple[Any, ...]] = []  # noqa: RUF012  shared by a process: ranks are processes

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
        weight = gathered.to(param_dtype)
        return weight, (gathered, weight)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
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
    """Declares separate memory for unsharded tensor and gathered bytes; torch before 2.15 does not ask."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Halved(Rounded):
    """Defines the gathered payload, and no conversion of the gathered payload."""

    fsdp_post_all_gather = property()  # `hasattr` returns False


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
    for network in (expected, model):
        network(inputs()).square().sum().backward()
    average(expected)
    for (name, a), b in zip(expected.named_parameters(), model.named_parameters(), strict=True):
        sharded = gradient_of(b[1])
        assert isinstance(sharded, DTensor)
        gradient = sharded.to_local()
        gradient = gradient._data if isinstance(gradient, Rounded) else gradient
        full_gradient, rank = gradient_of(a), torch.distributed.get_rank()
        chunks = full_gradient.chunk(2)
        expected_chunk = chunks[rank] if rank < len(chunks) else full_gradient[:0]
        assert_close(gradient, expected_chunk, name)


def test_a_tensor_with_half_the_extension_is_refused_in_fsdp2s_words(api: Api) -> None:
    def scenario(kind: type[Rounded], words: str) -> None:
        _, model = twins()
        _round_weights(model, kind)
        with pytest.raises(AssertionError, match=words):
            shard(api, model)(inputs())

    missing = "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions"
    on_ranks(scenario, cases=[(Halved, missing), (Misread, "Invalid fsdp_pre_all_gather: ")])


def test_a_tensor_subclass_chooses_the_tensors_that_are_gathered(api: Api) -> None:
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


def test_weights_that_release_their_all_gather_outputs_train_as_unsharded(api: Api) -> None:
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
        weight = outputs[0].to(dtype)
        return weight, (outputs[0], weight)

    for name, parameter in model.named_parameters():
        if "weight" in name:
            assert isinstance(parameter, DTensor)
            inner: Any = parameter._local_tensor
            inner.fsdp_pre_all_gather = _five_arguments(before, inner)
            inner.fsdp_post_all_gather = after.__get__(inner)


def _five_arguments(function: Any, tensor: torch.Tensor) -> Any:
    def bound(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return function(tensor, mesh, outer_size, outer_stride, module, mp_policy)

    return bound


def test_methods_on_a_plain_local_tensor_decide_the_payload(api: Api) -> None:
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


@pytest.mark.four_ranks
def test_a_tensor_receives_the_mesh_of_its_gather(api: Api) -> None:
    def scenario() -> None:
        model = nn.Sequential(Block(hidden=8))
        api.fully_shard(model, mesh=grid("outer", "inner"))
        log: list[DeviceMesh] = []
        _attach(model, log)
        with torch.no_grad():
            model(inputs())
        assert {(mesh.ndim, mesh.size()) for mesh in log} == {(1, 2)}

    on_ranks(scenario, 4)


class TravellingPair(TwoTensor):
    """Two equal tensors; both travel. The pair computes as a pair, so the gradient is a pair."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        num_missing = -(-outer_size[0] // mesh.size()) - len(self)
        return tuple(torch.cat([part, part.new_zeros(num_missing, *part.shape[1:])]) for part in (self.a, self.b)), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Gathered:
        parts = tuple(output.to(param_dtype) for output in all_gather_outputs)
        if out is None:
            return TravellingPair(*parts), (*all_gather_outputs, *parts)  # type: ignore[no-untyped-call]
        inner = out.to_local() if isinstance(out, DTensor) else out
        assert isinstance(inner, TwoTensor)
        for place, part in zip((inner.a, inner.b), parts, strict=True):
            if place.data_ptr() != part.data_ptr():
                with _unsafe_preserve_version_counter(place):
                    place.copy_(part[: len(place)])
        return None


def _pair_weights(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(TravellingPair(module.weight.detach(), module.weight.detach().clone()))  # type: ignore[no-untyped-call]


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (local.a, local.b) if isinstance(local, TwoTensor) else (local, local)


def _assert_gradients_of_pairs(api: Api, num_microbatches: int, hidden: int = 9, **options: Any) -> None:
    """Assert that a model of pairs trains as the twin of plain weights, compared with unsharded models elsewhere."""
    plain, paired = twins(lambda: Stack(hidden=hidden))
    _pair_weights(paired)
    for model in (plain, paired):
        shard(api, model, **options)
    for step in range(3):
        for model in (plain, paired):
            for i in range(num_microbatches):
                model.set_requires_gradient_sync(i == num_microbatches - 1)
                x = inputs(seed=10 * step + i)
                (model(x).float().square().mean() / num_microbatches).backward()
        for (name, a), (_, b) in zip(plain.named_parameters(), paired.named_parameters(), strict=True):
            assert type(b.grad.to_local()) is torch.Tensor
            for part in (*_parts(b.grad), *_parts(b)):
                assert part.isfinite().all(), name
            assert_close(b.grad.to_local(), a.grad.to_local(), f"{name}.grad")
            for part in _parts(b):
                assert_close(part, a.to_local(), name)
        for model in (plain, paired):
            descend(model)


def test_gradients_that_are_tensor_subclasses_are_reduced_as_plain_tensors(api: Api) -> None:
    def scenario(num_microbatches: int, hidden: int, wide: bool) -> None:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if wide else {}
        _assert_gradients_of_pairs(api, num_microbatches, hidden, mp_policy=api.MixedPrecisionPolicy(**dtypes))

    on_ranks(scenario, cases=((1, 8, False), (1, 9, False), (2, 9, False), (1, 8, True), (2, 9, True)))


@pytest.mark.four_ranks
def test_gradients_that_are_tensor_subclasses_are_reduced_over_replicas(api: Api) -> None:
    on_ranks(lambda: _assert_gradients_of_pairs(api, 2, mesh=grid("outer", "inner")), 4)


def test_plain_parameters_that_met_a_tensor_subclass_train_as_unsharded(api: Api) -> None:
    """The input is a pair; so are the gradients of plain weights."""

    def scenario(options: dict[str, Any]) -> None:
        expected, model = twins()
        shard(api, model, **options)
        for step in range(2):
            for network in (expected, model):
                x = inputs(seed=step)
                network(TravellingPair(x, x.clone())).square().mean().backward()  # type: ignore[no-untyped-call]
            for parameter in expected.parameters():
                parameter.grad = _parts(parameter.grad)[0]
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)

    def along_the_last_dim(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.shape[-1] % 2 == 0 else None

    on_ranks(scenario, cases=({}, {"shard_placement_fn": along_the_last_dim}))
