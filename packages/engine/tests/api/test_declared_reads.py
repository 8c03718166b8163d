"""Declarations of direct reads, their part in a plan, and the report of undeclared reads."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from engine_models import Net, assert_trains_alike, case, fsdp, twins
from reading_models import LOSS, Mixer, MixerBlock, MixerNet, X, convs_of, mixers_of
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import (
    DDP,
    ZERO1,
    ZERO2,
    ZERO3,
    ShardingOptions,
    declare_reads,
    fully_shard,
    fully_shard_model,
    plan_units,
)
from lamella_testing import run_ranks


def test_a_plan_passes_over_modules_with_declared_reads_and_notes_the_reader() -> None:
    model = MixerNet()
    for mixer in mixers_of(model):
        declare_reads(mixer, "conv1d.*")
    plan = plan_units(model, units=nn.Linear)
    assert [unit.name for unit in plan.units] == ["stem", "layers.0.up", "layers.1.up", "layers.2.up", "head", ""]
    assert plan.notes[0] == (
        "layers.0.mixer.conv1d (Linear) is no unit: a Mixer around it reads layers.0.mixer.conv1d.weight without "
        "calling its module. It is left to that one's unit."
    )
    assert "layers.0.mixer.conv1d" not in {unit.name for unit in plan_units(model, units=1).units}


def test_a_model_with_declared_reads_trains_as_unsharded_at_every_byte_budget() -> None:
    def check() -> None:
        def apply(model: Any, budget: int) -> None:
            for mixer in mixers_of(model):
                declare_reads(mixer, "conv1d.*")
            fully_shard_model(model, units=budget, verbose=False)

        for budget in (1, 300, 600, 10**6):
            with case(budget):
                assert_trains_alike(*twins(MixerNet, partial(apply, budget=budget)), LOSS)

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("conv1d.wieght",), ValueError, r"'conv1d\.wieght' to name a parameter.*of Mixer, got none.*'conv1d\.weight'"),
        (("conv1d",), ValueError, r"'conv1d' to name.*There are 'conv1d\.weight', 'conv1d\.bias'"),
        (("gate",), ValueError, r"'gate' to name a parameter below a child of Mixer"),
        (("conv1d.weight", "up.*"), ValueError, r"'up\.\*' to name"),
        ((), TypeError, r"`names` to be names of parameters below Mixer"),
        ((nn.Linear,), TypeError, r"`names` to be names"),
    ],
)
def test_declared_names_without_a_parameter_are_refused_with_the_candidates(
    names: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    mixer = Mixer(7)
    with pytest.raises(error, match=message):
        declare_reads(mixer, *names)
    assert not [name for name in mixer.__dict__ if "reads" in name]


def test_a_declared_read_of_a_removed_parameter_is_refused_before_sharding() -> None:
    def check() -> None:
        mixer = Mixer(7)
        declare_reads(mixer, "conv1d.bias")
        mixer.conv1d.bias = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"'conv1d\.bias' to name a parameter"):
            fully_shard(mixer)
        assert not isinstance(mixer.gate, DTensor)

    run_ranks(check, 1)


def test_a_declaration_that_comes_too_late_is_refused() -> None:
    def check() -> None:
        model = MixerNet()
        for layer in model.layers:
            fully_shard(layer)
        for reader in (model.layers[0], model.layers[0].get_submodule("mixer")):
            with pytest.raises(ValueError, match=r"in no unit yet, got one in a unit.*before fully_shard"):
                declare_reads(reader, "*conv1d.weight")
        with pytest.raises(TypeError, match=r"`reader` to be an nn\.Module, got str"):
            declare_reads("mixer", "conv1d.weight")  # type: ignore[arg-type]

    run_ranks(check, 1)


def test_a_unit_of_another_stage_is_not_taken_over() -> None:
    def check() -> None:
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"options": ShardingOptions(placements=ZERO1)}, {"options": ShardingOptions(placements=ZERO2)}),
            ({"options": ShardingOptions(placements=ZERO3)}, {"options": ShardingOptions(placements=DDP)}),
            ({"reshard_after_forward": 2}, {"reshard_after_forward": True}),
            ({"reshard_after_forward": True}, {"reshard_after_forward": 2}),
        ]
        for inner, outer in cases:
            mixer = Mixer(7)
            declare_reads(mixer, "conv1d.*")
            fully_shard(mixer.conv1d, **inner)
            with pytest.raises(ValueError, match=r"unit of 'conv1d\.\w+'.*`placements` and the number.*both calls"):
                fully_shard(mixer, **outer)
            assert not isinstance(mixer.gate, DTensor)

    run_ranks(check, 4)


def test_an_undeclared_read_of_a_sharded_parameter_is_named_in_the_error() -> None:
    class Undeclared(Mixer):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.project = nn.Linear(dim, dim)  # in the block's unit, which is gathered

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.project(x), self.conv1d.weight, self.conv1d.bias)

    class AroundNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return MixerBlock(dim, Undeclared)

    def check() -> None:
        model = AroundNet()
        for conv in convs_of(model):
            fully_shard(conv)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
            model(X)
        (note,) = caught.value.__notes__
        assert "Undeclared's forward was running" in note
        assert "these parameters were sharded: conv1d.weight, conv1d.bias. They" in note
        assert "declare_reads(module, 'conv1d.weight')" in note

        def fail(*_: object) -> None:
            raise RuntimeError("something else")

        fsdp(model).reset_iter_state()
        model.stem.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="something else") as caught:
            model(X)
        assert not getattr(caught.value, "__notes__", [])

    run_ranks(check, 2)


def test_a_backward_inside_the_outermost_units_forward_is_named_in_the_error_with_the_units_that_help() -> None:
    class LocalLosses(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.stem(x).detach())
            loss: Any = x.square().mean()
            loss.backward()
            return cast(torch.Tensor, self.head(self.layers[1](x.detach())))

    def with_units(model: LocalLosses, *more: nn.Module) -> None:
        for part in (*model.layers, *more, model):
            fully_shard(part)

    def check() -> None:
        model = LocalLosses()
        with_units(model)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
            model(X)
        (note,) = caught.value.__notes__
        assert "a backward inside it has freed its unit's parameters" in note and "head.weight" in note
        assert "as units of their own" in note
        pair = twins(LocalLosses, lambda model: with_units(model, model.stem, model.head))
        assert_trains_alike(*pair, lambda model: model(X).square().mean())

    run_ranks(check, 2)


class _Backbone(nn.Module):
    """A unit, and a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 7)
        self.project = nn.Linear(7, 7)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.embed(ids))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.project(x))


class _ReadingWrapper(nn.Module):
    """Embeds before the backbone runs: by the embedding itself, or by a method of the backbone."""

    calls_method = False

    def __init__(self) -> None:
        super().__init__()
        self.language = _Backbone()
        self.head = nn.Linear(7, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embed = self.language.look_up if self.calls_method else self.language.embed
        return cast(torch.Tensor, self.head(self.language(embed(ids))))


@pytest.mark.parametrize("calls_method", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_module_of_an_inner_unit_that_another_calls_is_named_with_the_declaration_that_helps(
    calls_method: bool, depth: int
) -> None:
    ids = torch.arange(4)
    name = ".".join([*["0"] * (depth - 1), "language.embed.weight"])

    def shard(model: nn.Module) -> None:
        for wrapper in model.modules():
            if isinstance(wrapper, _ReadingWrapper):
                wrapper.calls_method = calls_method
                fully_shard(wrapper.language)
        fully_shard(model)

    def make() -> nn.Module:
        return _ReadingWrapper() if depth == 1 else nn.Sequential(_ReadingWrapper())

    def declared(model: nn.Module) -> None:
        declare_reads(model, name)
        shard(model)

    def check() -> None:
        model = make()
        shard(model)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
            model(ids)
        (note,) = caught.value.__notes__
        assert "Wrapper's forward was running" in note
        assert "these parameters were sharded: language.embed.weight. They" in note
        assert "declare_reads(module, 'language.embed.weight')" in note
        assert_trains_alike(*twins(make, declared), lambda model: model(ids).square().mean())

    run_ranks(check, 2)
