"""Directly read parameters belong to the reader's unit like all other parameters, for every kind of unit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from engine_models import (
    EVERY_STAGE,
    SOME_STAGES,
    Net,
    assert_gradients_equal,
    assert_trains_alike,
    case,
    descend,
    fsdp,
    mesh_of,
    twins,
    whole,
)
from reading_models import (
    LOSS,
    OWN_UNITS,
    CallingMixer,
    CallingModel,
    Mixer,
    MixerBlock,
    MixerNet,
    MixersRecomputedByReentry,
    X,
    convs_of,
    mixers_of,
    record_by_name,
    shard_declared,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingOptions,
    declare_reads,
    delay_gradient,
    describe,
    fully_shard,
    register_fsdp_forward_method,
    set_main_grads,
)
from lamella_engine.extending import unit_of
from lamella_engine.testing import Residency, assert_at_rest, named_units, require_unit
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")


@SOME_STAGES
def test_every_zero_stage_trains_as_unsharded(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def apply(model: Any) -> None:
        shard_declared(model, mesh=mesh_of(shape), options=ShardingOptions(placements=placements))

    def check() -> None:
        reference, sharded = twins(partial(MixerNet, dim=8), apply)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, sharded)]
        for _ in range(2):
            for microbatch in range(2):
                fsdp(sharded).set_is_last_backward(microbatch == 1)
                reference(X * (microbatch + 1)).square().mean().backward()
                sharded(X * (microbatch + 1)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
                torch.testing.assert_close(whole(got), expected.detach(), rtol=1e-4, atol=1e-6)

    run_ranks(check, torch.Size(shape).numel())


@pytest.mark.parametrize("flag", [True, False, None, 2])
def test_directly_read_parameters_follow_the_owners_reshard_after_forward(flag: bool | int | None) -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, partial(shard_declared, reshard_after_forward=flag))
        assert_trains_alike(reference, sharded, LOSS, num_steps=1)
        LOSS(sharded)
        unit = require_unit(convs_of(sharded)[0])
        assert (unit.weights.residency is Residency.UNSHARDED) == (flag is False)
        if flag is False:
            return
        assert all((group.parts is not None) == (flag == 2) for group in unit.parameters.groups)

    run_ranks(check, 4)


def test_a_module_that_is_read_and_called_trains_as_unsharded_too() -> None:
    def check() -> None:
        for flag in (True, False):
            reference, sharded = twins(CallingModel, partial(shard_declared, reshard_after_forward=flag))
            log = record_by_name(sharded)
            for model in (reference, sharded):
                LOSS(model).backward()
            assert_gradients_equal(reference, sharded)
            assert log.units_of("reduce") == ["layers.2", "layers.1", "layers.0", "root"]
            assert log.units_of("gather")[:4] == OWN_UNITS

    run_ranks(check, 2)


def test_a_module_that_is_read_may_be_called_outside_of_the_reader() -> None:
    class Aside(MixerNet):
        """The last convolution runs again between the blocks, and after all blocks."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            conv = convs_of(self)[1]
            for layer in self.layers:
                x = layer(conv(x))
            head: torch.Tensor = self.head(conv(x))
            return head

    def check() -> None:
        for flag in (True, False):
            reference, sharded = twins(Aside, partial(shard_declared, reshard_after_forward=flag))
            for _ in range(3):
                for model in (reference, sharded):
                    LOSS(model).backward()
                assert_gradients_equal(reference, sharded)
                for model in (reference, sharded):
                    descend(model)
        alone = [convs_of(model)[0] for model in (reference, sharded)]
        for conv in alone:  # outside any forward: a separate pass
            conv(torch.ones(2, 7)).square().sum().backward()
        assert_gradients_equal(*alone)
        with torch.no_grad():
            torch.testing.assert_close(alone[1](torch.ones(2, 7)), alone[0](torch.ones(2, 7)))

    run_ranks(check, 2)


class _CallingRecomputed(MixersRecomputedByReentry):
    def make_layer(self, dim: int) -> nn.Module:
        return MixerBlock(dim, CallingMixer)


def test_a_module_that_is_read_and_called_runs_again_after_an_optimizer_stepped() -> None:
    """The unit's earlier gather still serves its backward: a call inside begins no gather."""

    def check() -> None:
        reference, sharded = twins(_CallingRecomputed, partial(shard_declared, reshard_after_forward=False))
        other = fully_shard(nn.Linear(3, 3))
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for model in (reference, sharded):
            loss = LOSS(model)
            optimizer.step()
            loss.backward()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def _shard_after(model: Any, tell: Callable[[nn.Linear], object]) -> list[Any]:
    """Settings of each convolution's unit, from before the takeover by outer units, come back."""
    answers = []
    for mixer in mixers_of(model):
        declare_reads(mixer, "conv1d.*")
        answers.append(tell(fully_shard(mixer.conv1d)))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return answers


def test_a_gradient_that_was_said_to_come_late_before_is_waited_for() -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, lambda model: None)
        came = _shard_after(sharded, lambda conv: delay_gradient(conv, conv.get_parameter("weight")))
        shards = [conv.weight for conv in convs_of(sharded)]
        for model in (reference, sharded):
            LOSS(model).backward()
        assert all(shard.grad is None for shard in shards)
        for call in came:
            call()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_main_grads_set_before_a_unit_is_taken_over_are_kept() -> None:
    def check() -> None:
        sharded = MixerNet()
        _shard_after(sharded, lambda conv: set_main_grads(conv, [conv.get_parameter("weight")]))
        for layer in sharded.layers:
            fsdp(layer).unshard()
        for conv in convs_of(sharded):
            weight: Any = conv.weight
            assert weight.get_main_grad().shape == weight.shape

    run_ranks(check, 2)


def test_a_registered_method_of_a_directly_read_module_casts_its_inputs() -> None:
    class Convolution(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.dtype:
            return x.dtype

    def check() -> None:
        mixer = Mixer(7)
        mixer.conv1d = Convolution(7, 7)
        declare_reads(mixer, "conv1d.*")
        fully_shard(mixer.conv1d, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        register_fsdp_forward_method(mixer.conv1d, "encode")
        fully_shard(mixer)
        assert mixer.conv1d.encode(torch.ones(2, 7)) is torch.bfloat16

    run_ranks(check, 1)


def test_a_list_of_units_to_gather_ahead_may_name_one_that_was_taken_over() -> None:
    def check() -> None:
        sharded = MixerNet()
        for mixer in mixers_of(sharded):
            declare_reads(mixer, "conv1d.*")
            fully_shard(mixer.conv1d)
        fsdp(fully_shard(sharded.layers[0])).set_modules_to_forward_prefetch([fsdp(convs_of(sharded)[1])])
        for module in (*sharded.layers[1:], sharded):
            fully_shard(module)
        log = record_by_name(sharded)
        sharded(X)
        assert log.order.index("gather layers.1") < log.order.index("compute layers.0")

    run_ranks(check, 2)


@pytest.mark.parametrize("inner", [None, CPUOffloadPolicy(pin_memory=False)])
def test_shards_may_rest_on_the_cpu(inner: CPUOffloadPolicy | None) -> None:
    """The reader's parameters and the read parameters, or the read parameters alone."""
    everywhere: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    apply = (
        partial(shard_declared, **everywhere)
        if inner is None
        else partial(shard_declared, inner={"offload_policy": inner})
    )

    def check() -> None:
        assert_trains_alike(*twins(MixerNet, apply), LOSS, num_steps=3)

    run_ranks(check, 2)


def test_a_unit_that_took_over_an_inner_unit_may_be_taken_over_in_turn() -> None:
    class Reading(MixerNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x * self.layers[0].get_parameter("up.weight").sum()

    def apply(model: Any) -> None:
        declare_reads(model, "layers.0.up.weight")
        shard_declared(model)
        assert unit_of(model) is unit_of(model.layers[0]) is unit_of(convs_of(model)[0])

    def check() -> None:
        reference, sharded = twins(Reading, apply)
        assert_trains_alike(reference, sharded, LOSS, num_steps=3)
        unit = require_unit(sharded)
        names = {parameter.name for group in unit.parameters.groups for parameter in group.parameters}
        assert names >= {"layers.0.up.weight", "layers.0.mixer.conv1d.weight", "stem.weight"}

    run_ranks(check, 2)


def test_several_forwards_before_their_backwards() -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, shard_declared)
        for model in (reference, sharded):
            losses = [model(X * scale).square().mean() for scale in (1, 2)]
            losses[0].backward()
            losses[1].backward()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


class _Anyhow(Net):
    """Blocks with reads, calls or both, recomputed in backward or not: drawn by a seed."""

    def __init__(self, choose: Random) -> None:
        self._choose = choose
        super().__init__(num_layers=4)
        self.recomputes = [choose.random() < 0.3 for _ in self.layers]

    def make_layer(self, dim: int) -> nn.Module:
        return MixerBlock(dim, self._choose.choice([Mixer, CallingMixer]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer, recomputes in zip(self.layers, self.recomputes, strict=True):
            x = cast(torch.Tensor, checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x))
        head: torch.Tensor = self.head(x)
        return head


def _cut_anyhow(choose: Random, model: Any) -> None:
    for layer in model.layers:
        declare_reads(choose.choice([layer, layer.mixer]), "*conv1d.*")
        for module in (layer.mixer.conv1d, layer.mixer, layer):
            if choose.random() < 0.6:
                fully_shard(module, reshard_after_forward=choose.choice([None, True, False]))
    fully_shard(model)


def test_units_that_are_cut_at_random_train_as_unsharded() -> None:
    def check() -> None:
        for seed in range(8):
            with case(f"seed {seed}"):
                make, apply = (lambda seed=seed: _Anyhow(Random(seed))), partial(_cut_anyhow, Random(100 + seed))
                reference, sharded = twins(make, apply)
                for scale in (1, 2, 3):
                    if Random(seed + scale).random() < 0.3:
                        with torch.no_grad():
                            torch.testing.assert_close(sharded(X), reference(X), rtol=1e-4, atol=1e-5)
                    for model in (reference, sharded):
                        one, two = (model(X * factor).square().mean() for factor in (scale, -scale))
                        (one + two).backward()
                    assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-5)
                    for model in (reference, sharded):
                        descend(model)

    run_ranks(check, 2)


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    class Frozen(MixerNet):
        def __init__(self) -> None:
            super().__init__()
            for conv in convs_of(self):
                conv.requires_grad_(False)

    def check() -> None:
        reference, sharded = twins(Frozen, shard_declared)
        assert_trains_alike(reference, sharded, LOSS, num_steps=3)
        assert all(conv.weight.grad is None for conv in convs_of(sharded))

    run_ranks(check, 2)


def test_a_convolution_may_keep_a_dtype_of_its_own() -> None:
    class MixedReads(MixerNet):
        def __init__(self) -> None:
            super().__init__()
            for mixer in mixers_of(self):
                mixer.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                mixer.register_forward_hook(lambda *args: args[-1].bfloat16())

    def check() -> None:
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        plain = MixedPrecisionPolicy()
        _, sharded = twins(MixedReads, partial(shard_declared, inner={"mp_policy": plain}, mp_policy=bf16))
        dtypes: set[tuple[torch.dtype, torch.dtype]] = set()
        for mixer in mixers_of(sharded):
            mixer.register_forward_pre_hook(lambda m, _: dtypes.add((m.conv1d.weight.dtype, m.gate.dtype)))
        LOSS(sharded).backward()
        assert dtypes == {(torch.float32, torch.bfloat16)}
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in sharded.parameters())
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_directly_read_parameters_on_meta_are_materialised_by_to_empty() -> None:
    def check() -> None:
        with torch.device("meta"):
            model = MixerNet()
        shard_declared(model)
        with pytest.raises(RuntimeError, match=r"materialized.*mixer\.conv1d\.weight"):
            model.layers[0](torch.ones(2, 7))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        LOSS(model).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_ranks(check, 2)


def test_a_registered_method_of_the_reader_may_use_the_declared_parameters() -> None:
    class Stepping(Mixer):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.conv1d.weight, self.conv1d.bias)

    def check() -> None:
        mixer = Stepping(7)
        expected = mixer.step(torch.ones(2, 7))
        declare_reads(mixer, "conv1d.*")
        fully_shard(mixer.conv1d)
        fully_shard(mixer)
        register_fsdp_forward_method(mixer, "step")
        with torch.no_grad():
            torch.testing.assert_close(mixer.step(torch.ones(2, 7)), expected)

    run_ranks(check, 2)


def test_verbs_of_a_directly_read_module_act_on_the_readers_unit() -> None:
    """A schedule without a call of `forward` drives the unit by hand."""

    def check() -> None:
        reference, sharded = twins(MixerNet, shard_declared)
        conv, block = convs_of(sharded)[0], sharded.get_submodule("layers.0")
        fsdp(conv).unshard()
        assert type(conv.weight) is type(block.get_parameter("up.weight")) is nn.Parameter
        x = torch.ones(2, 7)
        mixed = cast(Mixer, block.get_submodule("mixer"))(x)  # piecewise: the block's forward never runs
        assert torch.equal(conv(x), F.linear(x, conv.weight, conv.bias)), "it did not free what was gathered by hand"
        mixed.sum().backward()
        fsdp(block).reshard()
        fsdp(block).reduce_gradients()
        reference.get_submodule("layers.0.mixer")(x).sum().backward()
        expected, got = convs_of(reference)[0].weight.grad, conv.weight.grad
        assert expected is not None
        assert got is not None
        torch.testing.assert_close(whole(got), expected)

    run_ranks(check, 2)


def test_a_deleted_model_is_freed_at_once() -> None:
    def check() -> None:
        model = shard_declared(MixerNet())
        LOSS(model).backward()
        states = [weakref.ref(unit) for _, unit in named_units(model)]
        gc.collect()
        gc.disable()
        del model
        assert all(ref() is None for ref in states)
        gc.enable()

    run_ranks(check, 1)


def test_describe_lists_a_taken_over_unit_inside_the_readers_unit() -> None:
    def check() -> None:
        model = shard_declared(MixerNet())
        text = describe(model)
        assert "FSDPLinear" not in text
        assert "layers.0 ... layers.2: FSDPMixerBlock, 2 groups" in text

    run_ranks(check, 1)


def test_torchs_attention_reads_its_projection_and_need_not_be_told() -> None:
    class Attending(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return ReadAttention()

    class ReadAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(7, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.attention(x, x, x, need_weights=False)[0]
            return out

    def apply(model: Any) -> None:
        for layer in model.layers:
            fully_shard(layer.attention.out_proj)
            fully_shard(layer)
        fully_shard(model)

    def check() -> None:
        reference, sharded = twins(Attending, apply)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)
