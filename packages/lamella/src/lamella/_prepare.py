"""Preparation before any worker starts: read the text, write the tokens, check the run to be resumed."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
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
from lamella._models import NAMED, ModelSpec, check_context, load_spec, outline, sharding_units
from lamella._options import ConfigError
from lamella._pretrained import check_weights, pretrained_directory, told_of_weights
from lamella._profile import NUM_WARMUP_STEPS
from lamella._report import rewind
from lamella._resume import damaged, set_aside_after, wanted_checkpoint
from lamella._text import Corpus, collect
from lamella._tokenizer import RunTokenizer, read_tokenizer
from lamella._tokens import check_tokens, fingerprint, prepare_tokens
from lamella_checkpoint import CheckpointDamaged, CheckpointDirectory, CheckpointMismatch, check
from lamella_convert import keep_published

# These settings and the text determine the data stream. After a change, a resumed run would repeat or skip text.
_STREAM = (("data", "sequence_length"), ("optim", "batch_size"), ("run", "seed"))

# Of a model's config: what a run sets by itself, or what training does not read.
_NOT_OF_THE_MODEL = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "use_cache")

_NUM_NAMED = 3


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
    checkpoints = CheckpointDirectory(directory.checkpoints)
    latest = wanted_checkpoint(checkpoints, config.run)
    _check_wanted(config, directory, latest)
    if latest is None:
        _check_writable(directory)
    pretrained = pretrained_directory(config.model.name)
    _check_vocabulary(config, pretrained)
    spec = load_spec(config.model.name, config.data.vocab_size)
    check_context(spec, config.data.sequence_length)
    model = outline(spec)
    check_float8(sharding_units(model, spec.model_type), config.parallel)
    _check_compiler(config.parallel)
    tokenizer = None if pretrained is None else read_tokenizer(pretrained, spec.vocab_size)
    corpus = collect(config.data.paths, config.data.validation_fraction, without=directory.root)
    text = fingerprint(corpus, tokenizer or spec.vocab_size)
    summary = *_summary(corpus, model, spec), *_told_of_chats(corpus, tokenizer), *_told_of_units(tokenizer)
    untrained: tuple[str, ...] = ()
    if pretrained is not None and latest is None:
        untrained = check_weights(pretrained, model, spec)
        summary = *summary, told_of_weights(pretrained, untrained)
    first_step = 0 if latest is None else _check_resumable(latest, model, config, text)
    if latest is not None:
        _check_same_model(spec, directory)
    if first_step < config.optim.steps:
        _check_profile(config, first_step)
        with _writing(directory):
            data = prepare_tokens(corpus, tokenizer or spec.vocab_size, directory.tokens, directory.model)
            check_tokens(data, config.data)
            summary = *summary, *_going_back(checkpoints, first_step if latest is not None else -1, directory)
            if pretrained is None:
                _write_model(spec, model, directory)
            elif latest is None:
                _keep_published(pretrained, directory.model, untrained)
            # Without `from_step`: the next run with this config.json must not set the new checkpoints aside again.
            again = replace(config, run=replace(config.run, from_step=None))
            directory.config.write_text(json.dumps(to_values(again), indent=2) + "\n", encoding="utf-8")
    return Prepared(directory=directory, first_step=first_step, summary=summary)


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


def _going_back(checkpoints: CheckpointDirectory, step: int, directory: RunDirectory) -> list[str]:
    """Set aside checkpoints and drop records after `step`; return lines on both, to print."""
    told = [f"set aside: {path}" for path in set_aside_after(checkpoints, step)]
    if num_damaged := rewind(directory.metrics, step):
        told.append(
            f"dropped from {directory.metrics.name}: {num_damaged} damaged lines, as a run leaves that is killed"
        )
    return told


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


def _check_wanted(config: Config, directory: RunDirectory, latest: Path | None) -> None:
    if config.run.resume is True and latest is None:
        raise ConfigError(f"Expected a checkpoint to resume in {str(directory.root)!r}, got none.")
    if config.run.resume is False and latest is not None:
        raise ConfigError(
            f"Expected no checkpoint in {str(directory.root)!r}, got {latest.name}. "
            "Pass another --run-dir, or leave out --no-resume."
        )


def _check_writable(directory: RunDirectory) -> None:
    """Refuse an unwritable run directory, before reading the text takes time."""
    there = next(path for path in (directory.root, *directory.root.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        got = "cannot be written to" if there.is_dir() else "is a file"
        raise ConfigError(
            f"Expected a folder for the run in {str(directory.root)!r}, got {str(there)!r}, which {got}. Pass another "
            "--run-dir."
        )


def _check_resumable(checkpoint: Path, model: nn.Module, config: Config, text: str) -> int:
    """Return the checkpoint's step; refuse checkpoints of another model or data stream."""
    try:
        extra = check(checkpoint, model=model)
    except CheckpointDamaged as error:
        raise damaged(CheckpointDirectory(checkpoint.parent), checkpoint, error) from error
    except CheckpointMismatch as error:
        first = "; ".join(map(str, error.differences.names[:_NUM_NAMED]))
        more = len(error.differences.names) - _NUM_NAMED
        raise ConfigError(
            f"Expected a checkpoint of this model in {str(checkpoint)!r}, got a checkpoint of another model: {first}"
            f"{f'; and {more} more' if more > 0 else ''}. Pass the checkpoint's --model, or another --run-dir."
        ) from error
    _check_stream(extra, config, text)
    return int(extra["step"])


def _check_same_model(spec: ModelSpec, directory: RunDirectory) -> None:
    """Refuse to resume with a config of equal shapes that computes something else (an activation, an epsilon)."""
    if not directory.model_config.is_file():
        return
    before, now = load_spec(str(directory.model)).to_dict(), spec.to_dict()
    for name in sorted(before.keys() | now.keys()):
        if name not in _NOT_OF_THE_MODEL and before.get(name) != now.get(name):
            raise ConfigError(
                f"Expected the model's {name} to stay {before.get(name)!r} as in the run to be resumed, got "
                f"{now.get(name)!r}. Pass the former --model, or another --run-dir."
            )


def _check_profile(config: Config, first_step: int) -> None:
    """Refuse to profile more steps than remain."""
    needed = 0 if config.run.profile is None else NUM_WARMUP_STEPS + config.run.profile
    if needed > config.optim.steps - first_step:
        raise ConfigError(
            f"Expected at least {needed} steps to go for --profile {config.run.profile}, which begins after "
            f"{NUM_WARMUP_STEPS}, got {config.optim.steps - first_step}. Pass a larger --steps, or a smaller --profile."
        )


def _check_stream(stored: Mapping[str, object], config: Config, text: str) -> None:
    """Refuse to resume with other text or other settings of the data stream."""
    for name, value in stream_settings(config).items():
        if stored.get(name) != value:
            raise ConfigError(
                f"Expected {name} to stay {stored.get(name)!r} as in the run to be resumed, got {value!r}. "
                "Pass the former value, or another --run-dir."
            )
    if stored.get("fingerprint") != text:
        raise ConfigError(
            "Expected the text that the run to be resumed was started on, got another. "
            "Pass the same --data, or another --run-dir."
        )


def stream_settings(config: Config) -> dict[str, object]:
    """Return the settings that must not change over a run, by dotted name."""
    values = to_values(config)
    return {f"{group}.{name}": values[group][name] for group, name in _STREAM}
