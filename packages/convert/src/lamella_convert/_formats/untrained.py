"""Weights not trained by a run: kept beside the configuration, published again with the trained weights.

A published model may have untrained modules: a layer for multi-token prediction, a vision tower. Their
weights are not in a run's checkpoints, where each save would store them again. One file beside the configuration keeps
these weights, with the published names of all weights, and `convert` restores them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch

from lamella_convert._formats.float8 import Dequantised, block_of, is_quantised
from lamella_convert._formats.hf_files import copy_side_files, read_config, with_dtype, write_config, write_published
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.write_source import write_safetensors_file
from lamella_files import Over, Source, Wanted, in_model, own_name

UNTRAINED_FILE: Final = "lamella_untrained.safetensors"
"""Beside a configuration: published weights not trained by the run, by published name."""

ORIGINALS_FILE: Final = "lamella_originals.safetensors"
"""Beside a checkpoint: exact values of tensors rounded in the checkpoint, under the source's native names."""


def keep_published(directory: Path, to: Path, *, untrained: Iterable[str], dtype: torch.dtype) -> None:
    """Keep the files needed to publish a model trained from a Hugging Face directory.

    Kept are the side files (configuration, tokenizer), the names and shapes of all weights, and the values of weights
    not trained by the run. `convert(like=to)` finds them.

    Args:
        directory: The Hugging Face directory. Float8 weights are dequantised to fp32.
        to: An existing directory. Files of the same names are replaced.
        untrained: Names in the directory's files.
        dtype: The dtype of the trained weights, for the configuration.

    Raises:
        CheckpointDamaged: A file is absent, unreadable or malformed, or a link leads outside; the error names the file.

    Effects: holds a buffer of the weights; waits until all files are on the disk. No collective: for one process.
    """
    source: Source = SafetensorsSource(directory)
    config = read_config(directory)
    if is_quantised(source):
        source = Dequantised(source, dtype=torch.float32, block=block_of(config or {}))
    copy_side_files(directory, to)
    if config is not None:
        write_config(to, with_dtype(config, dtype))
    write_published(to, {name: info.shape for name, info in source.tensors.items()})
    dtypes = {name: source.tensors[name].dtype for name in untrained}
    (to / UNTRAINED_FILE).unlink(missing_ok=True)
    if dtypes:
        write_safetensors_file(source, dtypes, to / UNTRAINED_FILE)


def kept_in(folder: Path | None, file: str) -> Source | None:
    """The weights in a file of a folder; None if the file is absent.

    Raises:
        CheckpointDamaged: The file is damaged.

    Effects: reads the file's header.
    """
    return SafetensorsSource(folder / file) if folder is not None and (folder / file).is_file() else None


class Completed(Over):
    """A `Source` under published names, completed with weights of another source.

    Attributes:
        added: The names from the second source, as `model.<name>`.
    """

    def __init__(self, source: Source, published: Source) -> None:
        infos = {in_model(name): info for name, info in published.tensors.items()}
        self.added = tuple(name for name in infos if name not in source.tensors)
        super().__init__(source, {**source.tensors, **{name: infos[name] for name in self.added}})
        self._published = published

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`, of both."""
        added = frozenset(self.added)
        self.source.read([request for request in requests if request.name not in added])
        published_requests = [
            request._replace(name=own_name(request.name)) for request in requests if request.name in added
        ]
        if published_requests:
            self._published.read(published_requests)
