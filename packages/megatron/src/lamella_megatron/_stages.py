"""The tensors of a pipeline stage under the names that they have in a model of one stage.

Each stage counts its layers from 0, and the last one has a copy of an embedding that is shared with the output layer.
Checkpoints number all layers and have one embedding, so that they open on any number of stages.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lamella_checkpoint import Source
from lamella_convert import canonical_name
from lamella_files import rename, split_section

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\b")
_PLACE = re.compile(r"\w+\.layers\.\d+|\w+\.\w+")
Told = TypeVar("Told")
_COPY, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def unwrapped(name: str) -> str:
    """A name without the `module.` of Megatron's wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


class Stage:
    """Names of the tensors in a rank's chunks, one or several virtual stages; on an only stage the model's own names.

    Args:
        chunks: Sharded, or wrappers around sharded models.
        pp: The ranks with the other stages; None for a single stage.

    Raises:
        ValueError: Fewer or more chunks than the rank has.
    """

    def __init__(self, chunks: Sequence[nn.Module], pp: dist.ProcessGroup | None) -> None:
        _check_chunks(chunks)
        self._pp = pp if pp is not None and pp.size() > 1 else None
        self._numbers: dict[tuple[int, str], int] = {}
        for chunk, model in enumerate(chunks) if self._pp is not None else ():
            for path, module in model.named_modules():
                number = getattr(module, "layer_number", None)
                if number is not None and _LAYER.fullmatch(unwrapped(path)):
                    self._numbers[chunk, unwrapped(path)] = number - 1  # megatron-core counts from 1, over all stages

    def name(self, chunk: int, name: str, tensor: torch.Tensor) -> str:
        """The name in a model of one stage, of a tensor of a chunk's state dict."""
        own = unwrapped(name)
        if self.is_copy(name, tensor):
            return _EMBEDDING
        found = _LAYER.match(own)
        if found is None or (chunk, found[0]) not in self._numbers:
            return own
        return f"{found[1]}{self._numbers[chunk, found[0]]}{own[found.end() :]}"

    def is_copy(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a later stage's copy of the first stage's embedding."""
        if self._pp is None or not self._pp.rank():
            return False
        own = unwrapped(name)  # multi-token prediction has an embedding of its own on the last stage
        return own == _EMBEDDING or (own == _COPY and getattr(tensor, "shared_embedding", False))

    def on_each(self, mine: Told) -> list[Told]:
        """A small object of each stage, in order. Effects: an exchange along the pipeline, if it has several stages."""
        if self._pp is None:
            return [mine]
        told = [mine] * self._pp.size()
        dist.all_gather_object(told, mine, group=self._pp)
        return told

    def others(self, names: Iterable[str]) -> frozenset[str]:
        """The layers and modules that only other stages have.

        Args:
            names: Of this stage's tensors.

        Effects: as `on_each`.
        """
        own = {_place(canonical_name(name)) for name in names}
        return frozenset[str]().union(*self.on_each(own)) - own


def without(source: Source, others: Container[str]) -> Source:
    """A checkpoint, under native names, without the tensors of `Stage.others`."""

    def kept(name: str) -> str | None:
        section, rest = split_section(name)
        return None if section and _place(canonical_name(rest)) in others else name

    return rename(source, kept)


def _check_chunks(chunks: Sequence[nn.Module]) -> None:
    """A single chunk of several would be saved without the rank's other layers."""
    configs = (getattr(module, "config", None) for chunk in chunks for module in chunk.modules())
    told = (getattr(config, "virtual_pipeline_model_parallel_size", None) for config in configs)
    num_chunks = next(filter(None, told), 1)
    if len(chunks) != num_chunks:
        raise ValueError(
            f"Expected all {num_chunks} chunks of the rank (`config.virtual_pipeline_model_parallel_size`), got "
            f"{len(chunks)}. Pass the list that megatron-core's driver takes."
        )


def _place(name: str) -> str:
    """The layer, or the module beside the layers, that a tensor belongs to."""
    found = _PLACE.match(name)
    return name if found is None else found[0]
