"""The dtype of published weights."""

from math import prod
from pathlib import Path

import torch

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
