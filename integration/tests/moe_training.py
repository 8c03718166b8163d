"""Training of a mixture of experts whose units are driven by hooks, or by a schedule through `UnitResidence`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import ZERO1, ZERO2, ZERO3, FSDPModule, ShardingOptions, UnitResidence, delay_gradient, fully_shard
from lamella_integration.moe import VOCABULARY, WIDTH, DelayedLinear, MoE, MoELayer
from lamella_schedule import Event, run

STEPS, MICROBATCHES, LAYERS, TOKENS = 3, 4, 3, 12
STAGES = {"ZERO1": ZERO1, "ZERO2": ZERO2, "ZERO3": ZERO3}
Step = Callable[..., list[torch.Tensor]]


class Placed(NamedTuple):
    placement: Any
    mesh_info: Any


def layers_of(model: MoE) -> list[MoELayer]:
    return [cast(MoELayer, layer) for layer in model.layers]


def sharded(
    ep: int,
    stage: str,
    *,
    has_shared: bool,
    is_delayed: bool,
    device: str = "cpu",
    width: int = WIDTH,
    num_layers: int = LAYERS,
) -> MoE:
    """Experts on `ep` ranks and sharded over the other ranks, all else sharded over all ranks."""
    world = dist.get_world_size()
    meshes = init_device_mesh(device, (world // ep, ep), mesh_dim_names=("edp", "ep"))
    with torch.device(device):
        model = MoE(
            num_layers, group=meshes["ep"].get_group(), has_shared=has_shared, is_delayed=is_delayed, width=width
        )
    mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, dist.group.WORLD), device, mesh_dim_names=("dp",))
    experts = {layer.experts.weight for layer in layers_of(model)}
    placed = Placed(Shard(0), FSDPMeshInfo(meshes["edp"], shard_mesh_dim=0))
    options = ShardingOptions(placements=STAGES[stage])

    def place(parameter: torch.Tensor) -> Any:
        return placed if parameter in experts else None

    for module in (*model.layers, model):
        unit = fully_shard(module, mesh=mesh, options=options, shard_placement_fn=place)
        unit.set_gradient_divide_factor(world)
    for layer in layers_of(model) if is_delayed else ():
        for part in layer.modules():
            if isinstance(part, DelayedLinear):
                part.on_gradient = delay_gradient(layer, part.weight)
    return model


def microbatches(step: int, rank: int | None = None, num_tokens: int = TOKENS) -> list[torch.Tensor]:
    """Runs of consecutive tokens, learnable for a model."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    starts = torch.randint(VOCABULARY, (MICROBATCHES, 1), generator=generator)
    return list((starts + torch.arange(num_tokens)) % VOCABULARY)


def plain_step(model: MoE, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Forward and backward by hooks, microbatch after microbatch."""
    losses = []
    assert isinstance(model, FSDPModule)
    for i, batch in enumerate(batches):
        model.set_is_last_backward(i == len(batches) - 1)
        loss = model(batch, 1 / len(batches))
        loss.backward()
        model.finish_delayed()
        losses.append(loss.detach())
    model.wait_for_gradients()
    return losses


def scheduled_step(
    model: MoE,
    batches: Sequence[torch.Tensor],
    *,
    early_release: bool = False,
    layers_ahead: int = 1,
    around: Callable[[Event], AbstractContextManager[object]] | None = None,
) -> list[torch.Tensor]:
    """The forward of each microbatch beside the backward before."""
    residence = UnitResidence(model, layers_of(model))
    chunks = [model.chunk(batch, 1 / len(batches)) for batch in batches]
    device = batches[0].device
    return run(
        chunks,
        residence=residence,
        early_release=early_release,
        num_layers_ahead=layers_ahead,
        device=device,
        around=around,
    )


def train(
    model: MoE, step_of: Step, *, num_steps: int = STEPS, num_tokens: int = TOKENS, **how: Any
) -> list[torch.Tensor]:
    """The losses of all microbatches, and this rank's shards of the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(num_steps):
        batches = [batch.to(_local(model.norm.weight).device) for batch in microbatches(step, num_tokens=num_tokens)]
        losses += step_of(model, batches, **how)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(_local(parameter) for parameter in model.parameters())]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
