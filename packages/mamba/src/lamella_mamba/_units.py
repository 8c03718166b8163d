"""What `fully_shard` is called on.

Note [Why nothing smaller than a block]
    A unit's parameters are gathered when its own forward is called. In training the mixer hands `conv1d.weight`, its
    bias, `norm.weight` and `out_proj.weight` to one fused kernel, and the forwards of these children never run;
    `A_log`, `D` and `dt_bias` are the mixer's own. The block reads the dtype of its `norm.weight` before it calls the
    norm. So a child sharded by itself would give the kernel a shard, and the block is the smallest unit that is always
    right.
"""

from torch import nn

# By name: a model that exists has its classes imported, and this package then needs no transformers of its own.
_UNIT_CLASSES = frozenset({"Mamba2Block"})


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
