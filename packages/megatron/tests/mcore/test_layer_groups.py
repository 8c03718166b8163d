"""Groups of a hybrid model's layers are units, and names, forward and training stay as they are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lamella_engine import FSDPModule
from lamella_engine.extending import unit_of
from lamella_megatron import fully_shard_model, sharding_units
from lamella_testing import run_ranks
from lamella_testing.megatron import token_losses
from lamella_testing.megatron_parity import BATCH, Layout, assert_trains_as_on_one_rank, make_model


@pytest.mark.parametrize("groups", ["[*E][*E]", "*[E]*E", "*E[*E]", "[*E]*E"])
def test_groups_train_as_on_one_rank(groups: str) -> None:
    shard = partial(fully_shard_model, layer_groups=groups)
    assert_trains_as_on_one_rank("*E*E", Layout(num_ranks=2, ep=2), shard)


def test_mamba_layers_are_bound_in_groups() -> None:
    shard = partial(fully_shard_model, layer_groups="[M*][M*]")
    assert_trains_as_on_one_rank("M*M*", Layout(num_ranks=2), shard)


def test_a_group_is_one_unit() -> None:
    def on_each_rank() -> None:
        layout = Layout(num_ranks=2)
        model = make_model("*E*E", layout)
        before = [name for name, _ in model.named_parameters()]
        fully_shard_model(model, layer_groups="[*E]*E")
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        layers = list(model.decoder.layers)  # type: ignore[union-attr, arg-type]
        assert units == [model, *layers]
        assert unit_of(layers[0]) is unit_of(layers[1])
        assert len({unit_of(unit) for unit in units}) == 4
        assert [name for name, _ in model.named_parameters()] == before

    run_ranks(on_each_rank, 2)


def _weights_after_three_steps(groups: str | None) -> list[torch.Tensor]:
    model = make_model("*E*E", Layout(num_ranks=2))
    fully_shard_model(model, layer_groups=groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(3):
        token_losses(model, BATCH).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("groups", ["[*E][*E]", "[*E]*E"])
def test_bits_are_those_of_a_unit_a_layer(groups: str) -> None:
    alone, together = (run_ranks(_weights_after_three_steps, 2, each)[0] for each in (None, groups))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


class _Group(nn.Sequential):
    """A group as a branch of megatron-core builds it: a stack of its own."""

    is_layer_group_stack = True


def test_a_stack_of_its_own_is_the_unit() -> None:
    def on_one_rank() -> None:
        model = make_model("*E*E", Layout(num_ranks=1))
        layers = model.decoder.layers  # type: ignore[union-attr]
        first, second, *rest = list(layers)  # type: ignore[arg-type]
        model.decoder.layers = nn.ModuleList([_Group(first, second), *rest])  # type: ignore[union-attr]
        assert sharding_units(model) == list(model.decoder.layers)  # type: ignore[union-attr]

    run_ranks(on_one_rank, 1)


@pytest.mark.parametrize(
    ("kind", "groups", "words"),
    [
        ("*E*E", "[*E]", r"the model's pattern '\*E\*E' with brackets, got '\[\*E\]', a pattern of '\*E'"),
        ("gpt", "[*E]", "Expected a HybridModel for `layer_groups`, got GPTModel"),
        ("*E*E", "[*E][*E", "at position 7 of the pattern"),
    ],
)
def test_groups_of_other_layers_are_refused(kind: str, groups: str, words: str) -> None:
    def on_one_rank() -> None:
        model = make_model(kind, Layout(num_ranks=1))
        with pytest.raises(ValueError, match=words):
            fully_shard_model(model, layer_groups=groups)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())

    run_ranks(on_one_rank, 1)
