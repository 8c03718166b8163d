"""Experts rest by a ZeRO stage of their own, and train as on a single rank."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, FSDPModule, ShardingOptions
from lamella_engine.testing import held_nbytes, record, unsharded_nbytes
from lamella_megatron import build_sharded_model, fully_shard_model
from lamella_testing import run_ranks
from lamella_testing.megatron import token_losses
from lamella_testing.megatron_parity import BATCH, Layout, assert_trains_as_on_one_rank, make_model

EP2 = Layout(ep=2)
INSTANCES = Layout(ep=2, instances=2)


@pytest.mark.parametrize(
    ("kind", "layout", "dense", "experts"),
    [
        pytest.param("moe", EP2, ZERO3, ZERO1, id="whole experts"),
        pytest.param("*E*E", EP2, ZERO1, ZERO3, id="whole dense weights"),
        pytest.param("moe", EP2, ZERO3, DDP, id="replicas of experts", marks=pytest.mark.slow),
        pytest.param("*E/*E", Layout(num_ranks=2), DDP, ZERO2, id="replicas of dense weights, prediction, one mesh"),
        pytest.param("moe", Layout(instances=2), (HSDP, ZERO1), (HFSDP, ZERO3), id="main weights over instances"),
        pytest.param("ME", Layout(tp=2, ep=2), ZERO3, ZERO2, id="tensor-parallel", marks=pytest.mark.slow),
        pytest.param("moe", INSTANCES, (HSDP, ZERO3), (HSDP, ZERO1), id="instances", marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_on_one_rank(kind: str, layout: Layout, dense: Any, experts: Any) -> None:
    options = ShardingOptions(placements=dense)
    assert_trains_as_on_one_rank(
        kind, layout, lambda model: fully_shard_model(model, options=options, expert_stage=experts)
    )


# -- memory and collectives ------------------------------------------------------------------------------------------


def _microbatches(model: Any, num: int) -> None:
    for i in range(num):
        model.set_is_last_backward(i == num - 1)
        token_losses(model, BATCH).mean().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("dense", "experts"), [(ZERO3, ZERO1), (ZERO1, ZERO3)], ids=["experts stay", "experts go"])
def test_weights_that_stay_are_gathered_once_a_step_and_reduced_once(dense: Any, experts: Any) -> None:
    def on_each_rank() -> tuple[Counter[str], Counter[str], set[str], set[str]]:
        options = ShardingOptions(placements=dense)
        model: Any = fully_shard_model(make_model("moe", EP2), options=options, expert_stage=experts)
        _microbatches(model, 1)  # learns the order
        torch.optim.SGD(model.parameters()).step()
        log = record(model)
        _microbatches(model, 3)
        held = {name: nbytes for name, nbytes in held_nbytes(model).items() if name != "root"}
        assert all(nbytes == unsharded_nbytes(model.get_submodule(name)) for name, nbytes in held.items())
        units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule) and name}
        return Counter(log.units_of("gather")), Counter(log.units_of("reduce")), set(held), units

    gathers, reductions, held, units = run_ranks(on_each_rank, 4)[0]
    layers = {f"decoder.layers.{i}" for i in range(2)}
    all_experts = {f"{layer}.mlp.experts" for layer in layers}
    assert units == layers | all_experts
    staying = all_experts if experts is ZERO1 else layers
    assert held == staying
    # Three microbatches: weights that go are gathered for forward and for backward.
    assert {unit: gathers[unit] for unit in units} == {unit: 1 if unit in staying else 6 for unit in units}
    assert {unit: reductions[unit] for unit in units} == {unit: 1 if unit in staying else 3 for unit in units}


def test_an_outer_axis_shards_the_main_weights_of_experts() -> None:
    """In units of their layers experts have no outer axis: each instance holds all their main weights."""

    def on_each_rank(expert_stage: Any) -> list[float]:
        options = ShardingOptions(placements=(HFSDP, ZERO3))
        model = fully_shard_model(make_model("moe", INSTANCES), options=options, expert_stage=expert_stage)
        experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
        assert all(isinstance(parameter, DTensor) for parameter in experts)
        return [parameter.to_local().numel() / prod(parameter.shape) for parameter in experts]  # type: ignore[attr-defined]

    assert set(run_ranks(on_each_rank, 4, None)[0]) == {1.0}
    assert set(run_ranks(on_each_rank, 4, (HFSDP, ZERO3))[0]) == {0.5}


def test_a_model_that_is_sharded_while_built_has_the_same_units() -> None:
    def on_each_rank() -> None:
        from megatron.core import parallel_state

        shares = []
        for build in (True, False):
            stage: dict[str, Any] = {"expert_stage": ZERO1}
            model: Any = (
                build_sharded_model(lambda: make_model("moe", EP2), **stage)
                if build
                else fully_shard_model(make_model("moe", EP2), **stage)
            )
            shares.append({name: (p.placements, p.to_local()) for name, p in model.named_parameters()})
            units = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
            assert [unit.sharding_options.placements for name, unit in units.items() if name.endswith("experts")] == [
                ZERO1,
                ZERO1,
            ]
            parallel_state.destroy_model_parallel()
        for name, (placements, local) in shares[0].items():
            assert placements == shares[1][name][0]
            assert torch.equal(local, shares[1][name][1]), name

    run_ranks(on_each_rank, 4)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("gpt", {"expert_stage": ZERO1}, "a model with experts for `expert_stage`, got GPTModel with"),
        ("moe", {"expert_stage": (HSDP, ZERO1)}, r"one placement of `expert_stage` for each of the 1 axes .* got \(HS"),
        ("moe", {"expert_stage": HSDP}, "one of DDP, ZERO1, ZERO2, ZERO3 among `placements` .* got HSDP"),
        ("moe", {"expert_stage": ZERO1, "groups_by_name": lambda _: None}, "no `groups_by_name` with `expert_stage`"),
        ("moe", {"expert_stage": ZERO1, "unit_classes": "MLP"}, "got MLP inside SequentialMLP. Leave one of the two"),
    ],
    ids=["no experts", "another mesh", "no stage", "groups by name", "units inside"],
)
def test_a_stage_that_does_not_fit_is_refused_before_any_change(
    kind: str, arguments: dict[str, Any], message: str
) -> None:
    def on_each_rank() -> None:
        from megatron.core.transformer.mlp import MLP

        classes = {"unit_classes": [MLP]} if "unit_classes" in arguments else {}
        model = make_model(kind, Layout(num_ranks=2))
        with pytest.raises(ValueError, match=message):
            fully_shard_model(model, **{**arguments, **classes})
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    run_ranks(on_each_rank, 2)


def test_reshard_after_forward_of_dense_weights_is_allowed_beside_zero1_experts() -> None:
    def on_each_rank() -> None:
        make = make_model("moe", EP2)
        fully_shard_model(make, expert_stage=ZERO1, reshard_after_forward=True)  # for dense weights

    run_ranks(on_each_rank, 4)
