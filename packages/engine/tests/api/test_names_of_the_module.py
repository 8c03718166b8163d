"""A module goes on meaning its own methods, properties and children, whatever lamella's methods are called."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lamella_engine import FSDPModule, fully_shard
from lamella_engine._api.unit_class import _LAMELLA_NAMES
from lamella_testing import run_ranks


def _scale(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class _Caller(nn.Module):
    """Calls a method or child of a name in its forward."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(getattr(self, self.name)(x))
        return output


def _with_method(name: str) -> nn.Module:
    base = type("Base", (_Caller,), {name: _scale, "name": name})
    model: nn.Module = type("Model", (base,), {})()
    return model


def _with_property(name: str) -> nn.Module:
    model: nn.Module = type("Model", (_Caller,), {name: property(lambda module: lambda x: 2 * x), "name": name})()
    return model


def _with_child(name: str) -> nn.Module:
    model: nn.Module = type("Model", (_Caller,), {"name": name})()
    child = nn.Linear(4, 4)
    model.add_module(name, child)
    return model


def _with_attribute(name: str) -> nn.Module:
    model: nn.Module = type("Model", (_Caller,), {"name": name})()
    model.__dict__[name] = lambda x: 2 * x
    return model


@pytest.mark.parametrize("make", [_with_method, _with_property, _with_child])
def test_the_modules_own_name_wins_over_lamellas(make: Any) -> None:
    def outputs() -> None:
        for name in sorted(_LAMELLA_NAMES):
            model: Any = make(name)
            x = torch.ones(2, 4)
            expected = model(x)
            fully_shard(model)
            torch.testing.assert_close(model(x), expected)
            model(x).sum().backward()
            FSDPModule.mark_updated(model)  # lamella's method all the same
            torch.testing.assert_close(model(x), expected)

    run_ranks(outputs, 1)


def test_an_attribute_of_the_instance_wins_over_lamellas_method() -> None:
    def outputs() -> None:
        for name in sorted(_LAMELLA_NAMES - {"sharding_options"}):
            model = _with_attribute(name)
            expected = model(torch.ones(2, 4))
            torch.testing.assert_close(fully_shard(model)(torch.ones(2, 4)), expected)

    run_ranks(outputs, 1)


def test_lamellas_names_are_known() -> None:
    assert {"hold", "mark_updated", "reduce_gradients", "set_options", "sharding_options"} <= _LAMELLA_NAMES
    assert not {"unshard", "reshard", "zero_grad", "forward"} & _LAMELLA_NAMES


@pytest.mark.parametrize("make", [_with_method, _with_child])
def test_a_name_of_fsdp2s_is_warned_of(make: Any) -> None:
    def shard() -> None:
        with pytest.warns(UserWarning, match="Model has 'reshard' itself, and FSDP2's method of that name"):
            fully_shard(make("reshard"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fully_shard(make("hold"))

    run_ranks(shard, 1)


def test_a_class_and_its_plain_twin_share_no_names() -> None:
    def classes() -> None:
        with_child, plain = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        with_child.add_module("hold", nn.Linear(4, 4))
        fully_shard(with_child), fully_shard(plain)
        assert isinstance(with_child.hold, nn.Linear)
        assert isinstance(plain, FSDPModule)
        plain.hold().release()

    run_ranks(classes, 1)
