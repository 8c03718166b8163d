"""The flat layout: rows, blocks of rows and whole tensors stay together, and everything else is as in the even one."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    adamw,
    assert_gradients_equal,
    assert_trains_alike,
    assert_weights_equal,
    case,
    fsdp,
    mesh_of,
    no_gradient_sync,
    rows_of_this_rank,
    sgd,
    twins,
    whole,
)
from flat_models import LOSS, NEEDS_FLAT_LAYOUT, X, flat, matrices_only
from fused_models import FusedNet, fuse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lamella_engine import (
    DDP,
    HFSDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RaggedDTensor,
    Rows,
    ShardingOptions,
    Whole,
    fully_shard,
    fully_shard_model,
)
from lamella_engine.testing import assert_at_rest, named_units, record
from lamella_testing import run_ranks

pytestmark = NEEDS_FLAT_LAYOUT

KEEPS: dict[str, Any] = {
    "rows": Rows(1),
    "blocks": Rows(3),
    "whole": Whole(),
    "some in the even layout": matrices_only,
}


# -- training --------------------------------------------------------------------------------------------------------

STAGES: dict[str, tuple[tuple[int, ...], Any]] = {
    "FSDP2's": ((4,), None),
    "DDP": ((2,), DDP),
    "ZERO1": ((3,), ZERO1),
    "ZERO2": ((3,), ZERO2),
    "ZERO3": ((3,), ZERO3),
    "one rank": ((1,), None),
    "HSDP, as FSDP2's": ((2, 2), None),
    "HSDP, ZERO1": ((2, 2), (HSDP, ZERO1)),
    "HSDP, ZERO2": ((2, 2), (HSDP, ZERO2)),
    "HSDP, ZERO3": ((2, 2), (HSDP, ZERO3)),
    "HFSDP, ZERO3": ((2, 2), (HFSDP, ZERO3)),
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_takes_the_unsharded_steps_with_every_keep_together(stage: str) -> None:
    shape, placements = STAGES[stage]

    def check() -> int:
        mesh = mesh_of(shape)
        num_cut = 0
        for name, keep in KEEPS.items():
            with case(name):
                reference, sharded = twins(Net, flat(keep, mesh=mesh, placements=placements))
                optimizers = [sgd(list(model.parameters())) for model in (reference, sharded)]
                for step in range(2):
                    for model, x in ((reference, X), (sharded, rows_of_this_rank(X))):
                        (model(x + step).square().mean()).backward()
                    assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-5)
                assert_at_rest(sharded)
                num_cut += sum(isinstance(parameter, RaggedDTensor) for parameter in sharded.parameters())
        return num_cut

    for num_cut in run_ranks(check, math.prod(shape)):
        assert bool(num_cut) == (placements is not DDP), "nothing is cut where everything is replicated"


def test_rows_kept_together_lie_on_one_rank_and_some_parameters_are_cut() -> None:
    def check() -> None:
        _, sharded = twins(Net, flat(Rows(3)))
        bounds = {name: p.placements[0].bounds for name, p in sharded.named_parameters()}  # type: ignore[attr-defined]
        for name, parameter in sharded.named_parameters():
            inner = [bound for bound in bounds[name] if 0 < bound < len(parameter)]
            assert all(bound % 3 == 0 for bound in inner)
        assert any(0 < bound < 13 for bound in bounds["layers.0.up.weight"])
        _, sharded = twins(Net, flat(Whole()))
        for parameter in sharded.parameters():
            assert isinstance(parameter, DTensor)
            assert len(parameter.to_local()) in (0, len(parameter))

    run_ranks(check, 3)


def test_bf16_compute_takes_the_steps_of_the_even_layout() -> None:
    """Sums of two ranks' gradients have one order, in any wire dtype: bit by bit."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def check() -> None:
        for policy_, placements in ((policy, None), (MixedPrecisionPolicy(torch.bfloat16), ZERO2)):
            results = []
            for keep in (None, Rows(2)):
                torch.manual_seed(0)
                model = Net()
                flat(keep, mp_policy=policy_, placements=placements)(model)
                optimizer = adamw(list(model.parameters()))
                for _ in range(3):
                    model(rows_of_this_rank(X)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                results.append([whole(parameter) for parameter in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    run_ranks(check, 2)


@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
def test_units_may_stay_or_be_gathered_among_neighbours(reshard_after_forward: bool | int) -> None:
    def check() -> None:
        reference, sharded = twins(Net, flat(Rows(1), reshard_after_forward=reshard_after_forward))
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 4)


def test_microbatches_and_unused_parameters_are_as_in_the_even_layout() -> None:
    def check() -> None:
        for placements in (ZERO1, ZERO2, ZERO3):
            reference, sharded = twins(Net, flat(Rows(1), placements=placements))
            for model in (reference, sharded):
                model.get_submodule("head").bias.requires_grad_(False)
            with no_gradient_sync(sharded):
                for model in (reference, sharded):
                    LOSS(model).backward()
            for model in (reference, sharded):
                model.layers = model.layers[:2]  # type: ignore[index]
                LOSS(model).backward()
            assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_gradients_that_layers_add_to_buffers_are_reduced_as_those_of_autograd() -> None:
    def check() -> None:
        reference, sharded = twins(FusedNet, flat(Rows(1)))
        for layer in sharded.get_submodule("layers").children():
            fuse(layer)
        for i in range(2):
            with no_gradient_sync(sharded) if i == 0 else nullcontext():
                LOSS(reference).backward()
                LOSS(sharded).backward()
        assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_a_whole_model_is_sharded_in_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> None:
        reference, sharded = twins(
            Net,
            partial(fully_shard_model, units="layers.*", options=ShardingOptions(keep_together=Rows(1)), verbose=False),
        )
        assert all(isinstance(parameter, RaggedDTensor) for parameter in sharded.parameters())
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_shards_that_rest_on_the_cpu_take_the_unsharded_steps() -> None:
    def check() -> None:
        apply = flat(Rows(1), offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert_trains_alike(*twins(Net, apply), LOSS)

    run_ranks(check, 3)


# -- communication ---------------------------------------------------------------------------------------------------


def test_a_unit_is_gathered_and_reduced_as_one_payload_in_place() -> None:
    def check() -> None:
        _, sharded = twins(Net, flat(Rows(1)))
        groups = {name: unit.parameters.groups for name, unit in named_units(sharded)}
        assert all(len(unit_groups) == 1 for unit_groups in groups.values())
        log = record(sharded)
        LOSS(sharded).backward()
        nbytes = {name: 4 * unit_groups[0].layout.full_numel for name, unit_groups in groups.items()}
        gathers = [event for event in log.events if event.kind == "gather"]
        assert [event.nbytes for event in gathers] == [nbytes[event.unit] for event in gathers]
        assert sorted(log.units_of("gather")) == sorted([*groups, *(name for name in groups if name != "root")])
        assert sorted(log.units_of("reduce")) == sorted(groups)

        layer = fsdp(sharded.get_submodule("layers.0"))
        layer.unshard()
        (group,) = groups["layers.0"]
        buffer, layout = group.unsharded_weight.flat, group.layout
        for i, parameter in enumerate(group.parameters):
            assert parameter.unsharded.data_ptr() == buffer.data_ptr() + 4 * layout.tensor_range(i).start
        assert group.unsharded_weight.slots[0].data_ptr() == buffer.data_ptr()
        assert len(group.unsharded_weight.slots) == 1

    run_ranks(check, 3)


def test_even_and_flat_groups_of_a_unit_travel_in_one_call() -> None:
    def check() -> None:
        _, sharded = twins(Net, flat(matrices_only))
        log = record(sharded)
        LOSS(sharded).backward()
        names = [name for name, _ in named_units(sharded)]
        assert all(len(unit.parameters.groups) == 2 for _, unit in named_units(sharded))
        assert sorted(log.units_of("reduce")) == sorted(names)
        assert len(log.units_of("gather")) == 2 * len(names) - 1

    run_ranks(check, 2)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_arguments_incompatible_with_keep_together_are_refused_before_sharding() -> None:
    def check() -> None:
        for keep, options, error, message in (
            (3, {}, TypeError, "`keep_together` to be Rows"),
            (lambda _: "whole", {}, TypeError, "`keep_together` to be Rows"),
            (Rows(1), {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}, NotImplementedError, "at dim 0"),
        ):
            model = Net()
            before = dict(model.named_parameters())
            with pytest.raises(error, match=message):
                flat(keep, **options)(model)
            assert all(before[name] is parameter for name, parameter in model.named_parameters())
        model = Net()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh["tensor"], [Replicate()]))
        with pytest.raises(NotImplementedError, match="a plain parameter"):
            fully_shard(model, mesh=mesh["data"], options=ShardingOptions(keep_together=Rows(1)))

    run_ranks(check, 2)
