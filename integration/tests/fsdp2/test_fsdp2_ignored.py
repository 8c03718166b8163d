"""Ignored parameters stay unchanged in place, and the user's own code takes care of ignored parameters."""

from collections.abc import Iterator

import torch
from fsdp2_models import (
    Api,
    Stack,
    assert_all_sharded,
    assert_close,
    assert_none_sharded,
    average,
    count,
    full_value,
    inputs,
    on_ranks,
    twins,
)  # fmt: skip
from torch.distributed._composable import replicate  # type: ignore[attr-defined]
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel


def test_ignored_parameters_are_neither_sharded_nor_reduced(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        ignored = {*model.head.parameters(), model.blocks[0].up.weight}
        for block in model.blocks:
            api.fully_shard(block, ignored_params=ignored)
        api.fully_shard(model, ignored_params=ignored)
        assert_none_sharded(ignored)
        assert {*model.head.parameters(), model.blocks[0].up.weight} == ignored
        assert_all_sharded({*model.parameters()} - ignored)
        for network in (expected, model):
            network(inputs()).square().sum().backward()
        assert_close(model.head.weight.grad, expected.head.weight.grad)
        average(expected)
        assert_close(model.stem.weight.grad, expected.stem.weight.grad)
        assert_close(model.blocks[0].down.weight.grad, expected.blocks[0].down.weight.grad)
        assert not torch.equal(model.head.weight.grad, expected.head.weight.grad)

    on_ranks(scenario)


def test_a_unit_all_of_whose_parameters_are_ignored_communicates_nothing(api: Api) -> None:
    def scenario() -> None:
        model = Stack()
        api.fully_shard(model, ignored_params=set(model.parameters()))
        counts, _ = count(lambda: model(inputs()).sum().backward())
        assert counts == {}
        assert_none_sharded(model.parameters())

    on_ranks(scenario)


def test_ddp_may_replicate_ignored_parameters(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        ignored = set(model.blocks[1].parameters())
        model.blocks = api.fully_shard(_Run(model.blocks), ignored_params=ignored)
        names = [name for name, parameter in model.named_parameters() if type(parameter) is not torch.nn.Parameter]
        assert names
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
        wrapped = DistributedDataParallel(model)
        optimizers = [torch.optim.Adam(network.parameters(), lr=1e-2) for network in (expected, model)]
        for step in range(2):
            expected(inputs(seed=step)).square().sum().backward()
            wrapped(inputs(seed=step)).square().sum().backward()
            average(expected)
            with implicit_replication():
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for a, b in zip(expected.parameters(), model.parameters(), strict=True):
            assert_close(full_value(b), a)

    on_ranks(scenario)


def test_replicate_around_a_model_leaves_its_units_sharded(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        for block in model.blocks:
            api.fully_shard(block)
        replicate(model)
        optimizers = [torch.optim.Adam(network.parameters(), lr=1e-2) for network in (expected, model)]
        for step in range(3):
            for network in (expected, model):
                network(inputs(seed=step)).square().sum().backward()
            average(expected)
            with implicit_replication():
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_all_sharded(model.blocks.parameters())
        assert_none_sharded(model.head.parameters())
        for a, b in zip(expected.parameters(), model.parameters(), strict=True):
            assert_close(full_value(b), a)

    on_ranks(scenario)


class _Run(torch.nn.Module):
    """The blocks as a single module with a forward; a stack iterates over the module as over a block."""

    def __init__(self, blocks: torch.nn.ModuleList) -> None:
        super().__init__()
        self.inner = blocks

    def __iter__(self) -> Iterator[torch.nn.Module]:
        yield self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return x
