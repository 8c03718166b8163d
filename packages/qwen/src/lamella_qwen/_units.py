"""The units of Qwen3.5 models, and the declarations for smaller units.

Note [Why nothing smaller than a decoder layer]
    A unit's parameters are gathered when the unit's forward is called. The gated delta net passes `conv1d.weight` to a
    convolution kernel; the forward of `conv1d` never runs. A layer holds both modules. A convolution in a smaller unit
    needs a declaration by its reader (`declare_direct_reads`); a layer is as fine as communication needs.
"""

from torch import nn

from lamella_engine import declare_reads

# By name: an existing model has its classes imported, and the package needs no transformers.
_UNIT_CLASSES = frozenset(
    {"Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer", "Qwen3_5VisionBlock", "Qwen3_5MoeVisionBlock"}
)

# Parameters read without a call of the module around them, by the reading class.
_DIRECT_READS = {
    "Qwen3_5GatedDeltaNet": ("conv1d.*",),
    "Qwen3_5MoeGatedDeltaNet": ("conv1d.*",),
    "Qwen3_5VisionPatchEmbed": ("proj.weight",),  # the dtype alone
    "Qwen3_5MoeVisionPatchEmbed": ("proj.weight",),
}


def declare_direct_reads(model: nn.Module) -> None:
    """Declare the parameters of a transformers Qwen3.5 model that are read without a call of their module.

    Needed before `fully_shard` for units smaller than decoder layers: convolutions, byte budgets.

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

    The model is the outermost unit, with the embeddings, the last norm and the head.

    Raises:
        ValueError: The model has no such modules: no Qwen3.5.
    """
    units = [module for module in model.modules() if _is_unit(module)]
    if not units:
        raise ValueError(f"Expected a Qwen3.5 model with layers {sorted(_UNIT_CLASSES)}, got {type(model).__name__}.")
    return units


def _is_unit(module: nn.Module) -> bool:
    return any(cls.__name__ in _UNIT_CLASSES for cls in type(module).__mro__)
