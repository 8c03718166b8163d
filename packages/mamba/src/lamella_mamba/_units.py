"""What `fully_shard` is called on, and what has to be said for anything smaller.

Note [Why nothing smaller than a block]
    A unit's parameters are gathered when its own forward is called. In training the mixer hands `conv1d.weight`, its
    bias, `norm.weight` and `out_proj.weight` to one fused kernel, and the forwards of these children never run;
    `A_log`, `D` and `dt_bias` are the mixer's own. The block reads the dtype of its `norm.weight` before it calls the
    norm. So the block is the smallest unit that is right by itself. Where something smaller becomes a unit, the readers
    have to say what they read, which `declare_direct_reads` does.
"""

from torch import nn

from lamella_engine import declare_reads

# By name: a model that exists has its classes imported, and this package then needs no transformers of its own.
_UNIT_CLASSES = frozenset({"Mamba2Block"})

# What modules read without calling the modules that hold it.
_DIRECT_READS = {
    "Mamba2Mixer": ("conv1d.*", "norm.weight", "out_proj.*"),
    "Mamba2Block": ("norm.weight",),  # its dtype
}


def declare_direct_reads(model: nn.Module) -> None:
    """Declare what the modules of a transformers Mamba2 model read without calling the modules that hold it.

    Call it before `fully_shard` where units are smaller than the blocks: convolutions, projections, byte budgets.

    Raises:
        ValueError: A module is in a unit already.

    Effects: notes on the modules.
    """
    for module in model.modules():
        for cls in type(module).__mro__:
            if names := _DIRECT_READS.get(cls.__name__):
                declare_reads(module, *names)


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformers Mamba2 model, to shard in order.

    Shard these, then the model itself, which keeps the embeddings, the last norm and the head.

    Raises:
        ValueError: The model has none, so it is not a Mamba2.
    """
    units = [module for module in model.modules() if _is_unit(module)]
    if not units:
        raise ValueError(f"Expected a Mamba2 model with blocks {sorted(_UNIT_CLASSES)}, got {type(model).__name__}.")
    return units


def _is_unit(module: nn.Module) -> bool:
    return any(cls.__name__ in _UNIT_CLASSES for cls in type(module).__mro__)
