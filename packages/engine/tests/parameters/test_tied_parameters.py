"""One parameter under several names: one parameter inside a unit, refused across units."""

from __future__ import annotations

import pytest
import torch
from engine_models import Net, assert_trains_alike, mean_square, shard, twins, whole
from torch import nn

from lamella_engine import fully_shard
from lamella_testing import run_ranks

TOKENS = torch.arange(12).view(3, 4) % 11


class _LanguageModel(Net):
    """A language model: the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(11, 7)  # type: ignore[assignment]
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.stem.weight


class _Shared(Net):
    """The first layer is the last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]


LOSS = mean_square(lambda model: model(TOKENS))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tied_parameters_of_one_unit_train_as_one(num_ranks: int) -> None:
    def check() -> None:
        reference, sharded = twins(_LanguageModel)
        assert isinstance(sharded, _LanguageModel)
        assert len(list(sharded.parameters())) == len(list(reference.parameters()))
        assert sharded.head.weight is sharded.stem.weight
        assert_trains_alike(reference, sharded, LOSS)
        sharded.unshard()  # type: ignore[operator]
        assert sharded.head.weight is sharded.stem.weight
        sharded.reshard()  # type: ignore[operator]
        assert list(sharded.state_dict()) == list(reference.state_dict())

    run_ranks(check, num_ranks)


def test_a_module_that_one_unit_holds_twice_is_sharded_once() -> None:
    def check() -> None:
        reference, sharded = twins(_Shared, fully_shard)
        x = torch.ones(2, 3)
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(x)))

    run_ranks(check, 2)


def test_a_unit_that_is_held_twice_is_one_unit() -> None:
    def apply(model: _Shared) -> None:
        for layer in (model.layers[0], model.layers[1]):
            fully_shard(layer)
        fully_shard(model)

    def check() -> None:
        reference, sharded = twins(_Shared, apply)
        x = torch.ones(2, 3)
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(x)))

    run_ranks(check, 2)


def test_a_parameter_tied_across_units_is_refused_with_both_names() -> None:
    def check() -> None:
        model = _LanguageModel()
        fully_shard(model.head)
        with pytest.raises(ValueError, match=r"'stem\.weight'.*'weight'.*the unit around them"):
            shard(model)

    run_ranks(check, 2)


def test_a_module_shared_by_two_units_is_refused_with_the_way_out() -> None:
    def check() -> None:
        shared = nn.Linear(3, 3)
        first, second = nn.Sequential(shared), nn.Sequential(nn.Tanh(), shared)
        fully_shard(first)
        with pytest.raises(ValueError, match=r"'1\.weight'.*the unit around them"):
            fully_shard(second)

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["stem.weight", "head.weight"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_tied_parameter_can_be_loaded_under_any_of_its_names(name: str, assign: bool) -> None:
    def check() -> None:
        model = shard(_LanguageModel())
        value = torch.full_like(model.state_dict()[name], 3.0)
        model.load_state_dict({name: value}, strict=False, assign=assign)
        assert model.head.weight is model.stem.weight
        assert torch.equal(whole(model.stem.weight), torch.full((11, 7), 3.0))

    run_ranks(check, 2)


def test_tied_parameters_stay_tied_when_they_are_assigned_under_both_names() -> None:
    def check() -> None:
        reference, sharded = twins(_LanguageModel)
        sharded.load_state_dict({name: value.clone() for name, value in sharded.state_dict().items()}, assign=True)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)
