"""The tensors of a pipeline stage under the names that they have in a model of one stage.

Each stage counts its layers from 0, and the last one has a copy of an embedding that is shared with the output layer.
Checkpoints number all layers and have one embedding, so that they open on any number of stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from lamella_checkpoint import Source
from lamella_checkpoint.sources import rename, split_section
from lamella_convert import canonical_name

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\b")
_PLACE = re.compile(r"\w+\.layers\.\d+|\w+\.\w+")
_COPY, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def unwrapped(name: str) -> str:
    """A name without the `module.` of Megatron's wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


class Stage:
    """Names of a model on one pipeline stage; of a model on the only stage, the model's own.

    Args:
        model: Sharded, or a wrapper around it.
        pp: The ranks with the other stages; None for a single stage.

    Raises:
        NotImplementedError: A rank has several chunks, of virtual stages.
    """

    def __init__(self, model: nn.Module, pp: dist.ProcessGroup | None) -> None:
        self._pp = pp if pp is not None and pp.size() > 1 else None
        self._numbers: dict[str, int] = {}
        if self._pp is not None:
            _refuse_virtual_stages(model)
            for path, module in model.named_modules():
                number = getattr(module, "layer_number", None)
                if number is not None and _LAYER.fullmatch(unwrapped(path)):
                    self._numbers[unwrapped(path)] = number - 1  # megatron-core counts from 1, over all stages

    def name(self, name: str, tensor: torch.Tensor) -> str:
        """The name in a model of one stage, of a tensor of a state dict."""
        own = unwrapped(name)
        if self.is_copy(name, tensor):
            return _EMBEDDING
        found = _LAYER.match(own)
        if found is None or found[0] not in self._numbers:
            return own
        return f"{found[1]}{self._numbers[found[0]]}{own[found.end() :]}"

    def is_copy(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the last stage's copy of the first stage's embedding."""
        return self._pp is not None and unwrapped(name) == _COPY and getattr(tensor, "shared_embedding", False)

    def select(self, source: Source, names: Iterable[str]) -> Source:
        """A checkpoint without the tensors that only other stages have.

        Args:
            source: Under native names, as `load(translate=...)` has it.
            names: Of this stage's tensors.

        Effects: collective: one exchange of names along the pipeline, if it has several stages.
        """
        if self._pp is None:
            return source
        own = {_place(canonical_name(name)) for name in names}
        of_stages: list[set[str]] = [set()] * self._pp.size()
        dist.all_gather_object(of_stages, own, group=self._pp)
        others = set().union(*of_stages) - own

        def kept(name: str) -> str | None:
            section, rest = split_section(name)
            return None if section and _place(canonical_name(rest)) in others else name

        return rename(source, kept)


def _refuse_virtual_stages(model: nn.Module) -> None:
    """A single chunk would be saved without the rank's other layers."""
    for module in model.modules():
        num_chunks = getattr(getattr(module, "config", None), "virtual_pipeline_model_parallel_size", None)
        if num_chunks is not None:
            raise NotImplementedError(
                f"Expected a rank's whole stage in one model, got one of {num_chunks} chunks "
                "(virtual_pipeline_model_parallel_size). Build the model without virtual stages, from the same weights."
            )


def _place(name: str) -> str:
    """The layer, or the module beside the layers, that a tensor belongs to."""
    found = _PLACE.match(name)
    return name if found is None else found[0]
