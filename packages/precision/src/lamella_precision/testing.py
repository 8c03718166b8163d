"""A conformance test for recipes of your own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella_precision._protocol import Direction, DivisibleRecipe, Recipe, ScaledRecipe, WeightRows


def check_recipe(
    recipe: Recipe,
    *,
    main_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    relative_error: float = 2**-8,
) -> None:
    """Assert an engine's requirements of a recipe.

    Encoding shard by shard and gathering equals encoding the whole, and encoding a single direction's payloads equals
    encoding all; decoding returns the weight within the format's error; the decoded tensor follows refills of the
    payloads' storage; encoding writes every element of its destination and leaves the shard unchanged. Amaxes measured
    shard by shard, and the largest taken, give the scales of the whole; with delayed scaling, encodings raise amaxes as
    measurements do. Parts of a `DivisibleRecipe` are encoded alone as in the whole.

    Args:
        recipe: The recipe to test.
        main_dtype: Dtype of the main weights.
        device: Where to test.
        relative_error: The format's largest relative rounding error (half a unit in the last place of bf16
            by default).

    Raises:
        AssertionError: A property does not hold; the message says which.
    """
    rows, columns, num_shards = 4 * recipe.block_rows, 4 * recipe.block_rows, 2
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32).to(main_dtype)
    before = weight.clone()
    formats = recipe.payloads(weight.shape, main_dtype)
    assert formats, "a recipe must name at least one payload"
    for payload_format in formats:
        assert payload_format.shape[0] in (rows, rows // recipe.block_rows), (
            f"dim 0 of a payload must have the weight's {rows} rows or {rows // recipe.block_rows} blocks, "
            f"got {payload_format.shape}"
        )

    scales = _scales(recipe, weight.chunk(num_shards), weight.shape)
    assert _equal(scales, _scales(recipe, [weight], weight.shape)), "amaxes of shards must give the scales of the whole"
    payloads = [
        torch.empty(payload_format.shape, dtype=payload_format.dtype, device=device) for payload_format in formats
    ]
    for payload in payloads:
        payload.view(torch.uint8).fill_(1)
    decoded = recipe.decode(payloads, weight.shape, scales)
    assert decoded.shape == weight.shape, f"`decode` must give {tuple(weight.shape)}, gave {tuple(decoded.shape)}"

    for payload in payloads:
        payload.zero_()
    assert not decoded.double().any(), "`decode` must share the payloads' storage, so that a refill is seen"

    encode_into(recipe, weight, payloads, WeightRows(weight.shape, 0, scales))
    shard_payloads_by_payload = [
        [torch.empty_like(shard_payload) for shard_payload in payload.chunk(num_shards)] for payload in payloads
    ]
    for i, (shard, *shard_payloads) in enumerate(
        zip(weight.chunk(num_shards), *shard_payloads_by_payload, strict=True)
    ):
        encode_into(recipe, shard, shard_payloads, WeightRows(weight.shape, i * rows // num_shards, scales))
    assert torch.equal(weight, before), "`encode` must not write the main weight"
    for payload, pieces in zip(payloads, shard_payloads_by_payload, strict=True):
        assert _same_bytes(payload, torch.cat(pieces)), "encoding shards must equal encoding the whole tensor"
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        needed = [payload_format.direction.meets(direction) for payload_format in formats]
        direction_payloads = [
            torch.empty_like(payload) if is_needed else None
            for payload, is_needed in zip(payloads, needed, strict=True)
        ]
        encode_into(recipe, weight, direction_payloads, WeightRows(weight.shape, 0, scales))
        for payload, direction_payload in zip(payloads, direction_payloads, strict=True):
            assert direction_payload is None or _same_bytes(payload, direction_payload), (
                "encoding one direction must equal encoding both"
            )

    if isinstance(recipe, ScaledRecipe) and recipe.num_past:
        assert scales is not None
        _check_amaxes(recipe, weight.chunk(num_shards), scales)
    if isinstance(recipe, DivisibleRecipe):
        _check_parts(recipe, weight)
    error = (decoded.double() - weight.double()).abs() / weight.double().abs().clamp_min(1e-6)
    assert error.max().item() <= relative_error, f"decoded weight is off by {error.max().item():.3g} relative"


def _check_amaxes(recipe: ScaledRecipe, shards: Sequence[torch.Tensor], scales: torch.Tensor) -> None:
    """Assert that encodings of delayed scaling measure on the way."""
    shape = (sum(map(len, shards)), *shards[0].shape[1:])
    amaxes, row = torch.zeros_like(scales), 0
    for shard in shards:
        formats = recipe.payloads(shard.shape, shard.dtype)
        payloads = [
            torch.empty(payload_format.shape, dtype=payload_format.dtype, device=shard.device)
            for payload_format in formats
        ]
        encode_into(recipe, shard, payloads, WeightRows(shape, row, scales, amaxes))
        row += len(shard)
    expected = measured(recipe, shards, shape)
    assert torch.equal(amaxes.view(-1), expected), "with delayed scaling `encode` must raise `WeightRows.amaxes`"


def _check_parts(recipe: DivisibleRecipe, weight: torch.Tensor) -> None:
    """Assert that the parts between which a recipe divides are encoded alone as in the whole."""
    payloads = _encoded(recipe, weight)
    for row in range(1, len(weight)):
        if recipe.divides_at(weight.shape, row):
            parts = [_encoded(recipe, part) for part in (weight[:row].clone(), weight[row:].clone())]
            for payload, *pieces in zip(payloads, *parts, strict=True):
                assert _same_bytes(payload, torch.cat(pieces)), (
                    f"parts cut at row {row} must be encoded as in the whole"
                )


def _encoded(recipe: Recipe, weight: torch.Tensor) -> list[torch.Tensor]:
    """The payloads of a weight, and its scales."""
    scales = _scales(recipe, [weight], weight.shape)
    formats = recipe.payloads(weight.shape, weight.dtype)
    payloads = [
        torch.empty(payload_format.shape, dtype=payload_format.dtype, device=weight.device)
        for payload_format in formats
    ]
    encode_into(recipe, weight, payloads, WeightRows(tuple(weight.shape), 0, scales))
    return payloads if scales is None else [*payloads, scales]


def measured(recipe: ScaledRecipe, shards: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The amaxes of a whole weight from its shards in rank order, as an engine reduces them: (blocks,), fp32."""
    largest = torch.zeros(recipe.scale_shape(shape), device=shards[0].device)
    row = 0
    for shard in shards:
        shard_amaxes = torch.zeros_like(largest)
        if shard.numel():
            recipe.measure(*recipe.measure_columns([shard], [WeightRows(tuple(shape), row, shard_amaxes)]))
        row += len(shard)
        largest = torch.maximum(largest, shard_amaxes)
    return largest.view(-1)


def encode_into(
    recipe: Recipe, shard: torch.Tensor, payloads: Sequence[torch.Tensor | None], weight_rows: WeightRows
) -> None:
    """Encode a shard with elements twice, into memory with different earlier bytes.

    Raises:
        AssertionError: An element of a payload was not written.
    """
    encodings = []
    columns = recipe.columns([shard], [None if payload is None else [payload] for payload in payloads], [weight_rows])
    for before in (1, 2):
        for payload in payloads:
            if payload is not None:
                payload.view(torch.uint8).fill_(before)
        recipe.encode(*columns)
        encodings.append([payload.clone() for payload in payloads if payload is not None])
    for into, other in zip(*encodings, strict=True):
        assert _same_bytes(into, other), "`encode` must write every element of its destination"


def _scales(recipe: Recipe, shards: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    if not isinstance(recipe, ScaledRecipe):
        return None
    amaxes = measured(recipe, shards, shape)
    scales = torch.empty_like(amaxes)
    recipe.rescale(amaxes, scales, torch.full((recipe.num_past, len(amaxes)), -1.0, device=amaxes.device))
    return scales.view(recipe.scale_shape(shape))


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
