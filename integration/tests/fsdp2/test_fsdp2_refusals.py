"""What FSDP2 refuses is refused with the same exception, and FSDP2's sentence in it: callers match on both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp2_models import Api, Block, Stack, Where, inputs, on_ranks, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

FSDPMeshInfo = _fsdp_common.FSDPMeshInfo
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)  # not in torch 2.11


class _LinearWithScale(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


class _TiedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x))
        return out


def _tie_units(api: Api) -> None:
    model = _TiedLinears()
    for module in (model.one, model.two, model):
        api.fully_shard(module)
    model(torch.ones(1, 4))


def _run_meta(api: Api) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    api.fully_shard(model)
    model(torch.ones(1, 2))


def _reset_inner(api: Api) -> None:
    model = shard(api, Stack())
    model(inputs())
    model.blocks[0].reset_iter_state()


def _noncontiguous(api: Api) -> None:
    layer: Any = nn.Conv2d(8, 8, 3)  # `memory_format` is in none of the overloads of torch's stub
    api.fully_shard(layer.to(memory_format=torch.channels_last))


def _spread(api: Api, *, other: bool = False, placement: Shard | Replicate | None = None, **kwargs: object) -> None:
    """Shard a module whose parameters lie on a mesh of all axes, or not quite."""
    meshes = [init_device_mesh(Where.device, (1,), mesh_dim_names=("dp",)) for _ in range(2)]
    model = nn.Linear(2, 2)
    for name, parameter in list(model.named_parameters()):
        spread = distribute_tensor(parameter, meshes[0], [placement or Replicate()])
        model.register_parameter(name, nn.Parameter(spread))
    api.fully_shard(model, mesh=meshes[other], dp_mesh_dims=api.DataParallelMeshDims(shard="dp"), **kwargs)


def _list_alone(api: Api) -> None:
    blocks = [Block(), Block()]
    api.fully_shard(blocks)
    blocks[0](inputs())


def _placed_by_equal_infos(api: Api) -> None:
    mesh = init_device_mesh(Where.device, (1,))
    place = lambda _: ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))  # noqa: E731
    api.fully_shard(Block(), mesh=mesh, shard_placement_fn=place)


def _on_three_model_axes(api: Api) -> None:
    mesh = init_device_mesh(Where.device, (1, 1, 1, 1), mesh_dim_names=("dp", "a", "b", "c"))
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["a", "b", "c"], [Shard(0), Shard(0), Replicate()]))
    api.fully_shard(model, mesh=mesh["dp"])


Refused = tuple[Callable[[Api], object], type[Exception], str]

REFUSED: dict[str, Refused] = {
    "module_list": (
        lambda api: api.fully_shard(nn.ModuleList([Block()])),
        ValueError, "fully_shard does not support containers that do not implement forward",
    ),
    "module_dict": (
        lambda api: api.fully_shard(nn.ModuleDict({"a": Block()})),
        ValueError, "fully_shard does not support containers that do not implement forward",
    ),
    "twice": (
        lambda api: api.fully_shard(api.fully_shard(Block())),
        AssertionError, "Each distinct composable distributed API can only be applied to a module once",
    ),
    "deepcopy": (
        lambda api: copy.deepcopy(api.fully_shard(Block())),
        AssertionError, "FSDP does not support deepcopy",
    ),
    "scalar": (
        lambda api: api.fully_shard(_LinearWithScale()),
        ValueError, "fully_shard doesn't support scalar parameters. Change scale to a 1D tensor with numel equal to 1.",
    ),
    "noncontiguous": (_noncontiguous, NotImplementedError, "FSDP does not support non-contiguous parameters"),
    "mesh_of_three_axes": (
        lambda api: api.fully_shard(Block(), mesh=init_device_mesh(Where.device, (1, 1, 1))),
        ValueError, "fully_shard expects a 1D or 2D DeviceMesh but got",
    ),
    "mesh_of_two_axes_without_names": (
        lambda api: api.fully_shard(Block(), mesh=init_device_mesh(Where.device, (1, 1))),
        AssertionError, "Please init the 2D mesh for HSDP with mesh_dim_names specified",
    ),
    "tied_across_units": (
        _tie_units, ValueError,
        r"is shared with a parameter already managed by another FSDP group.*place them in the same FSDP group",
    ),
    "meta_at_forward": (
        _run_meta, RuntimeError,
        r"FSDP parameters should be materialized .*following were still on meta device: \['weight', 'bias'\]",
    ),
    "reset_of_an_inner_unit": (
        _reset_inner, RuntimeError, "reset_iter_state must be called on the root FSDP module"
    ),
    "reshard_to_no_divisor": (
        lambda api: api.fully_shard(Block(), reshard_after_forward=3),
        ValueError, "If passing reshard_after_forward as an int, it should be a factor of 1, not 3",
    ),
    "reshard_to_text": (
        lambda api: api.fully_shard(Block(), reshard_after_forward="yes"),
        ValueError,
        "reshard_after_forward should be a bool or an int representing the group size to reshard to, not yes",
    ),
    "set_reshard_to_int": (
        lambda api: api.fully_shard(Block()).set_reshard_after_forward(2),
        ValueError, "reshard_after_forward should be a bool, got <class 'int'>",
    ),
    "prefetch_of_no_unit": (
        lambda api: api.fully_shard(Block()).set_modules_to_forward_prefetch([Block()]),
        ValueError, r"Expects FSDPModule but got <class '.*Block'>: Block\(",
    ),
    "backward_prefetch_of_no_unit": (
        lambda api: api.fully_shard(Block()).set_modules_to_backward_prefetch([Block()]),
        ValueError, r"Expects FSDPModule but got <class '.*Block'>: Block\(",
    ),
    "a_forward_method_that_is_not_there": (
        lambda api: api.register_fsdp_forward_method(api.fully_shard(Block()), "nope"),
        ValueError, "FSDPBlock'> does not have a method nope",
    ),
    "shared_streams_of_no_unit": (
        lambda api: api.share_comm_ctx([Block()]), ValueError, "Expects list of FSDPModules but got",
    ),
    "no_input_buffers": (
        lambda api: api.fully_shard(Block()).set_reduce_scatter_max_input_buffers(0),
        ValueError, "max_input_buffers must be a positive int, got 0",
    ),
    "half_an_input_buffer": (
        lambda api: api.fully_shard(Block()).set_reduce_scatter_max_input_buffers(2.5),
        TypeError, "max_input_buffers must be an int, got float",
    ),
    "true_input_buffers": (
        lambda api: api.fully_shard(Block()).set_reduce_scatter_max_input_buffers(True),
        TypeError, "max_input_buffers must be an int, got bool",
    ),
    "dp_mesh_dims_that_the_mesh_lacks": (
        lambda api: api.fully_shard(
            Block(),
            mesh=init_device_mesh(Where.device, (1,), mesh_dim_names=("dp",)),
            dp_mesh_dims=api.DataParallelMeshDims(shard="other"),
        ),
        ValueError, r"Mesh dim name 'other' not found in mesh.mesh_dim_names \('dp',\)",
    ),
    "dp_mesh_dims_without_names": (
        lambda api: api.fully_shard(
            Block(), mesh=init_device_mesh(Where.device, (1,)), dp_mesh_dims=api.DataParallelMeshDims(shard="dp")
        ),
        ValueError, "mesh must have mesh_dim_names when dp_mesh_dims is provided",
    ),
    "dp_mesh_dims_over_plain_parameters": (
        lambda api: api.fully_shard(
            Block(),
            mesh=init_device_mesh(Where.device, (1,), mesh_dim_names=("dp",)),
            dp_mesh_dims=api.DataParallelMeshDims(shard="dp"),
        ),
        ValueError,
        r"parameters must be DTensors on the full SPMD mesh .*. Got plain tensor for parameter '",
    ),
    "dp_mesh_dims_on_another_mesh": (
        lambda api: _spread(api, other=True), ValueError,
        "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects",
    ),
    "dp_mesh_dims_over_what_is_sharded": (
        lambda api: _spread(api, placement=Shard(0)), ValueError,
        r"Expected Replicate\(\) on DP shard dim 'dp' \(index 0\) but got S",
    ),
    "dp_mesh_dims_and_fewer_ranks_after_forward": (
        lambda api: _spread(api, reshard_after_forward=1), NotImplementedError, "reshard_after_forward as int",
    ),
    "a_placement_that_is_none": (
        lambda api: api.fully_shard(Block(), shard_placement_fn=lambda _: "rows"),
        ValueError, "Invalid shard_placement_fn result: rows",
    ),
    "dp_mesh_dims_of_no_axis": (
        lambda api: api.DataParallelMeshDims(), ValueError, "At least one of shard or replicate must be set in",
    ),
    "a_list_without_a_unit_around_it": (
        _list_alone, RuntimeError, "FSDP requires a single root module but got"
    ),
    "two_infos_of_one_mesh": (
        _placed_by_equal_infos, ValueError, "Params sharing the same process group must use the same FSDPMeshInfo",
    ),
    "three_model_axes": (
        _on_three_model_axes, NotImplementedError, r"FSDP only supports 1D TP/EP or 2D EP\+TP",
    ),
    "a_placement_past_the_last_dim": (
        lambda api: api.fully_shard(Block(), shard_placement_fn=lambda _: Shard(1)),
        AssertionError, r"Shard dim 1 is invalid for 1D tensor: torch.Size\(\[9\]\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_has_fsdp2s_exception_and_words(api: Api, case: str) -> None:
    attempt, error, words = REFUSED[case]

    def scenario() -> None:
        with pytest.raises(error, match=f"(?s){words}"):
            attempt(api)

    on_ranks(scenario, 1)


def test_a_dim_other_than_0_must_divide(api: Api) -> None:
    def scenario() -> None:
        with pytest.raises(
            NotImplementedError,
            match=r"FSDP does not support uneven sharding on dim 1: torch.Size\(\[4, 3\]\) \(world size: 2\)",
        ):
            api.fully_shard(nn.Linear(3, 4, bias=False), shard_placement_fn=lambda _: Shard(1))

    on_ranks(scenario)
