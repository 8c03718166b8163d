"""The model of a run on one rank: built without memory, equipped with kernels, sharded, and filled with weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lamella._model.lora import RunAdapters, add_adapters
from lamella._model.matrices import matrices_for
from lamella._model.sharding import shard
from lamella._model.spec import load_spec
from lamella._model.trained_parameters import is_trained, narrow_frozen, trained_patterns
from lamella._model.weights import pretrained_directory
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella_checkpoint import Source, fill
from lamella_engine import find_nonfinite
from lamella_transformers import (
    FreshWeights,
    ModelSpec,
    Replacements,
    SequencePieces,
    SharedRows,
    build_without_parameters,
    flops_per_token,
    load_weights,
    materialise,
    set_attention,
    use_kernels,
)


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A sharded model, with the facts of its construction. The values of its weights are undefined at first.

    Attributes:
        module: The root unit.
        units: The units but the root.
        shared_rows: This rank's rows of the head, with tensor parallelism; None without.
        pieces: This rank's pieces of sequences, with context parallelism; None without.
        spec: The transformers config of the model.
        pretrained: The folder of the run's first weights; None for fresh weights.
        seed: The seed of fresh weights.
        adapters: The adapters in the model; None without.
        matrices: The names of the matrices under Muon; none for other optimizers.
        replacements: The functions of transformers that kernels replaced, for the end of the run.
        flops_per_token: Floating-point operations of a token's forward and backward.
    """

    module: nn.Module
    units: Sequence[nn.Module]
    shared_rows: SharedRows | None
    pieces: SequencePieces | None
    spec: ModelSpec
    pretrained: Path | None
    seed: int
    adapters: RunAdapters | None
    matrices: frozenset[str]
    replacements: Replacements
    flops_per_token: float

    def initialise(self, device: torch.device) -> None:
        """Give the model the first weights of a new run.

        Args:
            device: The device of this rank.

        Raises:
            ConfigError: The folder's weights are not finite; on every rank.
            RuntimeError: A tensor has vanished from the folder of weights.

        Effects: collective for weights from a folder. Allocates one parameter at a time for fresh weights.
        """
        if self.pretrained is not None:
            load_weights(self.pretrained, self.module, self.spec, over=partial(self._with_adapters, prefix="model."))
            if nonfinite := find_nonfinite(self.module, of="weight"):
                raise ConfigError(
                    f"Expected finite weights in {str(self.pretrained)!r}, got {nonfinite[0].kind} in "
                    f"{nonfinite[0].name!r}. Copy or export them again."
                )
        else:
            # A rank draws a full copy of a parameter, and keeps a shard: equal on any number of ranks.
            weights = self._with_adapters(FreshWeights(self.spec, device, self.seed))
            fill(dict(self.module.named_parameters()), weights)

    def _with_adapters(self, source: Source, prefix: str = "") -> Source:
        return source if self.adapters is None else self.adapters.fresh(source, prefix)


def build(config: Config, folder: Path, device: torch.device, weights_dtype: torch.dtype = torch.float32) -> RunModel:
    """Build and shard the model of a run.

    Args:
        config: The run's settings.
        folder: The run's model folder, which holds the model's config.
        device: The device of this rank.
        weights_dtype: The dtype of the weights that the run starts from, in which frozen weights may rest.

    Effects: collective over all ranks. Allocates the shards alone. Kernels replace functions of transformers in the
        whole process until `replacements.undo()`; attention as `set_attention`.
    """
    spec = load_spec(str(folder))
    set_attention(spec, config.model.attention)
    module = build_without_parameters(spec, device)
    adapters = add_adapters(module, config.model, config.run.seed)
    patterns = trained_patterns(config)
    flops = flops_per_token(module, spec, config.data.sequence_length, lambda name: is_trained(name, patterns))
    replacements = use_kernels(module, config.model.kernels)
    matrices = matrices_for(config.optim, module)
    narrow_frozen(module, config, weights_dtype)
    units, shared_rows, pieces = shard(module, config.parallel, matrices)
    materialise(module, torch.device("cpu") if config.parallel.rest == "cpu" else device)
    module.to(device)  # Buffers; shards at rest on the CPU stay there.
    return RunModel(
        module=module,
        units=units,
        shared_rows=shared_rows,
        pieces=pieces,
        spec=spec,
        pretrained=pretrained_directory(config.model.name),
        seed=config.run.seed,
        adapters=adapters,
        matrices=matrices,
        replacements=replacements,
        flops_per_token=flops,
    )
