"""The Hugging Face directory that a checkpoint came from, as far as it was kept; and names that share a tensor."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lamella_checkpoint import CheckpointDamaged, Source
from lamella_checkpoint.dcp import StoredCheckpoint
from lamella_checkpoint.sources import Renamed, WithObjects, is_of_model, own_name
from lamella_convert._formats.float8 import (
    is_scale,
)
from lamella_convert._formats.hf_files import read_published
from lamella_convert._formats.open import Format, OpenCheckpoint
from lamella_convert._formats.safetensors import SafetensorsSource, has_weights
from lamella_convert._formats.torch_file import TorchFile
from lamella_convert._formats.untrained import ORIGINALS_FILE, UNTRAINED_FILE, Completed, kept_in

SIDE_FILES: Final = "hf"
"""The folder of a checkpoint that keeps what lay beside the weights in a Hugging Face directory."""

Shapes = Mapping[str, tuple[int, ...]]


def beside_of(path: Path) -> Path | None:
    """Where a checkpoint keeps what lay beside the weights in a Hugging Face directory."""
    if (path / SIDE_FILES).is_symlink():
        raise CheckpointDamaged(str(path / SIDE_FILES), f"it leads outside, to {str((path / SIDE_FILES).resolve())!r}")
    if (path / SIDE_FILES).is_dir():
        return path / SIDE_FILES
    return path if has_weights(path) else None


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of the Hugging Face directory that a checkpoint came from.

    Attributes:
        shapes: Of its weights by name; none where nobody kept them.
        untrained: Those of its weights that were kept because the checkpoint is without them.
        originals: Values that the checkpoint cannot hold exactly, from where it came.
    """

    shapes: Shapes
    untrained: Source | None
    originals: Source | None

    @classmethod
    def of(cls, opened: OpenCheckpoint, own: Path | None, beside: Path | None) -> "Published":
        """Of a checkpoint with a folder of its own perhaps, by the folder that counts."""
        weights: Source | None = opened.raw if opened.format is Format.SAFETENSORS else None
        untrained = kept_in(beside, UNTRAINED_FILE) if weights is None else None
        originals = kept_in(own, ORIGINALS_FILE) or kept_in(beside, ORIGINALS_FILE)
        if weights is None and beside is not None and has_weights(beside):
            weights = SafetensorsSource(beside)
        if weights is None:
            shapes = {} if beside is None else read_published(beside)
            return cls(shapes=shapes, untrained=untrained, originals=originals)
        shapes = {name: info.shape for name, info in weights.tensors.items() if not is_scale(weights, name)}
        return cls(shapes=shapes, untrained=untrained, originals=originals)


def completed(source: Source, untrained: Source | None) -> Source:
    """With what was kept because nobody trained it."""
    return source if untrained is None else Completed(source, untrained)


def ties_of(opened: OpenCheckpoint, published: Container[str]) -> dict[str, str]:
    """Names of tensors that lie where another lies, by that other's name.

    Of this package's own checkpoints, and of files of `torch.save`; other formats cannot tell.
    The other is the one that was published, if either was: `published` are its names for what was.
    """
    firsts: dict[object, str] = {}
    ties: dict[str, str] = {}
    places = _places(opened)
    for name in sorted(places, key=lambda name: own_name(name) not in published):
        first = firsts.setdefault(places[name], name)
        if first != name:
            ties[name] = first
    return ties


def _places(opened: OpenCheckpoint) -> dict[str, object]:
    """Where each tensor lies in the files, by its native name, in formats in which two can lie in one place."""
    stored = opened.raw
    if opened.format is Format.LAMELLA and isinstance(stored, StoredCheckpoint):
        return {
            name: tuple(sorted((chunk, stored.metadata.items[name, chunk.offsets]) for chunk in info.chunks))
            for name, info in stored.tensors.items()
            if info.chunks
        }
    if isinstance(stored, TorchFile):
        native = opened.source.source if isinstance(opened.source, WithObjects) else opened.source
        origins = native.origins if isinstance(native, Renamed) else {name: name for name in stored.tensors}
        return {
            name: stored.place(origin)
            for name, origin in origins.items()
            if is_of_model(name) and origin in stored.tensors and stored.tensors[origin].chunks[0].numel
        }
    return {}
