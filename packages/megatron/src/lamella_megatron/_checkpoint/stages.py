"""The tensors of a pipeline stage under the names of a model with a single stage.

Each stage counts its layers from 0, and the last stage has a copy of an embedding shared with the output layer.
Checkpoints number all layers and have one embedding: they open on any number of stages.
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
_MODULE = re.compile(r"\w+\.layers\.\d+|\w+\.\w+")
StageObject = TypeVar("StageObject")
_COPY, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def unwrapped(name: str) -> str:
    """A name without the `module.` of Megatron's wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


class Stage:
    """Names of the tensors in a rank's chunks, one or several virtual stages; on a single stage the model's own names.

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
        own_name = unwrapped(name)
        if self.is_copy(name, tensor):
            return _EMBEDDING
        layer_match = _LAYER.match(own_name)
        if layer_match is None or (chunk, layer_match[0]) not in self._numbers:
            return own_name
        return f"{layer_match[1]}{self._numbers[chunk, layer_match[0]]}{own_name[layer_match.end() :]}"

    def is_copy(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a later stage's copy of the first stage's embedding."""
        if self._pp is None or not self._pp.rank():
            return False
        own_name = unwrapped(name)  # multi-token prediction has an embedding of its own on the last stage
        return own_name == _EMBEDDING or (own_name == _COPY and getattr(tensor, "shared_embedding", False))

    def from_every_stage(self, mine: StageObject) -> list[StageObject]:
        """A small object of each stage, in order. Effects: an exchange along the pipeline, if it has several stages."""
        if self._pp is None:
            return [mine]
        stage_objects = [mine] * self._pp.size()
        dist.all_gather_object(stage_objects, mine, group=self._pp)
        return stage_objects

    def only_elsewhere(self, names: Iterable[str]) -> frozenset[str]:
        """The layers and modules of other stages alone.

        Args:
            names: Names of this stage's tensors.

        Effects: an exchange along the pipeline, if it has several stages.
        """
        own_modules = {_module_of(canonical_name(name)) for name in names}
        return frozenset[str]().union(*self.from_every_stage(own_modules)) - own_modules


def without(source: Source, modules: Container[str]) -> Source:
    """A checkpoint, under native names, without the tensors of `Stage.others`."""

    def remaining_name(name: str) -> str | None:
        section, local_name = split_section(name)
        return None if section and _module_of(canonical_name(local_name)) in modules else name

    return rename(source, remaining_name)


def _check_chunks(chunks: Sequence[nn.Module]) -> None:
    """A single chunk of several would be saved without the rank's remaining layers."""
    configs = (getattr(module, "config", None) for chunk in chunks for module in chunk.modules())
    stage_counts = (getattr(config, "virtual_pipeline_model_parallel_size", None) for config in configs)
    num_chunks = next(filter(None, stage_counts), 1)
    if len(chunks) != num_chunks:
        raise ValueError(
            f"Expected all {num_chunks} chunks of the rank (`config.virtual_pipeline_model_parallel_size`), got "
            f"{len(chunks)}. Pass the list that megatron-core's driver takes."
        )


def _module_of(name: str) -> str:
    """The layer of a tensor, or the module beside the layers."""
    module_match = _MODULE.match(name)
    return name if module_match is None else module_match[0]
