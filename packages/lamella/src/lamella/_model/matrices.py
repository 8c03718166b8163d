"""`--optimizer muon`: the matrices under Muon, and a layout with matrices whole on one rank."""

from collections.abc import Callable, Collection
from functools import cache
from math import prod
from typing import Final

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lamella._settings.options import ConfigError
from lamella._settings.sections import OptimConfig
from lamella_engine import Rows, Whole
from lamella_layout import FlatLayout
from lamella_precision import Float8Recipe, matrices_of
from lamella_transformers import sharding_units

MUON: Final = "muon"
MOST_PADDING: Final = 0.1
"""Of a layer cut by rows: so much more is gathered at most for whole matrices, which need no exchange in a step."""


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


def keep_whole(
    model: nn.Module, names: Collection[str], num_shards: int
) -> Callable[[nn.Parameter], Rows | Whole] | None:
    """Return a rule for `ShardingOptions(keep_together=...)`: named matrices whole, all other parameters by rows.

    The layers' largest matrices may be cut too, see `_keeps`. A stack of experts is cut between matrices. None without
    names: torch's chunks.

    Args:
        model: The model before sharding.
        names: The names of the matrices for Muon.
        num_shards: The ranks that share a layer.
    """
    if not names:
        return None
    matrices = {id(model.get_parameter(name)) for name in names}
    keeps = WeakIdKeyDictionary()  # A unit keeps the rule: it must keep no parameter alive.
    for unit in sharding_units(model):
        parameters = [p for p in unit.parameters() if p.ndim and not isinstance(p, DTensor)]
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        indices = (i for i, p in enumerate(parameters) if id(p) in matrices and p.ndim == 2)
        for parameter, keep in zip(parameters, _keeps(shapes, frozenset(indices), num_shards), strict=True):
            keeps[parameter] = keep

    def keep_of(parameter: nn.Parameter) -> Rows | Whole:
        keep: Rows | Whole = keeps[parameter] if parameter in keeps else Rows(1)
        return keep

    return keep_of


@cache  # A model's layers are mostly alike.
def _keeps(shapes: tuple[tuple[int, ...], ...], matrices: frozenset[int], num_shards: int) -> tuple[Rows | Whole, ...]:
    """Return the rules of a layer's parameters.

    All ranks' shares of a layer are as large as the largest share, so on more ranks than a layer has large matrices the
    padding of whole matrices outgrows the layer: a layer of a Llama of 8 billion is gathered in 2.15 times its size on
    8 ranks, and in 17 times on 64. Muon exchanges a cut matrix for two all-to-alls a step, of a rank's share of it.

    Args:
        shapes: The shapes of the layer's parameters.
        matrices: The indices of the matrices: the largest are cut until the padding is small.
        num_shards: The ranks that share the layer.
    """
    keeps: list[Rows | Whole] = [Whole() if index in matrices else Rows(1) for index in range(len(shapes))]
    most_numel = (1 + MOST_PADDING) * FlatLayout.build(shapes, num_shards).full_numel
    for index in sorted(matrices, key=lambda index: (-prod(shapes[index]), index)):
        if FlatLayout.build(shapes, num_shards, keep=keeps).full_numel <= most_numel:
            break
        keeps[index] = Rows(1)
    return tuple(keeps)
