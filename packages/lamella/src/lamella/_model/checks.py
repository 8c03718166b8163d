"""The checks of a model before a run: its config, the folder of its weights, and the machine's memory and tools."""

import copy
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lamella._model.activations import check_recompute
from lamella._model.attention import check_attention
from lamella._model.compilation import check_compiler
from lamella._model.float8 import check_float8
from lamella._model.kernels import check_kernels
from lamella._model.lora import add_adapters, check_peft
from lamella._model.spec import check_context, load_spec, outline, refused_models
from lamella._model.tuned_functions import check_tuned_functions
from lamella._model.weights import pretrained_directory
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sections import ParallelConfig
from lamella_transformers import (
    FreshWeights,
    ModelError,
    ModelSpec,
    UnitChoice,
    balance_coefficient,
    check_sequences,
    check_tensor_parallel,
    choose_units,
)
from lamella_transformers.experts import check_spread


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """A model that a run can train.

    Attributes:
        pretrained: The folder of the weights to start from; None for fresh weights.
        spec: The config of the model.
        outline: The model on the meta device, without adapters.
        checkpointed: The model on the meta device as checkpoints hold it, with adapters.
        units: The choice of modules to shard one by one.
    """

    pretrained: Path | None
    spec: ModelSpec
    outline: nn.Module
    checkpointed: nn.Module
    units: UnitChoice

    def describe(self) -> str:
        """Return one line on the size of the model, and on units chosen without an adapter's or transformers' names."""
        num_parameters = sum(parameter.numel() for parameter in self.outline.parameters())
        units = (
            "" if self.units.note is None else f"; its units are {self.units.note}, which transformers does not name"
        )
        return f"model: {num_parameters:,} parameters, {self.spec.vocab_size:,} tokens{units}"


def check_model(config: Config, *, has_checkpoint: bool) -> CheckedModel:
    """Check the model of a run, and the machine's memory and tools.

    Args:
        config: The run's settings.
        has_checkpoint: The run goes on from a checkpoint, and draws no fresh weights.

    Raises:
        ConfigError: The settings cannot be met.

    Effects: reads the config of the model.
    """
    pretrained = pretrained_directory(config.model.name)
    _check_vocabulary(config, pretrained)
    spec = load_spec(config.model.name, config.data.vocab_size)
    check_context(spec, config.data.sequence_length)
    check_peft(config.model)
    model = outline(spec)
    checkpointed = model if config.model.lora_rank is None else copy.deepcopy(model)
    add_adapters(checkpointed, config.model, config.run.seed)
    if pretrained is None and not has_checkpoint:
        _check_memory(checkpointed, config.parallel)
        with refused_models():
            FreshWeights(spec, torch.device("cpu"), config.run.seed)
    _check_experts(model, config.parallel)
    check_neighbours(model, spec, config.parallel)
    units = choose_units(model)
    check_recompute(units.modules, config.parallel)
    check_float8(units.modules, config.parallel)
    check_kernels(config.model, spec.model_type, config.parallel)
    check_tuned_functions(config.run, model)
    check_attention(config.model, spec, config.parallel)
    check_compiler(config.parallel)
    return CheckedModel(pretrained=pretrained, spec=spec, outline=model, checkpointed=checkpointed, units=units)


def _check_vocabulary(config: Config, pretrained: Path | None) -> None:
    if pretrained is not None and config.data.vocab_size is not None:
        raise ConfigError(
            f"Expected no --vocab-size with the weights in {str(pretrained)!r}, which have their own vocabulary, got "
            f"{config.data.vocab_size}."
        )


def _check_experts(model: nn.Module, parallel: ParallelConfig) -> None:
    """Refuse --experts without experts, for unknown families, and for numbers of experts that it does not divide."""
    if parallel.experts == 1:
        return
    try:
        check_spread(model, parallel.experts)
    except ValueError as error:
        raise ConfigError(
            f"{str(error).partition('. ')[0]}, with --experts {parallel.experts}. Pass another --experts, or leave it "
            "out."
        ) from error


def check_neighbours(model: nn.Module, spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Refuse a model whose layers or sequences cannot be cut as the settings say.

    Args:
        model: On the meta device, without adapters.
        spec: The config of the model.
        parallel: The settings of sharding.

    Raises:
        ConfigError: Names the option.
    """
    _check_tensor_parallel(model, parallel)
    _check_context_parallel(model, spec, parallel)


def _check_tensor_parallel(model: nn.Module, parallel: ParallelConfig) -> None:
    """Refuse --tensor-parallel for models without a plan, and for sizes that it does not divide."""
    if parallel.tensor_parallel == 1:
        return
    try:
        check_tensor_parallel(model, parallel.tensor_parallel)
    except ModelError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}, with --tensor-parallel {parallel.tensor_parallel}. Pass another "
            "--tensor-parallel, or leave it out."
        ) from error


def _check_context_parallel(model: nn.Module, spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Refuse --context-parallel for models whose tokens meet outside plain attention."""
    if parallel.context_parallel == 1:
        return
    try:
        check_sequences(model)
    except ModelError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}, with --context-parallel {parallel.context_parallel}. Leave it out."
        ) from error
    if balance_coefficient(spec) and getattr(spec, "output_router_logits", False):
        raise ConfigError(
            f"Expected --context-parallel {parallel.context_parallel} without a loss that balances experts over whole "
            'sequences, got one. Leave it out, or set "output_router_logits": false in the model\'s config.'
        )


def _check_memory(model: nn.Module, parallel: ParallelConfig) -> None:
    """Refuse a model whose shards, with one fresh parameter during its drawing, exceed the memory of a rank."""
    nbytes = [parameter.numel() * torch.float32.itemsize for parameter in model.parameters()]
    num_ranks = parallel.ranks or 1
    needed = math.ceil(sum(nbytes) / num_ranks) + max(nbytes, default=0)
    place = "a GPU" if parallel.device == "cuda" else "this machine"
    if parallel.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"Expected a model whose fresh weights fit into the memory of {place}, {memory / 2**30:,.0f} GiB, got "
            f"{needed / 2**30:,.0f} GiB on {num_ranks} ranks, with one parameter unsharded. Pass a smaller --model or "
            "more --ranks."
        )
