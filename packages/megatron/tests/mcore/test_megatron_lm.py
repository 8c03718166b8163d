"""Programs of `megatron.training` train on lamella after `install()`, and as before without the call."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import megatron_lm
import pytest
from megatron_lm import SHARDED

import lamella_megatron
from lamella_testing import run_ranks


@pytest.fixture(scope="module", autouse=True)
def programs(on_cpu: None) -> Iterator[None]:
    with megatron_lm.programs_on_cpu():
        yield


Trained = tuple[list[tuple[float, float]], float, str]


def _train(*arguments: str) -> Trained:
    """Five steps; losses and gradients' norms, the norm of the weights afterwards, and the wrapper's module."""
    args, model, optimizer, scheduler = megatron_lm.build(*arguments)
    history = megatron_lm.train(args, model, optimizer, scheduler, num_steps=5)
    norm = importlib.import_module("megatron.training.training").calc_params_l2_norm(model)
    return history, norm, type(model[0]).__module__


def _train_installed(*arguments: str) -> Trained:
    with lamella_megatron.install():
        return _train(*SHARDED, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("", id="ZeRO-3"),
        pytest.param("--data-parallel-sharding-strategy optim --overlap-grad-reduce", id="ZeRO-1, overlapped"),
    ],
)
def test_a_program_has_the_losses_of_ddp(arguments: str) -> None:
    for sharded, replicated in zip(
        run_ranks(_train_installed, 2, *arguments.split()), run_ranks(_train, 2), strict=True
    ):
        assert sharded[2].startswith("lamella_megatron") and replicated[2].startswith("megatron.")
        losses, expected = [loss for loss, _ in sharded[0]], [loss for loss, _ in replicated[0]]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert sharded[1] == pytest.approx(replicated[1], rel=1e-6)  # --log-params-norm


def test_gradients_are_clipped_and_their_norm_is_told() -> None:
    for history, *_ in run_ranks(_train_installed, 2, "--clip-grad", "0.5"):
        assert all(norm > 0.5 for _, norm in history)


def test_norms_of_weights_count_tensor_parallel_parts_once() -> None:
    [whole] = run_ranks(_train_installed, 1)
    for parts in run_ranks(_train_installed, 2, "--tensor-model-parallel-size", "2"):
        assert parts[1] == pytest.approx(whole[1], rel=0.05)  # initial weights of the parts are drawn apart


def test_undo_gives_every_name_back() -> None:
    before = _bound()
    assert before["megatron_FSDP"].__module__.startswith("megatron.")
    installation = lamella_megatron.install()
    assert "megatron.training.training.megatron_FSDP" in installation.replaced
    assert not {name: bound for name, bound in _bound().items() if bound is before[name]}
    again = lamella_megatron.install()
    assert again.replaced == ()
    again.undo()
    assert _bound()["megatron_FSDP"] is not before["megatron_FSDP"]
    installation.undo()
    assert _bound() == before
    installation.undo()
    assert _bound() == before


def _bound() -> dict[str, Any]:
    """The objects under the names that are replaced, in the modules that read them."""
    module = importlib.import_module
    training, checkpointing = module("megatron.training.training"), module("megatron.training.checkpointing")
    names = {
        training: ("megatron_FSDP", "get_megatron_optimizer", "calc_params_l2_norm", "save_checkpoint"),
        checkpointing: ("generate_state_dict", "_load_base_checkpoint", "preprocess_fsdp_dtensor_state_dict"),
    }
    return {name: getattr(owner, name) for owner, owned in names.items() for name in owned}


def test_a_model_in_another_wrapper_is_left_to_megatron() -> None:
    def on_each_rank() -> Trained:
        with lamella_megatron.install():
            return _train()

    for history, _, wrapper in run_ranks(on_each_rank, 2):
        assert wrapper.startswith("megatron.")
        assert len(history) == 5


def test_a_map_of_parameters_to_groups_is_refused() -> None:
    with pytest.raises(Exception, match="Expected no `--dump-param-to-param-group-map`"):
        run_ranks(_train_installed, 1, "--dump-param-to-param-group-map", "map.json")
