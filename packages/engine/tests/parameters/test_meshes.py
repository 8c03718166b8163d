"""A step is the unsharded model's on any mesh, with parameters along any dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    Net,
    ShardPlacementResult,
    assert_gradients_equal,
    assert_weights_equal,
    case,
    descend,
    fsdp,
    inputs,
    local,
    mesh_of,
    rows_of_this_rank,
    twins,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchsPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from lamella_buffers import GlooTransport
from lamella_engine import (
    HFSDP,
    HSDP,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
)
from lamella_engine.testing import named_units, record
from lamella_testing import run_ranks

X = inputs(24)
Apply = Callable[[Any], None]


def _net() -> Net:
    return Net(num_layers=2, dim=8)


def _sharded(**options: Any) -> Apply:
    def apply(model: Net) -> None:
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)

    return apply


def _assert_equal(reference: nn.Module, sharded: nn.Module) -> None:
    for (name, expected), (other, got) in zip(reference.named_parameters(), sharded.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(
            whole(got), expected.detach(), rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name)
        )


def _assert_trains(apply: Apply) -> Net:
    """Each rank's mean over its rows, averaged over the ranks, is the mean over all rows."""
    reference, sharded = twins(_net, apply)
    for _ in range(3):
        reference(X).square().mean().backward()
        sharded(rows_of_this_rank(X)).square().mean().backward()
        for model in (reference, sharded):
            descend(model)
        assert_weights_equal(reference, sharded)
    _assert_equal(reference, sharded)
    assert isinstance(sharded, Net)
    return sharded


# -- replicas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["all", "replicas by shards", "smaller groups in backward, and one to reduce"])
def test_a_mesh_of_cpus_is_gloos_also_where_groups_have_nccl_for_gpus(
    ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As made by `init_process_group()` on a host with GPUs; NCCL's calls would reach gloo, without a wait."""

    def apply(model: Net) -> None:
        mesh = mesh_of((2, 2)) if "replicas" in ranks else init_device_mesh("cpu", (4,))
        _sharded(mesh=mesh, reshard_after_forward=2 if "smaller" in ranks else None)(model)
        if "reduce" in ranks:
            fsdp(model).set_separate_reduce_scatter_group()

    def check() -> None:
        monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
        _assert_trains(apply)

    run_ranks(check, 4)


def test_a_model_sharded_on_one_axis_and_replicated_on_another_trains_as_unsharded() -> None:
    def on_each_rank() -> None:
        model = _assert_trains(_sharded(mesh=mesh_of((2, 2))))
        assert isinstance(model.stem.weight, DTensor)
        assert model.stem.weight.placements == (Replicate(), Shard(0))
        assert model.stem.weight.to_local().shape == (4, 3)

    run_ranks(on_each_rank, 4)


def test_replicas_may_be_reduced_over_once_for_several_microbatches() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_net, _sharded(mesh=mesh_of((2, 2))))
        num_all_reduces = 0
        for group in (group for _, unit in named_units(sharded) for group in unit.parameters.groups):
            assert group.transports.replicas is not None
            real = group.transports.replicas.all_reduce

            def counted(*args: Any, real: Any = real) -> Any:
                nonlocal num_all_reduces
                num_all_reduces += 1
                return real(*args)

            group.transports.replicas.all_reduce = counted  # type: ignore[assignment, method-assign]
        for step in range(2):
            for microbatch in range(3):
                reference(X * (microbatch + 1)).square().mean().backward()
                fsdp(sharded).set_requires_all_reduce(microbatch == 2)
                sharded(rows_of_this_rank(X * (microbatch + 1))).square().mean().backward()
                has_gradients = [parameter.grad is not None for parameter in sharded.parameters()]
                assert has_gradients == [microbatch == 2] * len(has_gradients)
            assert num_all_reduces == 3 * (step + 1)  # one a unit and step
            for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
                assert expected.grad is not None and got.grad is not None
                torch.testing.assert_close(whole(got.grad), expected.grad)
            reference.zero_grad()
            sharded.zero_grad()

    run_ranks(on_each_rank, 4)


def test_zero_grad_drops_partial_gradients_kept_for_the_replicas() -> None:
    def on_each_rank() -> None:
        sharded = _net()
        _sharded(mesh=mesh_of((2, 2)))(sharded)
        fsdp(sharded).set_requires_all_reduce(False)
        sharded(rows_of_this_rank(X)).sum().backward()
        sharded.zero_grad()
        assert all(group.partial is None for _, unit in named_units(sharded) for group in unit.parameters.groups)

    run_ranks(on_each_rank, 4)


@pytest.mark.usefixtures("steps_on_shards")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision_with_replicas_equals_fsdp2(reduce_dtype: torch.dtype | None) -> None:
    def losses_of(shard: Any) -> list[float]:
        policy = TorchsPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        torch.manual_seed(0)
        model, mesh = _net(), mesh_of((2, 2))
        for unit_of in (*model.layers, model):
            shard(unit_of, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = model(rows_of_this_rank(X)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def on_each_rank() -> None:
        assert losses_of(fully_shard) == losses_of(torchs_fully_shard)

    run_ranks(on_each_rank, 4)


def _double(flat: torch.Tensor) -> None:
    flat.mul_(2)


@pytest.mark.parametrize("num_axes", [1, 2])
def test_a_hook_may_reduce_gradients_further(num_axes: int) -> None:
    def on_each_rank() -> None:
        mesh = mesh_of((2,) if num_axes == 1 else (1, 2))
        plain, hooked = _net(), _net()
        hooked.load_state_dict(plain.state_dict())
        for model in (plain, hooked):
            _sharded(mesh=mesh)(model)
        for module in (hooked, *hooked.layers):
            fsdp(module).set_all_reduce_hook(_double)
        for model in (plain, hooked):
            model(rows_of_this_rank(X)).sum().backward()
        for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(2 * whole(a.grad), whole(b.grad))

    run_ranks(on_each_rank, 2)


def test_sums_that_are_divided_afterwards_are_the_means() -> None:
    def on_each_rank() -> None:
        def apply(model: Net) -> None:
            _sharded(mesh=mesh_of((2, 2)))(model)
            for module in (model, *model.layers):
                fsdp(module).set_force_sum_reduction_for_comms(True)

        _assert_trains(apply)

    run_ranks(on_each_rank, 4)


@pytest.mark.parametrize("placements", [None, (HSDP, ZERO2), (HFSDP, ZERO3)], ids=str)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16], ids=str)
def test_a_gradient_kept_for_the_outer_axis_keeps_the_division_in_force_when_it_was_reduced(
    placements: Any, reduce_dtype: torch.dtype | None
) -> None:
    def on_each_rank() -> None:
        options = {
            "mesh": mesh_of((2, 2)),
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
            "options": ShardingOptions(placements=placements),
        }
        reference, sharded = twins(_net, _sharded(**options))
        changes: list[Callable[[Any], None]] = [
            lambda unit: None,
            lambda unit: unit.set_force_sum_reduction_for_comms(True),
            lambda unit: unit.set_gradient_divide_factor(16.0),
            lambda unit: unit.set_force_sum_reduction_for_comms(False),
            lambda unit: unit.set_gradient_divide_factor(4.0),  # the number of ranks
        ]
        for i, (change, factor) in enumerate(zip(changes, (4, 4, 16, 16, 4), strict=True)):
            for module in (sharded, *sharded.get_submodule("layers").children()):
                change(module)
            is_last = i == len(changes) - 1
            fsdp(sharded).set_is_last_backward(is_last)
            fsdp(sharded).set_requires_all_reduce(is_last)
            (reference(X).square().mean() * 4 / factor).backward()
            sharded(rows_of_this_rank(X)).square().mean().backward()
        tolerance = 1e-5 if reduce_dtype is None else 5e-3
        assert_gradients_equal(reference, sharded, rtol=tolerance, atol=tolerance / 10)

    run_ranks(on_each_rank, 4)


# -- dims and meshes of single parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parameters_may_be_sharded_along_any_dim_that_divides(dtype: torch.dtype | None) -> None:
    def last_dim(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.ndim > 1 and parameter.shape[-1] % 2 == 0 else None

    def on_each_rank() -> None:
        if dtype is None:
            model = _assert_trains(_sharded(shard_placement_fn=last_dim))
        else:
            model = _net()
            _sharded(shard_placement_fn=last_dim, mp_policy=MixedPrecisionPolicy(dtype))(model)
            model(X).sum().backward()
        weight = model.get_parameter("layers.0.up.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == (Shard(1),)
        assert weight.to_local().shape == (13, 4)
        model.layers[0].unshard()  # type: ignore[operator]
        assert model.get_parameter("layers.0.up.weight").is_contiguous()

    run_ranks(on_each_rank, 2)


def test_parameters_of_one_unit_may_lie_on_different_meshes() -> None:
    def on_each_rank() -> None:
        one, two = init_device_mesh("cpu", (4,)), mesh_of((2, 2))
        everywhere, pairs = (
            FSDPMeshInfo(one, shard_mesh_dim=0),
            HSDPMeshInfo(two, shard_mesh_dim=1, replicate_mesh_dim=0),
        )

        def place(parameter: nn.Parameter) -> Any:
            return ShardPlacementResult(Shard(0), pairs if parameter.ndim > 1 else everywhere)

        model = _assert_trains(_sharded(mesh=one, shard_placement_fn=place))
        assert {p.device_mesh.ndim for p in model.parameters() if isinstance(p, DTensor)} == {1, 2}
        with pytest.raises(
            ValueError, match=r"lie on one mesh, got several: set_all_reduce_hook is not supported with mul"
        ):
            fsdp(model).set_all_reduce_hook(lambda flat: None)

    run_ranks(on_each_rank, 4)


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        (lambda parameter: Shard(2), ValueError, r"one of the 2 dims of 'stem.weight', got dim 2"),
        (lambda parameter: Replicate(), ValueError, r"return a Shard.*got Replicate\(\)"),
        (
            lambda parameter: Shard(parameter.ndim - 1),
            NotImplementedError,
            r"dim 1 of 'stem.weight'.*\(8, 3\).*2 ranks",
        ),
    ],
)
def test_invalid_results_of_a_placement_function_are_refused_by_name(
    place: Callable[[nn.Parameter], Any], error: type[Exception], message: str
) -> None:
    def on_each_rank() -> None:
        model = _net()
        with pytest.raises(error, match=message):
            fully_shard(model, shard_placement_fn=place)
        assert type(model) is Net
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    run_ranks(on_each_rank, 2)


# -- beside further kinds of parallelism -----------------------------------------------------------------------------


@contextmanager
def _tensor_parallel(offload_policy: CPUOffloadPolicy | None = None) -> Iterator[tuple[DeviceMesh, Apply]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    def apply(model: Net) -> None:
        for layer in model.layers:
            parallelize_module(layer, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        _sharded(mesh=mesh["data"], offload_policy=offload_policy)(model)

    yield mesh, apply


@pytest.mark.parametrize("offload_policy", [None, CPUOffloadPolicy()], ids=["on_the_device", "offloaded"])
def test_tensor_parallel_parameters_are_sharded_within_each_ranks_part(offload_policy: CPUOffloadPolicy | None) -> None:
    def on_each_rank() -> None:
        with _tensor_parallel(offload_policy) as (mesh, apply):
            reference, sharded = twins(lambda: _WideNet(), apply)
            rows = X.chunk(2)[mesh["data"].get_local_rank()]
            for _ in range(3):
                reference(X).square().mean().backward()
                sharded(rows).square().mean().backward()
                for model in (reference, sharded):
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        with torch.no_grad():
                            parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
                _assert_equal(reference, sharded)
        weight = sharded.get_parameter("layers.0.up.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
        assert weight.device_mesh == mesh
        fsdp(sharded.get_submodule("layers.0")).unshard()
        unsharded = sharded.get_parameter("layers.0.up.weight")
        assert isinstance(unsharded, DTensor)
        assert unsharded.placements == (Shard(0),)

    run_ranks(on_each_rank, 4)


@pytest.mark.usefixtures("steps_on_shards")
@pytest.mark.parametrize(("shape", "num_parts"), [((2, 1, 2), 2), ((1, 2, 2), 2), ((2, 2, 2), 4)], ids=str)
def test_tensor_parallel_main_weights_are_sharded_over_both_data_axes(shape: tuple[int, ...], num_parts: int) -> None:
    """(HFSDP, ZERO3): each rank's part is cut by the inner axis, then by the outer one."""

    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner", "model"))
        data = mesh["outer", "inner"]

        def apply(model: Net) -> None:
            for layer in model.layers:
                parallelize_module(layer, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            for module in (*model.layers, model):
                fully_shard(module, mesh=data, options=ShardingOptions(placements=(HFSDP, ZERO3)))

        reference, sharded = twins(lambda: _WideNet(), apply)
        rows = X.chunk(shape[0] * shape[1])[mesh["outer"].get_local_rank() * shape[1] + mesh["inner"].get_local_rank()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (reference, sharded)]
        for _ in range(3):
            for is_last in (False, True):
                fsdp(sharded).set_is_last_backward(is_last)
                reference(X).square().mean().backward()
                sharded(rows).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_weights_equal(reference, sharded)
        _assert_equal(reference, sharded)
        for name in ("layers.0.up.weight", "layers.1.down.weight"):
            weight = sharded.get_parameter(name)
            assert isinstance(weight, DTensor)
            assert 2 * num_parts * weight.to_local().numel() == weight.numel()

    run_ranks(on_each_rank, shape[0] * shape[1] * shape[2])


class _WideNet(Net):
    """With hidden sizes divisible by two ranks, as torch's tensor parallelism requires."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, dim=8)

    def make_layer(self, dim: int) -> nn.Module:
        return type(super().make_layer(dim))(dim, 16)


@pytest.mark.parametrize(
    ("dims", "placements"),
    [
        (DataParallelMeshDims("outer", "inner"), (Shard(0), Replicate())),
        (DataParallelMeshDims(("outer", "inner")), (Shard(0),)),
        (DataParallelMeshDims(None, ("outer", "inner")), (Replicate(), Replicate())),
    ],
)
def test_the_data_axes_of_a_whole_mesh_can_be_named(dims: DataParallelMeshDims, placements: tuple[object, ...]) -> None:
    def on_each_rank() -> None:
        mesh = mesh_of((2, 2))

        def apply(model: Net) -> None:
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = nn.Parameter(
                            distribute_tensor(parameter.data, mesh, [Replicate()] * 2)
                        )
            _sharded(mesh=mesh, dp_mesh_dims=dims)(model)

        reference, sharded = twins(_net, apply)
        rows = DTensor.from_local(rows_of_this_rank(X), mesh, [Shard(0), Shard(0)], run_check=False)
        for _ in range(2):
            reference(X).square().mean().backward()
            sharded(rows).square().mean().full_tensor().backward()
            for model, scale in ((reference, 1.0), (sharded, 4.0)):  # the loss is all ranks' already
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    with torch.no_grad():
                        local(parameter).sub_(local(parameter.grad), alpha=0.1 * scale)
                    parameter.grad = None
            assert_weights_equal(reference, sharded)
        weight = sharded.get_parameter("stem.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == placements

    run_ranks(on_each_rank, 4)


def test_meshes_that_name_no_data_axes_are_refused() -> None:
    def on_each_rank() -> None:
        named = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
        unnamed = init_device_mesh("cpu", (1, 1))
        cases: list[tuple[dict[str, Any], str]] = [
            ({"mesh": named}, "1D or 2D DeviceMesh but got"),
            ({"mesh": unnamed}, "whose axes have names, got none"),
            ({"mesh": named, "dp_mesh_dims": DataParallelMeshDims("d")}, "got 'd'"),
            ({"mesh": unnamed, "dp_mesh_dims": DataParallelMeshDims("a")}, "to have mesh_dim_names"),
            ({"mesh": named, "dp_mesh_dims": DataParallelMeshDims("a")}, "'weight' to be on the whole mesh"),
        ]
        for options, message in cases:
            with case(message), pytest.raises(ValueError, match=message):
                fully_shard(nn.Linear(2, 2), **options)

    run_ranks(on_each_rank, 1)


# -- a smaller group between forward and backward --------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_backward_may_gather_from_a_few_neighbours(mesh_shape: tuple[int, ...]) -> None:
    neighbours = mesh_shape[-1] // 2 if len(mesh_shape) == 1 else 2

    def on_each_rank() -> None:
        mesh = mesh_of(mesh_shape)
        _assert_trains(_sharded(mesh=mesh, reshard_after_forward=neighbours))

    run_ranks(on_each_rank, 4)


def test_neighbours_are_found_on_an_axis_of_which_each_rank_knows_only_its_own_part() -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model"))["data"]
        reference, sharded = twins(lambda: Net(num_layers=1, dim=8), _sharded(mesh=mesh, reshard_after_forward=2))
        for model in (reference, sharded):
            model(X).square().mean().backward()
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert expected.grad is not None and got.grad is not None
            torch.testing.assert_close(whole(got.grad), expected.grad)

    run_ranks(on_each_rank, 8)


def test_between_forward_and_backward_each_rank_keeps_its_part_and_only_neighbours_gather() -> None:
    def on_each_rank() -> None:
        model = _net()
        _sharded(reshard_after_forward=2)(model)
        log = record(model)
        loss = model(X).square().mean()
        group = next(unit for name, unit in named_units(model) if name == "layers.0").parameters.groups[0]
        assert group.parts is not None
        parts_nbytes = sum(part.nbytes for part in group.parts)
        assert 2 * parts_nbytes == sum(slot.nbytes for slot in group.unsharded_weight.slots)
        assert group.unsharded_weight.flat.untyped_storage().nbytes() == 0
        loss.backward()
        assert log.units_of("gather") == ["root", "layers.0", "layers.1"]  # backward's gathers went to the neighbours
        assert all(group.parts is None for _, unit in named_units(model) for group in unit.parameters.groups)
        with torch.no_grad():
            model(X)
        assert all(group.parts is None for _, unit in named_units(model) for group in unit.parameters.groups)

    run_ranks(on_each_rank, 4)


def test_units_share_the_communicator_of_their_neighbours() -> None:
    def on_each_rank() -> None:
        model = Net()
        _sharded(reshard_after_forward=2)(model)
        neighbours = [
            group.transports.neighbours
            for name, unit in named_units(model)
            if name != "root"
            for group in unit.parameters.groups
        ]
        assert len({transport.process_group for transport in neighbours if isinstance(transport, GlooTransport)}) == 1
        assert all(isinstance(transport, GlooTransport) for transport in neighbours)

    run_ranks(on_each_rank, 4)


def test_parts_that_were_made_stale_are_not_used() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_net, _sharded(reshard_after_forward=2))
        for model in (reference, sharded):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            model(X).mean().backward()
            model(X)  # leaves parts behind: no backward follows
            optimizer.step()
        torch.testing.assert_close(sharded(X), reference(X))
        for model in (reference, sharded):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        torch.testing.assert_close(sharded(X), reference(X))

    run_ranks(on_each_rank, 4)


@pytest.mark.parametrize(("value", "message"), [(3, "factor of 4.*got 3"), (0, "got 0"), ("2", "got '2'")])
def test_a_number_of_neighbours_that_cannot_be_is_refused(value: Any, message: str) -> None:
    def on_each_rank() -> None:
        module = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=message):
            fully_shard(module, reshard_after_forward=value)
        assert type(module) is nn.Linear
        assert dist.is_initialized()

    run_ranks(on_each_rank, 4)
