"""What `fully_shard` is called on.

Note [Why nothing smaller than a decoder layer]
    A unit's parameters are gathered when its own forward is called. The gated delta net takes `conv1d.weight` and hands
    it to a convolution kernel; the forward of `conv1d` never runs. Sharded by itself, the convolution would give
    the kernel a shard. The mixer inside the layer would do as a unit, but the layer is as fine as communication needs.
"""

from torch import nn

# By name: a model that exists has its classes imported, and this package then needs no transformers of its own.
_UNIT_CLASSES = frozenset(
    {"Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer", "Qwen3_5VisionBlock", "Qwen3_5MoeVisionBlock"}
)


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """The modules of a transformers Qwen3.5 model (dense or mixture of experts, text or vision) to shard, in order.

    Shard these, then the model itself, which keeps the embeddings, the last norm and the head.

    Raises:
        ValueError: The model has none, so it is not a Qwen3.5.
    """
    units = [module for module in model.modules() if _is_unit(module)]
    if not units:
        raise ValueError(f"Expected a Qwen3.5 model with layers {sorted(_UNIT_CLASSES)}, got {type(model).__name__}.")
    return units


def _is_unit(module: nn.Module) -> bool:
    return any(cls.__name__ in _UNIT_CLASSES for cls in type(module).__mro__)
