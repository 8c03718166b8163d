"""Parameters that take no gradient, beside those that do, and parameters that change sides."""

from __future__ import annotations

import pytest
import torch
from engine_models import (
    Net,
    Residual,
    assert_gradients_equal,
    assert_trains_alike,
    fsdp,
    inputs,
    mean_square,
    shard,
    twins,
    whole,
)
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import assert_at_rest, record
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


class _Adapted(Residual):
    """A frozen block with a low-rank update of its first weight, as LoRA adds it."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, dim))
        self.b = nn.Parameter(torch.zeros(13, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x) + x @ self.a.t() @ self.b.t())
        out: torch.Tensor = x + self.gain * self.down(hidden)
        return out


class _Lora(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _Adapted(dim)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_frozen_and_trainable_parameters_may_share_a_unit(num_ranks: int) -> None:
    def check() -> None:
        reference, sharded = twins(_Lora)
        before = {name: whole(p) for name, p in sharded.named_parameters() if not p.requires_grad}
        assert len(before) == 12
        assert_trains_alike(reference, sharded, LOSS)
        for name, parameter in sharded.named_parameters():
            if name in before:
                assert parameter.grad is None
                assert torch.equal(whole(parameter), before[name])

    run_ranks(check, num_ranks)


def test_gradients_pass_through_a_wholly_frozen_unit() -> None:
    def freeze(model: Net) -> None:
        model.layers[1].requires_grad_(False)

    def check() -> None:
        reference, sharded = twins()
        for model in (reference, sharded):
            freeze(model)  # type: ignore[arg-type]
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_a_model_whose_parameters_are_all_frozen_still_gives_its_inputs_gradients() -> None:
    def check() -> None:
        gradients = []
        for model in twins():
            x = X.clone().requires_grad_()
            model.requires_grad_(False)
            for _ in range(2):
                model(x).square().mean().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)

    run_ranks(check, 2)


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)])
def test_requires_grad_may_change_between_steps(policy: MixedPrecisionPolicy | None) -> None:
    def apply(model: Net) -> None:
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    def check() -> None:
        reference, sharded = twins(Net, apply)
        for step in range(5):
            for model in (reference, sharded):
                model.get_submodule("stem").requires_grad_(step % 2 == 0)
                for i, layer in enumerate(model.get_submodule("layers").children()):
                    layer.requires_grad_((step + i) % 4 != 0)
                    layer.get_submodule("up").requires_grad_((step + i) % 3 != 0)
            assert_trains_alike(reference, sharded, LOSS, num_steps=1)

    run_ranks(check, 2)


def test_parameters_that_were_frozen_when_they_were_sharded_can_be_trained_later() -> None:
    def make() -> Net:
        model = Net()
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        return model

    def check() -> None:
        reference, sharded = twins(make)
        assert_trains_alike(reference, sharded, LOSS, num_steps=2)
        for model in (reference, sharded):
            model.requires_grad_(True)
        assert_trains_alike(reference, sharded, LOSS, num_steps=2)

    run_ranks(check, 2)


def test_freezing_between_two_backwards_keeps_the_earlier_gradient() -> None:
    def check() -> None:
        reference, sharded = twins()
        for model in (reference, sharded):
            LOSS(model).backward()
            model.get_submodule("layers.1").requires_grad_(False)
            LOSS(model).backward()
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_ignored_parameters_are_left_alone() -> None:
    def check() -> None:
        def apply(model: Net) -> None:
            fully_shard(model, ignored_params={model.head.weight, model.layers[0].gain})  # type: ignore[arg-type]

        reference, sharded = twins(Net, apply)
        ignored = [dict(sharded.named_parameters())[name] for name in ("head.weight", "layers.0.gain")]
        assert all(type(parameter) is nn.Parameter for parameter in ignored)
        assert all(not hasattr(parameter, "full_tensor") for parameter in ignored)
        for model in (reference, sharded):
            LOSS(model).backward()
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_flags_that_are_set_while_a_unit_is_unsharded_stay_set() -> None:
    def check() -> None:
        pair = twins()
        for flag in (False, True):
            for model in pair:
                model.zero_grad()
                model(X)  # leaves the root unsharded
                model.get_submodule("head").requires_grad_(flag)
                for _ in range(2):
                    LOSS(model).backward()
            assert_gradients_equal(*pair)
            assert_at_rest(pair[1])

    run_ranks(check, 2)


def test_flags_of_parameters_held_from_before_count_after_a_reshard() -> None:
    def check() -> None:
        reference, sharded = pair = twins()
        held = [model.get_parameter("head.weight") for model in pair]
        for flag in (False, True):
            for model in pair:
                model.zero_grad()
                model(X)  # leaves the root unsharded: the module holds another form than `held`
            fsdp(sharded).reshard()
            for parameter in held:
                parameter.requires_grad_(flag)
            for model in pair:
                LOSS(model).backward()
            assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_parameters_frozen_after_sharding_add_no_bytes_to_reductions() -> None:
    def on_each_rank() -> None:
        model = shard(Net(dim=8))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)
        log = record(model)
        model(X).square().mean().backward()
        trained = [parameter for name, parameter in model.named_parameters() if "bias" in name]
        assert all(parameter.grad is not None for parameter in trained)
        # A tensor of n rows travels as two chunks of n / 2 rows, rounded up.
        assert log.nbytes_of("reduce") == sum(4 * 2 * -(-parameter.numel() // 2) for parameter in trained)

    run_ranks(on_each_rank, 2)
