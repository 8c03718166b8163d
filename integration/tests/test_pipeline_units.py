"""Pipelines whose stages are sharded units, kept by `UnitResidence`: the bits of training without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # once here instead of once a rank
import torch.distributed as dist
from moe_training import STAGES, STEPS, TOKENS, Placed, microbatches, plain_step, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import ShardingOptions, UnitResidence, delay_gradient, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_integration.moe import WIDTH, DelayedLinear, MoE, MoELayer
from lamella_schedule import LayerSlots, ModelChunk, Pipeline, pipeline, run_pipeline
from lamella_testing import run_ranks


class Stage(nn.Module):
    """Some layers of a mixture of experts, with the embedding or the output layer at the ends."""

    def __init__(self, model: MoE, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.layers[i] for i in layers)
        self.embedding = model.embedding if is_first else None
        self.norm = model.norm if is_last else None
        self.output = model.output if is_last else None
        self._loss = model.loss

    def chunk(self, tokens: torch.Tensor, scale: float) -> ModelChunk:
        layers = [cast(MoELayer, layer).slots() for layer in self.layers]
        if self.norm is None:
            return ModelChunk(partial(self._enter, tokens), layers, lambda x: x)
        last, norm = layers[-1], self.norm
        layers[-1] = LayerSlots(
            pre=last.pre,
            dispatch=last.dispatch,
            experts=last.experts,
            combine=lambda *values: norm(cast(Any, last.combine)(*values)),
            delayed=last.delayed,
        )
        return ModelChunk(partial(self._enter, tokens), layers, partial(self._loss, tokens=tokens, scale=scale))

    def _enter(self, tokens: torch.Tensor, *received: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            return received[0]
        return cast(torch.Tensor, self.embedding(tokens))


BORDERS = (torch.empty(TOKENS, WIDTH, device="meta"),)
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", *SPLIT)
MICROBATCHES = 8  # DualPipeV needs one for each stage


def _batches(step: int, rank: int) -> list[torch.Tensor]:
    return microbatches(2 * step, rank) + microbatches(2 * step + 1, rank)


def _place(experts: set[nn.Parameter], placed: Placed, parameter: nn.Parameter) -> Placed | None:
    return placed if parameter in experts else None


def _stages(ours: Pipeline, mesh: Any, stage: str, *, is_delayed: bool) -> dict[int, Stage]:
    """This rank's stages, a layer each, as units over the ranks with the same stages; experts on all of those."""
    pipe, data = mesh["pipeline"], mesh["data"]
    model = MoE(ours.num_stages, group=data.get_group(), has_shared=True, is_delayed=is_delayed)
    options = ShardingOptions(placements=STAGES[stage])
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]
    stages = {}
    for i in ours.stages_of(pipe.get_local_rank()):
        part = Stage(model, range(i, i + 1), is_first=i == 0, is_last=i == ours.num_stages - 1)
        layers = [cast(MoELayer, layer) for layer in part.layers]
        experts = {layer.experts.weight for layer in layers}
        place = partial(_place, experts, Placed(Shard(0), FSDPMeshInfo(alone, shard_mesh_dim=0)))
        for module in (*layers, part):
            unit: Any = fully_shard(module, mesh=data, options=options, shard_placement_fn=place)
            unit.set_gradient_divide_factor(data.size())
        for layer in layers if is_delayed else ():
            for inner in layer.modules():
                if isinstance(inner, DelayedLinear):
                    inner.on_gradient = delay_gradient(layer, inner.weight)
        stages[i] = part
    return stages


def _piped(ours: Pipeline, stage: str, *, is_delayed: bool) -> dict[str, torch.Tensor]:
    """The losses and this rank's shards of the weights, by name, after some steps."""
    shape = (ours.num_ranks, dist.get_world_size() // ours.num_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data"))
    stages = _stages(ours, mesh, stage, is_delayed=is_delayed)
    residences = {i: UnitResidence(part, list(part.layers)) for i, part in stages.items()}
    parameters = {
        name.replace("layers.0", f"layers.{i}"): parameter
        for i, part in stages.items()
        for name, parameter in part.named_parameters()
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=0.2, momentum=0.9)
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        batches = _batches(step, mesh["data"].get_local_rank())
        losses += run_pipeline(
            ours,
            partial(_chunk, stages, batches),
            BORDERS,
            group=mesh["pipeline"].get_group(),
            residences=residences,
        )
        for part in stages.values():
            assert_at_rest(part)
        optimizer.step()
        optimizer.zero_grad()
    return _result(losses, parameters)


def _chunk(stages: dict[int, Stage], batches: list[torch.Tensor], stage: int, microbatch: int) -> ModelChunk:
    return stages[stage].chunk(batches[microbatch], 1 / MICROBATCHES)


def _result(losses: list[torch.Tensor], parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {f"loss {i}": loss for i, loss in enumerate(losses)} | {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in parameters.items()
    }


def _trained(model: MoE, step_of: Callable[[MoE, list[torch.Tensor]], list[torch.Tensor]], rank: int) -> Any:
    """The same without a pipeline."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        losses += step_of(model, _batches(step, rank))
        optimizer.step()
        optimizer.zero_grad()
    learned = sum(losses[:MICROBATCHES]) - sum(losses[-MICROBATCHES:])
    assert float(learned) > 0.05, "equal bits would prove nothing"
    return _result(losses, dict(model.named_parameters()))


def _unsharded_step(model: MoE, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        loss = model(batch, 1 / len(batches))
        loss.backward()
        losses.append(loss.detach())
    return losses


@cache
def _alone(num_layers: int) -> dict[str, torch.Tensor]:
    """One rank without units."""

    def on_one_rank() -> dict[str, torch.Tensor]:
        model = MoE(num_layers, group=cast(Any, dist.group.WORLD), has_shared=True)
        results: dict[str, torch.Tensor] = _trained(model, _unsharded_step, 0)
        return results

    [results] = run_ranks(on_one_rank, 1)
    return results


@pytest.mark.parametrize(
    ("stage", "is_delayed"),
    [
        ("ZERO3", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("ZERO1", False), ("ZERO1", True), ("ZERO2", False), ("ZERO2", True), ("ZERO3", True))
        ),
    ],
)
def test_four_ranks_of_units_train_as_one_rank(stage: str, is_delayed: bool) -> None:
    """Each stage's units are over one rank. Gradients are whole, so that all bits can be compared with one rank's."""

    pipelines = {schedule: pipeline(schedule, 4, MICROBATCHES) for schedule in SCHEDULES}
    alone = {num_stages: _alone(num_stages) for num_stages in {ours.num_stages for ours in pipelines.values()}}

    def on_each_rank() -> list[str]:
        unequal = []
        for schedule, ours in pipelines.items():
            expected = alone[ours.num_stages]
            results = _piped(ours, stage, is_delayed=is_delayed)
            assert ("loss 0" in results) == (ours.num_stages - 1 in ours.stages_of(dist.get_rank()))
            if is_delayed and schedule in SPLIT and stage != "ZERO1":
                # Norms and routers, whose gradients have no delay, are reduced two microbatches at a time.
                for name, tensor in results.items():
                    torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
            elif not all(torch.equal(tensor, expected[name]) for name, tensor in results.items()):
                unequal.append(schedule)
        return unequal

    assert run_ranks(on_each_rank, 4) == [[]] * 4


@pytest.mark.parametrize(
    ("schedule", "stage", "is_delayed"),
    [
        ("DualPipeV", "ZERO1", True),
        ("Interleaved1F1B", "ZERO3", False),
        pytest.param("1F1B", "ZERO2", True, marks=pytest.mark.slow),
    ],
)
def test_two_stages_of_spread_experts_train_as_two_ranks_without_a_pipeline(
    schedule: str, stage: str, is_delayed: bool
) -> None:
    """Two ranks share the experts and shards of each stage; the same two ranks without a pipeline have all stages."""
    ours = pipeline(schedule, 2, MICROBATCHES)

    def without_pipeline() -> dict[str, torch.Tensor]:
        model = sharded(2, stage, has_shared=True, is_delayed=is_delayed, num_layers=ours.num_stages)
        results: dict[str, torch.Tensor] = _trained(model, plain_step, dist.get_rank())
        return results

    expected = run_ranks(without_pipeline, 2)
    results = run_ranks(lambda: _piped(ours, stage, is_delayed=is_delayed), 4)
    names = set()
    for rank, result in enumerate(results):
        for name, tensor in result.items():
            assert torch.equal(tensor, expected[rank % 2][name]), f"{name} of rank {rank}"
        names |= {name for name in result if name in expected[rank % 2]}
    assert names == set(expected[0])
