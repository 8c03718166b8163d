"""The units of a Mamba model, and declarations for units smaller than a block.

Note [Why nothing smaller than a block]
    A unit's parameters are gathered when the unit's own forward is called. In training a mixer passes `conv1d.weight`,
    `conv1d.bias`, `norm.weight` and `out_proj.weight` to one fused kernel, and the forwards of the convolution, norm
    and projection never run; `A_log`, `D` and `dt_bias` are the mixer's own. Some blocks read the dtype of
    `norm.weight` before calling the norm, or fuse the norm with the residual addition. The block is therefore the
    smallest unit correct by itself. With smaller units, mixer and block must declare their reads:
    `declare_direct_reads`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lamella_engine import FSDPModule, declare_reads
from lamella_engine.extending import VendorVersions
from lamella_mamba._families import TABLE

KERNELS = (
    VendorVersions(distribution="mamba-ssm", floor="2.3.2", ceiling="2.4", extra="lamella-mamba[ssm]"),
    VendorVersions(distribution="causal-conv1d", floor="1.7", ceiling="1.8", extra="lamella-mamba[ssm]"),
)


def declare_direct_reads(model: nn.Module) -> None:
    """Declare the parameters that mixers and blocks of a Mamba model read without calling their modules.

    Needed before `fully_shard` when units are smaller than blocks: convolutions, projections, byte budgets. See
    Note [Why nothing smaller than a block]. Other modules are passed over.

    Raises:
        ImportError: The model is mamba-ssm's, and mamba-ssm or causal-conv1d is older than the tested versions.
        ValueError: A module is in a unit already.

    Effects: attaches the declarations to the modules, see `lamella_engine.declare_reads`.
    """
    _check_kernels(model)
    for module in model.modules():
        children = [name for row in TABLE if row.matches(module) for name in row.reads]
        # Options leave children out (a norm, the convolution of attention), and declare_reads refuses missing names.
        if names := [f"{name}.*" for name in dict.fromkeys(children) if _has_parameters(module, name)]:
            declare_reads(module, *names)


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a Mamba or hybrid model, to shard in order: blocks inside others first.

    Shard the blocks, then the model itself, whose unit holds the embeddings, the last norm and the head. A block that
    the model calls in several places is a single unit, gathered for each call.

    Raises:
        ImportError: The model is mamba-ssm's, and mamba-ssm or causal-conv1d is older than the tested versions.
        ValueError: The model has no blocks of a known family; or blocks in several places are separate modules with
            the same Parameters, which no unit can gather for a single call (`join_tied_blocks`).
    """
    _check_kernels(model)
    units = [module for module in _inner_first(model, set()) if _is_unit(module)]
    if not units:
        class_names = [row.class_name for row in TABLE if row.is_unit]
        raise ValueError(
            f"Expected a Mamba model with blocks among {class_names}, got {type(model).__name__}. Choose the units of "
            "other models by lamella_engine.fully_shard_model(model, units=...)."
        )
    for name, other, _ in _tied_copies(model):
        raise ValueError(
            f"Expected one module for the parameters of {name!r} and {other!r}, got two. Call "
            "lamella_mamba.join_tied_blocks(model) first."
        )
    return units


def join_tied_blocks(model: nn.Module) -> list[str]:
    """Put one module in all places of a block whose copies hold the same Parameters.

    Zamba and Zamba2 call a transformer block in several places. transformers builds a module for each place and ties
    the modules' parameters afterwards. A parameter is in one unit only, so such copies cannot be units; a single module
    can. The results of the model and the names in its state dict stay.

    Args:
        model: Changed in place. Call before `fully_shard`, and after weights were loaded and tied.

    Returns:
        The names of the places with another place's module now; empty for other families.

    Raises:
        ValueError: The model has copies, and is sharded already.

    Effects: none on parameters.
    """
    copies = list(_tied_copies(model))
    unit = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if copies and unit is not None:
        raise ValueError(
            f"Expected a model before fully_shard, got one with a unit at {unit!r} and copies of a block at "
            f"{copies[0][0]!r}: units would go on with the copies' modules. Join the blocks first."
        )
    for name, _, shared_block in copies:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, shared_block)
    return [name for name, _, _ in copies]


def _check_kernels(model: nn.Module) -> None:
    """For a model of mamba-ssm's classes, hold mamba-ssm and its kernels against the tested versions."""
    if any(type(module).__module__.partition(".")[0] == "mamba_ssm" for module in model.modules()):
        for versions in KERNELS:
            versions.check()


def _tied_copies(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Places of modules with the Parameters of a module in an earlier place: both names, and the earlier module."""
    first: dict[tuple[int, ...], tuple[str, nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not any(row.is_shared and row.matches(module) for row in TABLE):
            continue
        if parameters := tuple(id(parameter) for parameter in module.parameters()):
            other, shared_block = first.setdefault(parameters, (name, module))
            if shared_block is not module:
                yield name, other, shared_block


def _inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """A module and all below, each once; children before the module that holds them."""
    for child in module.children():
        if id(child) not in seen:
            seen.add(id(child))
            yield from _inner_first(child, seen)
    yield module


def _is_unit(module: nn.Module) -> bool:
    return any(row.is_unit and row.matches(module) for row in TABLE)


def _has_parameters(module: nn.Module, child: str) -> bool:
    submodule = getattr(module, child, None)
    return isinstance(submodule, nn.Module) and next(submodule.parameters(), None) is not None
