"""A Parameter kept by an object beside the modules is refused by name: the object's copy would never train."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from engine_models import assert_trains_alike, case, mean_square, twins
from torch import nn

from lamella_engine import FSDPModule, fully_shard
from lamella_testing import run_ranks

X = torch.arange(8.0).view(2, 4).sin()
LOSS = mean_square(lambda model: model(X))


class _Helper:
    """Keeps a Parameter from when its module was built, as megatron-core's MambaContextParallel does."""

    def __init__(self, weight: Any) -> None:
        self.weight_cp1 = weight


class _Slotted:
    __slots__ = ("empty", "weight")

    def __init__(self, weight: Any) -> None:
        self.weight = weight


class _ScaledOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(x) * self.scale
        return out


def _with(attribute: object) -> Any:
    model = _ScaledOutside()
    vars(model)["helper"] = attribute if not callable(attribute) else attribute(model)
    return nn.Sequential(model, nn.Linear(4, 2))


HOLDERS: dict[str, tuple[Any, str]] = {
    "object": (lambda model: _Helper(model.scale), r"'0\.helper\.weight_cp1' of a _Helper"),
    "object with slots": (lambda model: _Slotted(model.scale), r"'0\.helper\.weight' of a _Slotted"),
    "list": (lambda model: [model.scale], r"'0\.helper\[0\]' of a _ScaledOutside"),
    "dict in object": (lambda model: _Helper({"a": model.scale}), r"0\.helper\.weight_cp1\['a'\]. of a _Helper"),
    "tuple in list": (lambda model: [(1, model.scale)], r"'0\.helper\[0\]\[1\]'"),
    "partial": (lambda model: functools.partial(torch.mul, model.scale), r"'0\.helper\.args\[0\]'"),
    "another module's": (lambda model: _Helper(model.proj.bias), r"hold '0\.proj\.bias'"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_parameter_that_an_object_keeps_is_refused_with_the_objects_name(holder: str) -> None:
    attribute, expected = HOLDERS[holder]

    def check() -> None:
        model = _with(attribute)
        with pytest.raises(ValueError, match=expected) as refused:
            fully_shard(model)
        assert "at each use" in str(refused.value)
        assert not isinstance(model, FSDPModule), "nothing has changed"
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())

    run_ranks(check, 1)


def test_an_object_too_deep_below_one_module_is_looked_into_below_the_next() -> None:
    def check() -> None:
        model = _with([[]])
        deep, helper = [[model[0].scale]], vars(model[0])["helper"]
        helper[0].append(deep)
        vars(model[1])["helper"] = deep
        with pytest.raises(ValueError, match=r"'1\.helper\[0\]\[0\]' of a Linear"):
            fully_shard(model)

    run_ranks(check, 1)


def test_objects_that_hold_no_parameter_of_the_unit_are_let_be() -> None:
    class _Live:
        """Looks the parameter up at each use."""

        def __init__(self, model: nn.Module) -> None:
            self.modules = [model]

        @property
        def weight(self) -> Any:
            return self.modules[0].scale

    def check() -> None:
        for attribute in (
            _Live,
            lambda _: _Helper(nn.Parameter(torch.ones(4))),
            {"a": 1},
            torch.ones(3),
            lambda _: nn.Linear,
        ):
            with case(attribute):
                fully_shard(_with(attribute))

    run_ranks(check, 1)


def test_an_ignored_parameter_may_be_kept_anywhere() -> None:
    def check() -> None:
        model = _with(lambda inner: _Helper(inner.scale))
        fully_shard(model, ignored_params={model[0].scale})

    run_ranks(check, 1)


def test_an_object_that_refers_to_itself_ends_the_search() -> None:
    def check() -> None:
        helper = _Helper(None)
        helper.weight_cp1 = [helper, {"self": helper}]
        fully_shard(_with(helper))

    run_ranks(check, 1)


def test_recurrent_modules_with_their_list_of_weights_are_not_refused() -> None:
    class _RecurrentOutside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.lstm(x)[0]
            return out

    run_ranks(lambda: assert_trains_alike(*twins(_RecurrentOutside, fully_shard), LOSS), 2)
