"""A trained model in one process, read from a run's checkpoint or from a Hugging Face folder."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from lamella._data.tokenizer import RunTokenizer, read_tokenizer
from lamella._export.trained_run import TrainedRun, is_run, open_run, run_around
from lamella._model.attention import inference_attention
from lamella._model.lora import merged
from lamella._model.spec import generation_config, load_spec, outline
from lamella._model.weights import pretrained_directory, refuse_adapter
from lamella._settings.options import ConfigError, in_short
from lamella_checkpoint import load
from lamella_transformers import ModelSpec, build_without_parameters, materialise, set_attention

_DTYPES: Final = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model of transformers with its tokenizer.

    Attributes:
        model: The model of transformers, in evaluation mode on `device`.
        device: The device that computes.
        tokenizer: The tokenizer of the run, or of the folder.
        spec: The config of the model.
        run: The run with the checkpoint; None for a Hugging Face folder.
        name: The path that the user passed, with the step of a run.
    """

    model: nn.Module
    device: torch.device
    tokenizer: RunTokenizer
    spec: ModelSpec
    run: TrainedRun | None
    name: str


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda".

    Raises:
        ConfigError: No GPU is seen.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("Expected a GPU for --device cuda, got none that torch sees. Pass --device cpu.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def open_model(path: Path, step: int | None, device: torch.device) -> TrainedModel:
    """Read a model: fp32 on the CPU, bf16 on a GPU, as a run computes.

    Args:
        path: The folder of a run, or a Hugging Face folder.
        step: The step of a run's checkpoint; None for the newest.
        device: The device to compute on.

    Raises:
        CheckpointDamaged: A file of the checkpoint is absent or damaged.
        ConfigError: The folder is neither, or its tokenizer or config cannot be read.

    Effects: no collective. Holds the weights once, and writes nothing.
    """
    _silence_transformers()
    if not (path / "config.json").is_file():
        refuse_adapter(path)
        raise ConfigError(
            f"Expected the folder of a run of `lamella train`, or a Hugging Face folder, got {str(path)!r}, which "
            f"{'has no config.json' if path.is_dir() else 'is no folder'}.{run_around(path)}"
        )
    if is_run(path):
        return _model_of_run(open_run(path, step), path, device)
    if step is not None:
        raise ConfigError(f"Expected --step with the folder of a run only, got {str(path)!r}. Leave --step out.")
    return _model_of_folder(path, device)


def _model_of_run(run: TrainedRun, path: Path, device: torch.device) -> TrainedModel:
    folder = run.directory.model
    spec = load_spec(str(folder))
    outline(spec)  # which refuses a model whose adapter is not installed
    set_attention(spec, inference_attention(run.config.model.attention, device.type))
    model = build_without_parameters(spec, device)
    for parameter in model.parameters():  # Not the buffers: transformers leaves rotary tables in fp32.
        parameter.data = parameter.data.to(_DTYPES[device.type])
    materialise(model, device)
    load(run.checkpoint, model=model, translate=partial(merged, model=run.config.model))
    cast(Any, model).generation_config = generation_config(folder, spec)
    return TrainedModel(
        model=model.eval(),
        device=device,
        tokenizer=read_tokenizer(folder, spec.vocab_size),
        spec=spec,
        run=run,
        name=f"{path}, step {run.step}",
    )


def _model_of_folder(path: Path, device: torch.device) -> TrainedModel:
    from transformers import AutoModelForCausalLM

    if pretrained_directory(str(path)) is None:
        raise ConfigError(
            f"Expected weights (model.safetensors) in the folder {str(path)!r}, got none.{run_around(path)}"
        )
    spec = load_spec(str(path))
    outline(spec)
    generation = generation_config(path, spec)  # from_pretrained passes over a file that it cannot read.
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPES[device.type], local_files_only=True)
    except Exception as error:  # transformers raises errors of all its parts.
        raise ConfigError(
            f"Expected a model that transformers opens in {str(path)!r}, got: {in_short(error)}"
        ) from error
    cast(Any, model).generation_config = generation
    return TrainedModel(
        model=cast(nn.Module, model).to(device).eval(),
        device=device,
        tokenizer=read_tokenizer(path, spec.vocab_size),
        spec=spec,
        run=None,
        name=str(path),
    )


def _silence_transformers() -> None:
    """Keep bars and notes of transformers off a user's terminal; errors are raised all the same."""
    from transformers.utils import logging

    untyped = cast(Any, logging)
    untyped.set_verbosity_error()
    untyped.disable_progress_bar()
