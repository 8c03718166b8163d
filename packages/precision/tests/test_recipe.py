from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lamella_precision import Float8Recipe, PlainRecipe, Recipe, WeightRows
from lamella_precision.testing import check_recipe

Columns = Sequence[torch.Tensor]


@pytest.mark.parametrize("compute_dtype", [None, torch.float32, torch.bfloat16])
def test_the_plain_recipe_conforms(compute_dtype: torch.dtype | None) -> None:
    recipe = PlainRecipe(compute_dtype)
    assert isinstance(recipe, Recipe)
    check_recipe(recipe)


def test_a_destination_that_is_its_shard_is_left_alone() -> None:
    shard = torch.randn(8)
    version = shard._version
    PlainRecipe().encode(*PlainRecipe().columns([shard], [[shard]]))
    assert shard._version == version


class _Forgetful(PlainRecipe):
    """Leaves out the last element."""

    def encode(self, *columns: Columns | None) -> None:
        super().encode(*[column and [tensor[:-1] for tensor in column] for column in columns])


class _Copying(PlainRecipe):
    """Decodes to a copy, which a refill of the storage does not reach."""

    def decode(self, payloads: Columns, shape: torch.Size, scales: torch.Tensor | None = None) -> torch.Tensor:
        return super().decode(payloads, shape).clone()


class _Coarse(PlainRecipe):
    """Rounds more than it says."""

    def encode(self, *columns: Columns | None) -> None:
        into, shards = columns
        super().encode(into, shards and [s.to(torch.float8_e4m3fn).to(s.dtype) for s in shards])


class _Local(Float8Recipe):
    """Measures each shard alone, and forgets the rows before."""

    def measure_columns(self, shards: Columns, weight_rows: Sequence[WeightRows]) -> tuple[Sequence[Any]]:
        moved = [rows._replace(first_row=0) for rows in weight_rows]
        return super().measure_columns(shards, moved)


class _Apart(Float8Recipe):
    """Lets scales of blocks be cut."""

    def divides_at(self, shape: Sequence[int], row: int) -> bool:
        return True


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (_Forgetful(), "every element"),
        (_Copying(), "share the payloads' storage"),
        (_Coarse(), "off by"),
        (_Local((1, None)), "scales of the whole"),
        (_Apart((2, 2)), "cut at row 1 must be encoded as in the whole"),
    ],
)
def test_the_conformance_test_catches_a_broken_recipe(broken: Recipe, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_recipe(broken)
