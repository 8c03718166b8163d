"""A request is filled with a checkpoint's values; missing values stay, and do not count as loaded."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from lamella_checkpoint._state.fill import fill
from lamella_checkpoint.testing import MemorySource

ARGS = Namespace(lr=0.5)


def request() -> dict[str, Any]:
    return {
        "model": {"module.x": torch.zeros(2)},
        "args": ARGS,
        "iteration": 1,
        "checkpoint_version": 0,
        "rng_state": {"(0, 0)": [{"random_rng_state": (3, 4)}]},
        "opt_param_scheduler": {"num_steps": 0},
    }


def test_a_checkpoint_of_weights_alone_leaves_all_else() -> None:
    state = request()
    filled = fill(state, MemorySource({"model.module.x": torch.ones(2)}))
    assert state["model"]["module.x"].tolist() == [1, 1]
    assert state["args"] is ARGS
    assert state["iteration"] == 1
    assert filled.loaded == ("model.module.x",)
    assert filled.kept == (
        "args",
        "iteration",
        "checkpoint_version",
        "rng_state.(0, 0).0.random_rng_state",
        "opt_param_scheduler.num_steps",
    )


def test_stored_args_and_iteration_replace_the_requested_values() -> None:
    state = request()
    theirs = Namespace(lr=2.0)
    filled = fill(state, MemorySource({"model.module.x": torch.ones(2)}, {"args": theirs, "iteration": 7}))
    assert state["args"] is theirs
    assert state["iteration"] == 7
    assert filled.loaded == ("model.module.x", "args", "iteration")


def test_a_name_is_not_filled_from_a_longer_name() -> None:
    state: dict[str, Any] = {"model": {"x": torch.zeros(2)}, "it": 1}
    filled = fill(state, MemorySource({"model_ema.x": torch.ones(2)}, {"iteration": 5, "it.x": 6}))
    assert filled.loaded == ()
    assert filled.kept == ("model.x", "it")
    assert state["model"]["x"].tolist() == [0, 0]


def test_missing_nested_objects_of_a_present_section_stay() -> None:
    note = object()
    state = {"d": {"k": note, "n": 1}, "whole": {"a": 1}}
    filled = fill(state, MemorySource({}, {"d.n": 2, "whole": {"b": 3}}))
    assert state == {"d": {"k": note, "n": 2}, "whole": {"b": 3}}
    assert filled.kept == ("d.k",)


@pytest.mark.parametrize(
    ("tensors", "objects", "problem"),
    [
        ({"model.x": torch.ones(3)}, {}, r"'model.x' of shape \(2,\), got \(3,\)"),
        ({}, {"model.x": 5}, r"a tensor for 'model.x', got another value"),
        ({"n": torch.ones(2)}, {}, r"of type int for 'n', got a tensor"),
    ],
)
def test_values_of_another_shape_or_type_are_refused_before_the_request_changes(
    tensors: dict[str, torch.Tensor], objects: dict[str, int], problem: str
) -> None:
    state: dict[str, Any] = {"first": torch.zeros(2), "model": {"x": torch.zeros(2)}, "n": 1}
    with pytest.raises(ValueError, match=problem):
        fill(state, MemorySource({"first": torch.ones(2), **tensors}, objects))
    assert state["first"].tolist() == [0, 0]
    assert state["n"] == 1
