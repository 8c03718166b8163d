"""Units that stay unsharded between passes never compute with weights from before an update."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from engine_models import Net, case, fsdp, inputs, record, twins
from torch import nn

from lamella_engine import fully_shard
from lamella_testing import run_ranks

X = inputs()


def _looks_with_gradients(model: nn.Module) -> float:
    return float(model(X).mean().item())  # leaves the root unsharded: a backward might follow


def _looks_without_gradients(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(X).mean().item())


def _shard_and_keep(model: Net) -> None:
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)


@pytest.mark.parametrize("look", [_looks_with_gradients, _looks_without_gradients])
def test_an_optimizer_step_between_two_forwards_is_seen(look: Callable[[nn.Module], float]) -> None:
    def check() -> None:
        for foreach, fused in ((False, False), (True, False), (False, True)):
            with case(f"foreach={foreach}, fused={fused}"):
                step_and_look(foreach, fused)

    def step_and_look(foreach: bool, fused: bool) -> None:
        seen: list[list[float]] = []
        for model in twins(Net, _shard_and_keep):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach, fused=fused)
            seen.append([])
            for _ in range(3):
                model(X).square().mean().backward()
                seen[-1].append(look(model))
                optimizer.step()
                optimizer.zero_grad()
                seen[-1].append(look(model))
        assert seen[1] == pytest.approx(seen[0], rel=1e-5)

    run_ranks(check, 2)


def test_weights_that_were_written_by_hand_are_seen_when_it_is_said() -> None:
    def check() -> None:
        reference, sharded = twins(Net, _shard_and_keep)
        for model in (reference, sharded):
            parameters = list(model.parameters())
            _looks_without_gradients(model)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(0.5)
        fsdp(sharded).mark_updated()
        assert _looks_without_gradients(sharded) == pytest.approx(_looks_without_gradients(reference), rel=1e-5)

    run_ranks(check, 2)


def test_a_step_makes_those_units_stale_that_the_optimizer_updates_and_no_others() -> None:
    """Another model's units, or other units of the same model, are not gathered again."""

    def check() -> None:
        _, first = twins(Net, _shard_and_keep, seed=0)
        _, second = twins(Net, _shard_and_keep, seed=1)
        logs = {model: record(model) for model in (first, second)}
        for update, gathered in (
            (list(first.parameters()), {first: ["root", "layers.0", "layers.1", "layers.2"], second: []}),
            (list(first.get_submodule("layers.1").parameters()), {first: ["layers.1"], second: []}),
        ):
            for model in (first, second):
                _looks_without_gradients(model)
            optimizer = torch.optim.SGD(update, lr=0.1)
            for parameter in update:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for model in (first, second):
                logs[model].clear()
                _looks_without_gradients(model)
                assert logs[model].units_of("gather") == gathered[model]

    run_ranks(check, 2)


def test_a_step_on_other_dtensors_over_the_same_memory_is_seen() -> None:
    def check() -> None:
        _, model = twins(Net, _shard_and_keep)
        before = _looks_without_gradients(model)
        aliases = [nn.Parameter(parameter.detach()) for parameter in model.parameters()]
        for alias in aliases:
            alias.grad = torch.ones_like(alias)
        torch.optim.SGD(aliases, lr=0.1).step()
        assert _looks_without_gradients(model) != before

    run_ranks(check, 2)


def test_weights_that_were_loaded_are_seen() -> None:
    def check() -> None:
        other, source = twins(Net, _shard_and_keep, seed=1)
        _, sharded = twins(Net, _shard_and_keep, seed=0)
        _looks_without_gradients(sharded)
        sharded.load_state_dict(source.state_dict())
        assert _looks_without_gradients(sharded) == pytest.approx(_looks_without_gradients(other), rel=1e-5)

    run_ranks(check, 2)


def test_kept_weights_are_gathered_once_for_any_number_of_forwards() -> None:
    def check() -> None:
        _, sharded = twins(Net, _shard_and_keep)
        log = record(sharded)
        for _ in range(3):
            _looks_without_gradients(sharded)
        assert sorted(log.units_of("gather")) == ["layers.0", "layers.1", "layers.2", "root"]

    run_ranks(check, 2)


def test_unsharded_by_hand_weights_stay_until_they_are_resharded() -> None:
    def check() -> None:
        reference, sharded = twins(Net, fully_shard)
        handle = fsdp(sharded).unshard(async_op=True)
        assert handle is not None
        handle.wait()
        handle.wait()
        assert torch.equal(sharded.get_parameter("head.weight"), reference.get_parameter("head.weight"))
        log = record(sharded)
        fsdp(sharded).unshard()
        sharded(X).mean().backward()
        assert log.units_of("gather") == []
        fsdp(sharded).reshard()
        fsdp(sharded).reshard()

    run_ranks(check, 2)


def test_an_optimizer_of_other_parameters_that_steps_on_one_rank_alone_changes_nothing() -> None:
    """A probe that rank 0 fits between two validations, say."""

    def check() -> None:
        reference, sharded = twins(Net, _shard_and_keep)
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(sharded(X), reference(X))
            if dist.get_rank() == 0:
                probe = nn.Linear(2, 2)
                probe(torch.ones(1, 2)).sum().backward()
                torch.optim.SGD(probe.parameters(), lr=0.1).step()

    run_ranks(check, 2)
