"""The checks of a run before its text is read: settings, folder, model and machine."""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lamella._model.float8 import check_float8
from lamella._model.kernels import check_kernels
from lamella._model.spec import NAMED, check_context, load_spec, outline
from lamella._model.weights import pretrained_directory
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config, ParallelConfig
from lamella._settings.options import ConfigError
from lamella._training.resume import wanted_checkpoint
from lamella_transformers import ModelSpec, sharding_units


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A run whose settings can be met, as far as can be told without its text.

    Attributes:
        directory: The run's files.
        checkpoint: The checkpoint to go on from; None for a new run.
        pretrained: The folder of the weights to start from; None for fresh weights.
        spec: The config of the model.
        outline: The model on the meta device.
    """

    directory: RunDirectory
    checkpoint: Path | None
    pretrained: Path | None
    spec: ModelSpec
    outline: nn.Module


def check(config: Config) -> CheckedRun:
    """Check settings, folder, model and machine.

    Raises:
        ConfigError: The settings cannot be met.

    Effects: reads the config of the model; writes nothing.
    """
    directory = RunDirectory(run_root(config))
    checkpoint = wanted_checkpoint(directory, config.run)
    if checkpoint is None:
        _check_writable(directory)
    pretrained = pretrained_directory(config.model.name)
    _check_vocabulary(config, pretrained)
    spec = load_spec(config.model.name, config.data.vocab_size)
    check_context(spec, config.data.sequence_length)
    model = outline(spec)
    if pretrained is None and checkpoint is None:
        _check_memory(model, config.parallel)
    check_float8(sharding_units(model), config.parallel)
    check_kernels(config.model, spec.model_type, config.parallel)
    _check_compiler(config.parallel)
    return CheckedRun(directory=directory, checkpoint=checkpoint, pretrained=pretrained, spec=spec, outline=model)


def run_root(config: Config) -> Path:
    """Return the directory of a run: `--run-dir`, or runs/<model>."""
    return Path(config.run.directory or Path("runs", _model_name(config.model.name)))


def _model_name(name: str) -> str:
    """Return the name of a shipped model or a folder, dots included (Llama-3.1-8B), or of a file without its suffix."""
    path = Path(os.path.abspath(name))
    if name not in NAMED and path.is_file():
        return path.parent.name if path.name == "config.json" else path.stem
    return path.name


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


def _check_vocabulary(config: Config, pretrained: Path | None) -> None:
    if pretrained is not None and config.data.vocab_size is not None:
        raise ConfigError(
            f"Expected no --vocab-size with the weights in {str(pretrained)!r}, which have their own vocabulary, got "
            f"{config.data.vocab_size}."
        )


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
