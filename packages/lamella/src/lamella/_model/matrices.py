"""`--optimizer muon`: the matrices under Muon, and a layout with each matrix whole on one rank."""

from collections.abc import Callable, Collection
from typing import Final

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lamella._settings.options import ConfigError
from lamella._settings.sections import OptimConfig
from lamella_engine import Rows, Whole
from lamella_precision import Float8Recipe, matrices_of
from lamella_transformers import sharding_units

MUON: Final = "muon"


def matrices_for(optim: OptimConfig, model: nn.Module) -> frozenset[str]:
    """Return the names of the matrices under a run's Muon; none for another optimizer.

    Raises:
        ConfigError: The conditions of `muon_matrices`.
    """
    return muon_matrices(model) if optim.optimizer == MUON else frozenset()


def muon_matrices(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters for Muon: the matrices of the layers' products, and stacks of experts.

    All others are AdamW's: embeddings, the head, norms, biases, routers, convolutions and matrices of another use
    (Mamba's `A_log`).

    Args:
        model: The model before sharding.

    Raises:
        ConfigError: The layers have no such matrix.
    """
    try:  # The choice of `--float8`, by a recipe without parameters.
        choose = matrices_of(sharding_units(model), Float8Recipe())
    except ValueError as error:
        raise ConfigError(
            "Expected matrices in the model's layers for --optimizer muon, got none. Pass --optimizer adamw."
        ) from error
    return frozenset(name for name, parameter in model.named_parameters() if choose(parameter) is not None)


def keep_whole(model: nn.Module, names: Collection[str]) -> Callable[[nn.Parameter], Rows | Whole] | None:
    """Return a rule for `ShardingOptions(keep_together=...)`: named matrices whole, all others by rows.

    A stack of experts is cut between matrices. None without names: torch's chunks.
    """
    if not names:
        return None
    matrices = WeakIdKeyDictionary()  # A unit keeps the rule: it must keep no parameter alive.
    for name in names:
        matrices[model.get_parameter(name)] = None

    def keep(parameter: nn.Parameter) -> Rows | Whole:
        return Whole() if parameter.ndim == 2 and parameter in matrices else Rows(1)

    return keep
