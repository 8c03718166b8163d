"""What lies beside the weights in a Hugging Face directory: configuration, tokenizer, code. Copied, never run."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from lamella_checkpoint._errors import CheckpointDamaged

CONFIG_FILE: Final = "config.json"
_WEIGHTS: Final = frozenset({".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"})
_DTYPE_KEYS: Final = frozenset({"dtype", "torch_dtype"})


def side_files(directory: Path) -> Iterator[Path]:
    """The files of a directory that are neither weights nor an index of such, by name; folders are left out.

    Effects: reads the directory.
    """
    for file in sorted(directory.iterdir()):
        if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
            yield file


def copy_side_files(directory: Path, to: Path) -> tuple[str, ...]:
    """Copy them, following links, and wait until they are on the disk.

    Returns:
        Their names.
    """
    copied = []
    for file in side_files(directory):
        with file.open("rb") as source, (to / file.name).open("xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        copied.append(file.name)
    return tuple(copied)


def read_config(directory: Path) -> dict[str, Any] | None:
    """The model's configuration; None where the directory has none.

    Raises:
        CheckpointDamaged: It is no JSON object.
    """
    file = directory / CONFIG_FILE
    if not file.exists():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(str(file), f"{type(error).__name__}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointDamaged(str(file), f"expected a JSON object, got {type(config).__name__}")
    return config


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write the model's configuration, over what is there, and wait until it is on the disk."""
    with (directory / CONFIG_FILE).open("w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A configuration, and those inside it, that says another dtype wherever it says one. Effects: none."""
    name = str(dtype).removeprefix("torch.")
    return {
        key: name if key in _DTYPE_KEYS else with_dtype(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }
