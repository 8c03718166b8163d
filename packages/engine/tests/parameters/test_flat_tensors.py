"""Operations on tensors with any number of rows on each rank, and refused operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import Net, assert_shard_equals, case, mesh_of, twins
from flat_models import NEEDS_FLAT_LAYOUT, flat, weight_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lamella_engine import HFSDP, HSDP, ZERO3, RaggedDTensor, Rows
from lamella_engine.extending import dtensor_over
from lamella_layout import RaggedShard
from lamella_testing import run_ranks

pytestmark = NEEDS_FLAT_LAYOUT


def _on_each_mesh(check: Callable[[RaggedDTensor, torch.Tensor], None]) -> None:
    """A ragged weight and the whole value, on one axis, with replicas, and over two axes."""

    def on_each_rank() -> None:
        for shape, placements in (((4,), ZERO3), ((2, 2), (HSDP, ZERO3)), ((2, 2), (HFSDP, ZERO3))):
            mesh = mesh_of(shape)
            reference, sharded = twins(Net, flat(Rows(1), mesh=mesh, placements=placements))
            with case(placements):
                check(weight_of(sharded), reference.get_parameter("layers.0.up.weight").detach())

    run_ranks(on_each_rank, 4)


def test_the_whole_tensor_is_the_original_bit_by_bit() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        assert torch.equal(ragged.full_tensor(), value)
        ragged.zero_()
        ragged.to_local().neg_()  # -0.0, lost in a sum of floats
        assert ragged.full_tensor().signbit().all()
        as_mask = ragged == 0
        assert isinstance(as_mask, DTensor)
        assert as_mask.full_tensor().dtype is torch.bool
        assert as_mask.full_tensor().all()
        halves = (ragged + 0.5).to(torch.bfloat16)
        assert isinstance(halves, DTensor)
        assert halves.full_tensor().dtype is torch.bfloat16
        assert (halves.full_tensor() == 0.5).all()

    _on_each_mesh(check)


def test_a_ragged_tensor_redistributes_to_the_shards_of_distribute_tensor() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        for placement in (Replicate(), Shard(0), Shard(1)):
            placements = [Replicate()] * (ragged.device_mesh.ndim - 1) + [placement]
            got, expected = (
                ragged.redistribute(placements=placements),
                distribute_tensor(value, ragged.device_mesh, placements, src_data_rank=None),
            )
            assert type(got) is DTensor
            assert got.placements == expected.placements
            assert torch.equal(got.to_local(), expected.to_local())
        assert ragged.redistribute(placements=ragged.placements) is ragged
        with pytest.raises(NotImplementedError, match="torch's own"):
            ragged.redistribute(placements=[RaggedShard((0,) * ragged.device_mesh.size() + (13,))])

    _on_each_mesh(check)


def test_a_tensor_that_another_axis_cuts_too_computes_on_its_rows_and_refuses_all_else() -> None:
    """A tensor-parallel rank's part is cut by two axes: the ragged axis has this part alone."""

    def on_each_rank() -> None:
        mesh, placements = mesh_of((2, 2)), (RaggedShard((0, 0, 4)), Shard(1))
        meta = TensorMeta(torch.Size((4, 6)), (6, 1), torch.float32)
        rows = 4 * mesh.get_local_rank(0)
        tensor = dtensor_over(torch.ones(rows, 3), DTensorSpec(mesh, placements, tensor_meta=meta))
        assert isinstance(tensor, RaggedDTensor)
        doubled = torch.zeros_like(tensor).add_(tensor, alpha=2)
        assert isinstance(doubled, RaggedDTensor)
        assert torch.equal(doubled.to_local(), torch.full((rows, 3), 2.0))
        for refused in (tensor.full_tensor, tensor.sum, tensor.norm, tensor.uniform_, tensor.__create_chunk_list__):
            with pytest.raises(NotImplementedError, match=r"of shape \(4, 6\) that Shard\(dim=1\) cuts too"):
                refused()

    run_ranks(on_each_rank, 4)


def _local(cubes: torch.Tensor) -> torch.Tensor:
    total = cubes.sum()
    assert isinstance(total, DTensor)
    return total.to_local()


def test_gradients_pass_through_the_whole_the_local_and_sums() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        ragged.requires_grad_()
        value = value.clone().requires_grad_()
        (value**3).sum().backward()  # type: ignore[no-untyped-call]
        assert value.grad is not None
        losses: tuple[Callable[[], Any], ...] = (
            lambda: (ragged.full_tensor() ** 3).sum(),
            lambda: (ragged.to_local() ** 3).sum(),
            lambda: _local(ragged**3),
            lambda: _local(ragged.redistribute(placements=[Replicate()] * ragged.device_mesh.ndim) ** 3),
        )
        for loss in losses:
            ragged.grad = None
            loss().backward()
            assert_shard_equals(ragged.grad, value.grad, "gradient", rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]

    _on_each_mesh(check)


def test_norms_sums_and_extremes_are_of_all_ranks() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        computations: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
            *(partial(torch.linalg.vector_norm, ord=p) for p in (0, 1, 2, 3.5, math.inf)),
            *(partial(torch.norm, p=p) for p in (1, 2, math.inf)),
            *(lambda x, p=p: torch._foreach_norm([x, x], p)[1] for p in (1, 2, math.inf)),
            *(torch.sum, torch.mean, torch.max, torch.min, torch.amax, torch.amin),
            lambda x: x.isfinite().all(),
            lambda x: x.isnan().any(),
            lambda x: x.norm(dtype=torch.float64),
        )
        for compute in computations:
            got, expected = compute(ragged), compute(value)
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.to_local(), expected)
        torch.testing.assert_close(float(ragged.abs().max()), float(value.abs().max()))
        for bad in (math.nan, math.inf):
            if len(ragged.to_local()):
                ragged.to_local().view(-1)[-1] = bad  # on every rank with rows
            assert not ragged.isfinite().all()
            for p in (2, math.inf):
                got = torch.linalg.vector_norm(ragged, p).to_local()
                assert torch.isnan(got) if math.isnan(bad) else torch.isinf(got)
            for extreme in (ragged.max(), ragged.min()) if math.isnan(bad) else ():
                assert isinstance(extreme, DTensor)
                assert torch.isnan(extreme.to_local())

    _on_each_mesh(check)


def test_complex_rows_are_pairs_of_real_numbers_in_the_same_memory() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        numbers = ragged.detach() * (1 + 2j)
        pairs = torch.view_as_real(numbers)
        pairs.add_(1.0)
        expected = value * (1 + 2j) + (1 + 1j)
        assert_shard_equals(pairs, torch.view_as_real(expected), "pairs", rtol=0, atol=0)
        for got in (numbers, torch.view_as_complex(pairs)):
            assert isinstance(got, RaggedDTensor)
            assert torch.equal(got.full_tensor(), expected)

    _on_each_mesh(check)


def test_operands_that_lie_otherwise_are_cut_or_refused_and_never_mixed_up() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        mesh, axes = ragged.device_mesh, ragged.device_mesh.ndim
        replicated = distribute_tensor(value, mesh, [Replicate()] * axes, src_data_rank=None)
        assert_shard_equals(ragged + replicated, 2 * value, "sum", rtol=0, atol=0)
        assert_shard_equals(ragged * ragged.sum(), value * value.sum(), "product", rtol=1e-5, atol=1e-7)
        even = distribute_tensor(value, mesh, [Shard(0)] * axes, src_data_rank=None)
        for other in (even, value, value[0], value[:, :1]):
            with pytest.raises(NotImplementedError, match="lie alike"):
                ragged + other
            with pytest.raises(NotImplementedError, match="lie alike"):
                torch._foreach_add_([ragged], [other])
        with pytest.raises(NotImplementedError, match="to write into"):
            replicated.add_(ragged)
        with pytest.raises(NotImplementedError, match="to write into"):
            torch._foreach_add_([replicated], [ragged])
        # Made by code that reads placements without knowing the ragged placement.
        unaware = DTensor(value, ragged._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        with pytest.raises(NotImplementedError):
            ragged + unaware
        with pytest.raises(NotImplementedError):
            ragged.copy_(unaware)

    _on_each_mesh(check)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": lambda x: x.view(-1),
    "a reshape": lambda x: x.reshape(7, 13),
    "a product": lambda x: x @ torch.ones(7, 2),
    "a product with itself": lambda x: x @ x,
    "a transpose": lambda x: x.t(),
    "a row": lambda x: x[0],
    "rows": lambda x: x[2:5],
    "a concatenation": lambda x: torch.cat([x, x]),
    "sums along a dim": lambda x: x.sum(0),
    "norms along a dim": lambda x: torch.norm(x, dim=-1, keepdim=True),
    "a norm of negative order": lambda x: torch.linalg.vector_norm(x, -1),
    "a running sum": lambda x: x.cumsum(0),
    "a softmax": lambda x: x.softmax(0),
    "a comparison": lambda x: torch.equal(x, x + 0),
    "a deviation": lambda x: x.std(),
    "the largest of each": lambda x: torch._foreach_max([x]),
    "random numbers of the same shape": lambda x: torch.rand_like(x),
    "another shape": lambda x: x.new_zeros(13, 1),
    "a mean of rows": lambda x: x.mean(0),
    "the largest and their places": lambda x: x.max(0),
    "writing rows": lambda x: x.__setitem__(0, 1.0),
}


def test_unsupported_ops_on_ragged_tensors_raise_on_every_rank_with_the_way_out() -> None:
    def check() -> None:
        _, sharded = twins(Net, flat(Rows(1)))
        for name, compute in REFUSED.items():
            with case(name), pytest.raises(NotImplementedError, match="full_tensor"):
                compute(weight_of(sharded))

    run_ranks(check, 3)


def test_masks_write_elementwise() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        value = value.clone()
        for tensor in (ragged, value):
            tensor[tensor > 0] = -1.0
            tensor.masked_fill_(tensor < -0.2, 2.0)
        assert_shard_equals(ragged, value, "masked", rtol=0, atol=0)

    _on_each_mesh(check)


def test_ragged_tensors_draw_the_unsharded_random_numbers_alike_on_all_replicas() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        value = value.clone()
        for draw in (
            nn.init.kaiming_uniform_,
            nn.init.xavier_normal_,
            partial(nn.init.trunc_normal_, std=0.5),
            lambda x: x.bernoulli_(0.3),
        ):
            for tensor in (ragged, value):
                torch.manual_seed(3)
                draw(tensor)
            assert_shard_equals(ragged, value, "drawn", rtol=0, atol=0)
        torch.manual_seed(dist.get_rank())
        ragged.normal_()
        wholes: list[Any] = [None] * 4
        dist.all_gather_object(wholes, ragged.full_tensor())
        assert all(torch.equal(other, wholes[0]) for other in wholes)

    _on_each_mesh(check)
