"""`--lora-rank`: the adapters of a run, and the model that they are put into."""

from dataclasses import dataclass, replace

from torch import nn

from lamella._model.spec import refused_models
from lamella._settings.options import ConfigError
from lamella._settings.sections import ModelConfig
from lamella_checkpoint import Source
from lamella_transformers import FreshLora, LoraSettings, MergedLora, add_lora, has_peft

ADAPTERS: tuple[str, ...] = ("*.lora_*",)
"""Patterns of the names of adapters' parameters."""


@dataclass(frozen=True, kw_only=True)
class RunAdapters:
    """The adapters in a run's model.

    Attributes:
        settings: The sizes of the adapters.
        layers: The names of the layers that have adapters.
        seed: The seed of fresh adapters.
    """

    settings: LoraSettings
    layers: tuple[str, ...]
    seed: int

    def fresh(self, source: Source, prefix: str = "") -> Source:
        """Return the weights that a run starts from, with fresh adapters."""
        return FreshLora(source, self.layers, self.settings, self.seed, prefix)


def lora_settings(model: ModelConfig) -> LoraSettings | None:
    """Return the settings of the adapters; None for a model without adapters."""
    if model.lora_rank is None:
        return None
    alpha = lora_alpha(model.lora_rank, model.lora_alpha)
    settings = LoraSettings(rank=model.lora_rank, alpha=alpha, dora=model.dora)
    return replace(settings, targets=model.lora_targets) if model.lora_targets else settings


def lora_alpha(rank: int, alpha: float | None) -> float:
    """Return `--lora-alpha`, which is twice `--lora-rank` where it is not passed."""
    return alpha or 2 * rank


def check_peft(model: ModelConfig) -> None:
    """Refuse adapters where peft is not installed.

    Raises:
        ConfigError: Names the extra.
    """
    if model.lora_rank is not None and not has_peft():
        raise ConfigError(
            f"Expected peft to be installed for adapters (--lora-rank {model.lora_rank}), got none. Install it from a "
            "clone: uv pip install './packages/lamella[lora]'"
        )


def add_adapters(module: nn.Module, model: ModelConfig, seed: int) -> RunAdapters | None:
    """Put the adapters of a run into its model, before the model is sharded; None without adapters.

    Raises:
        ConfigError: `--lora-targets` matches no linear layer.
    """
    settings = lora_settings(model)
    if settings is None:
        return None
    with refused_models():
        layers = add_lora(module, settings)
    return RunAdapters(settings=settings, layers=tuple(layers), seed=seed)


def merged(source: Source, model: ModelConfig) -> Source:
    """Return the weights of a run's checkpoint, with adapters merged into their layers."""
    settings = lora_settings(model)
    return source if settings is None else MergedLora(source, settings)
