"""A model's own methods, children and attributes go on meaning the model's own after `fully_shard`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import Net, fsdp, shard
from torch import nn

from lamella_engine import FSDPModule, Hold, ShardingOptions, UnitResidence, fully_shard
from lamella_engine._api.verbs import UnitVerbs
from lamella_testing import run_ranks

VERBS = sorted(name for name in vars(UnitVerbs) if not name.startswith("_"))
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def _module(forward: Forward, **attributes: Any) -> type[nn.Module]:
    def build(self: Any) -> None:
        nn.Module.__init__(self)
        self.linear = nn.Linear(4, 4)

    model: type[nn.Module] = type("Model", (nn.Module,), {"__init__": build, "forward": forward, **attributes})
    return model


def _calls(name: str) -> Forward:
    return lambda self, x: self.linear(x) * getattr(self, name)(3)


def _reads(name: str) -> Forward:
    return lambda self, x: self.linear(x) * getattr(self, name)


def _model(kind: str, name: str) -> Any:
    """A model with an attribute `name` of some kind: forward returns three times the linear layer's output."""
    triple = lambda _, factor: float(factor)  # noqa: E731
    if kind == "method":
        return _module(_calls(name), **{name: triple})()
    if kind == "inherited method":
        base = _module(_calls(name), **{name: triple})
        return type("Derived", (base,), {})()
    if kind == "method of a mixin":
        mixin = type("Mixin", (), {name: triple})
        return type("Derived", (_module(_calls(name)), mixin), {})()
    if kind == "class attribute":
        return _module(_reads(name), **{name: 3.0})()
    if kind == "property with a setter":
        stored_property = property(lambda self: self.stored, lambda self, value: vars(self).update(stored=value + 1))
        model = _module(_reads(name), **{name: stored_property})()
        setattr(model, name, 2.0)
        return model
    if kind == "fallback":

        def fallback(self: Any, asked: str) -> Any:
            return 3.0 if asked == name else nn.Module.__getattr__(self, asked)

        return _module(_reads(name), __getattr__=fallback)()
    model = _module(_reads(name))()
    if kind == "instance attribute":
        setattr(model, name, 3.0)
    elif kind == "buffer":
        model.register_buffer(name, torch.tensor(3.0))
    elif kind == "parameter":
        model.register_parameter(name, nn.Parameter(torch.full((4,), 3.0)))
    else:
        model = _module(lambda self, x: getattr(self, name)(self.linear(x)) * 3)()
        model.add_module(name, nn.Identity())
    return model


_METHODS = ("method", "inherited method", "method of a mixin")
_KINDS = ("class attribute", "property with a setter", "fallback", "instance attribute")
_CHILDREN = ("buffer", "parameter", "child")


@pytest.mark.parametrize("kind", [*_METHODS, *_KINDS, *_CHILDREN])
def test_a_models_own_attribute_wins_over_each_method_that_lamella_adds(kind: str) -> None:
    def check() -> None:
        x = torch.ones(2, 4)
        for name in VERBS:
            model = _model(kind, name)
            expected = model.linear(x).detach() * 3
            fully_shard(model)
            assert torch.allclose(model(x), expected), name
            if kind == "property with a setter":
                setattr(model, name, 5.0)
                assert vars(model)["stored"] == 6.0

    run_ranks(check, 1)


def test_a_child_that_is_assigned_later_wins_too() -> None:
    def check() -> None:
        model: Any = fully_shard(nn.Linear(4, 4))
        assert isinstance(model.hold(), Hold)
        model.hold = nn.Identity()
        assert isinstance(model.hold, nn.Identity)
        del model.hold
        assert callable(model.hold)

    run_ranks(check, 1)


def test_the_units_method_is_called_on_its_class_where_the_model_has_its_own() -> None:
    def check() -> None:
        model = fully_shard(_model("method", "hold"))
        with FSDPModule.hold(fsdp(model)):
            assert type(model.linear.weight) is nn.Parameter

    run_ranks(check, 1)


def test_a_wrapper_that_passes_names_on_to_an_inner_unit_has_none_of_its_own() -> None:
    class NamedWrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.ones(1))

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    def check() -> None:
        model: Any = fully_shard(NamedWrapper(fully_shard(nn.Linear(4, 4))))
        model.set_options(keep_budget=7)  # refused by the inner unit
        assert model.sharding_options.keep_budget == 7
        with model.hold():
            assert type(model.scale) is nn.Parameter

    run_ranks(check, 1)


def test_schedules_reach_units_whose_names_the_model_has() -> None:
    def check() -> None:
        model = shard(Net())
        for name in VERBS:
            vars(model)[name] = vars(model.layers[0])[name] = None
        residence = UnitResidence(model, [model.layers[0]])
        residence.drop()
        assert residence.peak_nbytes([]) == 0

    run_ranks(check, 1)


def test_fsdp2s_methods_hide_a_models_own_as_in_fsdp2_with_a_warning() -> None:
    def check() -> None:
        with pytest.warns(UserWarning, match=r"Expected Model to have no attribute .* got \['unshard'\]"):
            fully_shard(_model("method", "unshard"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fully_shard(_model("instance attribute", "unshard"))

    run_ranks(check, 1)


def test_classes_that_watch_for_their_subclasses_do_not_see_the_units_class() -> None:
    """A registry lists models alone, and a class may demand a keyword of each subclass."""
    registered: list[str] = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, *, tag: str) -> None:
            super().__init_subclass__()
            registered.append(tag)

    class Model(Registered, tag="model"):
        pass

    def check() -> None:
        model = fully_shard(Model(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        assert isinstance(model, Model)
        assert registered == ["model"]

        class Later(Model, tag="later"):  # a model's own subclasses are registered as before
            pass

        assert registered == ["model", "later"]

    run_ranks(check, 1)


def test_a_class_that_refuses_to_be_a_base_leaves_the_model_unchanged() -> None:
    class Final(type):
        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Final:
            if bases != (nn.Module,):
                raise TypeError(f"{name} is final")
            return super().__new__(cls, name, bases, namespace)

    class Model(nn.Module, metaclass=Final):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.linear(x)
            return output

    def check() -> None:
        model = Model()
        weight = model.linear.weight
        with pytest.raises(TypeError, match="is final"):
            fully_shard(model, options=ShardingOptions())
        assert model.linear.weight is weight

    run_ranks(check, 1)


def test_a_models_own_zero_grad_is_called_with_its_own_arguments() -> None:
    def check() -> None:
        calls: list[str] = []
        model_class = _module(lambda self, x: self.linear(x), zero_grad=lambda _, why="none": calls.append(why))
        model: Any = model_class()
        fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        model.zero_grad(why="because")
        assert calls == ["none", "because"]
        assert model.linear.weight.grad is None

    run_ranks(check, 1)
