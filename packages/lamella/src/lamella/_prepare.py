"""Preparation before any worker starts: read the text, check the settings, write the files of the run."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from lamella._config import Config, ParallelConfig, to_values
from lamella._directory import RunDirectory
from lamella._documents import first_chat
from lamella._float8 import check_float8
from lamella._kernels import check_kernels
from lamella._models import NAMED, check_context, load_spec, outline
from lamella._options import ConfigError
from lamella._pretrained import check_weights, pretrained_directory, told_of_weights
from lamella._profile import NUM_WARMUP_STEPS
from lamella._resume import check_resumable, check_same_model, check_same_weights, go_back, wanted_checkpoint
from lamella._text import Corpus, collect
from lamella._tokenizer import RunTokenizer, read_tokenizer
from lamella._tokens import check_tokens, fingerprint, prepare_tokens
from lamella_checkpoint import CheckpointDamaged
from lamella_convert import keep_published
from lamella_transformers import ModelSpec, fingerprint_of_weights, sharding_units


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared run.

    Attributes:
        directory: The run's files.
        first_step: Steps completed by the latest checkpoint; 0 for a new run.
        summary: Lines on the data and the model, to print.
    """

    directory: RunDirectory
    first_step: int
    summary: tuple[str, ...]


def prepare(config: Config) -> Prepared:
    """Check the settings, then write all files the workers read.

    Raises:
        ConfigError: The text, the model or the run to be resumed does not fit the settings.

    Effects: writes the run's directory unless the run is complete: tokenizer, tokens, configurations; drops metrics
        after the latest checkpoint.
    """
    directory = RunDirectory(run_root(config))
    latest = wanted_checkpoint(directory, config.run)
    if latest is None:
        _check_writable(directory)
    pretrained = pretrained_directory(config.model.name)
    _check_vocabulary(config, pretrained)
    spec = load_spec(config.model.name, config.data.vocab_size)
    check_context(spec, config.data.sequence_length)
    model = outline(spec)
    if pretrained is None and latest is None:
        _check_memory(model, config.parallel)
    check_float8(sharding_units(model), config.parallel)
    check_kernels(config.model, spec.model_type, config.parallel)
    _check_compiler(config.parallel)
    tokenizer = None if pretrained is None else read_tokenizer(pretrained, spec.vocab_size)
    corpus = collect(config.data.paths, config.data.validation_fraction, without=directory.root)
    text = fingerprint(corpus, tokenizer or spec.vocab_size)
    summary = *_summary(corpus, model, spec), *_told_of_chats(corpus, tokenizer), *_told_of_units(tokenizer)
    untrained: tuple[str, ...] = ()
    if pretrained is not None and latest is None:
        untrained = check_weights(pretrained, model, spec)
        summary = *summary, told_of_weights(pretrained, untrained)
    first_step = 0
    if latest is not None:
        first_step = check_resumable(latest, model, config, text)
        check_same_model(spec, directory)
        if pretrained is not None:
            check_same_weights(pretrained, directory)
    if first_step < config.optim.steps:
        _check_profile(config, first_step)
        with _writing(directory):
            data = prepare_tokens(corpus, tokenizer or spec.vocab_size, directory.tokens, directory.model)
            check_tokens(data, config.data)
            summary = *summary, *go_back(directory, first_step if latest is not None else -1)
            if pretrained is None:
                _write_model(spec, model, directory)
            elif latest is None:
                _keep_published(pretrained, directory.model, untrained)
                directory.weights.write_text(f"{fingerprint_of_weights(pretrained) or ''}\n", encoding="ascii")
            # Without `from_step`: the next run with this config.json must not set the new checkpoints aside again.
            again = replace(config, run=replace(config.run, from_step=None))
            directory.config.write_text(json.dumps(to_values(again), indent=2) + "\n", encoding="utf-8")
    return Prepared(directory=directory, first_step=first_step, summary=summary)


def _check_memory(model: nn.Module, parallel: ParallelConfig) -> None:
    """Refuse a model that a rank cannot build: each rank makes all fresh weights, in fp32, before it shards them."""
    needed = sum(parameter.numel() * torch.float32.itemsize for parameter in model.parameters())
    place = "a GPU" if parallel.device == "cuda" else "this machine"
    if parallel.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"Expected a model whose fresh weights fit into the memory of {place}, {memory / 2**30:,.0f} GiB, got "
            f"{needed / 2**30:,.0f} GiB. Pass a smaller --model."
        )


def _check_compiler(parallel: ParallelConfig) -> None:
    """Refuse --compile where torch would find no compiler after the run has started."""
    if not parallel.compile:
        return
    if parallel.device == "cuda":
        variable, names = "CC", ["gcc", "clang"]
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("Expected Triton for --compile on GPUs, got none. Install it, or leave --compile out.")
    else:
        variable, names = "CXX", ["clang++"] if sys.platform == "darwin" else ["g++"]
    wanted = [os.environ[variable]] if variable in os.environ else names
    if not any(map(shutil.which, wanted)):
        raise ConfigError(
            f"Expected a compiler for --compile on {parallel.device} ({variable}, or {' or '.join(names)} on PATH), "
            f"got none of {', '.join(wanted)}. Install one, or leave --compile out."
        )


@contextmanager
def _writing(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f": {str(error.filename)!r}" if error.filename is not None else ""
        raise ConfigError(
            f"Expected to write the run to {str(directory.root)!r}, got {error.strerror or error}{where}. Pass another "
            "--run-dir."
        ) from error


def _keep_published(pretrained: Path, to: Path, untrained: tuple[str, ...]) -> None:
    """Copy the pretrained model's files but its trained weights: the run can then do without the original folder."""
    to.mkdir(parents=True, exist_ok=True)
    try:
        keep_published(pretrained, to, untrained=untrained, dtype=torch.float32)  # the main weights' dtype
    except CheckpointDamaged as error:
        raise ConfigError(f"{error}") from error


def _summary(corpus: Corpus, model: nn.Module, spec: ModelSpec) -> tuple[str, ...]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"data: {corpus.describe()}", f"model: {num_parameters:,} parameters, {spec.vocab_size:,} tokens"


def _told_of_chats(corpus: Corpus, tokenizer: RunTokenizer | None) -> tuple[str, ...]:
    """Describe the tokens in the loss of conversations; refuse conversations without a chat template."""
    chat = first_chat((*corpus.train, *corpus.validation))
    if chat is None:
        return ()
    if tokenizer is None:
        raise ConfigError(
            f"Expected a model whose tokenizer has a chat template for the conversation in {chat.place}, got one "
            "without a tokenizer. Pass the folder of a chat model as --model, or JSON lines with a 'text'."
        )
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"Expected a tokenizer with a chat template for the conversation in {chat.place}, got none. Put a "
            "chat_template.jinja into the model's folder, or pass JSON lines with a 'text'."
        )
    if tokenizer.marks_the_assistant:
        return ("conversations: the loss is on what the assistant says",)
    return ("conversations: the loss is on all tokens; the chat template does not mark the assistant's",)


def _told_of_units(tokenizer: RunTokenizer | None) -> tuple[str, ...]:
    if tokenizer is None or tokenizer.unit == "byte":
        return ()
    return ("validation: in nats a token, since the tokenizer does not tell a token's bytes",)


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


def run_root(config: Config) -> Path:
    """Return the directory of a run: `--run-dir`, or runs/<model>."""
    return Path(config.run.directory or Path("runs", _model_name(config.model.name)))


def _model_name(name: str) -> str:
    """Return the name of a shipped model or a folder, dots included (Llama-3.1-8B), or of a file without its suffix."""
    path = Path(os.path.abspath(name))
    if name not in NAMED and path.is_file():
        return path.parent.name if path.name == "config.json" else path.stem
    return path.name


def _check_vocabulary(config: Config, pretrained: Path | None) -> None:
    if pretrained is not None and config.data.vocab_size is not None:
        raise ConfigError(
            f"Expected no --vocab-size with the weights in {str(pretrained)!r}, which have their own vocabulary, got "
            f"{config.data.vocab_size}."
        )


def _check_writable(directory: RunDirectory) -> None:
    """Refuse an unwritable run directory, before reading the text takes time."""
    try:
        str(directory.root.absolute()).encode()
    except UnicodeEncodeError:  # The tokenizers library writes only to such paths.
        raise ConfigError(f"Expected a --run-dir whose name is UTF-8, got {str(directory.root)!r}.") from None
    there = next(path for path in (directory.root, *directory.root.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        got = "cannot be written to" if there.is_dir() else "is a file"
        raise ConfigError(
            f"Expected a folder for the run in {str(directory.root)!r}, got {str(there)!r}, which {got}. Pass another "
            "--run-dir."
        )


def _check_profile(config: Config, first_step: int) -> None:
    """Refuse to profile more steps than remain."""
    needed = 0 if config.run.profile is None else NUM_WARMUP_STEPS + config.run.profile
    if needed > config.optim.steps - first_step:
        raise ConfigError(
            f"Expected at least {needed} steps to go for --profile {config.run.profile}, which begins after "
            f"{NUM_WARMUP_STEPS}, got {config.optim.steps - first_step}. Pass a larger --steps, or a smaller --profile."
        )
