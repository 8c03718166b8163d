"""Helpers that kept a module's parameters look them up at each use, and so train with the module."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lamella_engine import fully_shard
from lamella_mamba import bind_live_parameters
from lamella_testing import assert_trains_as_unsharded, run_ranks

BATCH = torch.arange(32.0).view(4, 8).sin()


class _Helper:
    """Keeps parameters from when the mixer was built, as megatron-core's MambaContextParallel does."""

    def __init__(self, a_log: nn.Parameter, weight: nn.Parameter) -> None:
        self.A_log_cp1 = a_log
        self.conv1d_weight_cp1 = weight
        self.cp_size = 1

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.A_log_cp1 + self.conv1d_weight_cp1.sum() * self.cp_size


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.linspace(0.1, 1.0, 8))
        self.conv1d = nn.Linear(8, 8, bias=False)
        self.cp: Any = _Helper(self.A_log, self.conv1d.get_parameter("weight"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv1d(self.cp.scaled(x))
        return out


def _make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_Mixer(), nn.Tanh(), _Mixer())


def _shard(model: nn.Module) -> None:
    bind_live_parameters(model)
    for mixer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(mixer)
    fully_shard(model)


def test_parameters_that_a_helper_kept_train_as_unsharded() -> None:
    assert_trains_as_unsharded(_make, _shard, lambda model, batch: 10 * model(batch).square().mean(), BATCH)


def test_bind_live_parameters_lists_each_bound_path_once_and_keeps_attributes() -> None:
    model = _make()
    paths = [f"{i}.cp.{name}" for i in (0, 2) for name in ("A_log_cp1", "conv1d_weight_cp1")]
    assert bind_live_parameters(model) == paths
    assert bind_live_parameters(model) == []
    helper: Any = model[0].cp  # type: ignore[index]
    assert isinstance(helper, _Helper) and type(helper).__name__ == "_Helper"
    assert helper.A_log_cp1 is model.get_parameter("0.A_log")
    assert helper.conv1d_weight_cp1 is model.get_parameter("0.conv1d.weight")
    assert helper.cp_size == 1


def test_a_helper_with_unbound_parameters_is_refused_by_name() -> None:
    def check() -> None:
        with pytest.raises(ValueError, match=r"'A_log', got the Parameter itself in 'cp\.A_log_cp1' of a _Helper"):
            fully_shard(_Mixer())

    run_ranks(check, 1)


def test_a_model_whose_helpers_are_bound_is_freed_at_once() -> None:
    model = _make()
    bind_live_parameters(model)
    mixer = weakref.ref(model[0])  # type: ignore[index]
    gc.disable()
    try:
        del model
        assert mixer() is None
    finally:
        gc.enable()


def test_a_bound_model_is_not_copied_and_a_copy_can_be_bound() -> None:
    model = _make()
    copied = copy.deepcopy(model)
    bind_live_parameters(model)
    with pytest.raises(TypeError, match="copied before bind_live_parameters, got deepcopy after it"):
        copy.deepcopy(model)
    bind_live_parameters(copied)
    helper: Any = copied[0].cp  # type: ignore[index]
    assert helper.A_log_cp1 is copied.get_parameter("0.A_log") is not model.get_parameter("0.A_log")
    helper_of_model: Any = model[0].cp  # type: ignore[index]
    assert helper_of_model.A_log_cp1 is model.get_parameter("0.A_log")
