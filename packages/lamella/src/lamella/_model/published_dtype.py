"""The dtype of published weights, from their files or from a run's record."""

from math import prod
from pathlib import Path

import torch

from lamella._settings.options import ConfigError
from lamella_convert import open_checkpoint


def published_dtype(directory: Path) -> torch.dtype:
    """Return the dtype of most elements of the weights in a folder; bf16 for weights in 8 bits.

    Raises:
        CheckpointDamaged: A file cannot be read.

    Effects: reads the headers of the files.
    """
    numels: dict[torch.dtype, int] = {}
    for info in open_checkpoint(directory).raw.tensors.values():
        if info.dtype.is_floating_point:
            numels[info.dtype] = numels.get(info.dtype, 0) + prod(info.shape)
    dtype = max(numels, key=lambda dtype: numels[dtype], default=torch.bfloat16)
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def recorded_dtype(file: Path) -> torch.dtype:
    """Return the dtype of the weights that a run started from; fp32 for fresh weights.

    Args:
        file: The run's `RunDirectory.weights_dtype`.

    Raises:
        ConfigError: The file names no dtype.
    """
    name = file.read_text(encoding="ascii").strip() if file.is_file() else "float32"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"Expected the name of a dtype in {str(file)!r}, got {name!r:.40}. Write bfloat16, float16 or float32."
        )
    return dtype
