"""Models of transformers: built from a config, with or without memory for the weights, and refused unless causal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from lamella_transformers._errors import ModelError, in_short
from lamella_transformers._units import sharding_units


class ModelSpec(Protocol):
    """The attributes and methods used of a transformers config."""

    model_type: str
    vocab_size: int

    def to_dict(self) -> dict[str, object]: ...
    def to_json_file(self, json_file_path: Path, use_diff: bool) -> None: ...


def build_model(spec: ModelSpec, device: torch.device, seed: int) -> nn.Module:
    """Build the causal language model of a config, fp32, with weights that follow from `seed` alone.

    Every rank builds the whole model and keeps its shards, so the weights do not depend on the number of ranks.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(spec)  # type: ignore[no-untyped-call]
        return cast(nn.Module, model).train()


def outline(spec: ModelSpec) -> nn.Module:
    """Build the model of a config without memory for its weights: a trial before a run.

    Raises:
        ModelError: transformers cannot build the model, the model names no layers, or positions see the tokens that
            they predict. Names the model type and the reason.
    """
    try:
        model = build_model(spec, torch.device("meta"), seed=0)
    except Exception as error:
        raise ModelError(
            f"Expected a causal language model that transformers can build, got {spec.model_type!r}: {in_short(error)}"
        ) from error
    _check_causal(model, spec)
    sharding_units(model)
    return model


def _check_causal(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a model that was built to fill in words: trained on the next token, it would read that token."""
    is_causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if is_causal and not any(is_causal):
        way_out = ' Set "is_decoder": true in its config.' if hasattr(spec, "is_decoder") else ""
        raise ModelError(
            f"Expected a causal language model, got {spec.model_type!r}, each of whose positions sees all others."
            f"{way_out}"
        )


def build_without_parameters(spec: ModelSpec, device: torch.device) -> nn.Module:
    """Build the model of a config with parameters on the meta device, for weights to be read into its shards.

    Buffers are as built: `torch.device("meta")` alone would lose rotary tables, which no checkpoint holds.
    """
    with _parameters_on_meta():
        return build_model(spec, device, seed=0)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    setattr(nn.Module, "register_parameter", register_on_meta)  # noqa: B010  Types do not let methods be assigned.
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate the shards of a model without memory, with undefined values. Buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
