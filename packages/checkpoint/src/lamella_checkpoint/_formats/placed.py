"""The record of an item in a checkpoint's files, which ranks exchange before the checkpoint is completed."""

from dataclasses import dataclass

import torch

from lamella_checkpoint._formats.checksums import ByteSpan
from lamella_layout import Chunk


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An item written to a file, with the metadata's contents for the item. Pickles small."""

    names: tuple[str, ...]
    shape: tuple[int, ...] | None
    chunk: Chunk | None
    dtype: torch.dtype | None
    file: str
    span: ByteSpan
    checksum: int
