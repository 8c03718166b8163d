"""A GPTModel with weights in float8 trains in units as the model with bf16 weights does alone, with the same recipe."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import local_scaling_state
from lamella_megatron import load_checkpoint, save_checkpoint
from lamella_testing import run_ranks
from lamella_testing.megatron import ddp_config, seed_random_states, tiny_config, tiny_gpt, token_losses
from lamella_testing.megatron_parity import BATCH, LEARNING_RATE, Layout

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of megatron-core and Transformer Engine

NUM_STEPS = 4
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "ends_in_bf16": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True, "num_layers": 3},
}


def _make(recipe: str, *, tensor_ranks: int = 1, float8_weights: bool) -> tuple[Any, nn.Module]:
    """A GPTModel of Transformer Engine's layers on the current GPU. Effects: collective over the world."""
    Layout(num_ranks=dist.get_world_size(), tp=tensor_ranks).initialize()
    seed_random_states(0)
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = tiny_config(
        **{
            "hidden_size": 256,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "use_cpu_initialization": False,
            "tensor_model_parallel_size": tensor_ranks,
            "fp8_param": float8_weights,
            **RECIPES[recipe],
        }
    )
    model = tiny_gpt(config, transformer_layer_spec=specs.get_gpt_layer_with_transformer_engine_spec())
    return config, model.to("cuda", torch.bfloat16)  # position embeddings are built in fp32


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: Sequence[torch.Tensor]) -> float:
    """Take a step, and return the loss over all ranks before it. Effects: an all-reduce, and a host sync."""
    model.set_is_first_microbatch()  # type: ignore[operator]  # the driver's; else weights are not quantised again
    mean = torch.zeros((), device="cuda")
    for rows in microbatches:
        loss = token_losses(model, rows.to("cuda")).mean() / len(microbatches)
        loss.backward()  # type: ignore[no-untyped-call]
        mean += loss.detach() / dist.get_world_size()
    if finish := getattr(model, "finish_grad_sync", None):
        finish()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean)
    return mean.item()


def _unsharded_losses(recipe: str, tensor_ranks: int, num_microbatches: int) -> list[float]:
    """The losses of whole weights in bf16. A scale of activations is of one rank's rows: hence microbatches."""
    _, model = _make(recipe, tensor_ranks=tensor_ranks, float8_weights=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return [_step(model, optimizer, BATCH.chunk(num_microbatches)) for _ in range(NUM_STEPS)]


def _sharded(recipe: str, *, tensor_ranks: int = 1, stage: str = "optim_grads_params") -> tuple[Any, set[str]]:
    """The model in the wrapper, and the names of the weights that were in float8. Effects: collective."""
    config, module = _make(recipe, tensor_ranks=tensor_ranks, float8_weights=True)
    in_float8 = {name for name, weight in module.named_parameters() if type(weight.detach()) is not torch.Tensor}
    training = importlib.import_module("lamella_megatron.training")
    options = ddp_config(fp8_param_gather=True, data_parallel_sharding_strategy=stage)
    return training.ShardedModel(config=config, ddp_config=options, module=module), in_float8


def _assert_trains(recipe: str, num_ranks: int, *, tensor_ranks: int = 1, stage: str = "optim_grads_params") -> None:
    data_ranks = num_ranks // tensor_ranks
    expected, *_ = run_ranks(lambda: _unsharded_losses(recipe, tensor_ranks, data_ranks), tensor_ranks, device="cuda")
    assert expected[-1] < expected[0] - 0.05, f"nothing was learned: {expected}"

    def on_each_rank() -> None:
        model, in_float8 = _sharded(recipe, tensor_ranks=tensor_ranks, stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        rows = BATCH.chunk(data_ranks)[dist.get_rank() // tensor_ranks]
        losses = [_step(model, optimizer, [rows]) for _ in range(NUM_STEPS)]
        # Transformer Engine's first delayed scales are 1, of units those of the weights.
        tolerance = 0.15 if recipe == "delayed" else 1e-2
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0.0)
        weights = model.parameters()
        assert all(isinstance(weight, DTensor) and weight.dtype == torch.float32 for weight in weights)
        last_names = {name.rpartition(".")[2] for name in in_float8}
        assert last_names == {"weight"}, "only matrices of Transformer Engine's linears are in float8"

    run_ranks(on_each_rank, num_ranks, device="cuda")


@pytest.mark.gpu1
def test_float8_weights_on_one_gpu_train_as_bf16_weights() -> None:
    _assert_trains("delayed", 1)


@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("recipe", "stage"),
    [("tensorwise", "optim_grads_params"), ("blockwise", "optim"), ("ends_in_bf16", "optim_grads_params")],
)
def test_float8_weights_on_two_gpus_train_as_bf16_weights(recipe: str, stage: str) -> None:
    _assert_trains(recipe, 2, stage=stage)


@pytest.mark.gpu2
def test_tensor_parallel_weights_are_gathered_in_float8() -> None:
    _assert_trains("tensorwise", 2, tensor_ranks=2)


def _scales(model: Any) -> dict[str, list[list[float]]]:
    """Scales and past amaxes of this rank's weights, and of the activations and gradients of layers."""
    scales = local_scaling_state(model)
    for name, layer in model.named_modules():
        for key, scaling in (getattr(layer, "fp8_meta", None) or {}).items():
            if hasattr(scaling, "amax_history"):
                scales[f"{name}.{key}"] = [scaling.scale.tolist(), *scaling.amax_history.tolist()]
    return scales


def _assert_goes_on(path: Path, num_ranks: int, tensor_ranks: int) -> None:
    """A resumed model has the saved scales, to the bit, and steps from them as the model that did not stop."""

    def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        rows = BATCH.chunk(num_ranks // tensor_ranks)[dist.get_rank() // tensor_ranks]
        return [_step(model, optimizer, [rows]) for _ in range(NUM_STEPS)]

    def on_each_rank() -> None:
        model, in_float8 = _sharded("delayed", tensor_ranks=tensor_ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        steps(model, optimizer)
        save_checkpoint(path, model=model, optimizer=optimizer)
        saved, expected = _scales(model), steps(model, optimizer)
        assert in_float8 <= {name.removeprefix("module.") for name in saved}
        assert {"scaling_fwd", "scaling_bwd"} <= {name.rpartition(".")[2] for name in saved}
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
        again, _ = _sharded("delayed", tensor_ranks=tensor_ranks)
        optimizer = torch.optim.SGD(again.parameters(), lr=LEARNING_RATE)
        load_checkpoint(path, model=again, optimizer=optimizer)
        assert _scales(again) == saved
        torch.testing.assert_close(steps(again, optimizer), expected, rtol=1e-3, atol=0.0)

    run_ranks(on_each_rank, num_ranks, device="cuda")


@pytest.mark.gpu1
def test_delayed_scales_after_a_resume_equal_to_the_bit(tmp_path: Path) -> None:
    _assert_goes_on(tmp_path / "saved", 1, 1)


@pytest.mark.gpu2
@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_delayed_scales_of_two_gpus_equal_to_the_bit(tmp_path: Path, tensor_ranks: int) -> None:
    _assert_goes_on(tmp_path / "saved", 2, tensor_ranks)
