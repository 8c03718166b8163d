"""Sizes of kernels identify copies: planted copies are found."""

from dataclasses import replace

import pytest

from lamella_integration.trace import ParameterSizes, check_zero_copy, copied_numel, parameter_copies
from lamella_trace import Kernel

MATRIX, SHARD, TOKENS = 4096, 1024, 61
SIZES = ParameterSizes(
    full_numels=frozenset({MATRIX}), largest_shard_numel=2 * SHARD, cast_numel=10 * SHARD, num_tokens=TOKENS
)
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>"


def _kernel(name: str, start: float, duration: float, *numels: int, stream: int = 7, operator: int = 0) -> Kernel:
    return Kernel(
        name=name, stream=stream, start_us=start, duration_us=duration, numels=numels, operator=operator or int(start)
    )


# Gather, compute, cast a shard, copy an activation, reduce: the pattern of a zero-copy step.
STEP = [
    _kernel("Memcpy HtoD (Pinned -> Device)", 0, 1, 8),
    _kernel(COPY, 2, 4, SHARD, SHARD, stream=13),
    _kernel("ncclDevKernel_AllGather_RING_LL", 10, 100, stream=13),
    _kernel("nvjet_tst_256x128", 60, 100, TOKENS * 64, MATRIX),
    _kernel(COPY, 170, 10, TOKENS * 256, TOKENS * 256),
    _kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 180, 50, stream=17),
    _kernel(COPY, 240, 4, SHARD, SHARD, stream=17),
]


def test_casts_of_shards_and_copies_of_activations_are_zero_copy() -> None:
    check_zero_copy(STEP, SIZES)
    assert copied_numel(STEP, SIZES) == 2 * SHARD


@pytest.mark.parametrize(
    ("name", "numels"),
    {
        "a cloned parameter": (COPY, (MATRIX, MATRIX)),
        "a memcpy of one": ("Memcpy DtoD (Device -> Device)", (MATRIX, MATRIX)),
        "a unit concatenated": ("void CatArrayBatchedCopy<2>", (MATRIX, SHARD)),
        "a unit split": ("void split_with_sizes_copy_out_contiguous_no_cast_kernel", (3 * SHARD,)),
        "a copy of unknown size": (COPY, ()),
    }.values(),
    ids=str,
)
def test_a_planted_copy_of_parameter_size_is_found(name: str, numels: tuple[int, ...]) -> None:
    planted = _kernel(name, 165, 5, *numels)
    assert parameter_copies([*STEP, planted], SIZES) == [planted]
    with pytest.raises(RuntimeError, match="Expected no copies of parameter size, got:\n.*stream 7"):
        check_zero_copy([*STEP, planted], SIZES)


def test_a_parameter_copied_in_pieces_of_shard_size_is_found_by_the_sum() -> None:
    pieces = [_kernel(COPY, 300 + i, 1, SHARD, SHARD) for i in range(9)]
    assert parameter_copies(pieces, SIZES) == []
    with pytest.raises(RuntimeError, match="Expected casts of at most 10240 elements of shards, got 11264 copied"):
        check_zero_copy([*STEP, *pieces], SIZES)
    check_zero_copy([*STEP, *pieces], replace(SIZES, cast_numel=None))


def test_the_chunks_of_one_multi_tensor_copy_count_once() -> None:
    chunks = [_kernel(COPY, start, 1, SHARD, SHARD, operator=5) for start in (1, 2, 3)]
    assert copied_numel(chunks, SIZES) == SHARD
