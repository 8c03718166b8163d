"""`install`: programs of `megatron.training` with `--use-megatron-fsdp` train on lamella."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from lamella_engine.extending import Installation

_OURS: Final = "lamella_megatron._megatron_lm"


def install() -> Installation:
    """Put lamella in Megatron-FSDP's place in this process: a program of Megatron-LM trains on lamella.

        lamella_megatron.install()
        pretrain(...)     # with --use-megatron-fsdp --ckpt-format fsdp_dtensor

    The wrapper (`FullyShardedDataParallel`), `get_megatron_optimizer`, the norm of `--log-params-norm`, and the parts
    of `megatron.training.checkpointing` that know Megatron-FSDP are replaced in the globals of all modules, under any
    name. A model in another wrapper is left to megatron: each function asks for the model first. Gradients are
    finalised by megatron's own function, which reads lamella's shards as they are, and nothing is copied between model
    and main weights, which are the same.

    Returns:
        The installation, which lists the names; `undo()`, or the end of a `with` statement, gives the names back to
        megatron. A second call replaces nothing, and undoing the second changes nothing.

    Raises:
        ImportError: megatron-core is not installed, or without `megatron.training`.

    Effects: imports `megatron.training`; none beyond this process. Call on every rank, before `pretrain`.

    Source: `megatron.training` of megatron-core 0.19.2.
    """
    return Installation(_stand_ins().PAIRS, keeps=_is_ours)


def _stand_ins() -> ModuleType:
    """The module that pairs megatron's names with lamella's; `lamella_megatron` itself imports no megatron."""
    try:
        return importlib.import_module(f"{_OURS}.stand_ins")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ImportError(
            f"Expected megatron-core 0.19.2 with its `megatron.training`, got no module {error.name!r}. Install "
            "lamella-megatron[mcore]."
        ) from error


def _is_ours(module: ModuleType, _: object) -> bool:
    """Whether the module belongs to lamella's stand-ins, which call megatron's functions by name."""
    return getattr(module, "__name__", "").startswith(_OURS)
