"""The files of a run, written before any worker starts: tokens, tokenizer, model folder and settings."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from lamella._data.order import mixture_lines
from lamella._data.streamed_files import to_json
from lamella._data.token_checks import check_tokens
from lamella._data.tokenizer import read_tokenizer
from lamella._data.tokens import TokenData, prepare_tokens
from lamella._model.published_dtype import published_dtype
from lamella._model.spec import named_settings
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config, to_values
from lamella._settings.options import ConfigError
from lamella._streaming.reader import streaming_lines
from lamella._training.checks import CheckedRun
from lamella._training.resume import go_back, validation_lines
from lamella._training.sources import RunSources, lacks_model
from lamella_checkpoint import CheckpointDamaged
from lamella_convert import keep_published
from lamella_transformers import ModelSpec, fingerprint_of_weights


def write(config: Config, run: CheckedRun, sources: RunSources, lines: list[str], *, is_first: bool = True) -> None:
    """Write all files that the workers read.

    Args:
        config: The run's settings.
        run: The run, checked.
        sources: The run's sources.
        lines: The lines to print at the start; those on packing, on validation and on what is set aside are added.
        is_first: True on the host of rank 0, to which the metrics belong, and whose rank sets checkpoints aside.

    Raises:
        ConfigError: The text is too short, a document cannot be rendered, or a file cannot be written.

    Effects: writes tokenizer, tokens and configurations into the run's directory; drops metrics after the checkpoint
        to go on from, and sets later checkpoints aside.
    """
    directory = run.directory
    tokens = _tokens(config, run, sources)
    with _writing(run):
        lines += tokens.lines(config.data.sequence_length)
        if config.data.streaming:
            directory.streamed.write_text(to_json(sources.text.corpus.streamed), encoding="utf-8")
            lines += streaming_lines(config.data)
        else:
            sequences = tokens.sequences("train", config.data.sequence_length)
            lines += mixture_lines(sequences, config.data, config.optim.steps * config.optim.batch_size)
        if run.checkpoint is not None:
            lines += validation_lines(directory, config.run)
        if is_first:
            lines += go_back(directory, sources.first_step if run.checkpoint is not None else -1)
        if run.model.pretrained is None:
            _write_model(run.model.spec, run.model.outline, directory)
        elif lacks_model(run):
            _keep_published(run.model.pretrained, directory.model, sources.untrained)
            directory.weights.write_text(f"{fingerprint_of_weights(run.model.pretrained) or ''}\n", encoding="ascii")
            dtype = str(published_dtype(run.model.pretrained)).removeprefix("torch.")
            directory.weights_dtype.write_text(f"{dtype}\n", encoding="ascii")
        directory.config.write_text(json.dumps(to_values(_again(config)), indent=2) + "\n", encoding="utf-8")


def _again(config: Config) -> Config:
    """Return the settings for a later run, which may start in another working directory.

    They are without `from_step`: a later run must not set the new checkpoints aside again.
    """
    checkpoints = config.run.checkpoints and os.path.abspath(config.run.checkpoints)
    return replace(config, run=replace(config.run, from_step=None, checkpoints=checkpoints))


def in_steps(config: Config, run: CheckedRun, sources: RunSources) -> Config:
    """Return the settings with steps for epochs: as many as the sequences of the training text fill, rounded up.

    A named model's own warm-up is left out if it is longer than these steps.

    Raises:
        ConfigError: The text is too short, or a document cannot be rendered.

    Effects: with `--epochs`, writes tokenizer and tokens into the run's directory.
    """
    epochs = config.optim.epochs
    if epochs is None:
        return config
    count = len(_tokens(config, run, sources).sequences("train", config.data.sequence_length))
    steps = math.ceil(epochs * count / config.optim.batch_size)
    optim = config.optim
    named = named_settings(config.model.name).get("optim", {}).get("warmup_steps")
    if optim.warmup_steps is not None and optim.warmup_steps == named and named > steps:
        optim = replace(optim, warmup_steps=None)
    return replace(config, optim=replace(optim, steps=steps, epochs=None))


def _tokens(config: Config, run: CheckedRun, sources: RunSources) -> TokenData:
    """Return the tokens of the text, from the run's directory if they are there already."""
    text, directory = sources.text, run.directory
    with _writing(run):
        tokens = prepare_tokens(text.corpus, text.tokenizer, text.form, directory.tokens, directory.model)
        check_tokens(tokens, config.data)
    return tokens


@contextmanager
def _writing(run: CheckedRun) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f": {str(error.filename)!r}" if error.filename is not None else ""
        way_out = "Pass another --run-dir."
        if run.checkpoint is not None:  # Another folder would begin the run anew.
            way_out = "Make room, or make the folder writable, then run the same command again to go on from "
            way_out += f"{run.checkpoint.name}."
        raise ConfigError(
            f"Expected to write the run to {str(run.directory.root)!r}, got {error.strerror or error}{where}. {way_out}"
        ) from error


def _keep_published(pretrained: Path, to: Path, untrained: tuple[str, ...]) -> None:
    """Copy the pretrained model's files but its trained weights: the run can then do without the original folder."""
    to.mkdir(parents=True, exist_ok=True)
    try:
        keep_published(pretrained, to, untrained=untrained, dtype=torch.float32)  # the main weights' dtype
    except CheckpointDamaged as error:
        raise ConfigError(f"{error}") from error


def _write_model(spec: ModelSpec, model: nn.Module, directory: RunDirectory) -> None:
    """Write model and generation configurations matching the trained tokenizer, for tools opening the folder."""
    from transformers import GenerationConfig

    end = read_tokenizer(directory.model, spec.vocab_size).end
    # No padding token: nn.Embedding keeps the row of `padding_idx` without gradient.
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    for name, value in {**ids, "architectures": [type(model).__name__]}.items():
        setattr(spec, name, value)
    spec.to_json_file(directory.model_config, use_diff=False)
    make = cast("Callable[..., GenerationConfig]", GenerationConfig)
    make(**ids).save_pretrained(directory.model)
