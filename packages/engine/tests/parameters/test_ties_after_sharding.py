"""Parameters tied, untied or replaced after `fully_shard` train like unsharded parameters, or are refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    adamw,
    assert_trains_alike,
    assert_weights_equal,
    mean_square,
    mesh_of,
    no_gradient_sync,
    shard,
    twins,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call, grad

from lamella_engine import DDP, HSDP, ZERO1, ZERO3, Rows, ShardingOptions, fully_shard, set_main_grads
from lamella_engine.testing import named_units
from lamella_testing import run_ranks

TOKENS = torch.arange(12).view(3, 4) % 11
LOSS = mean_square(lambda model: model(TOKENS))


class _Untied(Net):
    """A language model whose head has a separate weight, until a test ties the two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(11, 7)  # type: ignore[assignment]
        self.head = nn.Linear(7, 11, bias=False)

    def tie_weights(self) -> None:
        self.head.weight = self.stem.weight


def _swap(first: nn.Module, second: nn.Module) -> None:
    first.weight, second.weight = second.weight, first.weight


def _tied_twins(**options: Any) -> tuple[_Untied, _Untied]:
    reference, sharded = twins(_Untied, lambda model: shard(model, **options))
    assert isinstance(reference, _Untied) and isinstance(sharded, _Untied)
    for model in (reference, sharded):
        model.tie_weights()
    return reference, sharded


def _num_parameters(model: nn.Module) -> int:
    return sum(len(group.parameters) for _, unit in named_units(model) for group in unit.parameters.groups)


OPTIONS: list[Any] = [
    {},
    {"reshard_after_forward": False},
    {"mesh": (2,), "options": ShardingOptions(placements=DDP)},
    {"mesh": (2,), "options": ShardingOptions(placements=ZERO1)},
    {"mesh": (2, 1), "options": ShardingOptions(placements=(HSDP, ZERO3))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_of_one_unit_that_are_tied_after_sharding_train_as_one(options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        mesh_options = options | ({"mesh": mesh_of(options["mesh"])} if "mesh" in options else {})
        reference, sharded = _tied_twins(**mesh_options)
        before = _num_parameters(sharded)
        assert_trains_alike(reference, sharded, LOSS)
        assert sharded.head.weight is sharded.stem.weight
        assert _num_parameters(sharded) == before - 1, "nothing is gathered that nobody reads"
        sharded.unshard()  # type: ignore[operator]
        assert sharded.head.weight is sharded.stem.weight
        sharded.reshard()  # type: ignore[operator]
        assert list(sharded.state_dict()) == list(reference.state_dict())

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("builds_first", [True, False])
def test_parameters_may_be_tied_after_a_step_under_an_optimizer_built_before(builds_first: bool) -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Untied)
        optimizers = [adamw(list(model.parameters())) for model in (reference, sharded)]

        def step() -> None:
            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                LOSS(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_weights_equal(reference, sharded)

        step()
        for model in (reference, sharded):
            model.tie_weights()  # type: ignore[operator]
        if not builds_first:
            optimizers[:] = [adamw(list(model.parameters())) for model in (reference, sharded)]
        step()
        step()

    run_ranks(on_each_rank, 2)


def test_parameters_tied_before_a_cast_or_to_empty_train_as_unsharded() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Untied)
        for model in (reference, sharded):
            model.tie_weights()  # type: ignore[operator]
            model.to(torch.float64)
        assert_trains_alike(reference, sharded, LOSS)

        with torch.device("meta"):
            empty = _Untied()
        shard(empty)
        empty.tie_weights()
        empty.to_empty(device="cpu")
        empty.load_state_dict(sharded.state_dict())
        reference.to(torch.float32)
        assert_trains_alike(reference, empty, LOSS)

    run_ranks(on_each_rank, 2)


def test_members_in_groups_of_their_own_are_tied_too() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Untied, lambda model: None)
        for model in (reference, sharded):
            model.get_parameter("head.weight").requires_grad_(False)
        shard(sharded)  # type: ignore[arg-type]
        for model in (reference, sharded):
            model.tie_weights()  # type: ignore[operator]
        assert_trains_alike(reference, sharded, LOSS)
        assert len(dict(named_units(sharded))["root"].parameters.groups) == 1

    run_ranks(on_each_rank, 2)


def test_parameters_may_change_places() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Untied)
        for model in (reference, sharded):
            _swap(model.get_submodule("layers.0.up"), model.get_submodule("layers.1.up"))
            _swap(model.get_submodule("stem"), model.get_submodule("head"))
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


def test_a_tie_across_units_is_refused_with_both_names() -> None:
    def on_each_rank() -> None:
        model = _Untied()
        fully_shard(model.head)
        shard(model)
        head_weight = model.head.weight
        model.tie_weights()
        with pytest.raises(RuntimeError, match=r"'head\.weight' to stay.*'stem\.weight'.*Tie parameters before"):
            model(TOKENS)
        model.head.weight = head_weight
        LOSS(model).backward()

    run_ranks(on_each_rank, 2)


def test_a_tie_to_another_model_is_refused() -> None:
    def on_each_rank() -> None:
        first, second = shard(_Untied()), shard(_Untied())
        LOSS(first).backward()
        second.head.weight = first.head.weight
        with pytest.raises(RuntimeError, match=r"'head\.weight' to stay in its unit.*'head\.weight'"):
            LOSS(second)
        LOSS(first).backward()

    run_ranks(on_each_rank, 2)


def test_untying_after_sharding_is_refused_with_the_name() -> None:
    def on_each_rank() -> None:
        model = _Untied()
        model.tie_weights()
        shard(model)
        assert isinstance(model.stem.weight, DTensor)
        model.head.weight = nn.Parameter(
            distribute_tensor(torch.ones(11, 7), model.stem.weight.device_mesh, [Shard(0)])
        )
        with pytest.raises(RuntimeError, match=r"2 places that hold 'stem\.weight'.*untied before fully_shard"):
            model(TOKENS)
        model.stem.weight = model.head.weight
        LOSS(model).backward()
        assert torch.equal(whole(model.stem.weight), torch.ones(11, 7))

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nn.Parameter(torch.ones(11, 7)), r"'head\.weight' to be a DTensor of shape \(11, 7\), got Parameter"),
        (None, r"'head\.weight' to stay in its module after fully_shard, got None"),
    ],
    ids=["plain", "none"],
)
def test_a_replacement_that_is_no_shard_is_refused(value: nn.Parameter | None, message: str) -> None:
    def on_each_rank() -> None:
        model = shard(_Untied())
        model.head.weight = value  # type: ignore[assignment]
        with pytest.raises(TypeError, match=message):
            model(TOKENS)
        model = shard(_Untied())
        del model.head.weight, model.stem.weight
        with pytest.raises(TypeError, match=r"'stem\.weight' to stay in its module after fully_shard, got None"):
            model(TOKENS)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("placements", [DDP, ZERO1, ZERO3], ids=str)
def test_a_functional_call_uses_parameters_that_are_given_and_refuses_other_tensors(placements: Any) -> None:
    """Foreign values would stay in the shards after the call has put the model's own parameters back."""

    def on_each_rank() -> None:
        apply = partial(shard, options=ShardingOptions(placements=placements))
        reference, sharded = twins(_Untied, apply)
        assert_trains_alike(reference, sharded, LOSS)
        with torch.no_grad():
            halves = {name: nn.Parameter(p.detach() / 2) for name, p in sharded.named_parameters()}
            expected = functional_call(reference, {name: p / 2 for name, p in reference.named_parameters()}, TOKENS)
            torch.testing.assert_close(functional_call(sharded, {**halves}, TOKENS), expected)
            with pytest.raises(TypeError, match=r"weight' to be replaced by an nn\.Parameter, got DTensor"):
                functional_call(sharded, {name: p.detach() for name, p in halves.items()}, TOKENS)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


def test_a_transform_by_parameters_is_refused_as_one() -> None:
    def on_each_rank() -> None:
        _, sharded = twins(_Untied, shard)
        parameters = dict(sharded.named_parameters())
        with pytest.raises(TypeError, match=r"transform of torch\.func.*differentiate by inputs alone"):
            grad(lambda parameters: functional_call(sharded, parameters, TOKENS).sum())(parameters)

    run_ranks(on_each_rank, 2)


def test_a_replacement_that_is_sharded_over_other_ranks_is_refused() -> None:
    """The only row would have been repeated over this rank's two."""

    def on_each_rank() -> None:
        model = fully_shard(nn.Linear(3, 4), mesh=mesh_of((2, 2)))
        model.bias = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh_of((4,)), [Shard(0)]))
        with pytest.raises(TypeError, match=r"'bias' to lie as before"):
            model(torch.ones(2, 3))

    run_ranks(on_each_rank, 4)


def test_a_replacement_of_an_unsharded_parameter_is_refused_once() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Untied)
        assert isinstance(sharded, _Untied)
        sharded.unshard()  # type: ignore[operator]
        sharded.tie_weights()
        with pytest.raises(RuntimeError, match=r"\['head\.weight'\] to be replaced or tied while"):
            sharded.reshard()  # type: ignore[operator]
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


def test_a_tie_in_the_middle_of_a_step_is_refused() -> None:
    def on_each_rank() -> None:
        model = shard(_Untied())
        with no_gradient_sync(model):
            LOSS(model).backward()
        model.tie_weights()  # type: ignore[operator]
        with pytest.raises(RuntimeError, match=r"\['head\.weight'\] to be tied between steps"):
            model(TOKENS)

    run_ranks(on_each_rank, 2)


def test_a_tie_of_a_parameter_with_main_grads_is_refused() -> None:
    def on_each_rank() -> None:
        model = shard(_Untied())
        set_main_grads(model, [model.head.get_parameter("weight")])
        model.tie_weights()  # type: ignore[operator]
        with pytest.raises(RuntimeError, match=r"\['head\.weight'\] to be tied before set_main_grads"):
            model(TOKENS)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("options", [{"options": ShardingOptions(keep_together=Rows(1))}], ids=str)
def test_a_tie_in_the_flat_layout_is_refused(options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        model = shard(_Untied(), **options)
        model.tie_weights()  # type: ignore[operator]
        with pytest.raises(
            NotImplementedError, match=r"\['head\.weight'\] to be tied before fully_shard, as `keep_together`"
        ):
            model(TOKENS)

    run_ranks(on_each_rank, 2)
