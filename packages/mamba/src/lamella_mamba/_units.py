"""The units of a Mamba2 model, and declarations for units smaller than a block.

Note [Why nothing smaller than a block]
    A unit's parameters are gathered when the unit's own forward is called. In training the mixer passes
    `conv1d.weight`, `conv1d.bias`, `norm.weight` and `out_proj.weight` to one fused kernel, and the forwards of the
    convolution, norm and projection never run; `A_log`, `D` and `dt_bias` are the mixer's own. The block reads the
    dtype of `norm.weight` before calling the norm. The block is therefore the smallest unit correct by itself. With
    smaller units, mixer and block must declare their reads: `declare_direct_reads`.
"""

from torch import nn

from lamella_engine import declare_reads

# Classes by name: the package then works without importing transformers, which a caller's model has imported already.
_UNIT_CLASSES = frozenset({"Mamba2Block"})

# Class -> parameters read without a call of their module.
_DIRECT_READS = {
    "Mamba2Mixer": ("conv1d.*", "norm.weight", "out_proj.*"),
    "Mamba2Block": ("norm.weight",),  # reads the dtype
}


def declare_direct_reads(model: nn.Module) -> None:
    """Declare the parameters that mixers and blocks of a transformers Mamba2 model read without calling their modules.

    Needed before `fully_shard` when units are smaller than blocks: convolutions, projections, byte budgets. See
    Note [Why nothing smaller than a block].

    Raises:
        ValueError: A module is in a unit already.

    Effects: attaches the declarations to the modules, see `lamella_engine.declare_reads`.
    """
    for module in model.modules():
        for cls in type(module).__mro__:
            if names := _DIRECT_READS.get(cls.__name__):
                declare_reads(module, *names)


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformers Mamba2 model, to shard in order.

    Shard the blocks, then the model itself, whose unit holds the embeddings, the last norm and the head.

    Raises:
        ValueError: The model has no Mamba2 blocks.
    """
    units = [module for module in model.modules() if _is_unit(module)]
    if not units:
        raise ValueError(f"Expected a Mamba2 model with blocks {sorted(_UNIT_CLASSES)}, got {type(model).__name__}.")
    return units


def _is_unit(module: nn.Module) -> bool:
    return any(cls.__name__ in _UNIT_CLASSES for cls in type(module).__mro__)
