"""What autograd does with units: outputs that nobody uses, containers, parts of a graph, and parts of a model."""

import dataclasses
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from fsdp2_models import (
    DIM,
    Api,
    Stack,
    assert_all_sharded,
    assert_close,
    assert_equal_models,
    assert_trains_as,
    average,
    descend,
    gradient_of,
    inputs,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn


class _Double(nn.Module):
    """Two linears; maybe only one is used."""

    def __init__(self, uses_second: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.uses_second = uses_second

    def forward(self, x: torch.Tensor) -> object:
        return (self.one(x).relu(), self.two(x).relu()) if self.uses_second else self.one(x).relu()


RESHARD = (True, False)


def test_an_output_may_go_unused(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins(_Double)
        api.fully_shard(model.one, reshard_after_forward=reshard)
        api.fully_shard(model, reshard_after_forward=reshard)
        for step in range(4):
            for network in (expected, model):
                a, b = network(inputs(seed=step))
                ((a * b).sum() if step < 2 else a.sum()).backward()
            average(expected)
            assert_equal_models(expected, model)
            assert_all_sharded(model.parameters())
            for network in (expected, model):
                descend(network)

    on_ranks(scenario, cases=RESHARD)


def test_a_unit_may_go_unused(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins(lambda: _Double(uses_second=False))
        for module in (model.one, model.two, model):
            api.fully_shard(module, reshard_after_forward=reshard)
        assert_trains_as(expected, model, loss_of=lambda m, x: m(x).square().sum())
        assert all(parameter.grad is None for parameter in model.two.parameters())

    on_ranks(scenario, cases=RESHARD)


def test_a_part_of_a_unit_may_go_unused(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins(lambda: _Double(uses_second=False))
        api.fully_shard(model, reshard_after_forward=reshard)
        assert_trains_as(expected, model, loss_of=lambda m, x: m(x).square().sum())
        assert all(parameter.grad is None for parameter in model.two.parameters())

    on_ranks(scenario, cases=RESHARD)


def test_the_halves_of_a_graph_may_go_backward_one_after_another(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(lambda: nn.Sequential(nn.Linear(DIM, DIM), _Double()))
        for module in (model[0], model[1].one, model[1].two, model):
            api.fully_shard(module)
        for _ in range(2):
            for network in (expected, model):
                one, two = network(inputs())
                if network is model:
                    model.set_is_last_backward(False)
                two.sum().backward(retain_graph=True)
                if network is model:
                    model.set_is_last_backward(True)
                one.square().sum().backward()
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)

    on_ranks(scenario)


def test_ranks_may_use_different_parts_if_told_so(api: Api) -> None:
    class Routed(_Double):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = (self.one if dist.get_rank() == 0 else self.two)(x)
            return out

    def scenario() -> None:
        expected, model = twins(Routed)
        api.fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        for network in (expected, model):
            network(inputs()).square().sum().backward()
        for parameter in expected.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario)


# -- containers -------------------------------------------------------------------------------------------------------


class _NamedOutput(NamedTuple):
    x: torch.Tensor
    extra: torch.Tensor


@dataclasses.dataclass
class _Record:
    x: torch.Tensor
    note: str = "kept"


CONTAINERS = {
    "list": (lambda x: [x], lambda value: value[0]),
    "tuple": (lambda x: (x, None, 3), lambda value: value[0]),
    "dict": (lambda x: {"x": x, "n": 1}, lambda value: value["x"]),
    "namedtuple": (lambda x: _NamedOutput(x, torch.ones(2)), lambda value: value.x),
    "dataclass": (lambda x: _Record(x), lambda value: value.x),
    "nested": (lambda x: {"a": [(x,)]}, lambda value: value["a"][0][0]),
}


class _Wrapping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, value: object) -> object:
        wrap, unwrap = CONTAINERS[self.kind]
        x = value if isinstance(value, torch.Tensor) else unwrap(value)  # type: ignore[no-untyped-call]
        return wrap(self.two(self.one(x).relu()).relu())  # type: ignore[no-untyped-call]


def test_activations_may_travel_in_containers(api: Api) -> None:
    def scenario(kind: str, reshard: bool) -> None:
        expected, model = twins(lambda: nn.Sequential(*(_Wrapping(kind) for _ in range(3))))
        for module in (*model, model):
            api.fully_shard(module, reshard_after_forward=reshard)
        assert_trains_as(expected, model, num_steps=2, loss_of=lambda m, x: CONTAINERS[kind][1](m(x)).square().sum())  # type: ignore[no-untyped-call]

    on_ranks(scenario, cases=itertools.product(CONTAINERS, RESHARD))


def test_outputs_that_are_no_tensors_pass_unchanged(api: Api) -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor, extra: object = None) -> object:  # type: ignore[override]
            return extra

    def scenario() -> None:
        model = api.fully_shard(Odd(2, 2))
        for extra in (None, 3, "text", [1, 2], {"a": None}):
            assert model(torch.ones(1, 2), extra) == extra
        model.reshard()
        assert_all_sharded(model.parameters())

    on_ranks(scenario)


# -- gradients of other things ----------------------------------------------------------------------------------------


def test_inputs_get_their_gradients_and_hooks_on_activations_run(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        seen: list[torch.Tensor] = []
        for network in (expected, model):
            x = inputs().requires_grad_()
            hidden = network.blocks[0](network.stem(x)) if network is expected else None
            out = network(x)
            out.register_hook(seen.append)
            out.square().sum().backward()
            seen.append(gradient_of(x))
            del hidden
        assert_close(seen[2], seen[0])
        assert_close(seen[3], seen[1])

    on_ranks(scenario)


def test_a_gradient_may_be_asked_for_without_touching_parameters(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        gradients: list[torch.Tensor] = []
        for network in (expected, model):
            x = inputs().requires_grad_()
            gradients += torch.autograd.grad(network(x).square().sum(), [x])
        assert_close(gradients[1], gradients[0])
        model.zero_grad()
        for network in (expected, model):
            network.zero_grad()
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_a_detached_half_trains_only_the_other(api: Api) -> None:
    class Detached(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.stem(x)).detach()
            head: torch.Tensor = self.head(self.blocks[1](x))
            return head

    def scenario() -> None:
        expected, model = twins(Detached)
        shard(api, model)
        assert_trains_as(expected, model)
        assert model.stem.weight.grad is None
        assert model.blocks[0].up.weight.grad is None

    on_ranks(scenario)
