"""Reading profiles: kinds of kernels by name, time by interval arithmetic, who launched what."""

from typing import Any

import pytest

from lamella_trace import Kernel, KernelKind, breakdown, kernels_of, operators_of, streams_of

# As torch 2.11 and NCCL 2.28 spell them, shortened.
NAMES = {
    KernelKind.ALL_GATHER: ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",),
    KernelKind.REDUCE_SCATTER: (
        "ncclDevKernel_ReduceScatter_SumPostDiv_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
    KernelKind.ALL_TO_ALL: (
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "gloo::all_to_all",
    ),
    KernelKind.COLLECTIVE: (
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "Memcpy PtoP (Device -> Device)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>",
    ),
    KernelKind.MATMUL: (
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN",  # hipBLASLt and rocBLAS
    ),
    KernelKind.ATTENTION: (
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80",
    ),
    KernelKind.OPTIMIZER: ("void multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>",),
    KernelKind.COPY: (
        "Memcpy DtoD (Device -> Device)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<OpaqueType<2u>, 3>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>",
        "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel<long>",
        "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>",
        "void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::BFloat16, float, 2, 1, 1>>",
    ),
    KernelKind.TRANSFER: ("Memcpy HtoD (Pinned -> Device)",),
    KernelKind.FILL: (
        "Memset (Device)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
    ),
    KernelKind.ELEMENTWISE: (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>",
    ),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_the_kind_of_a_kernel_follows_from_its_name(name: str, kind: KernelKind) -> None:
    assert _kernel(name, 0, 1).kind is kind


def _kernel(name: str, start: float, duration: float, stream: int = 7) -> Kernel:
    return Kernel(name=name, stream=stream, start_us=start, duration_us=duration)


# Gather, compute, cast a shard, copy an activation, reduce: what a zero-copy step looks like.
STEP = [
    _kernel("Memcpy HtoD (Pinned -> Device)", 0, 1),
    _kernel("direct_copy_kernel_cuda", 2, 4, stream=13),
    _kernel("ncclDevKernel_AllGather_RING_LL", 10, 100, stream=13),
    _kernel("nvjet_tst_256x128", 60, 100),
    _kernel("direct_copy_kernel_cuda", 170, 10),
    _kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 180, 50, stream=17),
    _kernel("direct_copy_kernel_cuda", 240, 4, stream=17),
]


def test_time_is_exposed_where_collectives_run_alone_and_idle_where_nothing_runs() -> None:
    times = breakdown(STEP)
    assert times.span == pytest.approx(0.244)
    assert times.by_kind[KernelKind.MATMUL] == pytest.approx(0.100)
    assert times.by_kind[KernelKind.ALL_GATHER] == pytest.approx(0.100)
    assert times.collectives == pytest.approx(0.150)
    assert times.exposed == pytest.approx(0.050 + 0.050)  # until the matmul starts; the whole reduction
    assert times.idle == pytest.approx(0.001 + 0.004 + 0.010 + 0.010)


def test_kernels_that_overlap_in_one_kind_are_not_counted_twice() -> None:
    times = breakdown([_kernel("nvjet", 0, 10), _kernel("nvjet", 5, 10, stream=8)])
    assert times.by_kind[KernelKind.MATMUL] == pytest.approx(0.015)


def test_a_window_around_the_kernels_is_idle_where_none_runs() -> None:
    times = breakdown([_kernel("nvjet", 10, 10)], (5, 30))
    assert (times.span, times.idle) == pytest.approx((0.025, 0.015))


def test_the_streams_of_a_kind() -> None:
    assert streams_of(STEP, KernelKind.ALL_GATHER) == {13}
    assert streams_of(STEP, KernelKind.MATMUL, KernelKind.REDUCE_SCATTER) == {7, 17}


def _event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 1, "args": args}


def test_kernels_take_their_sizes_from_their_operator_and_their_launch_from_the_runtimes_call() -> None:
    operator = {"External id": 3, "Input Dims": [[[64, 64], [8]], [[64, 64], [8]], []]}
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            _event("cpu_op", "aten::_foreach_copy_", 0, 5, **operator),
            _event("cpu_op", "aten::copy_", 6, 1, **{"External id": 4, "Input Dims": [[], [], []]}),
            _event("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=1),
            _event("cuda_runtime", "cudaDeviceSynchronize", 30, 1),
            _event("kernel", "CopyFunctor", 10, 5, stream=7, correlation=1, **{"External id": 3}),
            _event("kernel", "direct_copy_kernel_cuda", 15, 5, stream=7, **{"External id": 4}),
            _event("gpu_memcpy", "Memcpy DtoD", 20, 5, stream=9, bytes=64),
            _event("kernel", "ncclDevKernel_Generic_4", 30, 5, stream=9, **{"Collective name": "_allgather_base"}),
        ]
    }
    *kernels, collective = kernels_of(trace)
    assert collective.kind is KernelKind.ALL_GATHER
    assert [kernel.numels for kernel in kernels] == [(4096, 8, 4096, 8), (1,), ()]
    assert [kernel.stream for kernel in kernels] == [7, 7, 9]
    assert [(kernel.thread, kernel.launched_us) for kernel in kernels] == [(1, 3), (None, None), (None, None)]


def test_without_a_gpu_the_operators_of_the_main_thread_that_do_the_work_stand_in() -> None:
    shapes = {"External id": 1, "Input Dims": [[64, 64]]}
    trace = {
        "traceEvents": [
            _event("cpu_op", "aten::clone", 0, 10, **shapes),
            _event("cpu_op", "aten::copy_", 2, 5, **shapes),
            _event("cpu_op", "c10d::reduce_scatter_tensor_coalesced_", 20, 10, **shapes),
            _event("cpu_op", "aten::clone", 22, 5, **shapes),
            _event("cpu_op", "aten::matmul", 39, 7, **shapes),
            _event("cpu_op", "aten::mm", 40, 5, **shapes),
            _event("cpu_op", "aten::resolve_conj", 41, 1, **shapes),
            _event("cpu_op", "aten::_fused_adamw_", 50, 9, **shapes),
            _event("cpu_op", "aten::_fused_adamw_", 51, 7, **shapes),
            _event("cpu_op", "aten::item", 52, 1, **shapes),
            _event("cpu_op", "aten::copy_", 40, 5, **shapes) | {"tid": 2},
        ]
    }
    assert [(operator.name, operator.duration_us) for operator in operators_of(trace)] == [
        ("aten::copy_", 5),
        ("c10d::reduce_scatter_tensor_coalesced_", 10),
        ("aten::mm", 5),
        ("aten::_fused_adamw_", 9),
    ]
