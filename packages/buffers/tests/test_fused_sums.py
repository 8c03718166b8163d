"""Triton's kernel of sums, interpreted on the CPU, writes the bits of torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamella_buffers import Payload, _fused_sums
from lamella_buffers._exchange import add_up, arrivals_numel, places_for
from lamella_testing.interpreted import interpreted_copy


@pytest.fixture
def interpreted() -> Any:
    module = interpreted_copy(_fused_sums)
    module._ELEMENTS = 128  # several programs for a small payload
    return module


def _shards(numels: Sequence[int], *, together: bool) -> list[torch.Tensor]:
    """Memory for shards: in one storage with a gap before each, or in storages of their own."""
    flat = torch.full((sum(numels) + 5 * len(numels),), torch.nan)
    pieces = torch.split(flat, [5 + numel for numel in numels])
    return [piece[5:] if together else piece[5:].clone() for piece in pieces]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("averages", [True, False])
def test_the_kernel_adds_up_as_torch(
    interpreted: Any, dtype: torch.dtype, num_ranks: int, rank: int, together: bool, averages: bool
) -> None:
    numels = [300, 1, 128, 7, 0, *range(20, 36)]  # more than an argument each in one launch
    generator = torch.Generator().manual_seed(0)
    shards, expected = (_shards(numels, together=together) for _ in range(2))
    payloads = [Payload(shard, torch.empty(num_ranks * len(shard), dtype=dtype)) for shard in shards]
    places = places_for(payloads, num_ranks, torch.zeros(arrivals_numel(payloads, num_ranks), dtype=dtype))
    for place in places:
        place.copy_(torch.randn(place.shape, generator=generator))
    add_up(places, expected, dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
    parts = [place[rank].clone() for place in places]
    for place in places:
        place[rank] = torch.nan  # not read
    launches = interpreted.launches_for(places, shards)
    interpreted.add_up(launches, places, parts, shards, rank, averages=averages)
    for kernel_shard, expected_shard in zip(shards, expected, strict=True):
        # A third as a factor is rounded once more.
        torch.testing.assert_close(
            kernel_shard, expected_shard, rtol=2**-23 if averages and num_ranks == 3 else 0.0, atol=0.0
        )
    if together:
        storage = shards[0].as_strided((sum(numels) + 5 * len(numels),), (1,), 0)
        assert storage.isnan().sum() == 5 * len(numels), "memory between the shards must stay as it was"


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # A fused factor rounds no sum of two bf16 numbers.
def test_the_sum_kernel_compiled_for_hopper_moves_full_vectors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"rank": 1, "num_ranks": 4, "factor": 0.25, "elements": 4096, "alignment": 16}
    pointers = {"arrivals": "*bf16", "shards": "*fp32", "lines": "*i64", "line_of": "*i32", "row_stride": "i32"}
    kinds = {**pointers, **dict.fromkeys(_fused_sums._ADDRESSES, "i64"), **dict.fromkeys(sizes, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(_fused_sums._add_up, kinds, sizes, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    # 32 elements a thread: 4 vectors of 8 from each of 4 ranks, and 8 vectors of 4.
    assert code.count("ld.global.v4.b32") == 4 * 4
    assert code.count("st.global.v4.b32") == 8
