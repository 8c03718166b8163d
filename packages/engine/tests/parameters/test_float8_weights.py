"""Gathered weights in 8 bits: bytes, parameters at rest, and layers."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from engine_models import descend
from float8_models import (
    FP32,
    RECIPES,
    decoder,
    loss_of,
    sharded,
    train,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import (
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
)
from lamella_engine.testing import named_units, record
from lamella_layout import Rows
from lamella_precision import Float8Recipe, QuantizedWeight, matrices_of
from lamella_testing import run_ranks


@pytest.mark.parametrize(("name", "share"), [("tensor", 0.51), ("row", 0.51), ("block", 0.51), ("mxfp8", 0.52)])
def test_half_of_the_bytes_of_bf16_travel(name: str, share: float) -> None:
    """Counted: gathers and the reduction of amaxes, of whole units with their norms. MXFP8's scales alone are 1/32."""

    def check() -> None:
        nbytes = []
        for recipe in (replace(RECIPES[name], compute_dtype=torch.bfloat16), None):
            model = decoder(256, 512, num_layers=1)
            policy = MixedPrecisionPolicy(torch.bfloat16, recipe=recipe and matrices_of(model.layers, recipe))
            fully_shard(model.layers[0], mp_policy=policy)
            fully_shard(model, mp_policy=replace(policy, recipe=None))
            for _ in range(2):
                loss_of(model).backward()  # type: ignore[no-untyped-call]
                descend(model)
            log = record(model)
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            counted = [e for e in log.events if e.unit.startswith("layers") and e.kind in ("gather", "all-reduce")]
            nbytes.append(sum(event.nbytes for event in counted))
            is_scaled = isinstance(recipe, Float8Recipe)
            assert [event.kind for event in counted] == is_scaled * ["all-reduce"] + ["gather", "gather"]
        assert 0.5 < nbytes[0] / nbytes[1] <= share

    run_ranks(check, 2)


def test_optimizer_state_and_state_dict_are_of_fp32_main_weights() -> None:
    def check() -> None:
        recipe = Float8Recipe()
        model = sharded(decoder(), recipe)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        names = {name for name, _ in decoder().named_parameters()}
        state = model.state_dict()
        assert set(state) == names
        assert all(type(value) is DTensor and value.dtype == FP32 for value in state.values())
        assert all(value["exp_avg"].dtype == FP32 for value in optimizer.state.values())
        # Loaded into another recipe, and into none, the weights are the same.
        full_weights = {name: value.full_tensor() for name, value in state.items()}
        for other in (Float8Recipe((1, None), dtype=torch.float8_e5m2), None):
            fresh = decoder() if other is None else sharded(decoder(), other)
            if other is None:
                fresh.load_state_dict(full_weights)
            else:
                fresh.load_state_dict(state)
            for name, parameter in fresh.named_parameters():
                got = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                assert torch.equal(got, full_weights[name])

    run_ranks(check, 2)


def test_only_the_matrices_of_the_layers_are_quantised() -> None:
    def check() -> None:
        model = decoder()
        policy = MixedPrecisionPolicy(
            recipe=matrices_of(model.layers, Float8Recipe(compute_dtype=FP32), names=["mlp.*"])
        )
        fully_shard(model, mp_policy=policy)
        cast(Any, model).unshard()
        quantized_names = {
            name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedWeight)
        }
        assert quantized_names == {f"layers.{i}.mlp.{name}.weight" for i in range(2) for name in ("gate", "up", "down")}
        plain_model = decoder()
        matrices = matrices_of(plain_model, Float8Recipe())
        chosen = {name for name, parameter in plain_model.named_parameters() if matrices(parameter) is not None}
        assert "embedding.weight" not in chosen
        assert "head.weight" in chosen
        assert not any("norm" in name for name in chosen)

    run_ranks(check, 1)


def test_recipes_that_cannot_serve_a_weight_are_refused_at_the_call() -> None:
    def check() -> None:
        model = decoder()
        with pytest.raises(ValueError, match=r"got none for \['attention"):
            matrices_of(model.layers, Float8Recipe(), names="attention.*")
        policy = MixedPrecisionPolicy(recipe=matrices_of(model.layers, Float8Recipe()))
        with pytest.raises(ValueError, match=r"Expected `param_dtype` torch.bfloat16 .* got torch.float32"):
            fully_shard(model, mp_policy=policy)
        with pytest.raises(ValueError, match=r"(?s)'bias'.*Give it no recipe"):
            fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(recipe=Float8Recipe(compute_dtype=FP32)))
        mxfp8 = MixedPrecisionPolicy(recipe=lambda p: RECIPES["mxfp8"] if p.ndim == 2 else None)
        with pytest.raises(ValueError, match=r"'weight' to divide into blocks of 32 rows"):
            fully_shard(nn.Linear(33, 100), mp_policy=mxfp8)  # neither the even layout nor the flat one keeps blocks
        with pytest.raises(ValueError, match=r"'weight' to divide into blocks of 32 rows"):
            fully_shard(nn.Linear(64, 48), mp_policy=mxfp8)  # the second block of a column is cut short
        in_blocks = ShardingOptions(keep_together=lambda p: Rows(32))
        with pytest.raises(ValueError, match=r"'weight' to divide into blocks of 32 rows"):
            fully_shard(nn.Linear(48, 80), mp_policy=mxfp8, options=in_blocks)
        by_columns = MixedPrecisionPolicy(recipe=lambda p: RECIPES["row"] if p.ndim == 2 else None)
        with pytest.raises(NotImplementedError, match=r"'weight' at dim 0"):
            fully_shard(nn.Linear(4, 4), mp_policy=by_columns, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        halves = ShardingOptions(keep_together=lambda p: Rows(16))
        with pytest.raises(ValueError, match=r"`keep_together` to keep blocks of a multiple of 32 rows of 'weight'"):
            fully_shard(nn.Linear(64, 64), mp_policy=mxfp8, options=halves)

    run_ranks(check, 2)


def test_a_conversion_to_a_dtype_that_a_recipe_does_not_compute_in_is_refused_before_any_shard_changes() -> None:
    def check() -> None:
        model = sharded(decoder(), RECIPES["tensor"])
        message = r"'qkv.weight' to stay in torch.float32, .* got a conversion to torch.float64: .* compute_dtype="
        for module in (model, model.layers[0]):
            with pytest.raises(ValueError, match=message):
                module.to(torch.float64)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        train(model.to("cpu").float(), 1)
        chosen = sharded(decoder(), replace(RECIPES["tensor"], compute_dtype=torch.bfloat16))
        train(chosen.double(), 1)

    run_ranks(check, 2)


def test_the_engine_reads_no_attribute_of_a_wrapped_weight_through_python() -> None:
    """A wrapper's function takes microseconds a call, Transformer Engine's 29, on the path of every unit."""

    def on_each_rank() -> tuple[list[str], bool]:
        model = sharded(decoder(), RECIPES["tensor"])
        train(model, 2)
        callers: list[str] = []
        torch_function = QuantizedWeight.__dict__["__torch_function__"].__func__

        def noted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            callers.append(sys._getframe(1).f_globals["__name__"])
            return torch_function(cls, func, types, args, kwargs)

        with patch.object(QuantizedWeight, "__torch_function__", classmethod(noted)):
            model.set_requires_gradient_sync(False)  # type: ignore[operator]  # a microbatch whose gradients are kept
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            train(model, 1)
            model.zero_grad()  # drops unreduced gradients too
        return [
            name for name in callers if name.startswith("lamella_engine")
        ], "float8_models" in callers  # whose layers call `linear`

    assert run_ranks(on_each_rank, 2) == [([], True)] * 2


def test_gathered_payloads_have_no_bytes_at_rest() -> None:
    def check() -> None:
        model = sharded(decoder(), RECIPES["tensor"])
        train(model, 2)
        for _, unit in named_units(model):
            assert not any(buffer.has_bytes for group in unit.parameters.groups for buffer in group.buffers)

    run_ranks(check, 2)
