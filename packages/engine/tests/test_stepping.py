"""An optimizer that steps each unit inside backward trains, to the bit, as one that steps when backward is over."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import BF16, EVERY_STAGE, Net, case, local, shard, shard_on, unit
from optimizer_models import (
    OPTIMIZERS,
    WHOLE_TENSORS_ONLY,
    CountsInItsGroups,
    CountsItself,
    Lion,
    NormsOverAll,
    flavours_of,
)
from optimizer_pairs import LOSS, Make, SteppedInBackward, named, two_microbatches
from torch import nn
from torch.optim import Optimizer

from lamella_engine import (
    HFSDP,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Rows,
    step_in_backward,
    step_on_local_shards,
)
from lamella_testing import run_ranks

# -- every optimizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - WHOLE_TENSORS_ONLY.keys()))
def test_every_optimizer_and_flavour_of_it_takes_the_same_steps(name: str) -> None:
    def check() -> None:
        for flavour in flavours_of(name):
            with case(flavour):
                pair = SteppedInBackward(optimizer=named(name, lr=1e-2, **flavour))
                assert pair.train() == pair.all_names()

    run_ranks(check, 3)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Rprop"])
def test_parameters_in_the_flat_layout_take_the_same_steps(name: str) -> None:
    def check() -> None:
        for shape, options in (((4,), {}), ((2, 2), {"placements": (HFSDP, ZERO3)})):
            with case(options):
                apply = shard_on(shape, keep=Rows(1), **options)
                pair = SteppedInBackward(apply=apply, optimizer=named(name, lr=1e-2))
                assert pair.train() == pair.all_names()

    run_ranks(check, 4)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": 1e-2, "amsgrad": True, "maximize": True, "weight_decay": 0.1}, "Adam"),
        ({"lr": torch.tensor(1e-2)}, "AdamW"),
        ({"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "SGD"),
        ({"lr": 1e-2, "momentum": 0.9, "centered": True}, "RMSprop"),
    ],
)
def test_options_count(options: dict[str, Any], name: str) -> None:
    def check() -> None:
        pair = SteppedInBackward(optimizer=named(name, **options))
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_one_that_somebody_wrote_takes_the_same_steps() -> None:
    def check() -> None:
        pair = SteppedInBackward(optimizer=lambda model: Lion(model.parameters()))
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def _run_hooks_among_local_shards(optimizer: Optimizer) -> None:
    """Change an optimizer's class to one that hands shards as plain tensors to hooks, too."""
    kind: Any = type(optimizer)

    def step(self: Any, closure: None = None) -> None:
        whole = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [_local_with_gradient(p) for p in group["params"] if p.grad is not None]
        try:
            kind.step(self)
        finally:
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params

    optimizer.__class__ = type(f"Local{kind.__name__}", (kind,), {"step": step})


def _local_with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    plain = local(parameter).detach()
    assert parameter.grad is not None
    plain.grad = local(parameter.grad)
    return plain


def _locally(make: Make) -> Make:
    return lambda model: step_on_local_shards(make(model))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_one_that_steps_local_shards_takes_the_same_steps(name: str) -> None:
    def check() -> None:
        for flavour in ({"fused": True}, {"foreach": True}):
            make = named(name, lr=1e-2, **flavour)
            pair = SteppedInBackward(optimizer=_locally(make))
            assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_parameters_that_are_not_the_ones_that_were_stepped_are_not_stepped_again() -> None:
    def check() -> None:
        pair = SteppedInBackward(optimizer=named("SGD", lr=1e-2))
        _run_hooks_among_local_shards(pair.optimizer)
        assert pair.backward() == pair.all_names()
        with pytest.raises(RuntimeError, match="got others in its param groups"):
            pair.optimizer.step()

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (CountsInItsGroups, "stepped apart differ"),
        (CountsItself, "stepped apart differ"),
        (NormsOverAll, "stepped apart differ"),
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "dense"),
    ],
)
def test_one_that_cannot_step_a_parameter_at_a_time_is_refused_and_left_as_it_was(kind: type, why: str) -> None:
    def check() -> None:
        model = shard(Net())
        optimizer = kind(model.parameters())
        before = deepcopy(optimizer.state_dict()), dict(vars(optimizer))
        with pytest.raises(ValueError, match=why):
            step_in_backward(optimizer)
        assert (optimizer.state_dict(), vars(optimizer)) == before
        assert not optimizer._optimizer_step_pre_hooks

    run_ranks(check, 1)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear"):
        step_in_backward(nn.Linear(2, 2))  # type: ignore[arg-type]


# -- every way to shard ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", EVERY_STAGE)
@pytest.mark.parametrize("reduces_each", [True, False], ids=["reduce_each", "reduce_last"])
def test_every_stage_takes_the_same_steps_with_several_microbatches(stage: str, reduces_each: bool) -> None:
    shape, placements = EVERY_STAGE[stage]
    backward = partial(two_microbatches, reduces_each=reduces_each)

    def check() -> None:
        for policy in (MixedPrecisionPolicy(), BF16):
            for set_to_none in (True, False):
                with case((policy, set_to_none)):
                    apply = shard_on(shape, placements=placements, mp_policy=policy)
                    pair = SteppedInBackward(partial(Net, dim=8), apply, backward=backward)
                    # In fp32, DDP's autograd reads the main weights themselves.
                    reads_main = stage == "DDP" and policy.param_dtype is None
                    expected = set() if reads_main else pair.all_names()
                    assert pair.train(set_to_none=set_to_none) == expected

    run_ranks(check, torch.Size(shape).numel())


class _Skips(Net):
    """Leaves its first layer out when it is told to."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers[1:] if self.skips else self.layers:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


@pytest.mark.parametrize("stage", ["ZERO1", "ZERO3", "HSDP, ZERO3", "HFSDP, ZERO3"])
def test_a_unit_that_the_last_microbatch_leaves_out_is_stepped_with_what_it_has(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def backward(model: nn.Module) -> None:
        assert isinstance(model, _Skips)
        for model.skips in (False, True):
            unit(model).set_is_last_backward(model.skips)
            LOSS(model).backward()

    def check() -> None:
        pair = SteppedInBackward(partial(_Skips, dim=8), shard_on(shape, placements=placements), backward=backward)
        left_out = {name for name in pair.all_names() if name.startswith("layers.0.")}
        # With ZeRO-3 on one axis its gradients are there since the first backward, when nothing may be stepped.
        assert pair.train() == pair.all_names() - (left_out if stage == "ZERO3" else set())

    run_ranks(check, torch.Size(shape).numel())


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"reshard_after_forward": 2}, {"offload_policy": CPUOffloadPolicy()}],
    ids=str,
)
def test_other_ways_to_rest_take_the_same_steps(options: dict[str, Any], num_ranks: int) -> None:
    def check() -> None:
        if num_ranks == 1 and options == {"reshard_after_forward": 2}:
            return
        apply = shard_on((num_ranks,), mp_policy=BF16, **options)
        pair = SteppedInBackward(partial(Net, dim=8), apply)
        assert pair.train() == (set() if "offload_policy" in options else pair.all_names())

    run_ranks(check, num_ranks)


def test_weights_that_stay_after_backward_are_gathered_anew_after_the_step() -> None:
    def check() -> None:
        def apply(model: nn.Module) -> None:
            shard(model)  # type: ignore[arg-type]
            unit(model).set_reshard_after_backward(False)

        pair = SteppedInBackward(apply=apply)
        for _ in range(3):
            stepped = pair.backward()
            for optimizer in pair.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert stepped
        for model in pair.models:
            unit(model).reset_iter_state()
        pair.assert_equal()

    run_ranks(check, 2)
