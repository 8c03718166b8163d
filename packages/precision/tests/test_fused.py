"""Triton's kernels, interpreted on the CPU, write the bits of torch's operators.

Destinations are fp32 there: the interpreter's own rounding to float8 loses carries. Rounding is tested on a GPU
(`test_a_gpu_encodes_the_same_bits`), and compiled kernels are read here for the instructions that it stands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamella_precision import Float8Recipe, WeightRows
from lamella_precision._scales import kernels
from lamella_precision.te import ScaledWeights
from lamella_testing.interpreted import interpreted_copy
from lamella_testing.te_weights import Float8Tensor

SHAPES = [(70, 40), (3, 10, 24), (5, 7), (2, 300)]
BLOCKS = [(None, None), (1, None), (16, 32), (None, 100)]


@pytest.fixture
def interpreted() -> Any:
    module = interpreted_copy(kernels)
    module._ELEMENTS = 256  # several chunks in a block of a small weight
    return module


def _use(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr("lamella_precision._scales.encoding._kernels_for", lambda cuts: kernels)


def _weights(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator).exp() - 1).to(dtype) for shape in SHAPES]


def _slots(shapes: Sequence[Sequence[int]], dtype: torch.dtype, gap: int) -> list[torch.Tensor]:
    """Memory for tensors, one after another in a single storage, a gap before each."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(sum(numels) + gap * len(numels), dtype=dtype)
    parts = torch.split(flat, [gap + numel for numel in numels])
    return [part[gap:].view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _run(
    recipe: Float8Recipe | ScaledWeights, weights: Sequence[torch.Tensor], gap: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The amaxes and the encoding of the last two thirds of each weight's rows, from one storage into another."""
    firsts = [len(weight) // 3 for weight in weights]
    shards_on_host = [weight[first:] for weight, first in zip(weights, firsts, strict=True)]
    shards = _slots([rows.shape for rows in shards_on_host], weights[0].dtype, gap)
    into = _slots([rows.shape for rows in shards_on_host], torch.float32, 2 * gap)
    grids = [recipe.scale_shape(weight.shape) for weight in weights]
    amaxes, scales, raised = (_slots(grids, torch.float32, 0) for _ in range(3))
    for shard, rows in zip(shards, shards_on_host, strict=True):
        shard.copy_(rows)
    shapes = [tuple(weight.shape) for weight in weights]
    recipe.measure(*recipe.measure_columns(shards, list(map(WeightRows, shapes, firsts, amaxes))))
    for weight_scales, weight_amaxes in zip(scales, amaxes, strict=True):
        recipe.rescale(
            weight_amaxes.view(-1), weight_scales.view(-1), torch.full((recipe.num_past, weight_amaxes.numel()), -1.0)
        )
    weight_rows = list(map(WeightRows, shapes, firsts, scales, raised if recipe.num_past else [None] * len(shapes)))
    (column,) = recipe.columns(shards, [into], weight_rows)
    assert column is not None
    storage = into[0].untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)  # as between gathers: columns outlive the memory
    storage.resize_(num_bytes)
    into[0].as_strided((num_bytes // 4,), (1,), 0).fill_(7.0)
    recipe.encode(column[:1])  # a transport may ask for parts
    recipe.encode(column[1:])
    if recipe.num_past:
        for weight_amaxes, expected in zip(raised, amaxes, strict=True):
            torch.testing.assert_close(weight_amaxes, expected, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.cat([weight_amaxes.view(-1) for weight_amaxes in amaxes]), into[0].as_strided(
        (num_bytes // 4,), (1,), 0
    )


@pytest.mark.parametrize("num_past", [0, 2])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("gap", "dtype"), [(0, torch.float32), (3, torch.bfloat16)], ids=str)
def test_kernels_write_the_bits_of_multi_tensor_calls(
    monkeypatch: pytest.MonkeyPatch,
    interpreted: Any,
    block: tuple[int | None, int | None],
    gap: int,
    dtype: torch.dtype,
    num_past: int,
) -> None:
    recipe = Float8Recipe(block, num_past_amaxes=num_past)
    weights = _weights(dtype)
    weights[0][60, 30] = float("nan")
    _use(monkeypatch, None)
    expected = _run(recipe, weights, gap)
    _use(monkeypatch, interpreted)
    outputs = _run(recipe, weights, gap)
    assert expected[1].isnan().any()
    assert (expected[1] == 7.0).any() == (gap > 0), "memory between the slots must stay as it was"
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("block", [(None, None), (128, 128)], ids=str)
def test_kernels_write_the_bits_of_transformer_engines_scales_too(
    monkeypatch: pytest.MonkeyPatch, interpreted: Any, block: tuple[int | None, int | None]
) -> None:
    """Multiplied by a factor beside its reciprocal; and divided by the cells of padded rows."""
    num_past = 2 * (block == (None, None))  # delayed scaling is of whole matrices alone
    recipe = ScaledWeights(Float8Tensor, {}, torch.float8_e4m3fn, block, False, 0.0, num_past, 0, torch.bfloat16)
    weights = [weight for weight in _weights() if weight.ndim == 2]
    _use(monkeypatch, None)
    expected = _run(recipe, weights, 3)
    _use(monkeypatch, interpreted)
    for one, other in zip(_run(recipe, weights, 3), expected, strict=True):
        assert torch.equal(one, other)


def test_values_out_of_range_saturate_and_nan_stays(monkeypatch: pytest.MonkeyPatch, interpreted: Any) -> None:
    _use(monkeypatch, interpreted)
    recipe = Float8Recipe(num_past_amaxes=1)
    shard = torch.tensor([[1000.0, -1000.0], [float("nan"), float("-inf")]])
    into = torch.zeros(2, 2)
    recipe.encode(*recipe.columns([shard], [[into]], [WeightRows((2, 2), 0, torch.full((1, 1), 2.0))]))
    assert torch.equal(into.nan_to_num(7.0), torch.tensor([[448.0, -448.0], [7.0, -448.0]]))


def test_weights_of_two_storages_are_encoded_by_one_call(monkeypatch: pytest.MonkeyPatch, interpreted: Any) -> None:
    _use(monkeypatch, interpreted)
    recipe = Float8Recipe()
    shards = [torch.randn(4, 5), torch.randn(6, 3)]
    into = [torch.zeros(4, 5), torch.zeros(6, 3)]
    scales = [torch.full((1, 1), 2.0), torch.full((1, 1), 3.0)]
    parts = [WeightRows(tuple(shard.shape), 0, scale) for shard, scale in zip(shards, scales, strict=True)]
    recipe.encode(*recipe.columns(shards, [into], parts))
    for shard, encoded, scale in zip(shards, into, scales, strict=True):
        assert torch.equal(encoded, shard / scale)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # No product meets a sum in these kernels.
@pytest.mark.parametrize("measures", [False, True])
@pytest.mark.parametrize(("multiplies", "scaling"), [(False, "div.rn.f32"), (True, "mul.f32")])
def test_encode_kernels_compiled_for_hopper_move_full_vectors_and_round_exactly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, multiplies: bool, scaling: str, measures: bool
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"multiplies": multiplies, "measures": measures, "chunk_rows": 32, "chunk_columns": 128, "alignment": 16}
    pointers = {"source": "*fp32", "into": "*fp8e4nv", "cells": "*fp32", "amaxes": "*i32", "lines": "*i64"}
    pointers |= {"line_of": "*i32"}
    kinds = {**pointers, "largest": "fp32", **dict.fromkeys(sizes, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(kernels._encode, kinds, sizes, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    for instruction in ("ld.global.v4.b32", "st.global.v4.b32", scaling, "cvt.rn.satfinite.e4m3x2.f32"):
        assert instruction in code
    assert ("atom.global" in code) == measures
