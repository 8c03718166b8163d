"""An optimizer whose step hides the next forward's first gathers trains, to the bit, like an ordinary optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import BF16, EVERY_STAGE, SOME_STAGES, Net, case, fsdp, shard, shard_on
from optimizer_models import (
    OPTIMIZERS,
    WHOLE_TENSORS_ONLY,
    CountsInItsGroups,
    CountsItself,
    Lion,
    NormsOverAll,
    flavours_of,
)
from optimizer_pairs import ADAMW, LOSS, Overlapped, assert_same_weights, named, run_backward, two_microbatches
from torch import nn
from torch.optim import Optimizer

from lamella_engine import CPUOffloadPolicy, MixedPrecisionPolicy, Rows, ShardingOptions
from lamella_engine.extending import local_of
from lamella_engine.testing import (
    CollectiveLog,
    LoggedCollective,
    Residency,
    assert_at_rest,
    held_nbytes,
    named_units,
    record,
    require_unit,
)
from lamella_optim import MuonAndAdam, clip_grad_norm_, overlap_optimizer, step_on_local_shards
from lamella_testing import run_ranks

# -- a step ----------------------------------------------------------------------------------------------------------


class _Traced(Lion):
    """Notes updated parameters, in order."""

    def __init__(self, model: nn.Module, log: CollectiveLog) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self.names, self.log = {id(parameter): name for name, parameter in model.named_parameters()}, log

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if id(p) in self.names:  # not at the trial step
                self.log.events.append(LoggedCollective("update", self.names[id(p)], 0, frozenset()))
        super().step()


@pytest.mark.parametrize("late_gradients", [False, True])
def test_a_step_updates_and_gathers_the_first_units_of_forward_before_the_rest(late_gradients: bool) -> None:
    def check() -> None:
        model = shard(Net())
        log = record(model)
        optimizer = _Traced(model, log)
        overlap_optimizer(optimizer, late_gradients=late_gradients)
        for _ in range(2):
            run_backward(model)
            log.clear()
            optimizer.step()
        names = [name for name, _ in model.named_parameters()]
        late = [f"update {name}" for name in names if name.startswith(("layers.1", "layers.2"))]
        first = [f"update {name}" for name in names if f"update {name}" not in late]
        # While the outermost unit's gradients are being reduced, further units are ready for the update.
        early = [update for update in late if "layers.2" in update] if late_gradients else []
        late = [update for update in late if update not in early]
        assert log.order == [*early, *first, "gather root", "gather layers.0", *late]

    run_ranks(check, 2)


def test_forward_uses_units_gathered_in_the_step_without_a_second_gather() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train(2)
        gathered = pair.train(1)
        assert gathered == ["root", "layers.0"]
        pair.backward()
        expected, got = (log.units_of("gather") for log in pair.logs)
        assert gathered + got == expected
        assert pair.logs[0].units_of("reduce") == pair.logs[1].units_of("reduce")

    run_ranks(check, 2)


def test_an_overlapped_step_holds_two_units_for_forward_at_any_prefetch_budget() -> None:
    def check() -> None:
        for budget in (None, 0, 2**30):
            with case(budget):
                pair = Overlapped()
                fsdp(pair.model).set_options(prefetch_budget=budget)
                assert pair.train() == ["root", "layers.0"]
                units = {name: require_unit(pair.model.get_submodule(name)) for name in ("", "layers.0")}
                nbytes = {name or "root": unit.parameters.unsharded_nbytes for name, unit in units.items()}
                assert held_nbytes(pair.model) == nbytes

    run_ranks(check, 2)


def test_a_prefetch_budget_counts_units_gathered_in_the_step() -> None:
    def check() -> None:
        pair = Overlapped(partial(Net, dim=64))
        nbytes = require_unit(pair.model.get_submodule("layers.0")).parameters.unsharded_nbytes
        fsdp(pair.model).set_options(prefetch_budget=2 * nbytes)
        pair.train()
        most = 0

        def look(*_: object) -> None:
            nonlocal most
            most = max(most, sum(held_nbytes(pair.model).values()))

        for layer in pair.model.get_submodule("layers").children():
            layer.register_forward_hook(look, prepend=True)
        pair.backward()
        assert most <= require_unit(pair.model).parameters.unsharded_nbytes + 3 * nbytes

    run_ranks(check, 2)


def test_a_list_of_modules_to_prefetch_counts_here_too() -> None:
    def check() -> None:
        pair = Overlapped()
        layers = list(pair.model.get_submodule("layers").children())
        fsdp(pair.model).set_modules_to_forward_prefetch([fsdp(layers[1]), fsdp(layers[2])])
        assert pair.train() == ["root", "layers.1"]

    run_ranks(check, 2)


def test_an_overlapped_step_gathers_units_only_after_a_backward() -> None:
    def check() -> None:
        pair = Overlapped()
        assert pair.step() == []  # nothing has run
        assert pair.train() == ["root", "layers.0"]
        pair.backward()
        for model in pair.models:
            model.zero_grad()
        assert pair.step() == ["root", "layers.0"]  # without gradients
        assert pair.step() == []

    run_ranks(check, 2)


# -- every optimizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted((OPTIMIZERS.keys() - WHOLE_TENSORS_ONLY.keys()) | {"Rprop"}))
def test_every_flavour_of_every_optimizer_takes_the_same_steps_overlapped(name: str) -> None:
    def check() -> None:
        for flavour in flavours_of(name):
            with case(flavour):
                pair = Overlapped(optimizer=named(name, lr=1e-2, **flavour))
                assert pair.train() == ["root", "layers.0"]

    run_ranks(check, 3)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": 1e-2, "amsgrad": True, "maximize": True, "weight_decay": 0.1}, "Adam"),
        ({"lr": torch.tensor(1e-2)}, "AdamW"),
        ({"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "SGD"),
    ],
)
def test_options_and_several_groups_count(options: dict[str, Any], name: str) -> None:
    def check() -> None:
        def optimizer(model: nn.Module) -> Optimizer:
            matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
            vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
            groups = [{"params": matrices}, {"params": vectors, **options, "weight_decay": 0.0}]
            return OPTIMIZERS[name](groups, **options)

        pair = Overlapped(optimizer=optimizer)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in pair.optimizers]
        for _ in range(3):
            assert pair.train(1) == ["root", "layers.0"]
            for scheduler in schedulers:
                scheduler.step()

    run_ranks(check, 2)


def test_custom_and_local_shard_optimizers_take_the_same_steps_overlapped() -> None:
    def check() -> None:
        for make in (
            lambda model: Lion(model.parameters()),
            lambda model: step_on_local_shards(named("AdamW", lr=1e-2, fused=True)(model)),
        ):
            assert Overlapped(optimizer=make).train() == ["root", "layers.0"]

    run_ranks(check, 2)


def test_an_optimizer_built_before_sharding_takes_the_same_steps_overlapped() -> None:
    def check() -> None:
        models = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            model = Net()
            optimizer = ADAMW(model)
            shard(model)
            if overlaps:
                overlap_optimizer(optimizer)
            for _ in range(3):
                run_backward(model)
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        assert_same_weights(*models)

    run_ranks(check, 2)


@pytest.mark.parametrize("kind", [CountsInItsGroups, CountsItself, NormsOverAll, torch.optim.LBFGS])
def test_overlap_optimizer_refuses_optimizers_that_cannot_step_in_parts(kind: type) -> None:
    def check() -> None:
        optimizer = kind(shard(Net()).parameters())
        with pytest.raises(ValueError, match="Leave overlap_optimizer out"):
            overlap_optimizer(optimizer)
        assert not optimizer._optimizer_step_pre_hooks

    run_ranks(check, 1)


def test_overlap_optimizer_refuses_an_optimizer_of_several_and_steps_nothing() -> None:
    def check() -> None:
        model = shard(Net())
        run_backward(model)
        groups = [{"params": model.parameters()}]
        optimizer = MuonAndAdam(groups, is_matrix=lambda p: p.ndim == 2, muon={"lr": 0.1}, adam={"lr": 0.1})
        before = [local_of(parameter).clone() for parameter in model.parameters()]
        with pytest.raises(ValueError, match="steps by other optimizers. Leave overlap_optimizer out"):
            overlap_optimizer(optimizer)
        assert all(map(torch.equal, before, map(local_of, model.parameters())))

    run_ranks(check, 1)


def test_an_optimizer_overlapped_twice_is_refused() -> None:
    def check() -> None:
        optimizer = ADAMW(shard(Net()))
        handle = overlap_optimizer(optimizer)
        with pytest.raises(ValueError, match="remove()"):
            overlap_optimizer(optimizer)
        handle.remove()
        with pytest.raises(TypeError, match="Linear"):
            overlap_optimizer(nn.Linear(2, 2))  # type: ignore[arg-type]

    run_ranks(check, 1)


# -- every way to shard ----------------------------------------------------------------------------------------------


# Whether each microbatch is reduced, the precision, and whether gradients are late: every two values meet.
WAYS = [
    (True, MixedPrecisionPolicy(), False),
    (True, BF16, True),
    (False, MixedPrecisionPolicy(), True),
    (False, BF16, False),
]
FURTHER_WAYS = [(reduces_each, policy, not late) for reduces_each, policy, late in WAYS]


@SOME_STAGES
@pytest.mark.parametrize("ways", [WAYS, pytest.param(FURTHER_WAYS, marks=pytest.mark.slow)], ids=["pairs", "further"])
def test_every_stage_takes_the_same_steps_with_several_microbatches(
    stage: str, ways: list[tuple[bool, MixedPrecisionPolicy, bool]]
) -> None:
    shape, placements = EVERY_STAGE[stage]

    def check() -> None:
        for reduces_each, policy, late in ways:
            with case((reduces_each, policy, late)):
                apply = shard_on(shape, options=ShardingOptions(placements=placements), mp_policy=policy)
                backward = partial(two_microbatches, reduces_each=reduces_each)
                pair = Overlapped(partial(Net, dim=8), apply, backward=backward, looks=False, late_gradients=late)
                pair.train(set_to_none=late)
                computes_with_main = stage == "DDP" and policy.param_dtype is None
                early = [require_unit(m) for m in (pair.model, pair.model.get_submodule("layers.0"))]
                assert all((unit.weights.residency is Residency.UNSHARDING) != computes_with_main for unit in early)
                pair.assert_looks_alike()

    run_ranks(check, torch.Size(shape).numel())


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"options": ShardingOptions(keep_together=Rows(1))},
    ],
    ids=str,
)
def test_kept_units_and_the_flat_layout_take_the_same_steps_overlapped(options: dict[str, Any]) -> None:

    def check() -> None:
        pair = Overlapped(partial(Net, dim=8), shard_on((4,), mp_policy=BF16, **options), looks=False)
        pair.train()
        assert set(held_nbytes(pair.model)) == {"root", "layers.0"}
        pair.assert_looks_alike()

    run_ranks(check, 4)


def test_weights_that_stay_after_backward_are_not_gathered_in_the_step() -> None:
    """The bytes are in use: a holder may be about to read."""

    def check() -> None:
        def apply(model: Net) -> None:
            fsdp(shard(model)).set_reshard_after_backward(False)

        pair = Overlapped(apply=apply)
        assert pair.train() == []
        pair.assert_looks_alike()

    run_ranks(check, 2)


def test_shards_on_the_cpu_are_not_gathered_in_the_step() -> None:
    def check() -> None:
        pair = Overlapped(partial(Net, dim=8), shard_on((2,), mp_policy=BF16, offload_policy=CPUOffloadPolicy()))
        assert pair.train() == []
        assert_at_rest(pair.model)

    run_ranks(check, 2)


# -- gradients between backward and step -----------------------------------------------------------------------------


def test_gradients_may_be_clipped_and_changed_before_the_step() -> None:
    def check() -> None:
        def backward(model: nn.Module) -> None:
            run_backward(model)
            clip_grad_norm_(model.parameters(), 0.1)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)

        assert Overlapped(backward=backward).train() == ["root", "layers.0"]

    run_ranks(check, 2)


def test_hooks_that_are_registered_later_change_gradients_before_any_is_used() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train()

        def clip(optimizer: Optimizer, *_: object) -> None:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad.mul_(0.1)

        for optimizer in pair.optimizers:
            optimizer.register_step_pre_hook(clip)
        assert [pair.train(1), pair.train(1)] == [[], ["root", "layers.0"]]

    run_ranks(check, 2)


@pytest.mark.parametrize("flavour", [{"fused": True}, {"foreach": True}], ids=str)
def test_gradient_scalers_scale_and_skip_as_before(flavour: dict[str, Any]) -> None:
    def check() -> None:
        models: list[Net] = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            models.append(model := shard(Net()))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **flavour)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            if overlaps:
                overlap_optimizer(optimizer)
            for step in range(4):
                scaler.scale(LOSS(model)).backward()  # type: ignore[no-untyped-call]
                if step == 1:
                    for parameter in model.layers[2].parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(torch.inf)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 2.0
        assert_same_weights(*models)

    run_ranks(check, 2)


def test_a_step_with_a_closure_is_made_as_without() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train(2)
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            optimizer.step(partial(LOSS, model))
            optimizer.zero_grad()
        pair.assert_equal()
        assert pair.train() == ["root", "layers.0"]

    run_ranks(check, 2)


# -- exceptions ------------------------------------------------------------------------------------------------------


class _Raises(Lion):
    """In the second part, on demand."""

    raises = False
    last: nn.Parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if self.raises and any(group["params"][-1] is self.last for group in self.param_groups):
            raise ArithmeticError


def test_a_forward_after_a_failed_overlapped_step_uses_the_weights_updated_so_far() -> None:
    def check() -> None:
        def optimizer(model: nn.Module) -> Optimizer:
            raising = _Raises(model.parameters())
            raising.last = list(model.get_submodule("layers.2").parameters())[-1]
            return raising

        pair = Overlapped(apply=_last_layer_last, optimizer=optimizer)
        pair.train()
        pair.backward()
        for stepped in pair.optimizers:
            stepped.raises = True  # type: ignore[attr-defined]
            with pytest.raises(ArithmeticError):
                stepped.step()
            stepped.raises = False  # type: ignore[attr-defined]
        for model, stepped in zip(pair.models, pair.optimizers, strict=True):
            nums_updates = _count_updates(model)
            stepped.step(lambda: 0.0)
            assert all(nums_updates.values()), "the step that raised is not the one that was counted"
        pair.assert_looks_alike()
        pair.train()

    run_ranks(check, 2)


def _count_updates(model: nn.Module) -> dict[str, int]:
    """The updates noted by each unit from now on."""
    nums_updates = {name: 0 for name, _ in named_units(model)}

    def count(name: str, note: Callable[[], None]) -> None:
        nums_updates[name] += 1
        note()

    for name, unit in named_units(model):
        unit.weights.note_update = partial(count, name, unit.weights.note_update)  # type: ignore[method-assign]
    return nums_updates


def _last_layer_last(model: Net) -> None:
    """The head's parameters would be the last to be updated, and are not gathered last."""
    del model.head
    model.head = nn.Identity()  # type: ignore[assignment]
    shard(model)
