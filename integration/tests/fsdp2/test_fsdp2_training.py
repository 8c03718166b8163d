"""Sharded training is data-parallel training, for any order of calls of the units."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    DIM,
    Api,
    Block,
    Stack,
    Where,
    assert_all_sharded,
    assert_close,
    assert_equal_models,
    assert_none_sharded,
    assert_trains_as,
    average,
    count,
    descend,
    gradient_of,
    inputs,
    on_ranks,
    shard,
    twins,
    units,
)  # fmt: skip
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint  # type: ignore[attr-defined]
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

RESHARD = (True, False, None)
SHAPES = [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)]]


def _two_layers(num_in: int, hidden: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_in, hidden), nn.ReLU(), nn.Linear(hidden, num_out))


def _rows_of(dim: int, step: int) -> torch.Tensor:
    return inputs(4, dim, seed=step)


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.four_ranks)])
def test_one_unit_trains_as_data_parallelism(api: Api, num_ranks: int) -> None:
    def scenario() -> None:
        for (rows, hidden), (_, columns) in SHAPES:
            expected, model = twins(partial(_two_layers, rows, hidden, columns))
            api.fully_shard(model)
            assert_trains_as(expected, model, make_input=partial(_rows_of, rows))

    on_ranks(scenario, num_ranks)


def test_many_units_train_as_data_parallelism(api: Api) -> None:
    def scenario(reshard: bool | None) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        assert_trains_as(expected, model, num_steps=5)

    on_ranks(scenario, cases=RESHARD)


@pytest.mark.four_ranks
def test_four_ranks_own_nothing_of_some_parameters_and_train_all_the_same(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(lambda: Stack(dim=3, hidden=2))
        shard(api, model)
        assert_trains_as(expected, model, make_input=lambda step: inputs(4, 3, seed=step))

    on_ranks(scenario, 4)


def test_a_single_rank_communicates_nothing(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        counts, _ = count(lambda: model(inputs()).sum().backward())
        assert counts == {}
        model.zero_grad()
        assert_trains_as(expected, model)

    on_ranks(scenario, 1)


# -- what the modules hold --------------------------------------------------------------------------------------------


def test_after_forward_modules_hold_parameters_by_the_flag(api: Api) -> None:
    def scenario(reshard: bool | None, nested: bool) -> None:
        _, model = twins()
        if nested:
            shard(api, model, reshard_after_forward=reshard)
        else:
            api.fully_shard(model, reshard_after_forward=reshard)
        assert_all_sharded(model.parameters())
        out = model(inputs())
        inner, outer = list(model.blocks.parameters()), [*model.stem.parameters(), *model.head.parameters()]
        keeps_inner, keeps_outer = (reshard is False or (not nested and reshard is None)), reshard is not True
        (assert_none_sharded if keeps_inner else assert_all_sharded)(inner)
        (assert_none_sharded if keeps_outer else assert_all_sharded)(outer)
        out.sum().backward()
        assert_all_sharded(model.parameters())
        assert_all_sharded(parameter.grad for parameter in model.parameters())
        model(inputs())
        for module in units(api, model):
            module.reshard()
        assert_all_sharded(model.parameters())

    on_ranks(scenario, cases=itertools.product(RESHARD, (False, True)))


def test_parameters_are_the_same_objects_before_and_after_a_step(api: Api) -> None:
    def scenario() -> None:
        _, model = twins()
        shard(api, model)
        before = dict(model.named_parameters())
        model(inputs()).sum().backward()
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(after[name] is before[name] for name in before)

    on_ranks(scenario)


def test_inside_forward_parameters_are_plain_whole_and_need_gradients(api: Api) -> None:
    class ParameterCheckingLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert_none_sharded(self.parameters())
            assert isinstance(self.weight, nn.Parameter)
            assert self.weight.shape == (5, DIM) and self.weight.requires_grad
            self.num_calls = getattr(self, "num_calls", 0) + 1
            return super().forward(x)

    def scenario() -> None:
        model = nn.Sequential(ParameterCheckingLinear(DIM, 5), nn.Tanh())
        api.fully_shard(model[0])
        api.fully_shard(model)
        model(inputs()).sum().backward()
        assert model[0].num_calls == 1

    on_ranks(scenario)


# -- call patterns ----------------------------------------------------------------------------------------------------


class _InnerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(x) + self.inner(2 * x))
        return out


def test_a_unit_may_run_twice_in_a_forward(api: Api) -> None:
    def scenario(reshard: bool | None) -> None:
        expected, model = twins(_InnerTwice)
        api.fully_shard(model.inner, reshard_after_forward=reshard)
        api.fully_shard(model, reshard_after_forward=reshard)
        assert_trains_as(expected, model)

    on_ranks(scenario, cases=RESHARD)


def test_two_forwards_may_come_before_one_backward(api: Api) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        square: torch.Tensor = (model(x).mean() - model(x + 1).square().mean()).pow(2)
        return square

    def scenario(reshard: bool | None) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        assert_trains_as(expected, model, loss_of=loss)

    on_ranks(scenario, cases=RESHARD)


def test_a_unit_may_run_alone_after_a_step_of_the_whole(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        for call in (lambda m: m, lambda m: m.blocks[1], lambda m: m):
            for network in (expected, model):
                call(network)(inputs()).square().sum().backward()  # type: ignore[no-untyped-call]
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)

    on_ranks(scenario)


def test_an_evaluation_between_steps_changes_nothing(api: Api) -> None:
    def scenario(reshard: bool | None) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        for _ in range(2):
            assert_trains_as(expected, model, num_steps=1)
            with torch.no_grad():
                for unit in units(api, model):
                    unit.reshard()
                assert_close(model(inputs()), expected(inputs()))
                for unit in units(api, model):
                    unit.reshard()

    on_ranks(scenario, cases=RESHARD)


def test_units_may_nest_three_deep(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        for block in model.blocks:
            api.fully_shard(block.up)
            api.fully_shard(block)
        shard_less = model.head
        api.fully_shard(shard_less)
        api.fully_shard(model)
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_a_module_without_parameters_or_inputs_may_be_a_unit(api: Api) -> None:
    class Added(nn.Module):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return x + pair[0] + pair[1]

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self) -> torch.Tensor:
            return self.weight @ self.weight

    def scenario() -> None:
        added = api.fully_shard(Added())
        x = torch.ones(3, requires_grad=True)
        added(x, (x, x)).sum().backward()
        assert torch.equal(gradient_of(x), torch.full((3,), 3.0))
        model = api.fully_shard(Weight())
        out = model()
        out.sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 8.0))
        handle = added.unshard(async_op=True)
        handle.wait()

    on_ranks(scenario)


# -- tied parameters and lists ----------------------------------------------------------------------------------------


class _TiedEmbedding(nn.Module):
    """Embedding and head share a weight whose rows four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, DIM)
        self.block = Block()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.block(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 17, (2, 8), generator=generator, device="cpu").to(Where.device)


@pytest.mark.parametrize("listed", [False, True], ids=["root", "list"])
def test_tied_parameters_of_one_unit_stay_tied(api: Api, listed: bool) -> None:
    def scenario(reshard: bool | None) -> None:
        expected, model = twins(_TiedEmbedding)
        api.fully_shard(model.block, reshard_after_forward=reshard)
        if listed:
            api.fully_shard([model.embedding, model.norm, model.head], reshard_after_forward=reshard)
        api.fully_shard(model, reshard_after_forward=reshard)
        assert model.head.weight is model.embedding.weight
        assert_trains_as(expected, model, make_input=_tokens, loss_of=lambda m, x: m(x))
        assert model.head.weight is model.embedding.weight

    on_ranks(scenario, cases=RESHARD)


def test_a_unit_of_several_modules_trains_as_data_parallelism(api: Api) -> None:
    def scenario(reshard: bool | None) -> None:
        expected, model = twins()
        api.fully_shard([model.blocks[0], model.blocks[1]], reshard_after_forward=reshard)
        api.fully_shard([model.blocks[2], model.head], reshard_after_forward=reshard)
        api.fully_shard(model, reshard_after_forward=reshard)
        assert_trains_as(expected, model)

    on_ranks(scenario, cases=RESHARD)


class _Chunked(nn.Module):
    """Forward may leave out the head; the loss then runs the head chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = Block(), nn.LayerNorm(DIM), nn.Linear(DIM, 11, bias=False)

    def forward(self, x: torch.Tensor, with_head: bool = True) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.body(x))
        return self.head(hidden) if with_head else hidden


def _chunked_loss(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, with_head=False)
    gradients = []
    for chunk in hidden.detach().chunk(2):
        chunk.requires_grad_()
        model.head(chunk).square().sum().backward()
        gradients.append(chunk.grad)
    hidden.backward(torch.cat(gradients))


@pytest.mark.parametrize("listed", [False, True], ids=["units", "list"])
def test_a_part_that_forward_left_out_may_run_by_itself(api: Api, listed: bool) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins(_Chunked)
        for modules in [[model.norm, model.head]] if listed else [model.norm, model.head]:
            api.fully_shard(modules, reshard_after_forward=reshard)
        api.fully_shard(model.body, reshard_after_forward=reshard)
        api.fully_shard(model, reshard_after_forward=reshard)
        for step in range(3):
            for network in (expected, model):
                _chunked_loss(network, inputs(seed=step))
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)
            with torch.no_grad():
                model(inputs())
            model.reshard()

    on_ranks(scenario, cases=(True, False))


def test_forwards_that_leave_out_a_part_of_a_list_may_come_before_one_backward(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(_Chunked)
        api.fully_shard([model.norm, model.head])
        api.fully_shard(model)
        for network in (expected, model):
            (
                network(inputs(), with_head=False).sum() + network(inputs(seed=1), with_head=False).square().sum()
            ).backward()
        average(expected)
        assert model.head.weight.grad is None
        assert_equal_models(expected, model)

    on_ranks(scenario)


# -- recomputed activations -------------------------------------------------------------------------------------------


class _RecomputedStack(Stack):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        head: torch.Tensor = self.head(x)
        return head


@pytest.mark.parametrize("kind", ["reentrant", "not_reentrant", "composable"])
def test_activations_may_be_recomputed(api: Api, kind: str) -> None:
    def scenario(reshard: bool | None) -> None:
        expected, model = twins(Stack if kind == "composable" else lambda: _RecomputedStack(kind == "reentrant"))
        if kind == "composable":
            for block in model.blocks:
                composable_checkpoint(block)
        for block in model.blocks:
            api.fully_shard(block.up, reshard_after_forward=reshard)
        shard(api, model, reshard_after_forward=reshard)
        assert_trains_as(expected, model)

    on_ranks(scenario, cases=RESHARD)


def test_two_recomputed_forwards_may_come_before_one_backward(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        for block in model.blocks:
            composable_checkpoint(block)
            api.fully_shard(block.up)
        shard(api, model)
        loss = lambda m, x: (m(x).mean() - m(2 * x).mean()).pow(2)  # noqa: E731
        assert_trains_as(expected, model, loss_of=loss)

    on_ranks(scenario)


# -- optimizers -------------------------------------------------------------------------------------------------------


def test_an_optimizer_steps_on_shards(api: Api) -> None:
    def scenario(options: dict[str, Any]) -> None:
        expected, model = twins()
        shard(api, model)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, **options) for m in (expected, model)]
        for step in range(3):
            for network, optimizer in zip((expected, model), optimizers, strict=True):
                network(inputs(seed=step)).square().sum().backward()
                if network is expected:
                    average(network)
                optimizer.step()
                optimizer.zero_grad()
        assert_equal_models(expected, model)

    on_ranks(scenario, cases=({"foreach": True}, {"foreach": False}, {"fused": True}))


def test_a_hook_after_accumulation_sees_the_reduced_gradient_and_may_step(api: Api) -> None:
    """The optimizer in backward: each gradient is used and dropped on arrival."""

    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        seen = []

        def step(parameter: torch.Tensor) -> None:
            seen.append(parameter)
            with torch.no_grad():
                parameter -= 0.1 * gradient_of(parameter)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for round_ in range(2):
            model(inputs(seed=round_)).square().sum().backward()
            expected(inputs(seed=round_)).square().sum().backward()
            average(expected)
            with torch.no_grad():
                for parameter in expected.parameters():
                    parameter -= 0.1 * gradient_of(parameter)
                    parameter.grad = None
            assert_equal_models(expected, model)
        assert_all_sharded(seen)
        assert len(seen) == 2 * len(list(model.parameters()))

    on_ranks(scenario)


def test_gradients_add_up_until_zero_grad(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        for network in (expected, model):
            for step in range(3):
                network(inputs(seed=step)).square().sum().backward()
        average(expected)
        assert_equal_models(expected, model)
        model.zero_grad(set_to_none=False)
        assert all(not parameter.grad.full_tensor().any() for parameter in model.parameters())
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())

    on_ranks(scenario)


def test_weights_written_between_steps_are_used_in_the_next(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        assert_trains_as(expected, model, num_steps=1)
        with torch.no_grad():
            for network in (expected, model):
                for parameter in network.parameters():
                    parameter.mul_(0.5)
                    parameter.add_(0.01)
        assert_trains_as(expected, model, num_steps=1)

    on_ranks(scenario)
