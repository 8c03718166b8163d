"""`--attention`: the implementations that a machine and a model have."""

from dataclasses import replace
from typing import Final

import torch

from lamella._model.spec import load_spec, refused_models
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sections import Attention, ModelConfig, Packing, ParallelConfig
from lamella_transformers import ModelSpec
from lamella_transformers import check_attention as check_model_attention

_ANYWHERE: Final = ("auto", "eager", "sdpa")
_FLASH: Final = "flash_attention_"


def check_attention(model: ModelConfig, spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Refuse attention that the device, the dtype, the installed packages or the model's type has not.

    Raises:
        ConfigError: Names the option and the way out.
    """
    attention = model.attention
    problem = _problem(attention, parallel.device)
    if problem is None and attention not in (*_ANYWHERE, "flex_attention") and parallel.precision != "bf16":
        problem = f"Expected --precision bf16 for --attention {attention}, whose kernels take no {parallel.precision}"
    if problem is not None:
        raise ConfigError(f"{problem}. Pass --attention auto.")
    with refused_models():
        check_model_attention(spec, attention)


def with_default_attention(config: Config, model: str, packing: Packing) -> Config:
    """Return the settings of a run, with `documents` in the place of `auto` where its kernel was measured to be faster.

    The kernel is faster in packed documents on GPUs. A setting or a model that refuses `documents` keeps `auto`.

    Args:
        config: The run's settings, placed on this machine.
        model: The name or the folder of the model.
        packing: How the run's documents became sequences.

    Effects: reads the config of the model where documents are packed on a GPU.
    """
    if config.model.attention != "auto" or packing != "documents" or not _has_kernel(config.parallel.device):
        return config
    spec = load_spec(model)
    try:
        candidate = replace(config, model=replace(config.model, attention="documents"))
        check_attention(candidate.model, spec, candidate.parallel)
    except ConfigError:
        return config
    return candidate


def attention_lines(model: ModelConfig) -> list[str]:
    """Return the line on attention to print at the start; none for transformers' choice."""
    if model.attention == "auto":
        return []
    alternative = " (--attention sdpa: with masks)" if model.attention == "documents" else ""
    return [f"attention: {model.attention}{alternative}"]


def inference_attention(attention: Attention, device: str) -> Attention:
    """Return the attention of a trained model that generates or is evaluated, for the attention of its run.

    Args:
        attention: The attention of the run.
        device: "cpu" or "cuda".

    Returns:
        "auto" where the machine does not have the run's implementation, and in place of "documents": a prompt is one
        document, with a cache.
    """
    return "auto" if attention == "documents" or _problem(attention, device) is not None else attention


def _problem(attention: Attention, device: str) -> str | None:
    """Return why a machine does not have an implementation, without a way out; None if it does."""
    if attention in _ANYWHERE:
        return None
    if device != "cuda":
        return f"Expected --device cuda for --attention {attention}, got {device!r}"
    if attention.startswith(_FLASH) and not _has_flash(attention):
        version = attention.removeprefix(_FLASH)
        package = "flash-attn" if version == "2" else f"flash-attn-{version}"
        return f"Expected {package} to be installed for --attention {attention}, got none"
    return None


def _has_kernel(device: str | None) -> bool:
    """Return whether this rank's GPU runs torch's flash kernel."""
    return device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)


def _has_flash(attention: Attention) -> bool:
    # Not left to transformers: in place of an absent package it would fetch kernels from a hub.
    from transformers import utils

    is_available = getattr(utils, f"is_flash_attn_{attention.removeprefix(_FLASH)}_available", None)
    return is_available is not None and bool(is_available())
