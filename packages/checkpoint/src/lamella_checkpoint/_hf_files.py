"""What lies beside the weights in a Hugging Face directory: configuration, tokenizer, code. Copied, never run."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_WEIGHTS: Final = frozenset({".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"})


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
