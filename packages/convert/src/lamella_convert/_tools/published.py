"""The Hugging Face directory behind a checkpoint, from its side files; and tied names."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lamella_checkpoint.extending import StoredCheckpoint
from lamella_convert._formats.float8 import (
    is_scale,
)
from lamella_convert._formats.hf_files import read_published
from lamella_convert._formats.open import Format, OpenCheckpoint
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.safetensors_files import has_weights
from lamella_convert._formats.torch_file import TorchFile
from lamella_convert._formats.untrained import ORIGINALS_FILE, UNTRAINED_FILE, Completed, kept_in
from lamella_files import CheckpointDamaged, Renamed, Source, WithObjects, is_of_model, own_name

SIDE_FILES: Final = "hf"
"""The folder of a checkpoint with the side files of a Hugging Face directory: configuration, tokenizer."""

Shapes = Mapping[str, tuple[int, ...]]


def beside_of(path: Path) -> Path | None:
    """The folder of a checkpoint's side files; None without one."""
    if (path / SIDE_FILES).is_symlink():
        raise CheckpointDamaged(str(path / SIDE_FILES), f"it leads outside, to {str((path / SIDE_FILES).resolve())!r}")
    if (path / SIDE_FILES).is_dir():
        return path / SIDE_FILES
    return path if has_weights(path) else None


@dataclass(frozen=True, kw_only=True)
class Published:
    """The Hugging Face directory behind a checkpoint.

    Attributes:
        shapes: Shapes of its weights by name; empty if not kept.
        untrained: Weights absent from the checkpoint, because the run did not train them.
        originals: Exact values of tensors rounded in the checkpoint.
    """

    shapes: Shapes
    untrained: Source | None
    originals: Source | None

    @classmethod
    def of(cls, opened: OpenCheckpoint, source_folder: Path | None, published_folder: Path | None) -> "Published":
        """Read the side files of a checkpoint.

        Args:
            opened: The checkpoint.
            own: The checkpoint's own folder of side files, if any.
            beside: The relevant folder: `own`, or a folder named by the caller.
        """
        weights: Source | None = opened.raw if opened.format is Format.SAFETENSORS else None
        untrained = kept_in(published_folder, UNTRAINED_FILE) if weights is None else None
        originals = kept_in(source_folder, ORIGINALS_FILE) or kept_in(published_folder, ORIGINALS_FILE)
        if weights is None and published_folder is not None and has_weights(published_folder):
            weights = SafetensorsSource(published_folder)
        if weights is None:
            shapes = {} if published_folder is None else read_published(published_folder)
            return cls(shapes=shapes, untrained=untrained, originals=originals)
        shapes = {name: info.shape for name, info in weights.tensors.items() if not is_scale(weights, name)}
        return cls(shapes=shapes, untrained=untrained, originals=originals)


def completed(source: Source, untrained: Source | None) -> Source:
    """The source, completed with the weights not trained by the run."""
    return source if untrained is None else Completed(source, untrained)


def ties_of(opened: OpenCheckpoint, published: Container[str]) -> dict[str, str]:
    """Tied names: each name that shares a tensor's stored place with a first name, with the first name.

    Found in checkpoints of `save` and in files of `torch.save`; other formats store no ties.

    Args:
        opened: The checkpoint.
        published: Native names of published tensors: of two tied names, the published name is the first.
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
    """The place of each tensor in the files, by native name, in formats that store ties."""
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
