"""The model of a run on one rank: built with weights or without memory, given its kernels, and sharded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lamella._model.sharding import shard
from lamella._model.spec import load_spec
from lamella._model.weights import pretrained_directory
from lamella._settings.config import Config
from lamella_transformers import (
    ModelSpec,
    Replacements,
    build_model,
    build_without_parameters,
    flops_per_token,
    materialise,
    use_kernels,
)


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A sharded model, with the facts of its construction.

    Attributes:
        module: The root unit.
        units: The units but the root.
        spec: The transformers config of the model.
        pretrained: The folder of the weights that the run starts from, not read yet; None for fresh weights.
        replacements: The functions of transformers that kernels replaced, for the end of the run.
        flops_per_token: Floating-point operations of a token's forward and backward.
    """

    module: nn.Module
    units: Sequence[nn.Module]
    spec: ModelSpec
    pretrained: Path | None
    replacements: Replacements
    flops_per_token: float


def build(config: Config, folder: Path, device: torch.device) -> RunModel:
    """Build and shard the model of a run.

    Args:
        config: The run's settings.
        folder: The run's model folder, which holds the model's config.
        device: The device of this rank.

    Effects: collective over all ranks. Allocates all fresh weights before they are sharded, and of pretrained weights
        the shards alone, whose values are undefined until the weights are read. Kernels replace functions of
        transformers in the whole process until `replacements.undo()`.
    """
    spec = load_spec(str(folder))
    pretrained = pretrained_directory(config.model.name)
    if pretrained is None:
        module = build_model(spec, device, config.run.seed)
    else:
        module = build_without_parameters(spec, device)
    flops = flops_per_token(module, spec, config.data.sequence_length)
    replacements = use_kernels(module, config.model.kernels, is_compiled=config.parallel.compile)
    units = shard(module, config.parallel)
    if pretrained is not None:
        materialise(module, torch.device("cpu") if config.parallel.rest == "cpu" else device)
        module.to(device)  # Buffers; shards that rest on the CPU stay there.
    return RunModel(
        module=module,
        units=units,
        spec=spec,
        pretrained=pretrained,
        replacements=replacements,
        flops_per_token=flops,
    )
