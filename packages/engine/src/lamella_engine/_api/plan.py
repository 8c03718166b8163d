"""A plan of units, written down before sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from lamella_engine._common.text import range_text, size_text, table
from lamella_layout import EvenLayout

_NUMBERS = ("parameters", "unsharded", "a rank")


class PlannedParameter(NamedTuple):
    """One parameter of a planned unit.

    Attributes:
        name: Below the unit.
        shape: The whole parameter's shape; the shape of this rank's part, if the parameter comes as a DTensor on other
            axes.
        main_dtype: At rest.
        compute_dtype: The parameter's dtype in compute.
        unsharded_nbytes: Bytes of the gathered parameter, in its recipe's format, and of the parameter's caches.
    """

    name: str
    shape: tuple[int, ...]
    main_dtype: torch.dtype
    compute_dtype: torch.dtype
    unsharded_nbytes: int


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """A planned unit: a module for `fully_shard`.

    Attributes:
        name: The module's name in the model; "" is the model itself.
        class_name: The name of the module's class.
        parameters: The parameters of the unit, each once.
    """

    name: str
    class_name: str
    parameters: tuple[PlannedParameter, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters, without padding."""
        return sum(parameter.unsharded_nbytes for parameter in self.parameters)

    def shard_nbytes(self, num_ranks: int) -> int:
        """Bytes of rank 0's shards, the largest of all ranks, in their main dtypes, without padding."""
        layout = EvenLayout.build([parameter.shape or (1,) for parameter in self.parameters], num_ranks)
        itemsizes = [parameter.main_dtype.itemsize for parameter in self.parameters]
        return sum(layout.slot_numel(i) * itemsize for i, itemsize in enumerate(itemsizes))


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The units of a model under `fully_shard_model`, for `print`.

    Attributes:
        units: Planned units in the order of sharding; the model itself is the last.
        notes: Departures of the plan from the request, with reasons.
        num_ranks: The number of ranks with shares of each parameter; None if unknown.
    """

    units: tuple[PlannedUnit, ...]
    notes: tuple[str, ...] = ()
    num_ranks: int | None = None

    def __str__(self) -> str:
        """A table of units, equal units in one row; numbers are for one unit, in the last row for the whole model."""
        header = ("unit", "class", *_NUMBERS)
        rows = [header, *self._rows()]
        if self.num_ranks is None:
            rows = [row[:-1] for row in rows]
        return "\n".join([table(rows, right=_NUMBERS), *(f"Note: {note}" for note in self.notes)])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        alike: dict[tuple[object, ...], list[PlannedUnit]] = {}
        for unit in self.units:
            alike.setdefault((unit.name == "", unit.class_name, unit.parameters), []).append(unit)
        for units in alike.values():
            names = [unit.name or "(the model)" for unit in units]
            count = f"{len(units)} x " if len(units) > 1 else ""
            yield (range_text(names), f"{count}{units[0].class_name}", *self._numbers(units[:1]))
        yield ("all", f"{len(self.units)} unit{'s' * (len(self.units) != 1)}", *self._numbers(self.units))

    def _numbers(self, units: tuple[PlannedUnit, ...] | list[PlannedUnit]) -> Iterator[str]:
        yield f"{sum(unit.numel for unit in units):,}"
        yield size_text(sum(unit.unsharded_nbytes for unit in units))
        yield size_text(sum(unit.shard_nbytes(self.num_ranks or 1) for unit in units))
