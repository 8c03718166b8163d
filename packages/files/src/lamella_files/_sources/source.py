"""The common interface of all open formats: named tensors, read box by box, and plain data.

Note [One way through]
    A format is read by a `Source`; names are translated by a `Source` over a `Source` (`_translation`); a live model
    or another format's writer reads from the last source. No layer holds a tensor: a request for a
    box is turned into requests for boxes, down to the files. So a shard costs its own bytes, and a conversion
    costs one piece.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from lamella_files._base.errors import CheckpointDamaged
from lamella_files._base.names import GROUP_SIZES
from lamella_files._base.text import short
from lamella_layout import Chunk


class TensorInfo(NamedTuple):
    """A stored tensor: global shape, dtype, and the stored boxes.

    `chunks` cover the tensor, without overlaps, in no particular order; reading along chunks is cheapest.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Wanted(NamedTuple):
    """A box of a stored tensor, and the destination memory.

    `into` has the box's sizes; any device, dtype and strides. Values are cast to `into`'s dtype.
    """

    name: str
    chunk: Chunk
    into: torch.Tensor


class Source(Protocol):
    """Named tensors and objects of a checkpoint, wherever and however they are stored."""

    @property
    def path(self) -> Path:
        """The file or directory, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name, in stored order."""

    @property
    def objects(self) -> Sequence[str]:
        """The names of values that are no tensors."""

    def read(self, requests: Sequence[Wanted]) -> None:
        """Fill the given memory.

        Raises:
            CheckpointDamaged: A file is absent, unreadable or differs from its checksum; the error names the file. The
                destination's contents are undefined.

        Effects: no collective; opens only files with a wanted box, each once a call, in parallel; holds no
            more than the stored chunks in progress. Copies to an accelerator on its current stream.
        """

    def read_object(self, name: str) -> object:
        """The value of an object: plain data, or of an allowed type.

        Raises:
            CheckpointDamaged: The conditions of `read`; or the value is of a forbidden type, which the error names.
        """


def group_sizes(source: Source) -> list[int] | None:
    """The numbers of parameters of an optimizer's groups; None for an optimizer with names, or without groups.

    A parameter's number is a place among the groups, and means another parameter in groups of other sizes.

    Raises:
        CheckpointDamaged: The object under `GROUP_SIZES` is no list of sizes.
    """
    if GROUP_SIZES not in source.objects:
        return None
    sizes = source.read_object(GROUP_SIZES)
    if isinstance(sizes, list) and all(isinstance(size, int) and size >= 0 for size in sizes):
        return sizes
    raise CheckpointDamaged(str(source.path), f"expected the sizes of an optimizer's groups, got {short(sizes)}")


Translate = Callable[[Source], Source]
"""Lays other names or cuts over a source."""


class Over:
    """A `Source` over another source: the default of every member delegates to the source below.

    Attributes:
        source: The source below.
    """

    def __init__(self, source: Source, tensors: Mapping[str, TensorInfo] | None = None) -> None:
        """Lay one source over another.

        Args:
            source: The source below.
            tensors: Replaces the tensors of the source below; None keeps them. A subclass that replaces them overrides
                `read`.
        """
        self.source = source
        self._tensors = source.tensors if tensors is None else tensors

    @property
    def path(self) -> Path:
        """As `Source.path`."""
        return self.source.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """As `Source.tensors`."""
        return self._tensors

    @property
    def objects(self) -> Sequence[str]:
        """As `Source.objects`."""
        return self.source.objects

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`."""
        self.source.read(requests)

    def read_object(self, name: str) -> object:
        """As `Source.read_object`."""
        return self.source.read_object(name)
