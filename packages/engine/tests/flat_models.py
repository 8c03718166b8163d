"""Models in the flat layout, in which some of their parameters are cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from engine_models import Net, inputs, mean_square, shard
from torch import nn

from lamella_engine import RaggedDTensor, Rows, ShardingOptions
from lamella_engine.testing import named_units
from lamella_layout import FlatLayout, Keep

NEEDS_FLAT_LAYOUT = pytest.mark.usefixtures("small_parameters_are_cut")

X = inputs()
LOSS = mean_square(lambda model: model(X))


def matrices_only(parameter: nn.Parameter) -> Keep | None:
    return Rows(2) if parameter.ndim == 2 else None


def flat(keep: Any, *, placements: Any = None, **options: Any) -> Callable[[Net], Net]:
    """What shards a model so that `keep` stays together."""
    return partial(shard, options=ShardingOptions(keep_together=keep, placements=placements), **options)


def layouts_of(model: nn.Module) -> list[FlatLayout]:
    groups = [group for _, unit in named_units(model) for group in unit.parameters.groups]
    return [group.layout for group in groups if isinstance(group.layout, FlatLayout)]


def weight_of(model: nn.Module) -> RaggedDTensor:
    """One that is cut between two ranks."""
    parameter = model.get_parameter("layers.0.up.weight").detach()
    assert isinstance(parameter, RaggedDTensor)
    return parameter
