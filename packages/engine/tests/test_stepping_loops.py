"""Whatever a training loop does, an optimizer that steps inside backward does it too, or says that it cannot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import BF16, EVERY_STAGE, Net, assert_at_rest, local, rows_of_this_rank, shard, shard_on, unit
from optimizer_pairs import (
    ADAMW,
    LOSS,
    SteppedInBackward,
    X,
    assert_same_state,
    assert_same_weights,
    named,
    run_backward,
)
from torch import nn
from torch.optim import Optimizer

from lamella_engine import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, step_in_backward
from lamella_engine import _updates as updates
from lamella_testing import run_ranks

# -- every loop ------------------------------------------------------------------------------------------------------


class _Odd(Net):
    """A layer that is not used, one that is frozen, and a scale that no unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(5))
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * self.scale
        return out


def _shard_odd(model: nn.Module) -> None:
    assert isinstance(model, _Odd)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params={model.scale})


def test_frozen_unused_and_unsharded_parameters_are_stepped_as_they_would_be() -> None:
    def check() -> None:
        pair = SteppedInBackward(_Odd, _shard_odd)
        for set_to_none in (True, False):
            stepped = pair.train(set_to_none=set_to_none)
            others = {"scale", "unused.weight", "unused.bias"}
            frozen = {name for name in pair.all_names() if name.startswith("layers.0.")}
            assert stepped == pair.all_names() - others - frozen

    run_ranks(check, 2)


def _by_decay(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("is_built_first", [True, False])
def test_schedulers_see_one_step_for_each(is_built_first: bool) -> None:
    def check() -> None:
        pair = SteppedInBackward(optimizer=_by_decay)
        if is_built_first:
            pair.handle.remove()
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in pair.optimizers]
        if is_built_first:
            pair.handle = step_in_backward(pair.optimizer)
        for i in range(3):
            assert pair.backward() == pair.all_names()
            pair.step()
            for scheduler in schedulers:
                scheduler.step()
            rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in pair.optimizers]
            assert rates[0] == rates[1] == [1e-2 * 0.5 ** (i + 1), 3e-2 * 0.5 ** (i + 1)]

    run_ranks(check, 2)


def test_step_hooks_run_once_and_see_the_whole_optimizer() -> None:
    def check() -> None:
        pair = SteppedInBackward(optimizer=_by_decay)
        seen: list[tuple[str, list[int]]] = []

        def note(when: str) -> Callable[..., None]:
            def hook(optimizer: Optimizer, *_: object) -> None:
                assert optimizer is pair.optimizer
                seen.append((when, [len(group["params"]) for group in optimizer.param_groups]))

            return hook

        pair.optimizer.register_step_pre_hook(note("before"))
        pair.optimizer.register_step_post_hook(note("after"))
        sizes = [len(group["params"]) for group in pair.optimizer.param_groups]
        count = updates.count
        pair.backward()
        assert not seen
        assert updates.count == count
        pair.optimizer.step()
        assert seen == [("before", sizes), ("after", sizes)]
        assert updates.count == count + 1

    run_ranks(check, 2)


def test_hooks_that_only_wait_are_called_before_each_update_of_weights() -> None:
    def check() -> None:
        pair = SteppedInBackward(optimizer=_by_decay)
        weights = list(pair.model.parameters())
        before = [weight.detach().clone() for weight in weights]
        are_first: list[bool] = []

        def wait(*_: object) -> None:
            if not are_first:
                are_first.append(all(map(torch.equal, (weight.detach() for weight in weights), before)))
            seen.append(None)

        seen: list[None] = []
        setattr(wait, "only_waits", True)  # noqa: B010
        pair.optimizer.register_step_pre_hook(wait)
        pair.backward()
        assert are_first == [True]
        num_updates = len(seen)
        assert num_updates > 1
        pair.optimizer.step()
        assert len(seen) == num_updates + 1

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, of what Dynamo imports
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_step_that_is_compiled_is_compiled_as_often_as_without(name: str) -> None:
    def check() -> None:
        pair = SteppedInBackward(_Odd, _shard_odd, named(name, lr=1e-2))
        graphs_of = pair.compile_steps()
        for _ in range(5):
            assert pair.backward()
            for optimizer in pair.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if name == "SGD":  # compiled, AdamW's arithmetic is another than what it steps with inside
                for expected, got in zip(*(model.parameters() for model in pair.models), strict=True):
                    # Compiled by torch 2.11, SGD rounds in its own way.
                    torch.testing.assert_close(local(got), local(expected), rtol=1e-6, atol=1e-7)
        ordinary, ours = graphs_of
        assert len(ours) == len(ordinary)

    run_ranks(check, 2)


def test_groups_may_be_added_and_state_dicts_loaded() -> None:
    def check() -> None:
        def some(model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.get_submodule("layers").parameters(), lr=1e-2)

        pair = SteppedInBackward(optimizer=some)
        pair.train()
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            optimizer.add_param_group({"params": list(model.get_submodule("stem").parameters()), "lr": 1e-3})
            for parameter in model.parameters():
                parameter.grad = None
        stepped = pair.backward()
        assert {"stem.weight", "stem.bias"} < stepped
        pair.step()
        saved = deepcopy(pair.optimizers[0].state_dict())
        for optimizer in pair.optimizers:
            optimizer.load_state_dict(deepcopy(saved))
        assert pair.train() == stepped

    run_ranks(check, 2)


def test_a_state_dict_resumes_training_with_and_without() -> None:
    def check() -> None:
        pair = SteppedInBackward()
        pair.train()
        saved = [deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
        again = SteppedInBackward(apply=shard)
        for i, (model, optimizer) in enumerate(zip(again.models, again.optimizers, strict=True)):
            model.load_state_dict(pair.models[i].state_dict())
            optimizer.load_state_dict(saved[1 - i])  # each with what the other saved
        for one in (pair, again):
            assert one.train() == one.all_names()
        for a, b in zip(pair.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(local(a), local(b))

    run_ranks(check, 2)


def test_two_optimizers_on_one_model() -> None:
    def check() -> None:
        def blocks(model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.layers.parameters(), lr=1e-2)  # type: ignore[union-attr]

        def rest(model: nn.Module) -> Optimizer:
            ours = {id(p) for p in model.layers.parameters()}  # type: ignore[union-attr]
            return torch.optim.SGD([p for p in model.parameters() if id(p) not in ours], lr=0.1, momentum=0.9)

        pair = SteppedInBackward(optimizer=blocks)
        others = [rest(model) for model in pair.models]
        handle = step_in_backward(others[1])
        for _ in range(3):
            blocks_stepped = pair.backward()
            assert blocks_stepped == {name for name in pair.all_names() if name.startswith("layers.")}
            assert len(handle.stepped(pair.model.parameters())) == len(pair.all_names()) - len(blocks_stepped)
            for optimizer in others:
                optimizer.step()
            pair.step()
            assert_same_state(*(optimizer.state_dict() for optimizer in others))
            for optimizer in others:
                optimizer.zero_grad()

    run_ranks(check, 2)


def test_one_optimizer_over_two_models() -> None:
    def check() -> None:
        def both(model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=1e-2)

        def apply(model: nn.Module) -> None:
            for each in model:  # type: ignore[attr-defined]
                shard(each)

        def backward(model: nn.Module) -> None:
            x = rows_of_this_rank(X)
            for each in model:  # type: ignore[attr-defined]
                each(x).square().mean().backward()

        pair = SteppedInBackward(lambda: nn.ModuleList([Net(), Net(1)]), apply, both, backward)
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_an_optimizer_that_was_built_before_sharding() -> None:
    def check() -> None:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Net())
        optimizers = [ADAMW(model) for model in models]
        for model in models:
            shard(model)
        handle = step_in_backward(optimizers[1])
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                run_backward(model)
                if optimizer is optimizers[1]:
                    assert len(handle.stepped(model.parameters())) == len(list(model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(*models)

    run_ranks(check, 2)


def test_removed_it_steps_when_it_is_called_again() -> None:
    def check() -> None:
        pair = SteppedInBackward()
        pair.train()
        pair.backward()
        with pytest.raises(RuntimeError, match=r"AdamW\.step\(\)"):
            pair.handle.remove()
        pair.step()
        pair.handle.remove()
        assert pair.train() == set()
        pair.handle = step_in_backward(pair.optimizer)
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_the_handle_need_not_be_kept_and_keeps_nothing() -> None:
    def check() -> None:
        pair = SteppedInBackward()
        handle = weakref.ref(pair.handle)
        del pair.handle
        assert handle() is not None
        gc.disable()
        try:
            kept = weakref.ref(pair.optimizers.pop())
            assert kept() is None
            assert handle() is None
        finally:
            gc.enable()
        run_backward(pair.model)

    run_ranks(check, 1)


@pytest.mark.parametrize("stage", ["ZERO2", "ZERO3", "HSDP, ZERO3", "HFSDP, ZERO3"])
def test_gradients_may_go_when_they_were_used(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def check() -> None:
        for policy in (MixedPrecisionPolicy(), BF16):
            pair = SteppedInBackward(
                partial(Net, dim=8), shard_on(shape, placements=placements, mp_policy=policy), free_gradients=True
            )
            for _ in range(3):
                assert pair.backward() == pair.all_names()
                assert all(parameter.grad is None for parameter in pair.model.parameters())
                for optimizer in pair.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                pair.assert_equal()

    run_ranks(check, torch.Size(shape).numel())


# -- what cannot be had ----------------------------------------------------------------------------------------------


def test_a_forward_or_backward_before_the_step_is_an_error_and_the_step_goes_on() -> None:
    def check() -> None:
        pair = SteppedInBackward()
        pair.backward()
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) after the backward .*got another forward"):
            LOSS(pair.model)
        with torch.no_grad():
            LOSS(pair.model)
        pair.step()
        pair.train()

    run_ranks(check, 2)


def test_a_second_backward_of_the_same_graph_is_an_error() -> None:
    def check() -> None:
        pair = SteppedInBackward()
        loss = LOSS(pair.model)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="got another backward"):
            loss.backward()
        unit(pair.model).reset_iter_state()
        assert_at_rest(pair.model)

    run_ranks(check, 2)


def test_closures_and_gradient_scalers_are_refused() -> None:
    def check() -> None:
        pair = SteppedInBackward(optimizer=named("AdamW", fused=True))
        optimizer = pair.optimizer

        def closure() -> float:
            raise AssertionError("must not run")

        with pytest.raises(RuntimeError, match="without a closure"):
            optimizer.step(closure)
        pair.backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match="gradient scaler"):
            scaler.step(optimizer)
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        pair.step()

    run_ranks(check, 2)


def test_clipping_after_the_weights_moved_is_refused() -> None:
    def check() -> None:
        pair = SteppedInBackward()
        pair.backward()
        with pytest.raises(RuntimeError, match="clip_grad_norm_ comes too late"):
            clip_grad_norm_(pair.model.parameters(), 1.0)
        clip_grad_norm_(pair.models[0].parameters(), 1e9)
        pair.step()
        clip_grad_norm_(pair.model.parameters(), 1.0)  # of gradients that nobody will use

    run_ranks(check, 2)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    def check() -> None:
        pair = SteppedInBackward()
        for other in (pair.optimizer, torch.optim.SGD(list(pair.model.parameters())[-1:])):
            with pytest.raises(ValueError, match="that AdamW does"):
                step_in_backward(other)
        pair.handle.remove()
        step_in_backward(torch.optim.SGD(pair.model.parameters()))

    run_ranks(check, 1)


# -- exceptions ------------------------------------------------------------------------------------------------------


def test_after_an_exception_in_backward_the_next_step_is_whole() -> None:
    class Boom(Exception):
        pass

    def boom(_: torch.Tensor) -> None:
        raise Boom

    def check() -> None:
        pair = SteppedInBackward()
        pair.train()
        model = pair.model
        handle = model.get_submodule("layers.0").register_forward_hook(
            lambda _module, _args, out: out.register_hook(boom) and None
        )
        with pytest.raises(Boom):
            run_backward(model)
        handle.remove()
        unit(model).reset_iter_state()
        assert not pair.handle.stepped(model.parameters())
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        # Some units were stepped and some were not, which nobody can take back: go on from the same weights.
        model.load_state_dict(pair.models[0].state_dict())
        pair.optimizer.load_state_dict(deepcopy(pair.optimizers[0].state_dict()))
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_a_step_that_raises_may_be_called_again() -> None:
    def check() -> None:
        pair = SteppedInBackward(_Odd, _shard_odd)
        scale = pair.model.get_parameter("scale")
        pair.backward()
        good = scale.grad
        assert good is not None
        scale.grad = good.to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            pair.optimizer.step()
        scale.grad = good
        pair.step()

    run_ranks(check, 2)
