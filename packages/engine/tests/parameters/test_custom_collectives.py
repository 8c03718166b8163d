"""A unit with a user's collectives trains like any unit, in memory of the user's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_collectives import Gather, Reduce, all_gather_single
from engine_models import (
    ShardPlacementResult,
    assert_gradients_equal,
    assert_trains_alike,
    case,
    fsdp,
    inputs,
    mean_square,
    mesh_of,
    rows_of_this_rank,
    sgd,
    shard,
    twins,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard

from lamella_buffers import GlooTransport
from lamella_buffers.testing import check_transport
from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_engine._parameters.custom_collectives import CustomAllGather, CustomReduceScatter
from lamella_engine.testing import named_units
from lamella_testing import run_ranks

X = inputs()
_square = mean_square(lambda model: model(X))


def _bring(model: nn.Module, gather: Any, reduce: Any) -> None:
    """To every unit: the methods do not reach units below."""
    for _, module in [(name, model if name == "root" else model.get_submodule(name)) for name, _ in named_units(model)]:
        fsdp(module).set_custom_all_gather(gather)
        fsdp(module).set_custom_reduce_scatter(reduce)


@pytest.mark.parametrize("returns_work", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_custom_collectives_do_all_of_a_units_gathers_and_reductions(num_ranks: int, returns_work: bool) -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        gather, reduce = Gather(returns_work), Reduce(returns_work)
        _bring(sharded, gather, reduce)
        assert_trains_alike(reference, sharded, _square, num_steps=3)
        num_units, ranks = len(list(named_units(sharded))), dist.get_world_size()
        assert gather.num_calls == 3 * (2 * num_units - 1)  # the outermost unit's parameters stay for backward
        assert reduce.num_calls == 3 * num_units
        assert set(gather.groups) == set(reduce.groups) == {dist.group.WORLD}
        # Of a gather the whole, of a reduction first the whole and then this rank's part.
        assert len(gather.allocated) == gather.num_calls and len(reduce.allocated) == 2 * reduce.num_calls
        assert [ranks * part for part in reduce.allocated[1::2]] == reduce.allocated[::2]
        num_of_model = sum(parameter.numel() for parameter in reference.parameters())
        assert sum(reduce.allocated[::2]) >= 3 * num_of_model

    run_ranks(on_each_rank, num_ranks)


@dataclass
class _Reused(Gather):
    """Gives one piece of memory again and again, as allowed by the interface."""

    memory: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.memory is None:
            self.memory = torch.empty(10_000, dtype=dtype, device=device)
        return self.memory[: torch.Size(size).numel()]


@pytest.mark.parametrize("returns_work", [False, True])
def test_gathers_may_share_one_piece_of_memory(returns_work: bool) -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        _bring(sharded, _Reused(returns_work), Reduce())
        fsdp(sharded).set_modules_to_forward_prefetch(
            [fsdp(layer) for layer in sharded.get_submodule("layers").children()]
        )  # several in flight
        assert_trains_alike(reference, sharded, _square)

    run_ranks(on_each_rank, 2)


def test_torchs_own_collectives_are_taken() -> None:
    def on_each_rank() -> None:
        world: Any = dist.group.WORLD
        kinds = [
            (torchs.DefaultAllGather(), torchs.DefaultReduceScatter()),
            (torchs.ProcessGroupAllocAllGather(world), torchs.ProcessGroupAllocReduceScatter(world)),
        ]
        for gather, reduce in kinds:
            with case(type(gather).__name__):
                reference, sharded = twins()
                _bring(sharded, gather, reduce)
                assert_trains_alike(reference, sharded, _square)

    run_ranks(on_each_rank, 2)


def test_replicas_are_reduced_over_by_the_engine_itself() -> None:
    def on_each_rank() -> None:
        mesh = mesh_of((2, 2))
        reference, sharded = twins(apply=lambda model: shard(model, mesh=mesh))
        gather, reduce = Gather(), Reduce()
        _bring(sharded, gather, reduce)
        optimizers = [sgd(list(model.parameters())) for model in (reference, sharded)]
        for _ in range(2):
            reference(X).square().mean().backward()
            sharded(rows_of_this_rank(X)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(whole(got), expected.detach(), rtol=1e-5, atol=1e-6)
        assert set(gather.groups) == set(reduce.groups) == {mesh.get_group("inner")}

    run_ranks(on_each_rank, 4)


def test_neighbours_gather_from_each_other_with_the_same_collective() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(apply=lambda model: shard(model, reshard_after_forward=2))
        gather = Gather()
        _bring(sharded, gather, Reduce())
        assert_trains_alike(reference, sharded, _square)
        assert {group.size() for group in gather.groups} == {2, 4}

    run_ranks(on_each_rank, 4)


def test_parameters_of_several_dtypes_are_gathered_as_bytes_and_reduced_by_dtype() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Parameter(torch.randn(3, 5))
            self.wide = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.single).double() @ self.wide

    def on_each_rank() -> None:
        reference, sharded = twins(Two, fully_shard)
        gather, reduce = Gather(), Reduce()
        _bring(sharded, gather, reduce)
        assert_trains_alike(reference, sharded, _square, num_steps=1)
        assert gather.dtypes == [torch.uint8]
        assert set(reduce.dtypes) == {torch.float32, torch.float64} and reduce.num_calls == 2

    run_ranks(on_each_rank, 2)


def test_custom_collectives_move_the_policys_dtypes() -> None:
    def on_each_rank() -> None:
        _, sharded = twins(apply=lambda m: shard(m, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))
        gather, reduce = Gather(), Reduce()
        _bring(sharded, gather, reduce)
        sharded(X).square().mean().backward()
        assert set(gather.dtypes) == {torch.bfloat16} and set(reduce.dtypes) == {torch.float32}

    run_ranks(on_each_rank, 2)


def test_a_custom_collective_is_not_given_to_units_below() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        gather = Gather()
        fsdp(sharded).set_custom_all_gather(gather)
        assert_trains_alike(reference, sharded, _square, num_steps=2)
        assert gather.num_calls == 2

    run_ranks(on_each_rank, 2)


def test_a_custom_reduction_runs_on_a_communicator_of_its_own_in_either_order_of_calls() -> None:
    def on_each_rank() -> None:
        for is_separate_first in (True, False):
            reference, sharded = twins()
            reduce = Reduce()
            with case(is_separate_first):
                if is_separate_first:
                    fsdp(sharded).set_separate_reduce_scatter_group()
                _bring(sharded, Gather(), reduce)
                fsdp(sharded).set_separate_reduce_scatter_group()
                assert_trains_alike(reference, sharded, _square, num_steps=1)
                assert dist.group.WORLD not in reduce.groups and len(set(reduce.groups)) == 1
                fsdp(sharded).set_separate_reduce_scatter_group(False)
                reduce.groups.clear()
                assert_trains_alike(reference, sharded, _square, num_steps=1)
                assert set(reduce.groups) == {dist.group.WORLD}

    run_ranks(on_each_rank, 2)


def test_the_last_custom_collective_that_was_given_is_used() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        first, second = Gather(), Gather()
        _bring(sharded, first, Reduce())
        _bring(sharded, second, Reduce())
        assert_trains_alike(reference, sharded, _square, num_steps=1)
        assert first.num_calls == 0 and second.num_calls > 0

    run_ranks(on_each_rank, 2)


def test_one_rank_calls_no_custom_collective() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        gather, reduce = Gather(), Reduce()
        _bring(sharded, gather, reduce)
        sharded(X).square().mean().backward()
        reference(X).square().mean().backward()
        assert_gradients_equal(reference, sharded)
        assert gather.num_calls == reduce.num_calls == 0

    run_ranks(on_each_rank, 1)


@pytest.mark.parametrize("returns_work", [False, True])
def test_transports_of_custom_collectives_conform(returns_work: bool) -> None:
    def on_each_rank() -> None:
        world: Any = dist.group.WORLD
        check_transport(CustomAllGather(GlooTransport(world), Gather(returns_work)))
        check_transport(CustomReduceScatter(GlooTransport(world), Reduce(returns_work)))

    run_ranks(on_each_rank, 3)


def test_a_unit_on_several_meshes_takes_no_custom_collective() -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))

        def place(parameter: nn.Parameter) -> Any:
            info = FSDPMeshInfo(mesh["a"] if parameter.ndim == 2 else mesh["b"], shard_mesh_dim=0)
            return ShardPlacementResult(Shard(0), info)

        model = fsdp(fully_shard(nn.Linear(4, 4), mesh=mesh["a"], shard_placement_fn=place))
        with pytest.raises(ValueError, match="got several: set_custom_all_gather is not supported with multiple"):
            model.set_custom_all_gather(Gather())
        with pytest.raises(ValueError, match="got several: set_custom_reduce_scatter is not supported with multi"):
            model.set_custom_reduce_scatter(Reduce())

    run_ranks(on_each_rank, 2)


def test_custom_collectives_without_fsdp2s_interface_are_refused() -> None:
    def on_each_rank() -> None:
        model = fsdp(fully_shard(nn.Linear(4, 4)))
        with pytest.raises(TypeError, match="`comm` to be callable and to have a method `allocate`, got"):
            model.set_custom_all_gather(all_gather_single)
        with pytest.raises(TypeError, match="got DefaultAllocMixin"):
            model.set_custom_reduce_scatter(torchs.DefaultAllocMixin())  # type: ignore[arg-type]

    run_ranks(on_each_rank, 1)
