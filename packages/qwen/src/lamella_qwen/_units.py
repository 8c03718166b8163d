"""What `fully_shard` is called on, and what has to be said for anything smaller.

Note [Why nothing smaller than a decoder layer]
    A unit's parameters are gathered when its own forward is called. The gated delta net takes `conv1d.weight` and hands
    it to a convolution kernel; the forward of `conv1d` never runs. A layer holds both. Where something smaller becomes
    a unit, the reader has to say so, as `declare_direct_reads` does; but a layer is as fine as communication needs.
"""

from torch import nn

from lamella_engine import declare_reads

# By name: a model that exists has its classes imported, and this package then needs no transformers of its own.
_UNIT_CLASSES = frozenset(
    {"Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer", "Qwen3_5VisionBlock", "Qwen3_5MoeVisionBlock"}
)

# What modules read without calling the modules that hold it.
_DIRECT_READS = {
    "Qwen3_5GatedDeltaNet": ("conv1d.*",),
    "Qwen3_5MoeGatedDeltaNet": ("conv1d.*",),
    "Qwen3_5VisionPatchEmbed": ("proj.weight",),  # its dtype
    "Qwen3_5MoeVisionPatchEmbed": ("proj.weight",),
}


def declare_direct_reads(model: nn.Module) -> None:
    """Declare what the modules of a transformers Qwen3.5 model read without calling the modules that hold it.

    Call it before `fully_shard` where units are smaller than the decoder layers: convolutions, byte budgets.

    Raises:
        ValueError: A module is in a unit already.

    Effects: notes on the modules.
    """
    for module in model.modules():
        for cls in type(module).__mro__:
            if names := _DIRECT_READS.get(cls.__name__):
                declare_reads(module, *names)


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
