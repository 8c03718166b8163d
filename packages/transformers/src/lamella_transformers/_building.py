"""Models of transformers, built from a config with or without memory for the weights."""

import torch
from torch import nn

from lamella_checkpoint import fill
from lamella_transformers._construction import ModelSpec, constructed
from lamella_transformers._fresh import FreshWeights


def build_model(spec: ModelSpec, device: torch.device, seed: int) -> nn.Module:
    """Build the causal language model of a config, fp32, with the weights of `FreshWeights`.

    Raises:
        ModelError: The conditions of `FreshWeights`.
    """
    model = build_without_parameters(spec, device)
    if device.type != "meta":
        materialise(model, device)
        fill(dict(model.named_parameters()), FreshWeights(spec, device, seed))
    return model


def build_without_parameters(spec: ModelSpec, device: torch.device) -> nn.Module:
    """Build the model of a config with parameters on the meta device, for weights to be read into its shards.

    Buffers are as built, rotary tables too, which no checkpoint holds.
    """
    model, _ = constructed(spec, device)
    return model


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate the shards of a model without memory, with undefined values. Buffers and ties stay."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    slots = [
        (module, name, id(parameter))
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    model.to_empty(device=device)
    first: dict[int, nn.Parameter | None] = {}
    for module, name, origin in slots:
        module._parameters[name] = first.setdefault(origin, module._parameters[name])
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
