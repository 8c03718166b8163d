"""Sharded parameters are plain DTensors under the former names: any code for DTensors works."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    Net,
    adamw,
    assert_gradients_equal,
    assert_trains_alike,
    assert_weights_equal,
    case,
    fsdp,
    inputs,
    mean_square,
    shard,
    this_ranks,
    twins,
    whole,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import FSDPModule, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


def _at_rest(model: nn.Module) -> None:
    """Nothing: the model is at rest."""


def _after_forward(model: nn.Module) -> None:
    model(X)


def _unsharded(model: nn.Module) -> None:
    fsdp(model).unshard()
    fsdp(model.get_submodule("layers.1")).unshard(async_op=True)


# Moments for a call of `state_dict` or `load_state_dict`.
MOMENTS = [_at_rest, _after_forward, _unsharded]


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_parameters_are_shard_0_dtensors_whose_full_tensor_is_the_original(num_ranks: int) -> None:
    def check() -> None:
        reference, sharded = twins()
        assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in reference.named_parameters()]
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert isinstance(got, nn.Parameter)
            assert isinstance(got, DTensor)
            assert tuple(got.placements) == (Shard(0),)
            assert (got.shape, got.dtype, got.requires_grad) == (expected.shape, expected.dtype, True)
            assert torch.equal(got.to_local(), this_ranks(expected, got))
            assert torch.equal(got.full_tensor(), expected)

    run_ranks(check, num_ranks)


def test_the_modules_class_is_its_own_and_fsdps() -> None:
    def check() -> None:
        model = shard(Net())
        assert type(model).__name__ == "FSDPNet"
        assert isinstance(model, Net)
        assert isinstance(model, FSDPModule)
        assert type(shard(Net())) is type(model)

    run_ranks(check, 1)


def test_marks_on_a_parameter_are_on_both_of_its_forms() -> None:
    def check() -> None:
        model = Net()
        marks = {"sequence_parallel": True, "partition_dim": 1}
        vars(model.head.weight).update(marks)
        shard(model)
        for _ in range(2):
            assert vars(model.head.weight).items() >= marks.items()
            fsdp(model).unshard()
            assert not isinstance(model.head.weight, DTensor)
            assert vars(model.head.weight).items() >= marks.items()
            fsdp(model).reshard()
            model.double()

    run_ranks(check, 2)


def test_clip_grad_norm_gives_the_unsharded_norm_and_gradients() -> None:
    def check() -> None:
        for foreach in (None, True, False):
            pair = twins()
            norms = []
            for model in pair:
                LOSS(model).backward()
                norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)))
            torch.testing.assert_close(*norms)
            assert norms[0] > 0.05
            assert_gradients_equal(*pair)

    run_ranks(check, 3)


def test_clip_grad_norm_knows_other_norms() -> None:
    # torch has no largest element of an empty tensor: every rank must own a row of every parameter.
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

    def check() -> None:
        for norm_type in (1.0, float("inf")):
            pair = twins(make, fully_shard)
            norms = []
            for model in pair:
                LOSS(model).backward()
                norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=norm_type)))
            torch.testing.assert_close(*norms)
            assert_gradients_equal(*pair)

    run_ranks(check, 2)


# -- state dicts ----------------------------------------------------------------------------------------------------


def test_a_state_dict_has_the_unsharded_names_and_values_at_any_moment() -> None:
    def check() -> None:
        reference, sharded = twins()
        for moment, path in product(MOMENTS, ("", "layers.1", "layers.1.up", "head")):
            moment(sharded)
            expected = reference.get_submodule(path).state_dict()
            got = sharded.get_submodule(path).state_dict()
            assert list(got) == list(expected)
            for name, value in got.items():
                assert isinstance(value, DTensor), f"{moment.__name__}, {path}, {name}"
                assert torch.equal(value.to_local(), this_ranks(expected[name], value))

    run_ranks(check, 2)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_can_be_loaded_at_any_moment_and_is_trained_on(assign: bool) -> None:
    def check() -> None:
        for moment in MOMENTS:
            with case(moment.__name__):
                load_at(moment)

    def load_at(moment: Callable[[nn.Module], None]) -> None:
        reference, _ = twins(seed=1)
        _, source = twins(seed=1)
        _, sharded = twins(seed=0)
        optimizer = adamw(list(sharded.parameters()))
        LOSS(sharded).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = dict(sharded.named_parameters())
        moment(sharded)
        assert not sharded.load_state_dict(source.state_dict(), assign=assign).missing_keys
        assert_at_rest(sharded)
        assert_weights_equal(reference, sharded, rtol=0, atol=0)
        for name, parameter in sharded.named_parameters():
            assert parameter is before[name], f"{name}: the optimizer would train another one"
        assert_trains_alike(reference, sharded, LOSS)
        # Assigned or not, no storage is shared with what was loaded.
        assert_weights_equal(twins(seed=1)[0], source, rtol=0, atol=0)

    run_ranks(check, 2)


def test_torchs_helpers_gather_and_broadcast_whole_state_dicts() -> None:
    whole_dict = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def check() -> None:
        reference, sharded = twins(seed=0)
        got = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        assert list(got) == list(reference.state_dict())
        for name, expected in reference.state_dict().items():
            value = got[name]
            assert isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            assert torch.equal(value, expected)
        other, _ = twins(seed=1)
        state = other.state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(sharded, state, options=whole_dict)
        assert_weights_equal(other, sharded, rtol=0, atol=0)
        assert_trains_alike(other, sharded, LOSS)

    run_ranks(check, 2)


def test_part_of_a_state_dict_can_be_loaded_into_a_module_inside_a_unit() -> None:
    def check() -> None:
        reference, sharded = twins(seed=0)
        other, source = twins(seed=1)
        for path in ("head", "layers.1.up"):
            sharded(X)
            reference.get_submodule(path).load_state_dict(other.get_submodule(path).state_dict())
            sharded.get_submodule(path).load_state_dict(source.get_submodule(path).state_dict())
        fsdp(sharded).reshard()
        assert_weights_equal(reference, sharded, rtol=0, atol=0)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_a_whole_tensor_cannot_be_assigned_in_place_of_a_shard() -> None:
    def check() -> None:
        reference, sharded = twins()
        with pytest.raises(TypeError, match=r"Expected parameter 'stem\.weight' to be a DTensor.*distribute"):
            sharded.load_state_dict(reference.state_dict(), assign=True)

    run_ranks(check, 2)


def test_an_assigned_state_of_another_dtype_changes_the_parameters_dtype() -> None:
    def check() -> None:
        reference, sharded = twins()
        reference.double()
        sharded.load_state_dict({name: value.double() for name, value in sharded.state_dict().items()}, assign=True)
        for parameter in sharded.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.dtype == parameter._local_tensor.dtype == torch.float64
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X.double())))

    run_ranks(check, 2)


def _through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _through_pickle(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


def test_state_dicts_can_be_saved_pickled_and_copied() -> None:
    def check() -> None:
        for through in (_through_torch, _through_pickle, copy.deepcopy):
            with case(through.__name__):
                reference, sharded = twins()
                optimizer = adamw(list(sharded.parameters()))
                LOSS(sharded).backward()
                state = through(sharded.state_dict())
                gradients = through([parameter.grad for parameter in sharded.parameters()])
                optimizer.step()
                through(optimizer.state_dict())
                sharded.load_state_dict(state)
                assert_weights_equal(reference, sharded, rtol=0, atol=0)
                for got, parameter in zip(gradients, sharded.parameters(), strict=True):
                    assert isinstance(parameter.grad, DTensor)
                    assert torch.equal(got.to_local(), parameter.grad.to_local())

    run_ranks(check, 2)


def test_a_parameter_that_was_replaced_by_hand_is_the_one_that_trains() -> None:
    def check() -> None:
        reference, sharded = twins()
        for model in (reference, sharded):
            head = model.get_submodule("head")
            head.weight = nn.Parameter(2 * head.get_parameter("weight").detach())
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


# -- moves and casts ------------------------------------------------------------------------------------------------


def _double(model: nn.Module) -> None:
    model.double()


def _to(model: nn.Module) -> None:
    model.to(dtype=torch.float64, device="cpu")


def _module_by_module(model: nn.Module) -> None:
    if isinstance(model, FSDPModule):
        model.reshard()  # a module inside the unit must hold the shards now
    for module in model.modules():
        if module is not model:
            module.double()


@pytest.mark.parametrize("cast", [_double, _to, _module_by_module])
def test_a_cast_after_sharding_keeps_the_parameters_and_the_optimizer_that_holds_them(
    cast: Callable[[nn.Module], None],
) -> None:
    def check() -> None:
        for moment in MOMENTS:
            with case(moment.__name__):
                cast_at(moment)

    def cast_at(moment: Callable[[nn.Module], None]) -> None:
        reference, sharded = twins()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (reference, sharded)]
        before = list(sharded.parameters())
        moment(sharded)
        for model in (reference, sharded):
            cast(model)
        for _ in range(3):
            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                model(X.double()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(a is b for a, b in zip(before, sharded.parameters(), strict=True))
        assert {parameter.dtype for parameter in sharded.parameters()} == {torch.float64}
        assert_weights_equal(reference, sharded, rtol=1e-12, atol=1e-12)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_a_cast_carries_gradients_along() -> None:
    def check() -> None:
        reference, sharded = twins()
        for model in (reference, sharded):
            LOSS(model).backward()
            model.double()
            model(X.double()).square().mean().backward()
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_a_module_inside_a_unit_can_be_moved_and_goes_on_training() -> None:
    def check() -> None:
        reference, sharded = twins()
        for step in range(3):
            for model in (reference, sharded):
                # There and back again: new storage under the same parameters.
                model.get_submodule(("head", "stem", "layers.0.up")[step]).double().float()
            assert_trains_alike(reference, sharded, LOSS, num_steps=2)

    run_ranks(check, 2)


# -- containers -----------------------------------------------------------------------------------------------------


def test_a_slice_of_a_sharded_sequential_is_a_plain_sequential_of_units() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))

    def apply(model: nn.Sequential) -> None:
        for layer in list(model)[2:]:
            fully_shard(layer)
        fully_shard(model)

    def check() -> None:
        reference, sharded = twins(make, apply)
        assert isinstance(sharded, nn.Sequential)
        upper = sharded[2:]
        assert type(upper) is nn.Sequential
        assert [type(layer).__name__ for layer in upper] == ["FSDPLinear", "FSDPLinear"]
        torch.testing.assert_close(upper(torch.ones(2, 5)), reference[2:](torch.ones(2, 5)))  # type: ignore[index]
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_a_units_class_makes_plain_modules_whatever_its_constructor_takes() -> None:
    class CountedLinear(nn.Linear):
        def __new__(cls, size: int) -> Self:
            return super().__new__(cls)

        def __init__(self, size: int) -> None:
            super().__init__(size, size)

    def check() -> None:
        model = fully_shard(CountedLinear(3))
        assert type(type(model)(4)) is CountedLinear

    run_ranks(check, 1)
