"""Each ZeRO stage trains as the unsharded model does, rests in the bytes its placements say, and gathers no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import (
    EVERY_STAGE,
    ONE_AXIS,
    SOME_STAGES,
    Net,
    assert_weights_equal,
    case,
    descend,
    fsdp,
    inputs,
    rows_of_this_rank,
    sgd,
    shard_on,
    twins,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lamella_engine import (
    DDP,
    HFSDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    AxisPlacement,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
)
from lamella_engine.testing import CollectiveLog, named_units, record
from lamella_testing import run_ranks

X = inputs(24)
ONE_AXIS_ONLY = pytest.mark.parametrize("stage", ONE_AXIS)


def _net() -> Net:
    """Some dims divide over four ranks, and some do not."""
    return Net(dim=8)


def _num_ranks(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _counted(model: nn.Module) -> tuple[CollectiveLog, list[str]]:
    """The log of the shard axis's collectives, and the units that reduced over replicas."""
    all_reduced: list[str] = []
    for name, unit in named_units(model):
        for group in unit.parameters.groups:
            if group.transports.replicas is not None:
                group.transports.replicas = _NotingTransport(group.transports.replicas, name, all_reduced)  # type: ignore[assignment]
    return record(model), all_reduced


class _NotingTransport:
    """A transport that notes reductions by unit."""

    def __init__(self, inner: Any, name: str, noted: list[str]) -> None:
        self._inner, self._name, self._noted = inner, name, noted

    def all_reduce(self, *args: Any) -> Any:
        self._noted.append(self._name)
        return self._inner.all_reduce(*args)


def _assert_equal(reference: nn.Module, sharded: nn.Module) -> None:
    for (name, expected), got in zip(reference.named_parameters(), sharded.parameters(), strict=True):
        with case(name):
            assert isinstance(got, DTensor)
            torch.testing.assert_close(whole(got), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_every_zero_stage_trains_as_unsharded_with_several_microbatches(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def train(*, set_to_none: bool) -> None:
        reference, sharded = twins(_net, shard_on(shape, options=ShardingOptions(placements=placements)))
        optimizers = [sgd(list(model.parameters())) for model in (reference, sharded)]
        for _ in range(3):
            for microbatch in range(2):
                batch = X * (microbatch + 1)
                fsdp(sharded).set_is_last_backward(microbatch == 1)
                expected = reference(batch).square().mean()
                expected.backward()
                sharded(rows_of_this_rank(batch)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            assert_weights_equal(reference, sharded)
        _assert_equal(reference, sharded)
        with torch.no_grad():
            torch.testing.assert_close(sharded(X), reference(X), rtol=1e-5, atol=1e-6)

    def on_each_rank() -> None:
        for set_to_none in (True, False):
            with case(f"set_to_none={set_to_none}"):
                train(set_to_none=set_to_none)

    run_ranks(on_each_rank, _num_ranks(shape))


@pytest.mark.usefixtures("steps_on_shards")
@SOME_STAGES
def test_a_loop_that_knows_nothing_of_last_backwards_is_right_too(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def on_each_rank() -> None:
        reference, sharded = twins(_net, shard_on(shape, options=ShardingOptions(placements=placements)))
        for _ in range(2):
            for model, batch in ((reference, X), (sharded, rows_of_this_rank(X))):
                for scale in (1, 2):
                    model(batch * scale).square().mean().backward()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer.step()
                optimizer.zero_grad()
            assert_weights_equal(reference, sharded)

    run_ranks(on_each_rank, _num_ranks(shape))


def test_with_main_weights_on_both_axes_the_outer_one_is_used_once_a_step_each_way() -> None:
    def on_each_rank() -> None:
        model = Net(dim=8)  # 8 rows divide over 4 ranks; 13, 5 and 1 do not, and lie whole on the outer axis
        shard_on(
            (2, 2), options=ShardingOptions(placements=(HFSDP, ZERO3)), mp_policy=MixedPrecisionPolicy(torch.bfloat16)
        )(model)
        cut = [
            group
            for _, unit in named_units(model)
            for group in unit.parameters.groups
            if group.transports.outer is not None
        ]
        assert len(cut) == 4
        used: list[str] = []
        for group in cut:
            noting: Any = _NotingOuter(group.transports.outer, used)
            group.transports.outer = noting
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for microbatch in range(3):
                fsdp(model).set_is_last_backward(microbatch == 2)
                model(X).float().square().mean().backward()
            assert used.count("gather") == used.count("reduce") == len(cut) * (step + 1)
            optimizer.step()
            optimizer.zero_grad()
        weight = model.stem.weight
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape == (2, 3)
        assert cut[-1].main_weight.flat.numel() < cut[-1].layout.shard_numel
        assert all(
            model_weight.dtype == torch.bfloat16 for group in cut for model_weight in group.model_weights.values()
        )

    run_ranks(on_each_rank, 4)


class _NotingOuter:
    """A transport that notes its calls."""

    def __init__(self, inner: Any, noted: list[str]) -> None:
        self._inner, self._noted = inner, noted
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def all_gather(self, payloads: Any) -> Any:
        self._noted.append("gather")
        return self._inner.all_gather(payloads)

    def reduce_scatter(self, *args: Any) -> Any:
        self._noted.append("reduce")
        return self._inner.reduce_scatter(*args)


# Communication of two steps of two microbatches each, a unit: gathers of 3 blocks and the outermost unit.
@pytest.mark.usefixtures("steps_on_shards")
@pytest.mark.parametrize(
    ("stage", "gathers", "reductions", "all_reductions"),
    [
        ("DDP", {"layers.0": 2, "root": 2}, 2, 2),  # gathers are on an axis of one rank: copies, or nothing
        ("ZERO1", {"layers.0": 2, "root": 2}, 2, 0),
        ("ZERO2", {"layers.0": 2, "root": 2}, 4, 0),
        ("ZERO3", {"layers.0": 8, "root": 4}, 4, 0),
        ("HSDP, ZERO2", {"layers.0": 2, "root": 2}, 4, 2),
        ("HSDP, ZERO3", {"layers.0": 8, "root": 4}, 4, 2),
    ],
)
def test_every_zero_stage_issues_the_expected_number_of_collectives(
    stage: str, gathers: dict[str, int], reductions: int, all_reductions: int
) -> None:
    shape, placements = EVERY_STAGE[stage]

    def on_each_rank() -> None:
        sharded = Net()
        shard_on(shape, options=ShardingOptions(placements=placements))(sharded)
        log, all_reduced = _counted(sharded)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for _ in range(2):
            for microbatch in range(2):
                fsdp(sharded).set_is_last_backward(microbatch == 1)
                sharded(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, num_gathers in gathers.items():
            assert log.units_of("gather").count(name) == num_gathers, name
            assert log.units_of("reduce").count(name) == reductions, name
            assert all_reduced.count(name) == all_reductions, name

    run_ranks(on_each_rank, _num_ranks(shape))


@pytest.mark.usefixtures("steps_on_shards")
@ONE_AXIS_ONLY
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_at_rest_every_zero_stage_holds_the_bytes_of_its_placements(
    stage: str, param_dtype: torch.dtype | None
) -> None:
    def on_each_rank() -> None:
        model = Net(dim=8)
        numel = sum(parameter.numel() for parameter in model.parameters())
        shard_on(options=ShardingOptions(placements=ONE_AXIS[stage]), mp_policy=MixedPrecisionPolicy(param_dtype))(
            model
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        storages = {}
        for _, unit in named_units(model):
            for group in unit.parameters.groups:
                for flat in (group.main_weight.flat, group.unsharded_weight.flat):
                    storages[flat.untyped_storage()._cdata] = flat.untyped_storage().nbytes()
        main = numel * 4 // (1 if stage == "DDP" else 2)
        copy = numel * (4 if param_dtype is None else 2) if stage in ("ZERO1", "ZERO2") else 0
        if stage == "DDP" and param_dtype is not None:
            copy = numel * 2
        padding = 256 * 8 * sum(1 for _ in model.parameters())
        assert main + copy <= sum(storages.values()) <= main + copy + padding
        assert all(parameter.grad is None for parameter in model.parameters())

    run_ranks(on_each_rank, 2)


def test_between_microbatches_stage_one_keeps_whole_gradients_and_stage_two_shards() -> None:
    def on_each_rank() -> None:
        for stage, keeps_whole in ((ZERO1, True), (ZERO2, False), (ZERO3, False)):
            model = Net()
            shard_on(options=ShardingOptions(placements=stage))(model)
            fsdp(model).set_is_last_backward(False)
            model(X).square().mean().backward()
            parameters = [
                p for _, unit in named_units(model) for group in unit.parameters.groups for p in group.parameters
            ]
            assert all(parameter.has_gradient == keeps_whole for parameter in parameters)
            assert all((parameter.sharded.grad is None) == keeps_whole for parameter in parameters)

    run_ranks(on_each_rank, 2)


def _by_optimizer(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=value).step()


def _by_hand(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(value)
    fsdp(model).mark_updated()


def _by_state_dict(model: nn.Module, value: float) -> None:
    model.load_state_dict({name: tensor + value for name, tensor in model.state_dict().items()})


def _through_references(model: nn.Module, value: float) -> None:
    """As torch's DCP loads: into the tensors of a state dict."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(value)


def _by_backward_and_an_unknown_optimizer(model: nn.Module, value: float) -> None:
    model(X).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(value)


@ONE_AXIS_ONLY
def test_model_weights_are_made_anew_after_any_write_to_main_weights(stage: str) -> None:
    def write_and_compare(write: Callable[[nn.Module, float], None]) -> None:
        model = Net()
        shard_on(options=ShardingOptions(placements=ONE_AXIS[stage]))(model)
        with torch.no_grad():
            model(X)
        write(model, 0.25)
        plain = Net()
        plain.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()})
        with torch.no_grad():
            torch.testing.assert_close(model(X), plain(X))

    def on_each_rank() -> None:
        for write in (
            _by_optimizer,
            _by_hand,
            _by_state_dict,
            _through_references,
            _by_backward_and_an_unknown_optimizer,
        ):
            with case(write.__name__):
                write_and_compare(write)

    run_ranks(on_each_rank, 2)


def test_modules_hold_dtensors_between_steps_and_optimizers_made_late_train() -> None:
    def on_each_rank() -> None:
        model = Net()
        shard_on(options=ShardingOptions(placements=ZERO1))(model)
        model(X).square().mean().backward()
        before = [whole(parameter).clone() for parameter in model.parameters()]
        assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not any(torch.equal(whole(p), old) for p, old in zip(model.parameters(), before, strict=True))

    run_ranks(on_each_rank, 2)


def test_sharded_parameters_lie_as_its_placements_say() -> None:
    def on_each_rank() -> None:
        for shape, placements, expected in (
            ((2,), DDP, (Replicate(),)),
            ((2,), ZERO1, (Shard(0),)),
            ((1, 2), (HSDP, ZERO2), (Replicate(), Shard(0))),
            ((1, 2), (HFSDP, ZERO3), (_StridedShard(0, split_factor=2), Shard(0))),
        ):
            model = _net()
            shard_on(shape, options=ShardingOptions(placements=placements))(model)
            weight = model.get_parameter("layers.0.down.weight")
            assert isinstance(weight, DTensor)
            assert weight.placements == expected

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(
    ("shape", "placements", "options", "message"),
    [
        ((1,), (HSDP, ZERO3), {}, r"each of the 1 axes.*got 2"),
        ((1, 1), ZERO3, {}, r"each of the 2 axes.*got 1"),
        ((1,), HSDP, {}, r"one of DDP, ZERO1, ZERO2, ZERO3 .*got HSDP"),
        ((1, 1), (ZERO1, ZERO3), {}, r"one of HSDP, HFSDP .*got ZERO1"),
        ((1, 1), (HFSDP, ZERO2), {}, r"one of ZERO3 .*got ZERO2"),
        ((1, 1), (HSDP, DDP), {}, r"one of ZERO1, ZERO2, ZERO3 .*got DDP"),
        ((1,), ZERO2, {"reshard_after_forward": True}, r"no `reshard_after_forward`.*got True"),
        ((1,), AxisPlacement(Shard(0), Shard(0), Replicate()), {}, r"got AxisPlacement"),
    ],
)
def test_placements_that_cannot_be_are_refused(
    shape: tuple[int, ...], placements: Any, options: dict[str, Any], message: str
) -> None:
    def on_each_rank() -> None:
        model = Net()
        with pytest.raises(ValueError, match=message):
            shard_on(shape, options=ShardingOptions(placements=placements), **options)(model)
        assert type(model.layers[0]).__name__ == "Residual"

    run_ranks(on_each_rank, 1)


def test_main_weights_sharded_along_another_dim_lie_whole_on_the_outer_axis() -> None:
    def last_dim(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 4 == 0 else None

    def on_each_rank() -> None:
        reference, sharded = twins(
            _net, shard_on((2, 2), options=ShardingOptions(placements=(HFSDP, ZERO3)), shard_placement_fn=last_dim)
        )
        for model, batch in ((reference, X), (sharded, rows_of_this_rank(X))):
            model(batch).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        _assert_equal(reference, sharded)
        weight = sharded.get_parameter("layers.0.up.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == (Replicate(), Shard(1))

    run_ranks(on_each_rank, 4)


class _Skipping(Net):
    """Passes over the second block on demand."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, layer in enumerate(self.layers):
            x = x if self.skips and i == 1 else layer(x)
        head: torch.Tensor = self.head(x)
        return head


@SOME_STAGES
def test_gradients_of_a_unit_that_the_last_microbatch_passes_over_are_reduced_all_the_same(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def on_each_rank() -> None:
        reference, sharded = twins(
            lambda: _Skipping(dim=8), shard_on(shape, options=ShardingOptions(placements=placements))
        )
        for _ in range(2):
            for is_last in (False, True):
                fsdp(sharded).set_is_last_backward(is_last)
                for model, batch in ((reference, X), (sharded, rows_of_this_rank(X))):
                    assert isinstance(model, _Skipping)
                    model.skips = is_last
                    model(batch).square().mean().backward()
            for model in (reference, sharded):  # by hand: no copy may outlive the last backward
                assert all(parameter.grad is not None for parameter in model.parameters())
                descend(model)
            assert_weights_equal(reference, sharded)
        assert all(group.partial is None for _, unit in named_units(sharded) for group in unit.parameters.groups)

    run_ranks(on_each_rank, _num_ranks(shape))


@ONE_AXIS_ONLY
def test_a_stage_may_lie_on_a_named_axis_of_a_whole_mesh(stage: str) -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

        def make() -> nn.Module:
            """Of few operators: DTensor plans each of forward and backward anew on every rank."""
            return nn.Sequential(*(nn.Linear(width, 5, bias=False) for width in (3, 5)))

        def apply(model: nn.Sequential) -> None:
            for module in model:
                weight = distribute_tensor(module.get_parameter("weight").data, mesh, [Replicate()] * 2)
                module.register_parameter("weight", nn.Parameter(weight))
            for unit in (model[0], model):
                dims = DataParallelMeshDims("data")
                fully_shard(unit, mesh=mesh, dp_mesh_dims=dims, options=ShardingOptions(placements=ONE_AXIS[stage]))

        reference, sharded = twins(make, apply)
        rows = X.chunk(2)[mesh["data"].get_local_rank()]
        reference(X).square().mean().backward()
        batch = DTensor.from_local(rows, mesh, [Shard(0), Replicate()], run_check=False)
        sharded(batch).square().mean().full_tensor().backward()
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert expected.grad is not None and got.grad is not None
            torch.testing.assert_close(2 * whole(got.grad), expected.grad)  # the loss is both ranks' already

    run_ranks(on_each_rank, 4)
