"""The conformance test of the recipe protocol: run it against your own recipe."""

from __future__ import annotations

from itertools import chain

import torch

from lamella_precision._recipe import Recipe


def check_recipe(
    recipe: Recipe,
    *,
    main_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    relative_error: float = 2**-8,
) -> None:
    """Assert what an engine relies on in a recipe.

    Encoding shard by shard and gathering equals encoding the whole; decoding gives the weight back to within the
    format; the decoded tensor follows its payloads' storage when that is refilled; encoding writes every element of
    its destination and leaves the shard alone.

    Args:
        recipe: What to test.
        main_dtype: Dtype of the main weights.
        device: Where to test.
        relative_error: The format's largest relative rounding error (half a unit in the last place of bf16
            by default).

    Raises:
        AssertionError: A property does not hold; the message says which.
    """
    rows, columns, num_shards = 4 * recipe.block_rows, 24, 2
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32).to(main_dtype)
    shards = list(weight.view(-1).chunk(num_shards))
    before = weight.clone()

    dtypes = recipe.payload_dtypes(main_dtype)
    assert dtypes, "a recipe must name at least one payload"
    whole = _encoded(recipe, [weight.view(-1)], dtypes)
    parts = _encoded(recipe, shards, dtypes)
    assert torch.equal(weight, before), "`encode` must not write the main weight"
    gathered = [torch.cat(pieces) for pieces in parts]
    for (one,), joined in zip(whole, gathered, strict=True):
        assert torch.equal(one, joined), "encoding shards must equal encoding the whole tensor"

    decoded = recipe.decode(gathered, weight.shape)
    assert decoded.shape == weight.shape, f"`decode` must give {tuple(weight.shape)}, gave {tuple(decoded.shape)}"
    error = (decoded.double() - weight.double()).abs() / weight.double().abs().clamp_min(1e-6)
    assert error.max().item() <= relative_error, f"decoded weight is off by {error.max().item():.3g} relative"

    for joined in gathered:
        joined.zero_()
    assert not decoded.double().any(), "`decode` must share the payloads' storage, so that a refill is seen"


def _encoded(recipe: Recipe, shards: list[torch.Tensor], dtypes: tuple[torch.dtype, ...]) -> list[list[torch.Tensor]]:
    found, again = (
        [[torch.full_like(shard, before, dtype=dtype) for shard in shards] for dtype in dtypes] for before in (1, 2)
    )
    recipe.encode(shards, found)
    recipe.encode(shards, again)
    for into, other in zip(chain(*found), chain(*again), strict=True):
        assert torch.equal(into.view(torch.uint8), other.view(torch.uint8)), (
            "`encode` must write every element of its destination"
        )
    return found
