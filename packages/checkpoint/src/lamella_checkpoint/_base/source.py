"""What every format looks like once it is open: named tensors that are read box by box, and plain data.

Note [One way through]
    A format is read by a `Source`; names are translated by a `Source` over a `Source` (`_translation`); a live model
    or another format's writer takes what it needs of the last one. Nobody on the way holds a tensor: a request for a
    box is turned into requests for boxes, down to the files. So a shard costs its own bytes, and a conversion as
    much as the piece that is in hand.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from lamella_layout import Chunk


class TensorInfo(NamedTuple):
    """A stored tensor: its global shape, its dtype, and the boxes in which it lies in the files.

    `chunks` cover the tensor, without overlaps, in no particular order; reading along them is cheapest.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Wanted(NamedTuple):
    """A box of a stored tensor, and the memory to put it in.

    `into` has the box's sizes; any device, dtype and strides. Values are cast to its dtype.
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
        """The tensors by name, in the order in which they are stored."""

    @property
    def objects(self) -> Sequence[str]:
        """The names of values that are no tensors."""

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill the given memory.

        Raises:
            CheckpointDamaged: A file is absent, unreadable or not what its checksum says. It is named; what was to be
                filled is undefined.

        Effects: no collective; opens only files that hold a wanted box, each once a call, several at a time; holds no
            more than the stored chunks in hand. Copies to an accelerator on its current stream.
        """

    def read_object(self, name: str) -> object:
        """The value of an object: plain data, or of a type that is allowed.

        Raises:
            CheckpointDamaged: As for `read`; or the value is of a type that is not allowed, which is named.
        """


Translate = Callable[[Source], Source]
"""Lays other names or cuts over a source."""


class Over:
    """A `Source` over another one: whatever a subclass does not say itself is as it is there.

    Attributes:
        source: What lies under it.
    """

    def __init__(self, source: Source, tensors: Mapping[str, TensorInfo] | None = None) -> None:
        """Lay one source over another.

        Args:
            source: What lies under it.
            tensors: What it has instead of the other's tensors; None for the same. Whoever gives them overrides `read`.
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

    def read(self, wanted: Sequence[Wanted]) -> None:
        """As `Source.read`."""
        self.source.read(wanted)

    def read_object(self, name: str) -> object:
        """As `Source.read_object`."""
        return self.source.read_object(name)
