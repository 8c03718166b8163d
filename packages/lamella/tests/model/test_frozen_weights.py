"""Frozen weights of a bf16 run rest in the dtype that they were published in, and train and export the same numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from trained_runs import Run, TrainOn
from transformers import AutoConfig, AutoModelForCausalLM

from lamella import Config, estimate
from lamella._command.estimate import placed
from lamella._data.text import collect
from lamella._data.tokenizer import train_tokenizer
from lamella._estimate.kinds import MAIN_WEIGHTS
from lamella._model.published_dtype import recorded_dtype
from lamella._model.trained_parameters import narrow_frozen
from lamella._settings.config import Values, resolve
from lamella._settings.files import read_file
from lamella_checkpoint import fill
from lamella_convert import open_checkpoint
from lamella_transformers import LoraSettings, MergedLora

# peft asks a model by a name that transformers renames.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SETTINGS = LoraSettings(rank=4, alpha=8.0)
FROZEN = "model.layers.0.mlp.up_proj"
LAST_LAYER: Values = {
    "model": {"name": "llama-small"},
    "optim": {"train": ("model.layers.1.*",)},
    "parallel": {"precision": "bf16"},
}


@pytest.fixture(scope="module")
def runs(shared_config: Config, tmp_path_factory: pytest.TempPathFactory, train: TrainOn) -> dict[torch.dtype, Run]:
    """Runs of adapters in bf16 on the same weights, published in bf16 and in fp32."""
    root = tmp_path_factory.mktemp("published")
    spec = AutoConfig.for_model(**json.loads(Path(shared_config.model.name).read_text(encoding="utf-8")))
    tokenizer = train_tokenizer(collect(list(shared_config.data.paths), 0.05).train, 290)
    assert tokenizer.backend is not None
    model = cast(Any, AutoModelForCausalLM).from_config(spec).to(torch.bfloat16)
    finished = {}
    for dtype in (torch.bfloat16, torch.float32):
        folder = root / str(dtype)
        model.to(dtype).save_pretrained(folder)
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        config = replace(
            shared_config,
            model=replace(shared_config.model, name=str(folder), lora_rank=SETTINGS.rank, lora_alpha=SETTINGS.alpha),
            optim=replace(shared_config.optim, lr=1e-2),
            parallel=replace(shared_config.parallel, precision="bf16"),
            run=replace(shared_config.run, directory=str(folder / "run")),
        )
        finished[dtype] = train(config, 2)
    return finished


def test_losses_do_not_depend_on_the_dtype_at_rest(runs: dict[torch.dtype, Run]) -> None:
    assert runs[torch.bfloat16].losses == runs[torch.float32].losses


def test_frozen_weights_rest_in_the_published_dtype_and_adapters_in_fp32(runs: dict[torch.dtype, Run]) -> None:
    for dtype, run in runs.items():
        assert recorded_dtype(run.directory.weights_dtype) == dtype
        tensors = open_checkpoint(run.directory.checkpoints / "step_00000006").source.tensors
        dtypes = {name: info.dtype for name, info in tensors.items() if name.startswith(f"model.{FROZEN}.")}
        assert dtypes == {
            f"model.{FROZEN}.base_layer.weight": dtype,
            f"model.{FROZEN}.lora_A.default.weight": torch.float32,
            f"model.{FROZEN}.lora_B.default.weight": torch.float32,
        }


def test_merged_adapters_are_not_rounded_to_the_dtype_at_rest(runs: dict[torch.dtype, Run]) -> None:
    weights = []
    for run in runs.values():
        source = MergedLora(open_checkpoint(run.directory.checkpoints / "step_00000006").source, SETTINGS)
        info = source.tensors[f"model.{FROZEN}.weight"]
        weights.append(torch.empty(info.shape, dtype=info.dtype))
        parts: dict[str, Any] = {"model": {f"{FROZEN}.weight": weights[-1]}}
        fill(parts, source)
    assert weights[0].dtype == torch.float32
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[0].bfloat16().float())


def test_an_estimate_counts_frozen_weights_in_the_published_dtype(runs: dict[torch.dtype, Run]) -> None:
    weights = {}
    for dtype, run in runs.items():
        config = resolve(read_file(str(run.directory.config)), {"parallel": {"device": "cuda", "ranks": 2}})
        weights[dtype] = estimate(placed(config)).at_rest[MAIN_WEIGHTS]
    assert weights[torch.bfloat16] < weights[torch.float32]


@pytest.mark.parametrize(
    ("settings", "weights_dtype", "expected"),
    [
        pytest.param({}, torch.bfloat16, torch.bfloat16, id="bf16"),
        pytest.param({}, torch.float32, torch.float32, id="published in fp32"),
        pytest.param({"parallel": {"precision": "fp32"}}, torch.bfloat16, torch.float32, id="a forward in fp32"),
        pytest.param({"parallel": {"float8": "tensor"}}, torch.bfloat16, torch.float32, id="units in float8"),
        pytest.param({"optim": {"train": ()}}, torch.bfloat16, torch.float32, id="all weights trained"),
    ],
)
def test_frozen_weights_are_narrowed_where_the_forward_takes_the_same_numbers(
    settings: Values, weights_dtype: torch.dtype, expected: torch.dtype
) -> None:
    model = cast(nn.Module, cast(Any, AutoModelForCausalLM).from_config(_two_layers()))
    narrow_frozen(model, resolve(LAST_LAYER, settings), weights_dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".layers.1." in name else expected), name


def _two_layers() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoConfig.for_model("llama", vocab_size=32, **sizes)
