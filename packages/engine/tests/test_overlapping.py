"""An optimizer whose step hides the next forward's first gathers trains, to the bit, as one that is left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import (
    Collective,
    Log,
    Net,
    assert_at_rest,
    case,
    inputs,
    mean_square,
    record,
    rows_of_this_rank,
    shard,
    unit,
)
from fake_streams import Work, fake_streams
from test_every_optimizer import OPTIMIZERS, WHOLE_TENSORS_ONLY, _flavours
from test_stepping import _apart, _CountsInItsGroups, _CountsItself, _Lion, _local, _NormsOverAll, assert_same
from test_zero_stages import EVERY_STAGE
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lamella_engine import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Rows,
    clip_grad_norm_,
    find_nonfinite,
    fully_shard,
    overlap_optimizer,
    share_comm_ctx,
    step_in_backward,
    step_on_local_shards,
)
from lamella_engine import _updates as updates
from lamella_engine._attached import state_of
from lamella_engine._context import Context
from lamella_engine._parameter_group import ParameterGroup, Reduced
from lamella_engine._ragged import torch_asks_subclasses
from lamella_testing import run_ranks

X = inputs(24)
LOSS = mean_square(lambda model: model(rows_of_this_rank(X)).float())
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Make = Callable[[nn.Module], Optimizer]
Act = Callable[[nn.Module], None]


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _of(name: str, **options: Any) -> Make:
    return lambda model: OPTIMIZERS[name](model.parameters(), **options)


def _backward(model: nn.Module) -> None:
    LOSS(model).backward()


def _nothing(model: nn.Module) -> None:
    return


class Pair:
    """A model trained in the ordinary way, and its twin whose optimizer's steps hide gathers."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Net,
        apply: Callable[..., object] = shard,
        optimizer: Make = _adamw,
        backward: Act = _backward,
        *,
        looks: bool = True,
        late_gradients: bool = False,
    ) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(model := make())
            apply(model)
            self.optimizers.append(optimizer(model))
        self.handle = overlap_optimizer(self.optimizers[1], late_gradients=late_gradients)
        self.logs: list[Log] = [record(model) if looks else Log() for model in self.models]
        self._backward = backward

    @property
    def model(self) -> nn.Module:
        """The one whose steps hide gathers."""
        return self.models[1]

    def backward(self) -> None:
        for model, log in zip(self.models, self.logs, strict=True):
            log.clear()
            self._backward(model)

    def step(self, *, set_to_none: bool = True) -> list[str]:
        """The units that the step has gathered."""
        for log in self.logs:
            log.clear()
        for optimizer in self.optimizers:
            optimizer.step()
        gathered = [log.units_of("gather") for log in self.logs]
        self.assert_equal()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        assert gathered[0] == []
        return gathered[1]

    def train(self, num_steps: int = 3, *, set_to_none: bool = True, between: Act = _nothing) -> list[str]:
        """The units that the last step has gathered."""
        for _ in range(num_steps):
            self.backward()
            gathered = self.step(set_to_none=set_to_none)
            for model in self.models:
                between(model)
        return gathered

    def assert_equal(self) -> None:
        """Weights, gradients and state dicts are the same to the bit."""
        for (name, expected), got in zip(self.models[0].named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(_local(got), _local(expected)), name
            assert (got.grad is None) == (expected.grad is None), name
            if got.grad is not None and expected.grad is not None:
                assert torch.equal(_local(got.grad), _local(expected.grad)), name
        assert_same(*(optimizer.state_dict() for optimizer in self.optimizers))

    def assert_looks_alike(self) -> None:
        with torch.no_grad():
            assert torch.equal(*(model(X) for model in self.models))


# -- what a step does ------------------------------------------------------------------------------------------------


class _Traced(_Lion):
    """Notes which parameters it updates, and when."""

    def __init__(self, model: nn.Module, log: Log) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self.names, self.log = {id(parameter): name for name, parameter in model.named_parameters()}, log

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if id(p) in self.names:  # not when it is tried
                self.log.events.append(Collective("update", self.names[id(p)], 0, frozenset()))
        super().step()


@pytest.mark.parametrize("late_gradients", [False, True])
def test_what_forward_gathers_first_is_updated_and_gathered_before_the_others_are_updated(late_gradients: bool) -> None:
    def check() -> None:
        model = shard(Net())
        log = record(model)
        optimizer = _Traced(model, log)
        overlap_optimizer(optimizer, late_gradients=late_gradients)
        for _ in range(2):
            _backward(model)
            log.clear()
            optimizer.step()
        names = [name for name, _ in model.named_parameters()]
        late = [f"update {name}" for name in names if name.startswith(("layers.1", "layers.2"))]
        first = [f"update {name}" for name in names if f"update {name}" not in late]
        # While the outermost unit's gradients are still being reduced, there is something else to update.
        early = [update for update in late if "layers.2" in update] if late_gradients else []
        late = [update for update in late if update not in early]
        assert log.order == [*early, *first, "gather root", "gather layers.0", *late]

    run_ranks(check, 2)


def test_forward_uses_what_the_step_has_gathered_and_gathers_nothing_twice() -> None:
    def check() -> None:
        pair = Pair()
        pair.train(2)
        gathered = pair.train(1)
        assert gathered == ["root", "layers.0"]
        pair.backward()
        expected, got = (log.units_of("gather") for log in pair.logs)
        assert gathered + got == expected
        assert pair.logs[0].units_of("reduce") == pair.logs[1].units_of("reduce")

    run_ranks(check, 2)


def _held_nbytes(model: nn.Module) -> dict[str, int]:
    """The bytes that units hold unsharded."""
    states = {name or "root": state_of(module) for name, module in model.named_modules() if hasattr(module, "unshard")}
    return {
        name: nbytes
        for name, state in states.items()
        if (nbytes := sum(group.unsharded_weight.flat.untyped_storage().nbytes() for group in state.groups))
    }


def test_two_units_are_held_between_a_step_and_the_next_forward_whatever_the_prefetch_budget() -> None:
    def check() -> None:
        for budget in (None, 0, 2**30):
            with case(budget):
                pair = Pair()
                unit(pair.model).set_prefetch_budget(budget)
                assert pair.train() == ["root", "layers.0"]
                held = {name: state_of(pair.model.get_submodule(name)) for name in ("", "layers.0")}
                assert _held_nbytes(pair.model) == {n or "root": each.unsharded_nbytes for n, each in held.items()}

    run_ranks(check, 2)


def test_a_budget_counts_what_the_step_has_gathered() -> None:
    def check() -> None:
        pair = Pair(partial(Net, dim=64))
        nbytes = state_of(pair.model.get_submodule("layers.0")).unsharded_nbytes
        unit(pair.model).set_prefetch_budget(2 * nbytes)
        pair.train()
        most = 0

        def look(*_: object) -> None:
            nonlocal most
            most = max(most, sum(_held_nbytes(pair.model).values()))

        for layer in pair.model.get_submodule("layers").children():
            layer.register_forward_hook(look, prepend=True)
        pair.backward()
        assert most <= state_of(pair.model).unsharded_nbytes + 3 * nbytes

    run_ranks(check, 2)


def test_a_list_of_modules_to_prefetch_counts_here_too() -> None:
    def check() -> None:
        pair = Pair()
        layers = list(pair.model.get_submodule("layers").children())
        unit(pair.model).set_modules_to_forward_prefetch([unit(layers[1]), unit(layers[2])])
        assert pair.train() == ["root", "layers.1"]

    run_ranks(check, 2)


def test_nothing_is_gathered_before_a_step_whose_backward_has_been() -> None:
    def check() -> None:
        pair = Pair()
        assert pair.step() == []  # nothing has run
        assert pair.train() == ["root", "layers.0"]
        pair.backward()
        for model in pair.models:
            model.zero_grad()
        assert pair.step() == ["root", "layers.0"]  # which finds no gradients
        assert pair.step() == []

    run_ranks(check, 2)


# -- every optimizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted((OPTIMIZERS.keys() - WHOLE_TENSORS_ONLY.keys()) | {"Rprop"}))
def test_every_optimizer_and_flavour_of_it_takes_the_same_steps(name: str) -> None:
    def check() -> None:
        for flavour in _flavours(name):
            with case(flavour):
                pair = Pair(optimizer=_of(name, lr=1e-2, **flavour))
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
            others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
            groups = [{"params": matrices}, {"params": others, **options, "weight_decay": 0.0}]
            return OPTIMIZERS[name](groups, **options)

        pair = Pair(optimizer=optimizer)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in pair.optimizers]
        for _ in range(3):
            assert pair.train(1) == ["root", "layers.0"]
            for scheduler in schedulers:
                scheduler.step()

    run_ranks(check, 2)


def test_one_that_somebody_wrote_and_one_that_steps_local_shards_take_the_same_steps() -> None:
    def check() -> None:
        for make in (
            lambda model: _Lion(model.parameters()),
            lambda model: step_on_local_shards(_of("AdamW", lr=1e-2, fused=True)(model)),
        ):
            assert Pair(optimizer=make).train() == ["root", "layers.0"]

    run_ranks(check, 2)


def test_one_that_was_built_before_its_parameters_were_sharded_takes_the_same_steps() -> None:
    def check() -> None:
        models = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            model = Net()
            optimizer = _adamw(model)
            shard(model)
            if overlaps:
                overlap_optimizer(optimizer)
            for _ in range(3):
                _backward(model)
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        for expected, got in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(_local(expected), _local(got))

    run_ranks(check, 2)


@pytest.mark.parametrize("kind", [_CountsInItsGroups, _CountsItself, _NormsOverAll, torch.optim.LBFGS])
def test_one_that_cannot_step_in_parts_is_refused(kind: type) -> None:
    def check() -> None:
        optimizer = kind(shard(Net()).parameters())
        with pytest.raises(ValueError, match="Leave overlap_optimizer out"):
            overlap_optimizer(optimizer)
        assert not optimizer._optimizer_step_pre_hooks

    run_ranks(check, 1)


def test_one_that_is_given_twice_or_to_both_is_refused() -> None:
    def check() -> None:
        optimizer = _adamw(shard(Net()))
        for first, second in (
            (overlap_optimizer, overlap_optimizer),
            (overlap_optimizer, step_in_backward),
            (step_in_backward, overlap_optimizer),
        ):
            handle = first(optimizer)
            with pytest.raises(ValueError, match="remove()"):
                second(optimizer)
            handle.remove()
        with pytest.raises(TypeError, match="Linear"):
            overlap_optimizer(nn.Linear(2, 2))  # type: ignore[arg-type]

    run_ranks(check, 1)


# -- every way to shard ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", EVERY_STAGE)
@pytest.mark.parametrize("reduces_each", [True, False], ids=["reduce_each", "reduce_last"])
def test_every_stage_takes_the_same_steps_with_several_microbatches(stage: str, reduces_each: bool) -> None:
    shape, placements = EVERY_STAGE[stage]

    def backward(model: nn.Module) -> None:
        for microbatch in range(2):
            is_last = microbatch == 1
            unit(model).set_is_last_backward(is_last)
            unit(model).set_requires_gradient_sync(is_last or reduces_each)
            (LOSS(model) * (microbatch + 1)).backward()

    def check() -> None:
        for policy in (MixedPrecisionPolicy(), BF16):
            for late in (False, True):
                with case((policy, late)):
                    apply = _apart(shape, placements=placements, mp_policy=policy)
                    pair = Pair(partial(Net, dim=8), apply, backward=backward, looks=False, late_gradients=late)
                    pair.train(set_to_none=late)
                    computes_with_main = stage == "DDP" and policy.param_dtype is None
                    early = [state_of(m) for m in (pair.model, pair.model.get_submodule("layers.0"))]
                    assert all(state.is_unsharding != computes_with_main for state in early)
                    pair.assert_looks_alike()

    run_ranks(check, torch.Size(shape).numel())


@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"reshard_after_forward": 2}, {"keep": Rows(1)}],
    ids=str,
)
def test_other_ways_to_lie_take_the_same_steps(options: dict[str, Any]) -> None:
    if "keep" in options and not torch_asks_subclasses():
        pytest.skip("torch before 2.12 does not ask subclasses of DTensor")

    def check() -> None:
        pair = Pair(partial(Net, dim=8), _apart((4,), mp_policy=BF16, **options), looks=False)
        pair.train()
        assert set(_held_nbytes(pair.model)) == {"root", "layers.0"}
        pair.assert_looks_alike()

    run_ranks(check, 4)


def test_weights_that_stay_after_backward_are_not_gathered_in_the_step() -> None:
    """Their bytes are in use: what holds them may be about to read them."""

    def check() -> None:
        def apply(model: Net) -> None:
            unit(shard(model)).set_reshard_after_backward(False)

        pair = Pair(apply=apply)
        assert pair.train() == []
        pair.assert_looks_alike()

    run_ranks(check, 2)


def test_shards_on_the_cpu_are_not_gathered_in_the_step() -> None:
    def check() -> None:
        pair = Pair(partial(Net, dim=8), _apart((2,), mp_policy=BF16, offload_policy=CPUOffloadPolicy()))
        assert pair.train() == []
        assert_at_rest(pair.model)

    run_ranks(check, 2)


# -- gradients between backward and step -----------------------------------------------------------------------------


def test_gradients_may_be_clipped_and_changed_before_the_step() -> None:
    def check() -> None:
        def backward(model: nn.Module) -> None:
            _backward(model)
            clip_grad_norm_(model.parameters(), 0.1)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)

        assert Pair(backward=backward).train() == ["root", "layers.0"]

    run_ranks(check, 2)


def test_hooks_that_are_registered_later_change_gradients_before_any_is_used() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()

        def clip(optimizer: Optimizer, *_: object) -> None:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad.mul_(0.1)

        for optimizer in pair.optimizers:
            optimizer.register_step_pre_hook(clip)
        assert [pair.train(1), pair.train(1)] == [[], ["root", "layers.0"]]

    run_ranks(check, 2)


@pytest.mark.parametrize("flavour", [{"fused": True}, {"foreach": True}], ids=str)
def test_gradient_scalers_scale_and_skip_as_before(flavour: dict[str, bool]) -> None:
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
                scaler.scale(LOSS(model)).backward()
                if step == 1:
                    for parameter in model.layers[2].parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(torch.inf)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 2.0
        for expected, got in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(_local(expected), _local(got))

    run_ranks(check, 2)


def test_a_step_with_a_closure_is_made_as_without() -> None:
    def check() -> None:
        pair = Pair()
        pair.train(2)
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            optimizer.step(partial(LOSS, model))
            optimizer.zero_grad()
        pair.assert_equal()
        assert pair.train() == ["root", "layers.0"]

    run_ranks(check, 2)


# -- weights between step and forward --------------------------------------------------------------------------------


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _load_and_assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _write_one_of_the_second_unit(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("layers.0.up.weight").copy_(model.get_parameter("layers.1.up.weight"))


def _write_rows(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("stem.weight")[:2].zero_()


def _replace_storage(model: nn.Module) -> None:
    """As `.to()` on a module inside of a unit, which the unit is not told of."""
    stem = model.get_submodule("stem")
    held = dict(stem.named_parameters())
    stem.to(torch.float64)
    stem.to(torch.float32)
    with torch.no_grad():
        for name, parameter in stem.named_parameters():
            assert parameter is held[name]
            _local(parameter).mul_(2.0)


def _put_another(model: nn.Module) -> None:
    stem = model.get_submodule("stem")
    stem.weight = nn.Parameter(stem.get_parameter("weight").detach() * 0.5)


def _freeze_the_stem(model: nn.Module) -> None:
    """What is frozen stays so when what was gathered is thrown away."""
    model.get_submodule("stem").requires_grad_(False)
    _write(model)
    assert not model.get_parameter("stem.weight").requires_grad


def _say(act: Act) -> Act:
    def said(model: nn.Module) -> None:
        act(model)
        unit(model).mark_updated()

    said.__name__ = f"{act.__name__} and say so"
    return said


def _write_shards(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            _local(parameter).mul_(0.5)


def _write_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _write_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def _step_with_another(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize(
    "act",
    [
        _load,
        _load_and_assign,
        _write,
        _write_one_of_the_second_unit,
        _write_rows,
        _replace_storage,
        _put_another,
        _freeze_the_stem,
        _say(_write_shards),
        _say(_write_data),
        _say(_write_at_once),
        _step_with_another,
    ],
    ids=lambda act: act.__name__.strip("_"),
)
def test_weights_that_change_after_the_step_are_gathered_again(act: Act) -> None:
    def check() -> None:
        for between in (act, lambda model: (act(model), _look(model))):
            pair = Pair()
            pair.train(between=between)
            pair.assert_looks_alike()
            pair.assert_equal()

    run_ranks(check, 2)


@pytest.mark.parametrize("stage", ["ZERO1", "ZERO2", "HSDP, ZERO3", "HFSDP, ZERO3"])
def test_copies_that_persist_are_made_again_too(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def act_after_resharding(model: nn.Module) -> None:
        _reshard(model)
        _write(model)

    def check() -> None:
        for act in (_write, _freeze_the_stem, act_after_resharding):
            with case(act.__name__):
                pair = Pair(partial(Net, dim=8), _apart(shape, placements=placements, mp_policy=BF16), looks=False)
                pair.train(between=act)
                pair.assert_looks_alike()
                pair.assert_equal()

    run_ranks(check, torch.Size(shape).numel())


def test_weights_that_change_before_a_unit_is_unsharded_by_hand_are_gathered_again() -> None:
    def check() -> None:
        pair = Pair()
        for use in ("unshard", "hold"):
            with case(use):
                pair.train()
                for model in pair.models:
                    _write(model)
                held = [getattr(unit(model), use)() for model in pair.models]
                for each in held:
                    if each is not None:
                        each.wait()
                weights = [model.get_parameter("stem.weight").detach().clone() for model in pair.models]
                assert torch.equal(*weights)
                for model, each in zip(pair.models, held, strict=True):
                    if each is not None:
                        each.release()
                    unit(model).reshard()

    run_ranks(check, 2)


def test_a_shard_that_was_written_and_not_said_to_be_is_an_error_on_its_rank() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        _write_shards(pair.model)
        with pytest.raises(RuntimeError, match=r"mark_updated\(\).*overlap_optimizer"):
            pair.model(X)
        for model in pair.models:
            unit(model).mark_updated()
        _write_shards(pair.models[0])
        pair.train()
        pair.assert_looks_alike()

    run_ranks(check, 2)


@pytest.mark.parametrize("reshards", [None, True])
def test_a_step_between_a_forward_and_its_backward_is_seen_by_the_backward_as_without(reshards: bool | None) -> None:
    def check() -> None:
        pair = Pair(apply=_apart((2,), reshard_after_forward=reshards))
        pair.train()
        for act in (_nothing, _write_one_of_the_second_unit):
            for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
                _backward(model)
                loss = LOSS(model)
                optimizer.step()
                act(model)
                optimizer.zero_grad()
                loss.backward()
            pair.assert_equal()
            pair.step()

    run_ranks(check, 2)


# -- between steps ---------------------------------------------------------------------------------------------------


def _look(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)


def _look_at_one_unit(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("layers.1")(torch.ones(2, 7))


def _look_with_gradients(model: nn.Module) -> None:
    model(X)


def _ask_for_a_state_dict(model: nn.Module) -> None:
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


def _ask_one_unit_for_a_state_dict(model: nn.Module) -> None:
    model.get_submodule("layers.0").state_dict()


def _unshard_and_reshard(model: nn.Module) -> None:
    unit(model).unshard()
    unit(model).reshard()


def _reshard(model: nn.Module) -> None:
    for layer in (model, model.get_submodule("layers.0")):
        unit(layer).reshard()


def _reset(model: nn.Module) -> None:
    unit(model).reset_iter_state()


@pytest.mark.parametrize(
    "act",
    [
        _look,
        _look_at_one_unit,
        _look_with_gradients,
        _ask_for_a_state_dict,
        _ask_one_unit_for_a_state_dict,
        _unshard_and_reshard,
        _reshard,
        _reset,
    ],
    ids=lambda act: act.__name__.strip("_"),
)
def test_what_happens_between_steps_changes_nothing(act: Act) -> None:
    def check() -> None:
        pair = Pair()
        assert pair.train(between=act) == ["root", "layers.0"]
        pair.assert_equal()
        pair.backward()
        assert_at_rest(pair.model)

    run_ranks(check, 2)


def test_a_forward_that_does_not_use_what_was_gathered_frees_it() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        assert set(_held_nbytes(pair.model)) == {"root", "layers.0"}
        _look_at_one_unit(pair.model)
        assert_at_rest(pair.model)

    run_ranks(check, 2)


def test_remove_frees_what_was_gathered_and_the_optimizer_steps_as_before() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        pair.handle.remove()
        assert_at_rest(pair.model)
        assert pair.train() == []
        pair.handle = overlap_optimizer(pair.optimizers[1])
        assert pair.train() == ["root", "layers.0"]

    run_ranks(check, 2)


def test_an_unfinished_gather_keeps_no_rank_from_ending() -> None:
    run_ranks(lambda: Pair().train() and None, 2)


def test_a_deleted_model_is_freed_at_once_with_what_was_gathered_for_it() -> None:
    def check() -> None:
        model = shard(Net())
        optimizer = _adamw(model)
        overlap_optimizer(optimizer)
        for _ in range(2):
            _backward(model)
            optimizer.step()
        gone = weakref.ref(model.layers[0])
        gc.collect()
        gc.disable()
        del model, optimizer
        try:
            assert gone() is None
        finally:
            gc.enable()

    run_ranks(check, 2)


def test_a_tree_that_gets_the_streams_of_another_has_nothing_on_its_old_ones() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        share_comm_ctx([unit(shard(Net())), unit(pair.model)])
        assert_at_rest(pair.model)
        pair.train()

    run_ranks(check, 2)


def test_an_outer_unit_that_comes_later_finds_nothing_gathered() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        outer = nn.Sequential(pair.model)
        fully_shard(outer)
        assert_at_rest(pair.model)
        pair.backward()
        pair.step()

    run_ranks(check, 2)


def test_the_order_check_finds_nothing_to_say() -> None:
    def check() -> None:
        pair = Pair()
        unit(pair.model).set_order_check()
        assert pair.train(between=_write) == ["root", "layers.0"]
        pair.backward()

    run_ranks(check, 2)


# -- several optimizers, several trees -------------------------------------------------------------------------------


def _train_with(optimizers: Sequence[Optimizer], model: nn.Module, num_steps: int = 3) -> list[list[str]]:
    """The units that each optimizer's last step has gathered."""
    log = record(model)
    for _ in range(num_steps):
        _backward(model)
        gathered = []
        for optimizer in optimizers:
            log.clear()
            optimizer.step()
            optimizer.zero_grad()
            gathered.append(log.units_of("gather"))
    log.clear()
    _backward(model)
    gathered.append(log.units_of("gather"))
    return gathered


@pytest.mark.parametrize("overlapped", [(True, True), (True, False), (False, True)])
def test_each_of_several_optimizers_gathers_the_units_that_are_all_its_own(overlapped: tuple[bool, bool]) -> None:
    def check() -> None:
        models, found = [], []
        for overlaps in (False, True):
            torch.manual_seed(0)
            models.append(model := shard(Net()))
            inner = [p for layer in model.layers for p in layer.parameters()]
            outer = [p for p in model.parameters() if not any(p is other for other in inner)]
            optimizers = [torch.optim.AdamW([*outer, *inner[4:8]]), torch.optim.SGD([*inner[:4], *inner[8:]], lr=0.1)]
            for optimizer, wanted in zip(optimizers, overlapped, strict=True):
                if overlaps and wanted:
                    overlap_optimizer(optimizer)
            found.append(_train_with(optimizers, model))
        for expected, got in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(_local(expected), _local(got))
        first, second, forward = found[1]
        assert first == (["root"] if overlapped[0] else [])  # layers.0 is the other's
        assert second == []  # it has not the first unit, which is gathered before others
        assert first + second + forward == found[0][-1]  # what one has gathered outlives the other's step

    run_ranks(check, 2)


def test_a_unit_that_two_optimizers_share_is_not_gathered_in_the_step_of_either() -> None:
    def check() -> None:
        model = shard(Net())
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizers = [torch.optim.AdamW(parameters) for parameters in (matrices, others)]
        for optimizer in optimizers:
            overlap_optimizer(optimizer)
        *gathered, _ = _train_with(optimizers, model)
        assert gathered == [[], []]

    run_ranks(check, 2)


class _OwnAdamW(torch.optim.AdamW):
    """Of torch's own the version counters of a step would show what was gathered too early."""


def test_what_is_frozen_between_a_backward_and_its_step_is_updated_before_it_is_gathered() -> None:
    def check() -> None:
        pair = Pair(optimizer=lambda model: _OwnAdamW(model.parameters(), lr=1e-2, foreach=True))
        pair.train()
        pair.backward()
        for model in pair.models:
            for parameter in model.stem.parameters():
                parameter.requires_grad_(False)
        pair.step()
        pair.assert_looks_alike()

    run_ranks(check, 2)


def test_frozen_units_are_gathered_with_those_that_train() -> None:
    def check() -> None:
        def apply(model: Net) -> None:
            for parameter in (*model.stem.parameters(), *model.head.parameters()):
                parameter.requires_grad_(False)
            shard(model)

        assert Pair(apply=apply).train() == ["root", "layers.0"]

    run_ranks(check, 2)


class _Residuals(Net):
    """Takes what it gives, so that another can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :3]


@pytest.mark.parametrize("freezes", [False, True])
def test_a_generator_and_its_discriminator_train_as_before(freezes: bool) -> None:
    def check() -> None:
        weights = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            generator, critic = shard(_Residuals()), shard(Net())
            steps = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (generator, critic)]
            log = record(critic)
            if overlaps:
                for optimizer in steps:
                    overlap_optimizer(optimizer)
            for _ in range(3):
                critic.requires_grad_(not freezes)
                critic(generator(rows_of_this_rank(X))).square().mean().backward()
                log.clear()
                steps[0].step()
                assert log.units_of("gather") == []  # none of the critic's
                critic.zero_grad()
                generator.zero_grad()
                critic.requires_grad_(True)
                critic(generator(rows_of_this_rank(X)).detach()).square().mean().neg().backward()
                steps[1].step()
                critic.zero_grad()
            weights.append([_local(p) for model in (generator, critic) for p in model.parameters()])
            if overlaps:
                assert set(_held_nbytes(generator)) == {"root"}  # for a backward that might follow its last forward
                assert set(_held_nbytes(critic)) == {"root", "layers.0"}
        for expected, got in zip(*weights, strict=True):
            assert torch.equal(expected, got)

    run_ranks(check, 2)


# -- exceptions ------------------------------------------------------------------------------------------------------


class _Raises(_Lion):
    """In the part that comes second, when it is told to."""

    raises = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if self.raises and any(group["params"][-1] is self.last for group in self.param_groups):
            raise ArithmeticError


def test_after_a_step_that_raised_the_next_forward_sees_what_it_has_updated() -> None:
    def check() -> None:
        def optimizer(model: nn.Module) -> Optimizer:
            made: Any = _Raises(model.parameters())
            made.last = list(model.get_submodule("layers.2").parameters())[-1]
            return made

        pair = Pair(apply=_last_layer_last, optimizer=optimizer)
        pair.train()
        pair.backward()
        for each in pair.optimizers:
            each.raises = True  # type: ignore[attr-defined]
            with pytest.raises(ArithmeticError):
                each.step()
            each.raises = False  # type: ignore[attr-defined]
        for each in pair.optimizers:
            count = updates.count
            each.step(lambda: 0.0)
            assert updates.count > count, "the step that raised is not the one that was counted"
        pair.assert_looks_alike()
        pair.train()

    run_ranks(check, 2)


def _last_layer_last(model: Net) -> None:
    """The head's parameters would be the last to be updated, and are not gathered last."""
    del model.head
    model.head = nn.Identity()  # type: ignore[assignment]
    shard(model)


# -- gradients that are late -----------------------------------------------------------------------------------------


class _Late:
    """A model on streams that know what they come after, and an optimizer whose step waits for gradients itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_axes: int = 1, **options: Any) -> None:
        self.installed: dict[int, Work] = {}
        real = ParameterGroup.install_gradients

        def install(group: ParameterGroup, reduced: Reduced) -> None:
            work = self.streams.work()
            self.installed.update((id(parameter.sharded), work) for parameter in group.parameters)
            real(group, reduced)

        monkeypatch.setattr(ParameterGroup, "install_gradients", install)
        self.model = Net()
        _apart((2,) * num_axes, **options)(self.model)
        self.streams = fake_streams(self.model)
        self.optimizer = _Noting(self.model.parameters())
        self.optimizer.late = self
        self.handle = overlap_optimizer(self.optimizer, late_gradients=True)

    def backward(self) -> set[str]:
        """The parameters whose gradients the compute stream has not waited for."""
        self.installed.clear()
        _backward(self.model)
        return self.missing()

    def missing(self) -> set[str]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        seen = self.streams.current.seen
        return {names.get(key, "") for key, work in self.installed.items() if not work.is_before(seen)}


class _Noting(_Lion):
    """Looks whether each gradient that it uses has been waited for."""

    late: Any = None
    num_seen = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.late is not None:
            held = [p for group in self.param_groups for p in group["params"] if id(p) in self.late.installed]
            assert all(self.late.installed[id(p)].is_before(self.late.streams.current.seen) for p in held)
            self.late.optimizer.num_seen += len(held)
        super().step()


OUTER = {"stem.weight", "stem.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(("num_axes", "options"), [(1, {}), (1, {"mp_policy": BF16}), (2, {})], ids=str)
def test_each_part_of_a_step_waits_for_its_own_gradients(
    num_axes: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        late = _Late(monkeypatch, num_axes, **options)
        for step in range(3):
            assert late.backward() >= OUTER
            late.optimizer.step()
            assert late.optimizer.num_seen == (step + 1) * len(late.installed)
            assert late.missing() == set()
            late.optimizer.zero_grad()

    run_ranks(check, 2**num_axes)


def test_gradients_of_the_last_of_several_microbatches_are_late_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        late = _Late(monkeypatch)
        for _ in range(2):
            for _ in range(2):
                assert late.backward() >= OUTER
            late.optimizer.step()
            assert late.missing() == set()
            late.optimizer.zero_grad()

    run_ranks(check, 2)


def _clip(late: _Late) -> None:
    clip_grad_norm_(late.model.parameters(), 1.0)


def _find(late: _Late) -> None:
    find_nonfinite(late.model)


def _wait(late: _Late) -> None:
    unit(late.model).wait_for_gradients()


def _zero(late: _Late) -> None:
    unit(late.model).zero_grad(set_to_none=False)


def _forward(late: _Late) -> None:
    late.model(X)


def _move(late: _Late) -> None:
    late.model.to(torch.float32)


def _remove(late: _Late) -> None:
    late.handle.remove()


def _step_another(late: _Late) -> None:
    torch.optim.SGD(late.model.layers[1].parameters(), lr=0.0).step()


def _step_with_a_closure(late: _Late) -> None:
    late.optimizer.step(lambda: 0.0)  # type: ignore[arg-type]


def _step_after_a_hook(late: _Late) -> None:
    def look(*_: object) -> None:
        assert late.missing() == set()

    late.optimizer.register_step_pre_hook(look)
    for _ in range(2):  # first it comes after ours, and then before
        late.optimizer.step()
        late.backward()
    late.optimizer.step()


def _give_up(late: _Late) -> None:
    unit(late.model).reset_iter_state()


@pytest.mark.parametrize(
    "look",
    [
        _clip,
        _find,
        _wait,
        _zero,
        _forward,
        _move,
        _remove,
        _step_another,
        _step_with_a_closure,
        _step_after_a_hook,
        _give_up,
    ],
    ids=lambda look: look.__name__.strip("_"),
)
def test_who_looks_at_late_gradients_waits_for_all_of_them(
    look: Callable[[_Late], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        late = _Late(monkeypatch)
        for _ in range(2):
            late.backward()
            late.optimizer.step()
        assert late.backward() >= OUTER
        look(late)
        assert not [work for work in late.installed.values() if not work.is_before(late.streams.current.seen)]

    run_ranks(check, 2)


def test_backward_waits_for_gradients_of_a_tree_that_no_step_is_to_wait_for() -> None:
    def check() -> None:
        late = _adamw(shard(Net()))
        overlap_optimizer(late, late_gradients=True)
        other = shard(Net())
        fake_streams(other)
        _backward(other)
        assert not state_of(other).context.is_left

    run_ranks(check, 2)


def test_gradients_that_go_to_the_cpu_are_not_late() -> None:
    def check() -> None:
        apply = _apart((2,), mp_policy=BF16, offload_policy=CPUOffloadPolicy())
        pair = Pair(partial(Net, dim=8), apply, late_gradients=True)
        pair.backward()
        assert not state_of(pair.model).context.is_left
        pair.train()

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Rprop"])
def test_steps_that_wait_for_gradients_are_the_same(name: str) -> None:
    def check() -> None:
        assert Pair(optimizer=_of(name, lr=1e-2), late_gradients=True).train() == ["root", "layers.0"]

    run_ranks(check, 3)


def test_units_that_are_reduced_in_two_microbatches_on_two_streams_are_waited_for_on_both() -> None:
    """As of two groups, one of them cast: the last microbatch may use the other one alone."""

    def check() -> None:
        state = state_of(model := shard(Net()))
        streams, context, works = fake_streams(model), state.context, []
        for stream in (context.all_reduce_stream, context.reduce_scatter_stream):
            with context.on(stream):
                works.append(streams.work())
            context.note_installed(state.index, {stream})
        context.wait_for_gradients_of([state])
        assert all(work.is_before(streams.current.seen) for work in works)

    run_ranks(check, 1)


# -- streams and graphs ----------------------------------------------------------------------------------------------


def test_gathers_come_behind_the_update_of_what_they_read_and_not_behind_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = ParameterGroup.prepare_gather

    def check() -> None:
        model = shard(Net())
        streams = fake_streams(model)
        seen: list[dict[Any, int]] = []

        def prepare(group: ParameterGroup) -> Any:
            seen.append(dict(streams.current.seen))
            return real(group)

        monkeypatch.setattr(ParameterGroup, "prepare_gather", prepare)
        optimizer: Any = _TracedOnStreams(model.parameters())
        optimizer.streams, optimizer.work = streams, {}
        overlap_optimizer(optimizer)
        for step in range(3):
            _backward(model)
            if step == 2:  # left from a step before: it says nothing of this one
                state_of(model).context.post_optim_event = streams.compute.record_event()  # type: ignore[assignment]
            optimizer.work.clear()
            seen.clear()
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == 2
        for name, parameter in model.named_parameters():
            is_late = name.startswith(("layers.1", "layers.2"))
            for each in seen:
                assert optimizer.work[id(parameter)].is_before(each) != is_late, name

    run_ranks(check, 2)


class _TracedOnStreams(_Lion):
    """Puts something on the current stream for each parameter."""

    streams: Any = None
    work: Any = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.streams is not None:
            for p in (p for group in self.param_groups for p in group["params"]):
                self.work[id(p)] = self.streams.work()
        super().step()


def test_a_step_that_is_captured_gathers_nothing_and_a_captured_forward_refuses_what_was_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        monkeypatch.setattr(Context, "is_captured", True)
        with pytest.raises(RuntimeError, match=r"remove\(\) what overlap_optimizer returned before the capture"):
            pair.model(X)
        for model in pair.models:
            unit(model).reset_iter_state()
        pair.backward()
        assert pair.step() == []

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, of what Dynamo imports
def test_a_step_that_is_compiled_is_compiled_once_and_made_as_without() -> None:
    def check() -> None:
        pair = Pair(optimizer=_of("SGD", lr=1e-2, momentum=0.9), late_gradients=True)
        gathered: list[str] = []
        graphs_of: list[list[object]] = []
        for optimizer in pair.optimizers:
            graphs: list[object] = []
            optimizer.step = torch.compile(optimizer.step, backend=partial(_noted, graphs))  # type: ignore[method-assign]
            graphs_of.append(graphs)
        for _ in range(4):
            pair.backward()
            gathered += pair.step()
            assert not state_of(pair.model).context.is_left
        assert gathered == []
        assert len(graphs_of[0]) == len(graphs_of[1]) > 0
        pair.assert_looks_alike()

    run_ranks(check, 2)


def _noted(graphs: list[object], graph: Any, inputs: Any) -> Any:
    graphs.append(graph)
    return graph.forward
