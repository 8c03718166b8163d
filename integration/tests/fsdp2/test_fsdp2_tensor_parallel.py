"""Units over tensor-parallel modules, and over parameters already on a mesh of all axes."""

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    DIM,
    Api,
    Stack,
    assert_all_sharded,
    assert_close,
    assert_equal_models,
    average,
    count,
    descend,
    draw,
    grid,
    inputs,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

pytestmark = [
    pytest.mark.four_ranks,
    # A tensor-parallel linear returns a view, and FSDP2 warns of writes to views.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

PLAN: dict[str, ParallelStyle] = {f"blocks.{index}.{name}": style() for index in range(3) for name, style in
        (("up", ColwiseParallel), ("down", RowwiseParallel))}  # fmt: skip


def _two_axes(api: Api, **kwargs: object) -> tuple[Stack, Stack, DeviceMesh]:
    """A twin, and a model with tensor-parallel blocks, sharded over the data-parallel axis."""
    mesh = grid("dp", "tp")
    expected, model = twins(lambda: Stack(hidden=10))
    parallelize_module(model, mesh["tp"], PLAN)
    parallelize_module(model, mesh["tp"], {"stem": _Replicated(), "head": _Replicated()})
    shard(api, model, mesh=mesh["dp"], **kwargs)
    return expected, model, mesh


class _Replicated(ColwiseParallel):
    """Parameters replicated on the tensor-parallel axis: a single kind of parameter in a model."""

    def _partition_linear_fn(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))

    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate())


def _rows_of_this_replica(mesh: DeviceMesh, seed: int = 0) -> torch.Tensor:
    """Tensor-parallel peers see the same rows."""
    return draw(4, DIM, seed=100 * seed + mesh.get_local_rank("dp"))


def test_a_parameter_keeps_its_placement_and_gains_one(api: Api) -> None:
    def scenario() -> None:
        expected, model, mesh = _two_axes(api)
        block = model.blocks[0]
        placements = {
            "up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
            "up.bias": (_StridedShard(0, split_factor=2), Shard(0)),
            "down.weight": (Shard(0), Shard(1)),
            "down.bias": (Shard(0), Replicate()),
        }
        for name, parameter in block.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.placements == placements[name], name
            assert parameter.device_mesh == mesh
            assert parameter.shape == expected.blocks[0].get_parameter(name).shape
        for (name, a), b in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(b.full_tensor(), a), name

    on_ranks(scenario, 4)


def test_tensor_parallel_units_train_as_the_whole(api: Api) -> None:
    def scenario(reshard: bool | None) -> None:
        expected, model, mesh = _two_axes(api, reshard_after_forward=reshard)
        for step in range(2):
            x = _rows_of_this_replica(mesh, step)
            losses = []
            for network in (expected, model):
                losses.append(network(x).square().sum())
                losses[-1].backward()
            assert_close(losses[1], losses[0])
            average(expected, mesh["dp"])
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)
        assert_equal_models(expected, model)

    on_ranks(scenario, 4, cases=(True, False, None))


def test_inside_forward_a_parameter_is_tensor_parallel_only(api: Api) -> None:
    def scenario() -> None:
        _, model, mesh = _two_axes(api)
        seen = []
        hook = lambda module, args: seen.append(module.weight)  # noqa: E731
        model.get_submodule("blocks.0.up").register_forward_pre_hook(hook)
        model(_rows_of_this_replica(mesh)).sum().backward()
        assert isinstance(seen[0], DTensor)
        assert seen[0].placements == (Shard(0),)
        assert seen[0].device_mesh == mesh["tp"]
        assert_all_sharded(model.parameters())
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements

    on_ranks(scenario, 4)


def test_clipping_spans_both_axes(api: Api) -> None:
    def scenario() -> None:
        expected, model, mesh = _two_axes(api)
        for network in (expected, model):
            (100 * network(_rows_of_this_replica(mesh)).square().sum()).backward()
        average(expected, mesh["dp"])
        norms = [torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0) for network in (expected, model)]
        assert isinstance(norms[1], DTensor)
        assert_close(norms[1].full_tensor(), norms[0])
        assert_equal_models(expected, model)

    on_ranks(scenario, 4)


def test_a_state_dict_of_both_axes_is_loaded_in_place(api: Api) -> None:
    def scenario() -> None:
        expected, model, mesh = _two_axes(api)
        doubled = {name: tensor.detach().clone() * 2 for name, tensor in model.state_dict().items()}
        model.load_state_dict(doubled)
        expected.load_state_dict({name: 2 * tensor for name, tensor in expected.state_dict().items()})
        assert_equal_models(expected, model)
        assert_close(model(_rows_of_this_replica(mesh)), expected(_rows_of_this_replica(mesh)))

    on_ranks(scenario, 4)


# -- dp_mesh_dims -----------------------------------------------------------------------------------------------------


def _spread(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay every parameter on a mesh of all axes, replicated over the data-parallel axes."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Replicate()] * mesh.ndim
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, placements)))


def _on_mesh(mesh: DeviceMesh, x: torch.Tensor) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


DIMS = {
    "shard": ({"shard": "dp"}, (Shard(0), Replicate())),
    "replicate_and_shard": ({"shard": "tp", "replicate": "dp"}, (Replicate(), Shard(0))),
    "replicate": ({"replicate": "dp"}, (Replicate(), Replicate())),
}


def test_axes_of_data_parallelism_are_named_on_a_mesh_of_all_axes(api: Api) -> None:
    def scenario(case: str) -> None:
        options, placements = DIMS[case]
        mesh = grid("dp", "tp")
        expected, model = twins()
        _spread(model, mesh)
        shard(api, model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(**options))
        for parameter in model.parameters():
            assert parameter.placements == placements
            assert parameter.device_mesh == mesh
        spans_all = case == "replicate_and_shard"
        seed = dist.get_rank() if spans_all else mesh.get_local_rank("dp")
        x = draw(4, DIM, seed=seed)
        expected(x).square().sum().backward()
        out = model(_on_mesh(mesh, x))
        out.to_local().square().sum().backward()
        average(expected, mesh if spans_all else mesh["dp"])
        assert_equal_models(expected, model)

    on_ranks(scenario, 4, cases=DIMS)


def test_named_axes_communicate_by_their_kind(api: Api) -> None:
    def scenario(case: str, expected_counts: dict[str, int]) -> None:
        mesh = grid("dp", "tp")
        model = Stack()
        _spread(model, mesh)
        shard(api, model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(**DIMS[case][0]))
        counts, _ = count(lambda: model(_on_mesh(mesh, inputs())).to_local().sum().backward())
        assert counts == expected_counts

    on_ranks(
        scenario,
        4,
        cases=(
            ("shard", {"all_gather": 7, "reduce_scatter": 4}),
            ("replicate_and_shard", {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 4}),
            ("replicate", {"all_reduce": 4}),
        ),
    )
