"""Weights that a run starts from: the safetensors of a Hugging Face directory, read straight into shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from lamella._options import ConfigError
from lamella_checkpoint import CheckpointDamaged, Rules, check_safetensors, find_family, load_safetensors

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_NUM_NAMED = 3


def pretrained_directory(name: str) -> Path | None:
    """The directory with weights that `--model` names; None for a config alone, and for models that ship."""
    directory = Path(name)
    return directory if any((directory / file).is_file() for file in _WEIGHTS) else None


def check_weights(directory: Path, outline: nn.Module, model_type: str) -> str:
    """Refuse weights that are not all of the model's, before anything starts.

    Args:
        outline: The model, on the meta device.

    Returns:
        What the run leaves alone of them, in words.

    Raises:
        ConfigError: A tensor is absent or of another shape, or a file is damaged; it is named.
    """
    try:
        found = check_safetensors(directory, model=outline, rules=_rules(model_type))
    except (CheckpointDamaged, ValueError) as error:
        raise ConfigError(f"{error}") from error
    unfit = [each for each in found.names if each.live is not None]
    if unfit:
        first = "; ".join(map(str, unfit[:_NUM_NAMED]))
        more = f"; and {len(unfit) - _NUM_NAMED} more" if len(unfit) > _NUM_NAMED else ""
        raise ConfigError(f"Expected the weights in {str(directory)!r} to be the model's, got {first}{more}.")
    unused = [name.removeprefix("model.") for name in found.unexpected]
    if not unused:
        return f"weights: {directory}"
    return f"weights: {directory}; {len(unused)} tensors stay unused: {', '.join(islice(unused, _NUM_NAMED))}, ..."


def load_weights(directory: Path, model: nn.Module, model_type: str) -> None:
    """Read the weights into a model that `check_weights` has been asked about. Effects: collective."""
    load_safetensors(directory, model=model, rules=_rules(model_type), strict=False)


def _rules(model_type: str) -> Rules:
    family = find_family(model_type)
    return Rules(()) if family is None else family.text_modules


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built here have no memory for their parameters; their buffers (rotary tables) are as built.

    With `torch.device("meta")` instead the buffers would be lost, and those that no checkpoint holds with them.
    """
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
    """Give the shards of a model without memory theirs; what is in it is undefined. Buffers keep their values."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
