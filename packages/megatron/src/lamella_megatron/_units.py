"""The units of megatron-core models. Imports megatron-core inside `sharding_units`, and nowhere else."""

import importlib

from torch import nn

_UNIT_CLASSES = {
    "TransformerLayer": "megatron.core.transformer.transformer_layer",
    "MambaLayer": "megatron.core.ssm.mamba_layer",
}


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a megatron-core model (GPTModel, MambaModel, HybridModel), to shard in order.

    Layers are the smallest correct units: the mixer of a Mamba layer passes the convolution's weight to a fused kernel
    without calling the convolution, and would read a shard of a convolution sharded by itself.

    Shard the layers, then the model itself, whose unit holds the embedding, the last norm and the output layer.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The model has no TransformerLayer or MambaLayer.
    """
    classes = _unit_classes()
    units = [module for module in model.modules() if isinstance(module, classes)]
    if not units:
        raise ValueError(
            f"Expected a megatron-core model with layers {sorted(_UNIT_CLASSES)}, got {type(model).__name__}."
        )
    return units


def _unit_classes() -> tuple[type[nn.Module], ...]:
    try:
        return tuple(getattr(importlib.import_module(module), name) for name, module in _UNIT_CLASSES.items())
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ImportError(
            "Expected megatron-core to be installed, got none. With Python 3.12 or newer install it from a clone: "
            "uv pip install './packages/megatron[mcore]'"
        ) from error
