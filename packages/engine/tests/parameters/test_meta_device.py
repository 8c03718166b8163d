"""A model built on meta gets storage after sharding, and only for shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_models import Net, assert_trains_alike, case, inputs, mean_square, shard, whole
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


def _reference() -> Net:
    torch.manual_seed(0)
    return Net()


def _on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def _distributed(reference: nn.Module, sharded: nn.Module) -> dict[str, torch.Tensor]:
    """The reference's state, laid out as the sharded model's. Every rank has it all: nothing is sent."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        value = reference.state_dict()[name]
        state[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return state


def _initialise(sharded: nn.Module, reference: nn.Module) -> None:
    with torch.no_grad():
        for name, value in _distributed(reference, sharded).items():
            sharded.get_parameter(name).copy_(value)


def _whole_model(model: nn.Module) -> None:
    model.to_empty(device="cpu")


def _module_by_module(model: nn.Module) -> None:
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)


def _module_by_module_backwards(model: nn.Module) -> None:
    for module in [*model.modules()][::-1]:
        module.to_empty(device="cpu", recurse=False)


MATERIALISE = [_whole_model, _module_by_module, _module_by_module_backwards]


@pytest.mark.parametrize(("num_ranks", "ways"), [(1, MATERIALISE), (2, MATERIALISE), (4, MATERIALISE[:1])])
def test_a_model_from_meta_trains_as_one_that_was_built_whole(
    num_ranks: int, ways: list[Callable[[nn.Module], None]]
) -> None:
    def check() -> None:
        for materialise in ways:
            with case(materialise.__name__):
                sharded = shard(_on_meta())
                assert all(parameter.is_meta for parameter in sharded.parameters())
                materialise(sharded)
                for parameter in sharded.parameters():
                    assert isinstance(parameter, DTensor)
                    assert parameter.device.type == parameter._local_tensor.device.type == "cpu"
                reference = _reference()
                _initialise(sharded, reference)
                assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, num_ranks)


def test_parameters_from_meta_get_the_main_dtype() -> None:
    def check() -> None:
        model = _on_meta().bfloat16()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_dtype=torch.float32))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        assert model(X).dtype == torch.bfloat16
        model(X).float().mean().backward()
        assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())

    run_ranks(check, 2)


def test_an_optimizer_built_before_to_empty_trains_the_materialised_parameters() -> None:
    def check() -> None:
        sharded = shard(_on_meta())
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
        sharded.to_empty(device="cpu")
        reference = _reference()
        _initialise(sharded, reference)
        LOSS(sharded).backward()
        optimizer.step()
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert got.grad is not None
            torch.testing.assert_close(whole(got), expected.detach() - 0.5 * whole(got.grad))
            assert not torch.equal(whole(got), expected)

    run_ranks(check, 2)


def test_a_forward_on_meta_is_refused_with_the_way_out_and_works_after_to_empty() -> None:
    def check() -> None:
        sharded = shard(_on_meta())
        with pytest.raises(RuntimeError, match=r"'stem\.weight', .*to_empty\(device=\"cpu\"\)"):
            sharded(X)
        sharded.to_empty(device="cpu")
        reference = _reference()
        _initialise(sharded, reference)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_parameters_still_on_meta_are_named_at_the_first_forward() -> None:
    def check() -> None:
        sharded = shard(_on_meta())
        for layer in sharded.layers:
            layer.to_empty(device="cpu")
        sharded.stem.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match=r"still on meta device: \['head\.weight', 'head\.bias'\]"):
            sharded(X)

    run_ranks(check, 2)


def test_parameters_that_have_storage_keep_their_values_beside_those_on_meta() -> None:
    def check() -> None:
        reference = _reference()
        torch.manual_seed(0)
        model = Net()
        model.layers[1].to("meta")
        model.head.to("meta")
        shard(model)
        model.layers[1].to_empty(device="cpu")
        model.head.to_empty(device="cpu")
        with torch.no_grad():
            for name, value in _distributed(reference, model).items():
                if name.startswith(("layers.1", "head")):
                    model.get_parameter(name).copy_(value)
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


@pytest.mark.parametrize("assign_to_meta", [True, False])
def test_a_state_dict_can_be_assigned_instead_of_initialising(assign_to_meta: bool) -> None:
    def check() -> None:
        sharded = shard(_on_meta())
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
        if not assign_to_meta:
            sharded.to_empty(device="cpu")
        reference = _reference()
        sharded.load_state_dict(_distributed(reference, sharded), assign=True)
        for parameter in sharded.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.device.type == parameter._local_tensor.device.type == "cpu"
            assert any(parameter is stepped_parameter for stepped_parameter in optimizer.param_groups[0]["params"])
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_a_state_dict_that_leaves_some_parameters_on_meta_is_noticed_at_the_first_forward() -> None:
    def check() -> None:
        sharded = shard(_on_meta())
        state = _distributed(_reference(), sharded)
        missing_state = {name: state.pop(name) for name in ("head.bias", "layers.1.gain")}
        sharded.load_state_dict(state, strict=False, assign=True)
        with pytest.raises(RuntimeError, match=r"still on meta device: \['head\.bias'\]"):
            sharded(X)
        sharded.load_state_dict(missing_state, strict=False, assign=True)
        assert_trains_alike(_reference(), sharded, LOSS)

    run_ranks(check, 2)


def test_buffers_on_meta_are_the_callers_to_fill() -> None:
    def check() -> None:
        with torch.device("meta"):
            model = Net()
            model.register_buffer("scale", torch.ones(3))
        fully_shard(model)
        model.to_empty(device="cpu")
        scale = model.get_buffer("scale")
        assert scale.device.type == "cpu" and type(scale) is torch.Tensor

    run_ranks(check, 2)
