"""A parameter is placed on a separate mesh as by FSDP2's `ShardPlacementResult`."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import fully_shard
from lamella_engine.extending import placement_on
from lamella_testing import run_ranks


def test_a_placement_has_the_axes_of_fsdp2s_mesh_infos() -> None:
    def on_each_rank() -> None:
        one = init_device_mesh("cpu", (2,))
        two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
        sharded, hybrid, replicated = (
            placement_on(one),
            placement_on(two, dim=1),
            placement_on(one, is_replicated=True),
        )
        assert [placement.placement for placement in (sharded, hybrid, replicated)] == [Shard(0), Shard(1), Shard(0)]
        assert sharded.mesh_info == (one, FSDPMeshInfo(one, shard_mesh_dim=0).shard_mesh_dim, None)
        torchs = HSDPMeshInfo(two, shard_mesh_dim=1, replicate_mesh_dim=0)
        assert hybrid.mesh_info == (two, torchs.shard_mesh_dim, torchs.replicate_mesh_dim)
        assert replicated.mesh_info == (one, None, DDPMeshInfo(one, replicate_mesh_dim=0).replicate_mesh_dim)

    run_ranks(on_each_rank, 2)


def test_a_parameter_may_lie_on_another_mesh_than_its_unit() -> None:
    def on_each_rank() -> None:
        one = init_device_mesh("cpu", (2,))
        two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
        torch.manual_seed(0)
        layer = nn.Linear(4, 6)
        weight = layer.weight.detach().clone()
        fully_shard(
            layer, mesh=two, shard_placement_fn=lambda parameter: placement_on(one) if parameter.ndim == 2 else None
        )
        assert isinstance(layer.weight, DTensor) and isinstance(layer.bias, DTensor)
        assert (layer.weight.device_mesh.ndim, layer.bias.device_mesh.ndim) == (1, 2)
        assert torch.equal(layer.weight.full_tensor(), weight)

    run_ranks(on_each_rank, 2)


def test_a_mesh_of_too_many_axes_is_refused() -> None:
    def on_each_rank() -> None:
        three = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pipe", "outer", "inner"))
        with pytest.raises(ValueError, match="Expected `mesh` with one axis or two, got"):
            placement_on(three)
        with pytest.raises(ValueError, match="Expected `mesh` with one axis for a replicated parameter, got"):
            placement_on(three["outer", "inner"], is_replicated=True)

    run_ranks(on_each_rank, 2)
