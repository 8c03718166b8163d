"""Optimizers whose kernels take plain tensors only, on shards with ranks that own nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine_models import Net, assert_weights_equal, inputs, shard, twins, whole
from optimizer_models import OPTIMIZERS, Lion, Short
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from lamella_engine import ZERO1, Rows, ShardingOptions, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_optim import clip_grad_norm_, step_on_local_shards
from lamella_testing import run_ranks

X = inputs()


class PlainAdam(torch.optim.Optimizer):
    """Adam in the manner of fused kernels: one launch over lists of plain tensors, one count of steps a group.

    Makes state for parameters without a gradient too, and unpacks and packs state by itself, as Transformer Engine's.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})
        self.scales: dict[nn.Parameter, float] = {}

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self._make_state(parameter)
            self._launch([p for p in group["params"] if p.grad is not None], group["lr"], group["step"], scale)
        return loss

    def _make_state(self, parameter: nn.Parameter) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][name] = torch.zeros(parameter.shape)
        self.scales[parameter] = 1.0

    @torch.no_grad()
    def _launch(self, parameters: list[nn.Parameter], lr: float, step: int, scale: float) -> None:
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            for tensor in (parameter, gradient, *state.values()):
                assert not isinstance(tensor, DTensor), "a kernel knows no DTensors"
                assert tensor.numel() > 0, "a kernel writes beside an empty tensor"
            unscaled = gradient.float() / scale
            state["exp_avg"].lerp_(unscaled, 0.1)
            state["exp_avg_sq"].lerp_(unscaled.square(), 0.001)
            mean, square = state["exp_avg"] / (1 - 0.9**step), state["exp_avg_sq"] / (1 - 0.999**step)
            parameter.sub_(lr * mean / (square.sqrt() + 1e-8))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for key, parameter in self._by_key(state).items():
            if key in state["state"]:
                packed = state["state"][key].items()
                state["state"][key] = {name: value * self.scales[parameter] for name, value in packed}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for key, parameter in self._by_key(state_dict).items():
            if key in state_dict["state"]:
                self._make_state(parameter)
                for name, value in state_dict["state"][key].items():
                    self.state[parameter][name].copy_(value)

    def _by_key(self, state_dict: dict[str, Any]) -> dict[Any, nn.Parameter]:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        return dict(zip(keys, (p for group in self.param_groups for p in group["params"]), strict=True))


def _on_shards(model: nn.Module) -> PlainAdam:
    return step_on_local_shards(PlainAdam(model.parameters()))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def _short() -> tuple[nn.Module, nn.Module]:
    return twins(Short, fully_shard)


def test_plain_kernels_take_the_unsharded_steps() -> None:
    def check() -> list[int]:
        reference, sharded = _short()
        _train(reference, PlainAdam(reference.parameters()))
        _train(sharded, _on_shards(sharded))
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)
        assert_at_rest(sharded)
        return [p.to_local().numel() for p in sharded.parameters() if isinstance(p, DTensor)]

    assert any(numel == 0 for numels in run_ranks(check, 4) for numel in numels)


def test_plain_kernels_refuse_dtensors_without_step_on_local_shards() -> None:
    """Checks the helper above: its kernels refuse DTensors."""

    def check() -> None:
        _, sharded = _short()
        with pytest.raises(AssertionError, match="knows no DTensors"):
            _train(sharded, PlainAdam(sharded.parameters()))

    run_ranks(check, 2)


def test_state_lies_as_parameters_do_and_is_not_made_anew() -> None:
    def check() -> None:
        _, sharded = _short()
        optimizer = _on_shards(sharded)
        _train(sharded, optimizer, 1)
        parameters = [p for p in sharded.parameters() if isinstance(p, DTensor)]
        assert list(optimizer.state) == parameters == optimizer.param_groups[0]["params"]
        for parameter in parameters:
            assert isinstance(parameter.grad, DTensor)  # the step's reads are still in place
            for value in optimizer.state[parameter].values():
                assert value.placements == parameter.placements
                assert value.shape == parameter.shape
                assert value.to_local().shape == parameter.to_local().shape
        before = {id(value) for state in optimizer.state.values() for value in state.values()}
        _train(sharded, optimizer, 1)
        assert before == {id(value) for state in optimizer.state.values() for value in state.values()}

    run_ranks(check, 4)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Rprop"])
def test_optimizers_of_torch_step_on_shards_too(name: str) -> None:
    """Rprop too, which DTensors cannot run."""

    def check() -> None:
        reference, sharded = twins(Net, shard)
        _train(reference, OPTIMIZERS[name](reference.parameters(), lr=1e-2))
        _train(sharded, step_on_local_shards(OPTIMIZERS[name](sharded.parameters(), lr=1e-2)))
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 3)


def test_hooks_and_closures_see_dtensors() -> None:
    def check() -> None:
        reference, sharded = _short()
        optimizers = [PlainAdam(reference.parameters()), _on_shards(sharded)]
        seen: list[type] = []

        def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
            seen.append(type(optimizer.param_groups[0]["params"][0].data))

        optimizers[1].register_step_pre_hook(note)
        optimizers[1].register_step_post_hook(note)
        for model, optimizer in zip((reference, sharded), optimizers, strict=True):

            def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(X).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            for _ in range(2):
                assert optimizer.step(closure, scale=2.0) is not None
        assert seen == [DTensor] * 4
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)

    run_ranks(check, 2)


def test_a_failed_local_step_restores_the_optimizers_dtensors() -> None:
    def check() -> None:
        reference, sharded = _short()
        expected, optimizer = PlainAdam(reference.parameters()), _on_shards(sharded)
        _train(reference, expected)
        _train(sharded, optimizer, 1)
        lr = optimizer.param_groups[0].pop("lr")
        with pytest.raises(KeyError, match="lr"):
            optimizer.step()
        optimizer.param_groups[0].update(lr=lr, step=1)
        assert all(isinstance(p, DTensor) for p in (*optimizer.param_groups[0]["params"], *optimizer.state))
        _train(sharded, optimizer, 2)
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)

    run_ranks(check, 2)


def test_state_dicts_hold_dtensors_and_load() -> None:
    def check() -> None:
        reference, sharded = _short()
        expected, optimizer = PlainAdam(reference.parameters()), _on_shards(sharded)
        _train(reference, expected)
        _train(sharded, optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        assert all(isinstance(value, DTensor) for state in saved["state"].values() for value in state.values())
        resumed = _on_shards(sharded)
        resumed.load_state_dict(saved)
        _train(sharded, resumed, 1)
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)
        for state, expected_state in zip(resumed.state.values(), expected.state.values(), strict=True):
            torch.testing.assert_close({k: whole(v) for k, v in state.items()}, expected_state, rtol=1e-5, atol=1e-6)

    run_ranks(check, 4)


def test_state_that_was_loaded_lies_as_parameters_do_at_once() -> None:
    """A reader before the first step must find the state, and must not leave empty state in its place."""

    def check() -> None:
        _, sharded = _short()
        optimizer = _on_shards(sharded)
        _train(sharded, optimizer, 1)
        resumed = _on_shards(sharded)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert list(resumed.state) == list(optimizer.state)
        for parameter in sharded.parameters():
            assert all(isinstance(value, DTensor) for value in resumed.state[parameter].values())

    run_ranks(check, 4)


def test_ranks_that_own_nothing_have_the_state_of_torchs_optimizers_too() -> None:
    """Whole tensors come from state by a collective a tensor."""

    def check() -> list[list[str]]:
        reference, sharded = _short()
        expected, optimizer = (torch.optim.AdamW(model.parameters()) for model in (reference, sharded))
        _train(reference, expected, 1)
        _train(sharded, step_on_local_shards(optimizer), 1)
        found: Any = get_optimizer_state_dict(sharded, optimizer)["state"]
        return [sorted(state) for state in found.values()]

    assert all(state_names == [["exp_avg", "exp_avg_sq", "step"]] * 6 for state_names in run_ranks(check, 4))


class ScheduleFree(torch.optim.Optimizer):
    """Trains at `z`, and moves the parameters to an average for evaluation: a write where there is state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert parameter.abs().max() < 10  # of nothing there is no maximum
                state = self.state[parameter]
                if not state:
                    state.update(z=parameter.clone(), num_steps=0)
                state["num_steps"] += 1
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["z"].sub_(parameter.grad, alpha=2 * group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        for parameter, state in self.state.items():
            parameter.lerp_(state["z"], 0.1)


def _evaluate(model: nn.Module, optimizer: ScheduleFree) -> torch.Tensor:
    with torch.no_grad():
        model(X)
        optimizer.eval()
        outputs: torch.Tensor = model(X)
    return outputs


def _assert_same_schedule_free_state(expected: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    for state, expected_state in zip(optimizer.state.values(), expected.state.values(), strict=True):
        assert isinstance(state["z"], DTensor)
        assert state.keys() == expected_state.keys()
        torch.testing.assert_close(whole(state["z"]), expected_state["z"], rtol=1e-5, atol=1e-6)
        assert state["num_steps"] == expected_state["num_steps"]


@pytest.mark.parametrize("options", [ShardingOptions(), ShardingOptions(keep_together=lambda parameter: Rows(1))])
def test_ranks_that_own_nothing_have_the_state_of_any_optimizer(options: ShardingOptions) -> None:
    """A count too, which a checkpoint takes from one rank; also after a resumption, and in a group added later."""

    def check() -> None:
        reference, sharded = twins(Short, partial(fully_shard, options=options))
        expected = ScheduleFree([*reference.parameters()][:3])
        optimizer = step_on_local_shards(ScheduleFree([*sharded.parameters()][:3]))
        for model, stepped in ((reference, expected), (sharded, optimizer)):
            _train(model, stepped, 2)
            stepped.add_param_group({"params": [*model.parameters()][3:]})
            _train(model, stepped, 1)
        assert [sorted(optimizer.state[p]) for p in sharded.parameters()] == [["num_steps", "z"]] * 6
        resumed = step_on_local_shards(ScheduleFree([*sharded.parameters()][:3]))
        resumed.add_param_group({"params": [*sharded.parameters()][3:]})
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _assert_same_schedule_free_state(expected, resumed)
        _train(reference, expected, 1)
        _train(sharded, resumed, 1)
        _assert_same_schedule_free_state(expected, resumed)
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)

    run_ranks(check, 4)


def test_whole_state_is_gathered_from_ranks_that_own_nothing() -> None:
    def check() -> None:
        reference, sharded = _short()
        expected, optimizer = Lion(reference.parameters()), step_on_local_shards(Lion(sharded.parameters()))
        _train(reference, expected)
        _train(sharded, optimizer)
        assert all(optimizer.state[p] for p in sharded.parameters())  # otherwise the collectives below would hang
        found: Any = get_optimizer_state_dict(sharded, optimizer, options=StateDictOptions(full_state_dict=True))
        for name, parameter in reference.named_parameters():
            average = found["state"][name]["average"]
            torch.testing.assert_close(average, expected.state[parameter]["average"], rtol=1e-5, atol=1e-6)

    run_ranks(check, 4)


def test_writes_beside_state_between_steps_reach_the_next_forward_on_all_ranks() -> None:
    """Under ZeRO-1 a forward gathers again after a write: on all ranks, or the gather hangs."""

    def check() -> None:
        options = ShardingOptions(placements=ZERO1)
        reference, sharded = twins(Short, partial(fully_shard, options=options))
        expected, optimizer = (ScheduleFree(model.parameters()) for model in (reference, sharded))
        step_on_local_shards(optimizer)
        for _ in range(2):
            _train(reference, expected, 1)
            _train(sharded, optimizer, 1)
            assert all(optimizer.state[p] for p in sharded.parameters())
            torch.testing.assert_close(
                _evaluate(sharded, optimizer), _evaluate(reference, expected), rtol=1e-5, atol=1e-6
            )

    run_ranks(check, 4)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copied_and_pickled_optimizers_of_local_steps_step_too(through: Callable[[Any], Any]) -> None:
    def check() -> None:
        optimizer = step_on_local_shards(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.5))
        copied = through(optimizer)
        (parameter,) = copied.param_groups[0]["params"]
        parameter.grad = torch.ones(2)
        copied.step()
        assert parameter.tolist() == [0.5, 0.5]
        assert step_on_local_shards(copied) is copied

    run_ranks(check, 1)


class Scaled(PlainAdam):
    """Takes a gradient scaler, as fused optimizers do; and more than a closure."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, scale: float = 1.0, grad_scaler: Any = None) -> Any:
        return super().step(closure, scale=scale)


def test_local_steps_take_the_arguments_of_the_optimizers_step() -> None:
    def check() -> None:
        reference, sharded = _short()
        optimizers = [Scaled(reference.parameters()), step_on_local_shards(Scaled(sharded.parameters()))]
        for model, optimizer in zip((reference, sharded), optimizers, strict=True):
            model(X).square().mean().backward()
            optimizer.step(None, 2.0)
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
def test_a_scaler_that_the_optimizer_was_to_ask_is_refused() -> None:
    """Gradients would stay scaled, unseen: the scaler passes itself only to a step with the parameter."""

    def check() -> None:
        _, sharded = _short()
        optimizer, scaler = step_on_local_shards(Scaled(sharded.parameters())), torch.amp.GradScaler("cpu")
        scaler.scale(sharded(X).square().mean()).backward()
        with pytest.raises(RuntimeError, match="no gradient scaler for Scaled"):
            scaler.step(optimizer)

    run_ranks(check, 2)


def test_a_checkpoint_by_name_resumes_on_another_number_of_ranks(tmp_path: Any) -> None:
    def save() -> None:
        _, sharded = _short()
        optimizer = _on_shards(sharded)
        _train(sharded, optimizer, 2)
        state = {"model": sharded.state_dict(), "optimizer": get_optimizer_state_dict(sharded, optimizer)}
        dcp.save(state, checkpoint_id=tmp_path)  # type: ignore[attr-defined]

    def resume() -> None:
        reference, sharded = _short()
        _train(reference, PlainAdam(reference.parameters()))
        optimizer = _on_shards(sharded)
        state = {"model": sharded.state_dict(), "optimizer": get_optimizer_state_dict(sharded, optimizer)}
        dcp.load(state, checkpoint_id=tmp_path)  # type: ignore[attr-defined]
        set_optimizer_state_dict(sharded, optimizer, state["optimizer"])
        _train(sharded, optimizer, 1)
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)

    run_ranks(save, 4)
    run_ranks(resume, 3)


def test_local_steps_follow_parameters_cast_or_built_before_sharding() -> None:
    def check() -> None:
        reference, sharded = twins(Short, lambda model: None)
        optimizer = _on_shards(sharded)
        fully_shard(sharded)
        _train(reference, PlainAdam(reference.parameters()), 1)
        _train(sharded, optimizer, 1)
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)
        sharded.bfloat16()
        with torch.no_grad():
            sharded(X.bfloat16())
        optimizer.zero_grad()
        sharded(X.bfloat16()).square().mean().backward()
        before = [whole(p).clone() for p in sharded.parameters()]
        optimizer.step()
        assert all(not torch.equal(whole(p), old) for p, old in zip(sharded.parameters(), before, strict=True))

    run_ranks(check, 2)


def test_step_on_local_shards_returns_the_same_optimizer_under_its_class_name() -> None:
    def check() -> None:
        _, sharded = _short()
        optimizer = PlainAdam(sharded.parameters())
        assert step_on_local_shards(optimizer) is optimizer
        assert step_on_local_shards(optimizer) is optimizer
        assert isinstance(optimizer, PlainAdam)
        assert type(optimizer).__name__ == "PlainAdam"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        _train(sharded, optimizer, 1)
        scheduler.step()

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
def test_optimizers_that_need_whole_tensors_are_refused_local_steps(name: str) -> None:
    optimizer = OPTIMIZERS[name]([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=f"got {name}, which needs whole"):
        step_on_local_shards(optimizer)


def test_a_scheduler_that_came_first_is_named() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="before building the scheduler"):
        step_on_local_shards(optimizer)


@pytest.mark.parametrize("module", ["transformer_engine.pytorch.optimizers.fused_adam", "apex.optimizers"])
def test_kernels_that_would_write_past_a_shard_are_refused(module: str) -> None:
    """Before the first step makes state or moves a weight; later steps go on from the loaded state."""

    def check() -> None:
        reference, sharded = _short()
        fused = type("FusedAdam", (PlainAdam,), {"__module__": module})
        optimizer = fused(sharded.parameters())
        with pytest.raises(TypeError, match=r"got DTensors.*lamella_optim\.step_on_local_shards\(optimizer\) once"):
            _train(sharded, optimizer, 1)
        assert not optimizer.state
        _train(reference, PlainAdam(reference.parameters()))
        _train(sharded, step_on_local_shards(optimizer))
        assert_weights_equal(reference, sharded, rtol=1e-5, atol=1e-6)
        unsharded = Short()
        _train(unsharded, fused(unsharded.parameters()), 1)

    run_ranks(check, 2)
