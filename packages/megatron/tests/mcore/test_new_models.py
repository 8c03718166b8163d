"""Models are sharded during construction, or built on the meta device; attributes reach both forms of a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import FSDPModule
from lamella_megatron import build_sharded_model, fully_shard_model, mark
from lamella_testing import run_ranks
from lamella_testing.megatron import seed_random_states, tiny_config, tiny_gpt, token_losses
from lamella_testing.megatron_parity import (
    BATCH,
    Layout,
    assert_trains_as_on_one_rank,
    make_model,
)

# -- sharded while built ---------------------------------------------------------------------------------------------


def _drawn(kind: str, layout: Layout) -> nn.Module:
    """A model whose weights come from megatron-core's random states: model-parallel ranks differ."""
    return make_model(kind, layout, use_cpu_initialization=False)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", Layout(num_ranks=2)),
        ("mtp", Layout(num_ranks=2, tp=2)),
        ("moe", Layout(tp=2, ep=2, expert_tp=1, instances=2)),
        ("M*-E", Layout(ep=2)),
    ],
    ids=str,
)
def test_a_model_sharded_during_construction_has_the_weights_of_a_full_build(kind: str, layout: Layout) -> None:
    def on_each_rank() -> dict[str, torch.Tensor]:
        from megatron.core import parallel_state

        expected_weights = {
            name: parameter.detach().clone() for name, parameter in _drawn(kind, layout).named_parameters()
        }
        parallel_state.destroy_model_parallel()
        model = build_sharded_model(lambda: _drawn(kind, layout))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), expected_weights[name]), name
        return expected_weights

    first, second = run_ranks(on_each_rank, layout.num_ranks)[:2]
    differ = {name for name in first if not torch.equal(first[name], second[name])}
    assert bool(differ) == (layout.tp > 1 or layout.ep > 1), "the states of model-parallel ranks, and no others, differ"


def test_a_model_built_from_a_seed_a_rank_is_the_first_ranks() -> None:
    def on_each_rank() -> None:
        def build(seed: int) -> nn.Module:
            seed_random_states(seed)
            return tiny_gpt(tiny_config())

        Layout(num_ranks=2).initialize()
        first = {name: parameter.detach() for name, parameter in build(7).named_parameters()}
        model = build_sharded_model(lambda: build(7 + dist.get_rank()))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), first[name]), name

    run_ranks(on_each_rank, 2)


def test_no_rank_holds_two_whole_layers() -> None:
    """Counted in elements, whenever a module takes a parameter."""

    def on_each_rank() -> tuple[int, int, int]:
        plain: weakref.WeakSet[nn.Parameter] = weakref.WeakSet()
        counts = [0]

        def note(_: nn.Module, __: str, parameter: Any) -> None:
            if isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor):
                plain.add(parameter)
                counts.append(sum(tensor.numel() for tensor in plain))

        layout = Layout(num_ranks=2)
        with torch.nn.modules.module.register_module_parameter_registration_hook(note):
            model = build_sharded_model(lambda: make_model("gpt", layout, num_layers=6))
        numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
        layer = sum(numel for name, numel in numels.items() if name.startswith("decoder.layers.0."))
        return max(counts), layer, sum(numel for name, numel in numels.items() if "layers." not in name)

    for most, layer, other_counts in run_ranks(on_each_rank, 2):
        assert layer <= most <= layer + other_counts


def test_a_model_sharded_while_built_has_the_same_units() -> None:
    def units(sharded: Callable[[], nn.Module]) -> list[str]:
        return [name for name, module in sharded().named_modules() if isinstance(module, FSDPModule)]

    def build() -> nn.Module:
        return make_model("M*-E", Layout(num_ranks=1))

    [built] = run_ranks(units, 1, lambda: build_sharded_model(build))
    [expected_units] = run_ranks(units, 1, lambda: fully_shard_model(build()))
    assert built == expected_units
    assert len(built) == 5


def test_constructors_are_as_before_after_an_error() -> None:
    def on_one_rank() -> None:
        from megatron.core.transformer.transformer_layer import TransformerLayer

        before = TransformerLayer.__init__

        def build() -> nn.Module:
            assert TransformerLayer.__init__ is not before
            raise RuntimeError("no model")

        with pytest.raises(RuntimeError, match="no model"):
            build_sharded_model(build)
        assert TransformerLayer.__init__ is before

    run_ranks(on_one_rank, 1)


def test_building_on_the_meta_device_is_refused() -> None:
    def on_one_rank() -> None:
        def build() -> nn.Module:
            with torch.device("meta"):
                return make_model("gpt", Layout(num_ranks=1))

        message = "values, got '.*' of TransformerLayer on the meta device. Build outside"
        with pytest.raises(ValueError, match=message):
            build_sharded_model(build)

    run_ranks(on_one_rank, 1)


# -- the meta device, for weights to be loaded -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"), [("gpt", Layout(tp=2)), ("tied", Layout(num_ranks=2)), ("M*M*", Layout(num_ranks=2))], ids=str
)
def test_a_model_from_the_meta_device_trains_as_on_one_rank(kind: str, layout: Layout) -> None:
    assert_trains_as_on_one_rank(kind, layout, fully_shard_model, from_meta=True)


# -- attributes ------------------------------------------------------------------------------------------------------


def _seen_in_forward(model: nn.Module, module: str, attribute: str) -> Any:
    """The attribute of a module's weight while the module runs."""
    attributes = []
    inner: Any = model.get_submodule(module)
    inner.register_forward_pre_hook(lambda layer, _: attributes.append(getattr(layer.weight, attribute, None)))
    token_losses(model, BATCH)
    return attributes[0]


def test_marks_are_on_both_forms_and_attributes_on_one() -> None:
    def on_each_rank() -> None:
        model = fully_shard_model(make_model("gpt", Layout(num_ranks=2)))
        for module in ("output_layer", "decoder.layers.0.mlp.linear_fc1"):
            name = f"{module}.weight"
            mark(model, name, told=1)
            model.get_parameter(name).said = 1  # type: ignore[attr-defined]
            assert model.get_parameter(name).told == 1  # type: ignore[attr-defined]
            assert (_seen_in_forward(model, module, "told"), _seen_in_forward(model, module, "said")) == (1, None)
            assert _seen_in_forward(model, module, "tensor_model_parallel") is True, "from before"

    run_ranks(on_each_rank, 2)


def test_marks_last_when_parameters_get_new_storage() -> None:
    def on_one_rank() -> None:
        model = fully_shard_model(make_model("gpt", Layout(num_ranks=1)))
        mark(model, "output_layer.weight", told=1)
        model.to(torch.float64)
        assert model.get_parameter("output_layer.weight").told == 1  # type: ignore[attr-defined]
        assert _seen_in_forward(model, "output_layer", "told") == 1

    run_ranks(on_one_rank, 1)


def test_mark_sets_attributes_of_unsharded_parameters() -> None:
    linear = nn.Linear(2, 2)
    mark(linear, "weight", told=1)
    assert linear.weight.told == 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        mark(linear, "weights", told=1)
