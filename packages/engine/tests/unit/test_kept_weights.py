"""Units that stay unsharded between passes never compute with weights from before an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import Boom, Net, case, fsdp, inputs, mesh_of, shard, twins
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import (
    DDP,
    HFSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    Rows,
    ShardingOptions,
    fully_shard,
)
from lamella_engine.testing import record
from lamella_testing import run_ranks

X = inputs()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _looks_with_gradients(model: nn.Module) -> float:
    return float(model(X).abs().mean().item())  # leaves the root unsharded: a backward might follow


def _looks_without_gradients(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(X).abs().mean().item())


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


def test_weights_written_by_hand_are_seen_after_mark_updated() -> None:
    def check() -> None:
        reference, sharded = twins(Net, _shard_and_keep)
        for model in (reference, sharded):
            parameters: list[torch.Tensor] = list(model.parameters())
            _looks_without_gradients(model)
            with torch.no_grad():
                torch._foreach_mul_(parameters, 0.5)  # as `AveragedModel`, past the counters of DTensors
        fsdp(sharded).mark_updated()
        assert _looks_without_gradients(sharded) == pytest.approx(_looks_without_gradients(reference), rel=1e-5)

    run_ranks(check, 2)


def test_a_step_makes_only_the_units_stale_that_its_optimizer_updates() -> None:
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
        aliases = [nn.Parameter(parameter.detach()) for parameter in model.parameters()]
        assert all(isinstance(alias, DTensor) for alias in aliases)
        before = _looks_without_gradients(model)
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


# -- writes outside of an optimizer's step ---------------------------------------------------------------------------

KEEPING: dict[str, dict[str, Any]] = {
    "unsharded between passes": {"reshard_after_forward": False},
    "DDP in bf16": {"mesh": (2,), "options": ShardingOptions(placements=DDP), "mp_policy": BF16},
    "ZeRO-1": {"mesh": (2,), "options": ShardingOptions(placements=ZERO1)},
    "ZeRO-1 in bf16": {"mesh": (2,), "options": ShardingOptions(placements=ZERO1), "mp_policy": BF16},
    "ZeRO-2": {"mesh": (2,), "options": ShardingOptions(placements=ZERO2)},
    "ZeRO-1, flat": {
        "mesh": (2,),
        "options": ShardingOptions(placements=ZERO1, keep_together=lambda parameter: Rows(1)),
    },
    "ZeRO-1, offloaded": {
        "mesh": (2,),
        "options": ShardingOptions(placements=ZERO1),
        "offload_policy": CPUOffloadPolicy(),
    },
    "HFSDP": {"mesh": (2, 1), "options": ShardingOptions(placements=(HFSDP, ZERO3))},
    "keep budget": {"options": ShardingOptions(keep_budget=1 << 20)},
}
over_keeping = pytest.mark.parametrize("options", KEEPING.values(), ids=KEEPING)


def _keeping_twins(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    arguments = options | ({"mesh": mesh_of(options["mesh"])} if "mesh" in options else {})
    return twins(Net, lambda model: shard(model, **arguments))


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _tolerance(options: dict[str, Any]) -> float:
    return 3e-2 if "mp_policy" in options else 1e-5


class _ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): `eval` and `train` write other points into the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9})
        self.num_steps = 0

    @torch.no_grad()
    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._move(lambda beta: 1 - beta)

    def _move(self, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(end=self.state[parameter]["z"], weight=weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        share = 1 / self.num_steps
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                parameter.lerp_(end=z, weight=share)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


@over_keeping
def test_the_points_of_a_schedule_free_optimizer_are_seen(options: dict[str, Any]) -> None:
    def check() -> None:
        losses: list[list[float]] = []
        for model in _keeping_twins(options):
            optimizer = _ScheduleFree(model.parameters())
            losses.append([])
            for _ in range(3):
                model(X).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(_looks_without_gradients(model))
                optimizer.eval()
                losses[-1].append(_looks_without_gradients(model))
                optimizer.train()
        assert losses[1] == pytest.approx(losses[0], rel=_tolerance(options))

    run_ranks(check, 2)


def _copy(parameter: torch.Tensor, average: torch.Tensor) -> None:
    parameter.copy_(average)


def _multiply(parameter: torch.Tensor, average: torch.Tensor) -> None:
    parameter.mul_(0).add_(average)


@over_keeping
def test_averages_swapped_in_by_operators_on_the_parameters_are_seen(options: dict[str, Any]) -> None:
    def check() -> None:
        reference, sharded = _keeping_twins(options)
        for look, write in product((_looks_with_gradients, _looks_without_gradients), (_copy, _multiply)):
            for model in (reference, sharded):
                _reshard(sharded)
                parameters = list(model.parameters())
                averages = [parameter.detach() * 0.5 for parameter in parameters]
                look(model)
                with torch.no_grad():
                    for parameter, average in zip(parameters, averages, strict=True):
                        write(parameter, average)
            with case(f"{look.__name__}, {write.__name__}"):
                assert look(sharded) == pytest.approx(look(reference), rel=_tolerance(options))

    run_ranks(check, 2)


@over_keeping
def test_writes_after_an_unshard_by_hand_are_seen_by_the_next_forward(options: dict[str, Any]) -> None:
    def check() -> None:
        for reshards in (True, False):
            reference, sharded = _keeping_twins(options)
            parameters = [*reference.parameters(), *sharded.parameters()]
            fsdp(sharded).unshard()
            if reshards:
                fsdp(sharded).reshard()
            _halve(parameters)
            with case(f"{reshards=}"):
                _assert_looks_alike(reference, sharded, options)

    run_ranks(check, 2)


@over_keeping
def test_writes_after_a_failed_forward_are_seen_by_the_next_one(options: dict[str, Any]) -> None:
    def fail(*_: object) -> None:
        raise Boom

    def check() -> None:
        for resets in (True, False):
            reference, sharded = _keeping_twins(options)
            parameters = [*reference.parameters(), *sharded.parameters()]
            handle = sharded.get_submodule("layers.1").register_forward_pre_hook(fail)
            with pytest.raises(Boom):
                sharded(X)
            handle.remove()
            if resets:
                fsdp(sharded).reset_iter_state()
            _halve(parameters)
            with case(f"{resets=}"):
                _assert_looks_alike(reference, sharded, options)

    run_ranks(check, 2)


@over_keeping
def test_writes_between_a_forward_and_its_backward_are_seen_by_the_next_forward(options: dict[str, Any]) -> None:
    def check() -> None:
        reference, sharded = _keeping_twins(options)
        parameters = [*reference.parameters(), *sharded.parameters()]
        fsdp(sharded).set_is_last_backward(False)
        loss = sharded(X).mean()
        _halve(parameters)
        loss.backward()
        _assert_looks_alike(reference, sharded, options)

    run_ranks(check, 2)


def _assert_looks_alike(reference: nn.Module, sharded: nn.Module, options: dict[str, Any]) -> None:
    expected = _looks_without_gradients(reference)
    assert _looks_without_gradients(sharded) == pytest.approx(expected, rel=_tolerance(options))


def _halve(parameters: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


def test_data_assigned_to_a_weight_that_stays_gathered_are_refused_by_the_next_forward() -> None:
    def check() -> None:
        reference, sharded = twins(Net, _shard_and_keep)
        _looks_with_gradients(sharded)
        gathered = sharded.get_parameter("head.weight")
        gathered.data = torch.zeros_like(gathered)
        with pytest.raises(RuntimeError, match=r"\['head\.weight'\] to be written in place"):
            _looks_with_gradients(sharded)
        assert _looks_with_gradients(sharded) == pytest.approx(_looks_with_gradients(reference), rel=1e-5)

    run_ranks(check, 2)


def test_a_write_in_place_gathers_once_more_and_only_its_unit() -> None:
    def check() -> None:
        _, sharded = twins(Net, _shard_and_keep)
        parameter = sharded.get_parameter("layers.1.up.weight")
        _looks_without_gradients(sharded)
        log = record(sharded)
        with torch.no_grad():
            parameter.mul_(2)
        for _ in range(2):
            _looks_without_gradients(sharded)
        assert log.units_of("gather") == ["layers.1"]

    run_ranks(check, 2)
