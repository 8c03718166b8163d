"""The flat layout: rows, blocks of rows and whole tensors stay together, and everything else is as in the even one."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine_models import (
    Net,
    adamw,
    assert_at_rest,
    assert_gradients_equal,
    assert_shard_equals,
    assert_trains_alike,
    assert_weights_equal,
    case,
    inputs,
    mean_square,
    no_gradient_sync,
    record,
    rows_of_this_rank,
    sgd,
    shard,
    twins,
    unit,
    units,
    whole,
)
from test_main_grads import FusedNet, fuse
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
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
    Whole,
    _flat_group,
    clip_grad_norm_,
    find_nonfinite,
    fully_shard,
    fully_shard_model,
    parameter_norms,
)
from lamella_engine._parameter_group import ParameterGroup
from lamella_engine._ragged import torch_asks_subclasses
from lamella_layout import FlatLayout, Keep, RaggedShard
from lamella_testing import run_ranks

pytestmark = pytest.mark.skipif(
    not torch_asks_subclasses(), reason="torch before 2.12 does not ask subclasses of DTensor how they compute"
)

X = inputs()
LOSS = mean_square(lambda model: model(X))


@pytest.fixture(autouse=True)
def _small_parameters_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the engine's own alignment no parameter of these models would be cut."""
    monkeypatch.setattr(_flat_group, "ALIGNMENT", 2)


def _matrices_only(parameter: nn.Parameter) -> Keep | None:
    return Rows(2) if parameter.ndim == 2 else None


KEEPS: dict[str, Any] = {
    "rows": Rows(1),
    "blocks": Rows(3),
    "whole": Whole(),
    "some in the even layout": _matrices_only,
}


def _flat(keep: Any, **options: Any) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        assert isinstance(model, Net)
        for module in (*model.layers, model):
            fully_shard(module, keep=keep, **options)

    return apply


def _groups(model: nn.Module) -> list[ParameterGroup]:
    return [group for _, state in units(model) for group in state.groups]


def _layouts(model: nn.Module) -> list[FlatLayout]:
    return [group.layout for group in _groups(model) if isinstance(group.layout, FlatLayout)]


# -- training -------------------------------------------------------------------------------------------------------

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
def test_every_stage_takes_the_unsharded_steps_whatever_stays_together(stage: str) -> None:
    shape, placements = STAGES[stage]

    def check() -> int:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        num_cut = 0
        for name, keep in KEEPS.items():
            with case(name):
                reference, sharded = twins(Net, _flat(keep, mesh=mesh, placements=placements))
                optimizers = [sgd(list(model.parameters())) for model in (reference, sharded)]
                for step in range(3):
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


def test_what_stays_together_is_on_one_rank_and_layouts_cut_some_parameters() -> None:
    def check() -> None:
        _, sharded = twins(Net, _flat(Rows(3)))
        bounds = {name: p.placements[0].bounds for name, p in sharded.named_parameters()}  # type: ignore[attr-defined]
        for name, parameter in sharded.named_parameters():
            inner = [bound for bound in bounds[name] if 0 < bound < len(parameter)]
            assert all(bound % 3 == 0 for bound in inner)
        assert any(0 < bound < 13 for bound in bounds["layers.0.up.weight"])
        _, sharded = twins(Net, _flat(Whole()))
        for parameter in sharded.parameters():
            assert isinstance(parameter, DTensor)
            assert len(parameter.to_local()) in (0, len(parameter))

    run_ranks(check, 3)


def test_at_the_engines_alignment_starts_and_shards_are_multiples_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def check() -> None:
        reference, sharded = twins(lambda: Net(num_layers=2, dim=32), _flat(Rows(1)))
        assert_trains_alike(reference, sharded, LOSS)
        for layout in _layouts(sharded):
            assert layout.alignment == 256
            assert layout.shard_numel % 256 == 0

    run_ranks(check, 2)


def test_bf16_compute_takes_the_steps_of_the_even_layout() -> None:
    """Sums of two ranks' gradients have one order, whatever they travel in: bit by bit."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def check() -> None:
        for policy_, options in ((policy, {}), (MixedPrecisionPolicy(torch.bfloat16), {"placements": ZERO2})):
            results = []
            for keep in (None, Rows(2)):
                torch.manual_seed(0)
                model = Net()
                _flat(keep, mp_policy=policy_, **options)(model)
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
        reference, sharded = twins(Net, _flat(Rows(1), reshard_after_forward=reshard_after_forward))
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 4)


def test_microbatches_and_unused_parameters_are_as_in_the_even_layout() -> None:
    def check() -> None:
        for placements in (ZERO1, ZERO2, ZERO3):
            reference, sharded = twins(Net, _flat(Rows(1), placements=placements))
            for model in (reference, sharded):
                model.get_submodule("head").bias.requires_grad_(False)
            with no_gradient_sync(sharded):
                for model in (reference, sharded):
                    LOSS(model).backward()
            for model in (reference, sharded):
                model.layers = model.layers[:2]  # type: ignore[assignment, index]
                LOSS(model).backward()
            assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_gradients_that_layers_add_to_buffers_are_reduced_as_those_of_autograd() -> None:
    def check() -> None:
        reference, sharded = twins(FusedNet, _flat(Rows(1)))
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
        reference, sharded = twins(Net, partial(fully_shard_model, units="layers.*", keep=Rows(1), verbose=False))
        assert all(isinstance(parameter, RaggedDTensor) for parameter in sharded.parameters())
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_shards_that_rest_on_the_cpu_and_optimizers_from_before_sharding_take_the_unsharded_steps() -> None:
    def check() -> None:
        apply = _flat(Rows(1), offload_policy=CPUOffloadPolicy(pin_memory=False))
        reference, sharded = twins(Net, apply)
        assert_trains_alike(reference, sharded, LOSS)
        torch.manual_seed(0)
        reference = Net()
        sharded = copy.deepcopy(reference)
        optimizers = [adamw(list(model.parameters())) for model in (reference, sharded)]
        for step in range(3):
            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                LOSS(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 0:
                _flat(Rows(1))(sharded)
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
        assert all(isinstance(state["exp_avg"], RaggedDTensor) for state in optimizers[1].state.values())

    run_ranks(check, 3)


# -- communication --------------------------------------------------------------------------------------------------


def test_a_unit_is_gathered_and_reduced_as_one_payload_in_place() -> None:
    def check() -> None:
        _, sharded = twins(Net, _flat(Rows(1)))
        groups = {name: state.groups for name, state in units(sharded)}
        assert all(len(found) == 1 for found in groups.values())
        log = record(sharded)
        LOSS(sharded).backward()
        nbytes = {name: 4 * found[0].layout.full_numel for name, found in groups.items()}
        gathers = [event for event in log.events if event.kind == "gather"]
        assert [event.nbytes for event in gathers] == [nbytes[event.unit] for event in gathers]
        assert sorted(log.units_of("gather")) == sorted([*groups, *(name for name in groups if name != "root")])
        assert sorted(log.units_of("reduce")) == sorted(groups)

        layer = unit(sharded.get_submodule("layers.0"))
        layer.unshard()
        (group,) = groups["layers.0"]
        flat, layout = group.unsharded_weight.flat, group.layout
        for i, parameter in enumerate(group.parameters):
            assert parameter.unsharded.data_ptr() == flat.data_ptr() + 4 * layout.tensor_range(i).start
        assert group.unsharded_weight.slots[0].data_ptr() == flat.data_ptr()
        assert len(group.unsharded_weight.slots) == 1

    run_ranks(check, 3)


def test_both_layouts_of_a_unit_travel_in_one_call() -> None:
    def check() -> None:
        _, sharded = twins(Net, _flat(_matrices_only))
        log = record(sharded)
        LOSS(sharded).backward()
        names = [name for name, _ in units(sharded)]
        assert all(len(state.groups) == 2 for _, state in units(sharded))
        assert sorted(log.units_of("reduce")) == sorted(names)
        assert len(log.units_of("gather")) == 2 * len(names) - 1

    run_ranks(check, 2)


# -- the tensors ----------------------------------------------------------------------------------------------------


def _weight(model: nn.Module) -> RaggedDTensor:
    parameter = model.get_parameter("layers.0.up.weight").detach()
    assert isinstance(parameter, RaggedDTensor)
    return parameter


def _on_each_mesh(check: Callable[[RaggedDTensor, torch.Tensor], None]) -> None:
    """A ragged weight and its whole value, on one axis, with replicas, and over two axes."""

    def on_each_rank() -> None:
        for shape, placements in (((4,), ZERO3), ((2, 2), (HSDP, ZERO3)), ((2, 2), (HFSDP, ZERO3))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
            reference, sharded = twins(Net, _flat(Rows(1), mesh=mesh, placements=placements))
            with case(placements):
                check(_weight(sharded), reference.get_parameter("layers.0.up.weight").detach())

    run_ranks(on_each_rank, 4)


def test_the_whole_tensor_is_the_original_bit_by_bit() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        assert torch.equal(ragged.full_tensor(), value)
        ragged.zero_()
        ragged.to_local().neg_()  # -0.0, which a sum of floats would lose
        assert ragged.full_tensor().signbit().all()
        as_mask = ragged == 0
        assert as_mask.full_tensor().dtype is torch.bool
        assert as_mask.full_tensor().all()
        halves = (ragged + 0.5).to(torch.bfloat16)
        assert halves.full_tensor().dtype is torch.bfloat16
        assert (halves.full_tensor() == 0.5).all()

    _on_each_mesh(check)


def test_it_is_redistributed_as_torch_would_have_distributed_it() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        for placement in (Replicate(), Shard(0), Shard(1)):
            placements = [Replicate()] * (ragged.device_mesh.ndim - 1) + [placement]
            got, expected = (
                ragged.redistribute(placements=placements),
                distribute_tensor(value, ragged.device_mesh, placements, src_data_rank=None),
            )
            assert type(got) is DTensor
            assert got.placements == expected.placements
            assert torch.equal(got.to_local(), expected.to_local())
        assert ragged.redistribute(placements=ragged.placements) is ragged
        with pytest.raises(NotImplementedError, match="torch's own"):
            ragged.redistribute(placements=[RaggedShard((0,) * ragged.device_mesh.size() + (13,))])

    _on_each_mesh(check)


def test_gradients_pass_through_the_whole_the_local_and_sums() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        ragged = ragged.requires_grad_()
        value = value.clone().requires_grad_()
        (value**3).sum().backward()
        assert value.grad is not None
        for loss in (
            lambda: (ragged.full_tensor() ** 3).sum(),
            lambda: (ragged.to_local() ** 3).sum(),
            lambda: (ragged**3).sum().to_local(),
            lambda: (ragged.redistribute(placements=[Replicate()] * ragged.device_mesh.ndim) ** 3).sum().to_local(),
        ):
            ragged.grad = None
            loss().backward()
            assert_shard_equals(ragged.grad, value.grad, "gradient", rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]

    _on_each_mesh(check)


def test_norms_sums_and_extremes_are_of_all_ranks() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        for compute in (
            *(partial(torch.linalg.vector_norm, ord=p) for p in (0, 1, 2, 3.5, math.inf)),
            *(partial(torch.norm, p=p) for p in (1, 2, math.inf)),
            *(lambda x, p=p: torch._foreach_norm([x, x], p)[1] for p in (1, 2, math.inf)),
            *(torch.sum, torch.mean, torch.max, torch.min, torch.amax, torch.amin),
            lambda x: x.isfinite().all(),
            lambda x: x.isnan().any(),
            lambda x: x.norm(dtype=torch.float64),
        ):
            got, expected = compute(ragged), compute(value)
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.to_local(), expected)
        torch.testing.assert_close(float(ragged.abs().max()), float(value.abs().max()))
        for bad in (math.nan, math.inf):
            if len(ragged.to_local()):
                ragged.to_local().view(-1)[-1] = bad  # on every rank that has any
            assert not ragged.isfinite().all()
            for p in (2, math.inf):
                got = torch.linalg.vector_norm(ragged, p).to_local()
                assert torch.isnan(got) if math.isnan(bad) else torch.isinf(got)
            for extreme in (ragged.max(), ragged.min()) if math.isnan(bad) else ():
                assert torch.isnan(extreme.to_local())

    _on_each_mesh(check)


def test_operands_that_lie_otherwise_are_cut_or_refused_and_never_mixed_up() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        mesh, axes = ragged.device_mesh, ragged.device_mesh.ndim
        replicated = distribute_tensor(value, mesh, [Replicate()] * axes, src_data_rank=None)
        assert_shard_equals(ragged + replicated, 2 * value, "sum", rtol=0, atol=0)
        assert_shard_equals(ragged * ragged.sum(), value * value.sum(), "product", rtol=1e-5, atol=1e-7)
        even = distribute_tensor(value, mesh, [Shard(0)] * axes, src_data_rank=None)
        for other in (even, value, value[0], value[:, :1]):
            with pytest.raises(NotImplementedError, match="lie alike"):
                ragged + other
            with pytest.raises(NotImplementedError, match="lie alike"):
                torch._foreach_add_([ragged], [other])
        with pytest.raises(NotImplementedError, match="to write into"):
            replicated.add_(ragged)
        with pytest.raises(NotImplementedError, match="to write into"):
            torch._foreach_add_([replicated], [ragged])
        # Made by code that reads placements and does not know this one.
        unaware = DTensor(value, ragged._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        with pytest.raises(NotImplementedError):
            ragged + unaware
        with pytest.raises(NotImplementedError):
            ragged.copy_(unaware)

    _on_each_mesh(check)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": lambda x: x.view(-1),
    "a reshape": lambda x: x.reshape(7, 13),
    "a product": lambda x: x @ torch.ones(7, 2),
    "a product with itself": lambda x: x @ x,
    "a transpose": lambda x: x.t(),
    "a row": lambda x: x[0],
    "rows": lambda x: x[2:5],
    "a concatenation": lambda x: torch.cat([x, x]),
    "sums along a dim": lambda x: x.sum(0),
    "norms along a dim": lambda x: torch.norm(x, dim=-1, keepdim=True),
    "a norm of negative order": lambda x: torch.linalg.vector_norm(x, -1),
    "a running sum": lambda x: x.cumsum(0),
    "a softmax": lambda x: x.softmax(0),
    "a comparison": lambda x: torch.equal(x, x + 0),
    "a deviation": lambda x: x.std(),
    "the largest of each": lambda x: torch._foreach_max([x]),
    "random numbers of the same shape": lambda x: torch.rand_like(x),
    "another shape": lambda x: x.new_zeros(13, 1),
    "a mean of rows": lambda x: x.mean(0),
    "the largest and their places": lambda x: x.max(0),
    "writing rows": lambda x: x.__setitem__(0, 1.0),
}


def test_everything_else_is_refused_on_every_rank_with_the_way_out() -> None:
    def check() -> None:
        _, sharded = twins(Net, _flat(Rows(1)))
        for name, compute in REFUSED.items():
            with case(name), pytest.raises(NotImplementedError, match="full_tensor"):
                compute(_weight(sharded))

    run_ranks(check, 3)


def test_masks_write_elementwise() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        value = value.clone()
        for tensor in (ragged, value):
            tensor[tensor > 0] = -1.0
            tensor.masked_fill_(tensor < -0.2, 2.0)
        assert_shard_equals(ragged, value, "masked", rtol=0, atol=0)

    _on_each_mesh(check)


def test_random_numbers_are_the_unsharded_tensors_and_replicas_agree_whatever_their_seeds() -> None:
    def check(ragged: RaggedDTensor, value: torch.Tensor) -> None:
        value = value.clone()
        for draw in (
            nn.init.kaiming_uniform_,
            nn.init.xavier_normal_,
            partial(nn.init.trunc_normal_, std=0.5),
            lambda x: x.bernoulli_(0.3),
        ):
            for tensor in (ragged, value):
                torch.manual_seed(3)
                draw(tensor)
            assert_shard_equals(ragged, value, "drawn", rtol=0, atol=0)
        torch.manual_seed(dist.get_rank())
        ragged.normal_()
        wholes: list[Any] = [None] * 4
        dist.all_gather_object(wholes, ragged.full_tensor())
        assert all(torch.equal(other, wholes[0]) for other in wholes)

    _on_each_mesh(check)


# -- gradients' norms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_is_the_unsharded_models_with_torchs_function_and_with_ours(norm_type: float, foreach: bool) -> None:
    def check() -> None:
        for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_):
            for keep in (Rows(1), Whole()):
                reference, sharded = twins(Net, _flat(keep))
                norms = []
                for model in (reference, sharded):
                    LOSS(model).backward()
                    norms.append(clip(model.parameters(), 0.1, norm_type, foreach=foreach))
                torch.testing.assert_close(whole(norms[1]), norms[0])
                assert norms[0] > 0.1
                assert_gradients_equal(reference, sharded)

    run_ranks(check, 3)


def test_clipping_with_torchs_function_takes_both_layouts_at_once() -> None:
    def check() -> None:
        reference, sharded = twins(Net, _flat(_matrices_only))
        for model in (reference, sharded):
            LOSS(model).backward()
        expected, got = (nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (reference, sharded))
        torch.testing.assert_close(whole(got), expected)
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 3)


@pytest.mark.parametrize("keep", [Rows(1), _matrices_only], ids=["flat", "both layouts"])
def test_a_scaler_skips_the_step_on_every_rank_if_one_rows_gradient_is_not_finite(keep: Any) -> None:
    def check() -> None:
        reference, sharded = twins(Net, _flat(keep))
        for model in (reference, sharded):
            optimizer = sgd(list(model.parameters()))
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for is_finite in (True, False, True):
                optimizer.zero_grad()
                scaler.scale(LOSS(model)).backward()
                weight = model.get_parameter("layers.0.up.weight").grad
                assert weight is not None
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                if not is_finite and len(local) and (model is reference or dist.get_rank() == 2):
                    local[-1, -1] = math.inf
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 4.0
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 3)


def test_diagnostics_see_all_ranks() -> None:
    def check() -> None:
        reference, sharded = twins(Net, _flat(Rows(1)))
        for model in (reference, sharded):
            LOSS(model).backward()
        norms = parameter_norms(sharded)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-5)
        local = _weight(sharded).to_local()
        if len(local):
            local.view(-1)[0] = math.nan
        assert {found.name for found in find_nonfinite(sharded, of="weight")} == {"layers.0.up.weight"}

    run_ranks(check, 3)


# -- state ----------------------------------------------------------------------------------------------------------


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(whole(p), whole(q)) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_state_dicts_are_loaded_copied_saved_and_assigned() -> None:
    def check() -> None:
        reference, source = twins(Net, _flat(Rows(1)), seed=1)
        state = source.state_dict()
        assert all(isinstance(value, RaggedDTensor) for value in state.values())
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        for given in (state, copy.deepcopy(state), torch.load(file), pickle.loads(pickle.dumps(state))):
            for assign in (False, True):
                _, target = twins(Net, _flat(Rows(1)), seed=2)
                target.load_state_dict(copy.deepcopy(given), assign=assign)
                assert _same(target, source)
                assert_trains_alike(copy.deepcopy(reference), target, LOSS, num_steps=1)

    run_ranks(check, 2)


def test_a_state_dict_is_loaded_into_another_layout_and_not_assigned_to_it() -> None:
    def check() -> None:
        applications = [_flat(Rows(1)), _flat(Whole()), shard]
        for apply_source in applications:
            for apply_target in applications:
                _, source = twins(Net, apply_source, seed=1)
                _, target = twins(Net, apply_target, seed=2)
                target.load_state_dict(source.state_dict())
                assert _same(target, source)
                if apply_source is not apply_target:
                    with pytest.raises(TypeError, match="lie as before"):
                        target.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
        _, target = twins(Net, _flat(Rows(1)))
        with pytest.raises(RuntimeError, match="full_tensor"):  # as DTensors refuse it
            target.load_state_dict(Net().state_dict())

    run_ranks(check, 3)


def test_torchs_full_state_dict_is_the_unsharded_models() -> None:
    def check() -> None:
        reference, sharded = twins(Net, _flat(Rows(1)))
        full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        for name, value in reference.state_dict().items():
            assert torch.equal(full[name], value)

    run_ranks(check, 3)


def test_dtype_and_storage_are_replaced_under_the_same_parameters() -> None:
    def check() -> None:
        reference, sharded = twins(Net, _flat(Rows(1)))
        before = list(sharded.parameters())
        for model in (reference, sharded):
            model.double()
        assert all(a is b for a, b in zip(sharded.parameters(), before, strict=True))
        assert all(isinstance(p, RaggedDTensor) and p.dtype is torch.float64 for p in sharded.parameters())
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X.double())))
        sharded.to_empty(device="cpu")
        sharded.load_state_dict({name: _like(value, reference, name) for name, value in sharded.state_dict().items()})
        assert_weights_equal(reference, sharded, rtol=0, atol=0)

    def _like(ragged: torch.Tensor, reference: nn.Module, name: str) -> torch.Tensor:
        assert isinstance(ragged, RaggedDTensor)
        value = reference.get_parameter(name).detach()
        return distribute_tensor(value, ragged.device_mesh, [Replicate()], src_data_rank=None)

    run_ranks(check, 3)


def test_a_model_built_on_meta_is_initialised_as_one_built_whole() -> None:
    def initialise(model: nn.Module) -> None:
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=0.2)

    def check() -> None:
        with torch.device("meta"):
            sharded = Net()
        _flat(Rows(1))(sharded)
        sharded.to_empty(device="cpu")
        reference = Net()
        for model in (reference, sharded):
            initialise(model)
        assert_weights_equal(reference, sharded, rtol=0, atol=0)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 3)


def _saved(path: str, apply: Callable[[Any], object]) -> None:
    _, model = twins(Net, apply, seed=4)
    optimizer = adamw(list(model.parameters()))
    LOSS(model).backward()
    optimizer.step()
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    dcp.save({"model": model.state_dict(), "moments": moments}, checkpoint_id=path)


def _loaded(path: str, apply: Callable[[Any], object]) -> dict[str, torch.Tensor]:
    _, model = twins(Net, apply, seed=6)
    state = {"model": model.state_dict(), "moments": {n: torch.zeros_like(p) for n, p in model.named_parameters()}}
    dcp.load(state, checkpoint_id=path)
    return {f"{part}.{name}": whole(value) for part, values in state.items() for name, value in values.items()}


def test_dcp_checkpoints_open_in_plain_torch_on_any_number_of_ranks_and_in_any_layout(tmp_path: Path) -> None:
    applications: dict[str, Callable[[Any], object]] = {"rows": _flat(Rows(1)), "whole": _flat(Whole()), "even": shard}

    def save() -> None:
        for name, apply in applications.items():
            _saved(str(tmp_path / name), apply)

    def load() -> list[dict[str, torch.Tensor]]:
        unsharded = [_loaded(str(tmp_path / name), lambda _: None) for name in applications]
        return unsharded + [_loaded(str(tmp_path / name), a) for name in applications for a in applications.values()]

    run_ranks(save, 3)
    loaded = [state for num_ranks in (2, 4) for state in run_ranks(load, num_ranks)[0]]
    expected = loaded[2]  # what the even layout saved, in an unsharded model
    for state in loaded:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


def test_dcp_writes_each_row_once_where_shards_have_replicas(tmp_path: Path) -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for placements in ((HSDP, ZERO3), (HFSDP, ZERO3)):
            path = str(tmp_path / repr(len(list(tmp_path.iterdir()))) if dist.get_rank() == 0 else "")
            paths = [path]
            dist.broadcast_object_list(paths)
            _, model = twins(Net, _flat(Rows(1), mesh=mesh, placements=placements))
            dcp.save({"model": model.state_dict()}, checkpoint_id=paths[0])
            target = Net().state_dict()
            dcp.load({"model": target}, checkpoint_id=paths[0])
            for name, parameter in model.named_parameters():
                assert torch.equal(whole(parameter), target[name])

    run_ranks(check, 4)


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_torch_that_does_not_ask_subclasses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_called(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(DTensor, "__torch_dispatch__", never_called)

    def check() -> None:
        with pytest.raises(NotImplementedError, match="torch 2.12 or later for `keep`"):
            fully_shard(nn.Linear(2, 2), keep=Rows(1))

    run_ranks(check, 1)


def test_what_does_not_go_with_keep_is_refused_at_the_call_and_changes_nothing() -> None:
    def check() -> None:
        for options, error, message in (
            ({"keep": 3}, TypeError, "`keep` to be Rows"),
            ({"keep": lambda _: "whole"}, TypeError, "`keep` to be Rows"),
            ({"keep": Rows(1), "shard_placement_fn": lambda p: Shard(p.ndim - 1)}, NotImplementedError, "at dim 0"),
        ):
            model = Net()
            before = dict(model.named_parameters())
            with pytest.raises(error, match=message):
                fully_shard(model, **options)  # type: ignore[arg-type]
            assert all(before[name] is parameter for name, parameter in model.named_parameters())
        model = Net()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh["tensor"], [Replicate()]))
        with pytest.raises(NotImplementedError, match="a plain parameter"):
            fully_shard(model, mesh=mesh["data"], keep=Rows(1))

    run_ranks(check, 2)
