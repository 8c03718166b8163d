"""Side files of a Hugging Face directory: configuration, tokenizer, code. Copied, never run."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from lamella_checkpoint.extending import CHECKSUMS_FILE, MANIFEST_FILE
from lamella_files import METADATA_FILE, CheckpointDamaged, are_sizes, read_json, sync, unreadable

CONFIG_FILE: Final = "config.json"
CHAT_TEMPLATES: Final = "additional_chat_templates"
"""The folder in which transformers keeps a tokenizer's templates with names, such as `tool_use.jinja`."""
_PUBLISHED_FILE: Final = "lamella_published.json"
"""In a checkpoint's folder of side files: the weights' names in the Hugging Face directory, with their shapes."""
_OWN_FILES: Final = frozenset({_PUBLISHED_FILE, METADATA_FILE, MANIFEST_FILE, CHECKSUMS_FILE})
"""Files by which a directory is recognised as a checkpoint; copies in another format would mislead readers."""
_WEIGHTS: Final = frozenset(
    {".bin", ".ckpt", ".distcp", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
)
_DTYPE_KEYS: Final = frozenset({"dtype", "torch_dtype"})


def side_files(directory: Path) -> Iterator[Path]:
    """The files of a directory in the order of names, without weights and indices of weights; then chat templates.

    Other folders are left out.

    Raises:
        CheckpointDamaged: A link leads outside; a copy would publish its target.

    Effects: reads the directory.
    """
    real = directory.resolve()
    # The hub's cache keeps the files outside the directories: snapshots/<revision>/<link to ../../blobs>.
    allowed = (real, real / CHAT_TEMPLATES, real.parent.parent / "blobs")
    for file in [*sorted(directory.iterdir()), *sorted((directory / CHAT_TEMPLATES).glob("*.jinja"))]:
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if not file.is_file() or is_weights or file.name in _OWN_FILES:
            continue
        if file.resolve().parent not in allowed:
            raise CheckpointDamaged(str(file), f"it leads outside, to {str(file.resolve())!r}")
        yield file


def copy_side_files(directory: Path, to: Path) -> tuple[str, ...]:
    """Copy side files over files of the same names, and wait until the copies are on the disk.

    Returns:
        The paths of the files in the directory.

    Raises:
        CheckpointDamaged: The conditions of `side_files`.
    """
    copied = []
    for file in side_files(directory):
        path = file.relative_to(directory)
        (to / path.parent).mkdir(exist_ok=True)
        with file.open("rb") as source, (to / path).open("wb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        copied.append(path.as_posix())
    if (to / CHAT_TEMPLATES).is_dir():
        sync(to / CHAT_TEMPLATES)
    return tuple(copied)


def read_config(directory: Path) -> dict[str, Any] | None:
    """The model's configuration; None without a `config.json`.

    Raises:
        CheckpointDamaged: The file holds no JSON object.
    """
    file = directory / CONFIG_FILE
    return cast(dict[str, Any], _read(file, dict)) if file.exists() else None


def read_published(directory: Path) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of weights; empty if not kept.

    Raises:
        CheckpointDamaged: The file's contents are malformed.
    """
    file = directory / _PUBLISHED_FILE
    content = cast(dict[str, list[int]], _read(file, dict)) if file.exists() else {}
    try:
        shapes = {name: tuple(shape) for name, shape in content.items()}
    except TypeError as error:
        raise unreadable(file, error) from error
    for name, shape in shapes.items():
        if not are_sizes(shape):
            raise CheckpointDamaged(str(file), f"expected a shape of {name!r}, got {shape}")
    return shapes


def write_published(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Keep published names and shapes, and wait until the file is on the disk."""
    _write(directory / _PUBLISHED_FILE, shapes)


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write or replace the model's configuration, and wait until the file is on the disk."""
    _write(directory / CONFIG_FILE, config)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A configuration with every dtype entry replaced."""
    name = str(dtype).removeprefix("torch.")
    return {
        key: name if key in _DTYPE_KEYS else with_dtype(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }


def _read(file: Path, kind: type) -> object:
    content = read_json(file)
    if not isinstance(content, kind):
        raise CheckpointDamaged(str(file), f"expected a JSON {kind.__name__}, got {type(content).__name__}")
    return content


def _write(file: Path, content: object) -> None:
    with file.open("w", encoding="utf-8") as opened:
        json.dump(content, opened, indent=2)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())
