from collections.abc import Sequence

import pytest
import torch

from lamella_precision import PlainRecipe, Recipe
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
    PlainRecipe().encode([shard], [[shard]])
    assert shard._version == version


class _Forgetful(PlainRecipe):
    """Leaves out the last element."""

    def encode(self, shards: Columns, payloads: Sequence[Columns | None], weights: Columns = ()) -> None:
        super().encode([s[:-1] for s in shards], [ps and [p[:-1] for p in ps] for ps in payloads])


class _Copying(PlainRecipe):
    """Decodes to a copy, which a refill of the storage does not reach."""

    def decode(self, payloads: Columns, shape: torch.Size, main_weight: torch.Tensor | None = None) -> torch.Tensor:
        return super().decode(payloads, shape).clone()


class _Coarse(PlainRecipe):
    """Rounds more than it says."""

    def encode(self, shards: Columns, payloads: Sequence[Columns | None], weights: Columns = ()) -> None:
        super().encode([s.to(torch.float8_e4m3fn).to(s.dtype) for s in shards], payloads)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [(_Forgetful(), "every element"), (_Copying(), "share the payloads' storage"), (_Coarse(), "off by")],
)
def test_the_conformance_test_catches_a_broken_recipe(broken: Recipe, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_recipe(broken)
