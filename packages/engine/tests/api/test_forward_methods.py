"""A registered method unshards before and reshards after, as forward does."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from engine_models import Net, assert_trains_alike, fsdp, inputs, mean_square, shard, twins
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from lamella_engine._modules.hooks import pre_forward
from lamella_engine._modules.state import find_state
from lamella_engine.testing import record
from lamella_testing import run_ranks

X = inputs()


class Coded(Net):
    """Two ways in beside forward."""

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Everything but the head."""
        x = self.stem(x) * scale
        for layer in self.layers:
            x = layer(x)
        return x

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        """Calls forward inside, as `generate` does."""
        output: torch.Tensor = self(x) + self(-x) + self.head.bias
        return output


def _registered(model: Coded) -> Coded:
    shard(model)
    for name in ("encode", "twice"):
        register_fsdp_forward_method(model, name)
    return model


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.encode(X, scale=2.0),
        lambda model: model.twice(X),
        lambda model: model.encode(X).mean() + model(X),
    ],
)
def test_training_through_a_registered_method_equals_the_unsharded_model(call: Any) -> None:
    run_ranks(lambda: assert_trains_alike(*twins(Coded, _registered), mean_square(call), num_steps=3), 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_registered_method_may_read_the_roots_parameters_after_forward_without_gradients(mode: Any) -> None:
    def twice(model: Any) -> Any:
        return model.twice(X)

    def on_each_rank() -> None:
        reference, sharded = twins(Coded, _registered)
        with mode():
            assert torch.equal(twice(sharded), twice(reference))
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)))

    run_ranks(on_each_rank, 2)


def test_a_method_of_an_inner_unit_may_be_registered() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            return out

    class NetOfRuns(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return Half()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                assert isinstance(layer, Half)
                x = layer.run(x)
            head: torch.Tensor = self.head(x)
            return head

    def apply(model: NetOfRuns) -> None:
        shard(model)
        for layer in model.layers:
            register_fsdp_forward_method(layer, "run")

    def check() -> None:
        reference, sharded = twins(NetOfRuns, apply)
        log = record(sharded)
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)))
        assert log.units_of("gather").count("layers.1") == 4

    run_ranks(check, 2)


def test_a_registered_method_casts_its_output_as_forward_does() -> None:
    def check() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        model = fully_shard(Coded(), mp_policy=policy)
        register_fsdp_forward_method(model, "encode")
        assert model.encode(X).dtype == torch.float64

    run_ranks(check, 1)


def test_a_registered_method_keeps_its_name_docstring_and_signature() -> None:
    def check() -> None:
        model = _registered(Coded())
        assert model.encode.__name__ == "encode"
        assert model.encode.__doc__ == "Everything but the head."
        assert list(inspect.signature(model.encode).parameters) == ["x", "scale"]

    run_ranks(check, 1)


def test_a_function_set_on_a_module_may_be_registered_as_a_forward_method() -> None:
    def check() -> None:
        model = shard(Coded())
        vars(model)["other"] = lambda x: model.head(model.stem(x))
        register_fsdp_forward_method(model, "other")
        assert vars(model)["other"](X).shape == (12, 5)

    run_ranks(check, 2)


def test_a_module_that_is_no_unit_is_left_alone_and_an_unknown_name_is_refused() -> None:
    def check() -> None:
        plain = Coded()
        register_fsdp_forward_method(plain, "encode")
        assert "encode" not in vars(plain)
        with pytest.raises(ValueError, match=r"`method_name` to be a method of FSDPCoded, got 'decode'"):
            register_fsdp_forward_method(shard(plain), "decode")

    run_ranks(check, 1)


def test_a_deleted_model_goes_though_its_methods_were_registered() -> None:
    def check() -> None:
        model = _registered(Coded())
        loss: Any = model.twice(X).sum()
        loss.backward()
        del loss
        ref = weakref.ref(model)
        gc.disable()
        del model
        assert ref() is None

    run_ranks(check, 1)


def test_only_inputs_of_the_outermost_forward_are_moved_to_the_units_device() -> None:
    def check() -> None:
        model = shard(Net())
        outer, inner = find_state(model), find_state(model.layers[0])
        assert outer is not None
        assert inner is not None
        outer.tree.streams.device = torch.device("meta")  # the only device beside CPU on every machine
        (args, kwargs) = pre_forward(outer, model, ([X],), {"x": X})
        assert args[0][0].is_meta
        assert kwargs["x"].is_meta
        (args, kwargs) = pre_forward(inner, model.layers[0], (X,), {})
        assert args[0] is X
        outer.tree.streams.device = torch.device("cpu")
        fsdp(model).reset_iter_state()
        (args, kwargs) = pre_forward(outer, model, (X,), {})
        assert args[0] is X

    run_ranks(check, 1)
