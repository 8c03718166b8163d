"""The folder of the weights that a run starts from, and the lines on the folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from torch import nn

import lamella_transformers
from lamella._model.spec import load_spec, refused_models
from lamella._settings.config import Values
from lamella._settings.options import ConfigError
from lamella_checkpoint import Source
from lamella_transformers import ModelSpec

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_OTHER_WEIGHTS = (
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.safetensors",
    "*.h5",
    "*.msgpack",
)
_NUM_NAMED = 3

FINE_TUNING: Final[Values] = {"optim": {"lr": 2e-5}}
"""Settings for weights that have been trained before."""


def pretrained_directory(name: str) -> Path | None:
    """Return the directory with weights that `--model` names; None for a config alone and for shipped models.

    Raises:
        ConfigError: The directory has weights in another format than safetensors, or of an adapter alone: a run would
            start without weights.
    """
    directory = Path(name)
    if any((directory / file).is_file() for file in _WEIGHTS):
        return directory
    refuse_adapter(directory)
    if directory.is_dir() and (
        unread_files := [file for pattern in _OTHER_WEIGHTS for file in directory.glob(pattern)]
    ):
        raise ConfigError(
            f"Expected weights as {_WEIGHTS[0]} in {name!r}, got {min(unread_files).name}. "
            f"{_to_safetensors(directory)}, or pass {str(directory / 'config.json')!r} as --model to start from no "
            "weights."
        )
    return None


def refuse_adapter(directory: Path) -> None:
    """Refuse a folder of peft's in the place of a model's.

    Raises:
        ConfigError: Names the ways to merge the adapter.
    """
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"Expected a model in {str(directory)!r}, got an adapter of peft's (adapter_config.json). Merge it into "
            "its model first: lamella export RUN OUT --merge, or peft's merge_and_unload() and save_pretrained()."
        )


def _to_safetensors(directory: Path) -> str:
    """Return the way out: lamella reads one file of torch.save, transformers reads several by their index."""
    if (directory / "pytorch_model.bin").is_file():
        file, to = directory / "pytorch_model.bin", f"{directory.name}-safetensors"
        return f"Run: lamella ckpt convert {file} {to} --to hf --config {directory}, then pass --model {to}"
    return "Load it with transformers' from_pretrained and save it with save_pretrained"


def pretrained_settings(name: str) -> Values:
    """Return the settings for weights that `--model` names; none without weights."""
    return {} if pretrained_directory(name) is None else FINE_TUNING


def check_weights(directory: Path, outline: nn.Module, spec: ModelSpec) -> tuple[str, ...]:
    """Refuse weights that are not all of the model's: as `lamella_transformers.check_weights`.

    Raises:
        ConfigError: The weights are not the model's, or a file is damaged.
    """
    with refused_models():
        return lamella_transformers.check_weights(directory, outline, spec)


def as_published(directory: Path) -> Callable[[Source], Source] | None:
    """Return the translation of a run's checkpoint to published names: as `lamella_transformers.as_published`.

    Args:
        directory: The run's `model` folder.

    Raises:
        ConfigError: The config is not a model's.
    """
    with refused_models():
        return lamella_transformers.as_published(directory, load_spec(str(directory)))


def weights_line(directory: Path, untrained: Sequence[str]) -> str:
    """Return a line on the folder of the weights, and on tensors that a run does not train."""
    if not untrained:
        return f"weights: {directory}"
    more = ", ..." if len(untrained) > _NUM_NAMED else ""
    first = ", ".join(untrained[:_NUM_NAMED])
    return f"weights: {directory}; {len(untrained)} tensors are not trained, and are kept: {first}{more}"
