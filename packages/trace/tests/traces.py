"""Chrome traces in the format of `torch.profiler`, written by hand: all times are known."""

from typing import Any

Event = dict[str, Any]

MAIN, AUTOGRAD = 100, 101
COMPUTE, GATHER, REDUCE = 7, 13, 17

MATMUL = "nvjet_tst_256x128"
CAST = "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL"
ALL_TO_ALL = "ncclDevKernel_SendRecv"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
PUSH = "Memcpy PtoP (Device -> Device)"
ADAM = "void multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"


class TraceMaker:
    """Collects events. Times are microseconds."""

    def __init__(self) -> None:
        self.events: list[Event] = [{"ph": "M", "name": "process_name", "pid": MAIN}]

    def host(self, name: str, start: float, end: float, thread: int = MAIN) -> int:
        """Add a range of the host and return the range's number."""
        number = len(self.events)
        self._add("user_annotation", name, start, end, thread, {"External id": number})
        return number

    def kernel(
        self, name: str, start: float, end: float, stream: int, launched: float, thread: int = MAIN, **args: Any
    ) -> None:
        """Add a kernel and the kernel's launch."""
        number = len(self.events)
        self._add("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, {"correlation": number})
        numbers = {"stream": stream, "correlation": number, "External id": number}
        self._add("kernel", name, start, end, stream, numbers | args)

    def device(self, number: int, name: str, start: float, end: float, stream: int) -> None:
        """Add the time on a stream of a numbered range of the host."""
        self._add("gpu_user_annotation", name, start, end, stream, {"External id": number})

    def push(self, start: float, end: float, nbytes: int) -> None:
        """Add a copy into a peer's memory, without a launch event."""
        self._add("gpu_memcpy", PUSH, start, end, GATHER, {"stream": GATHER, "bytes": nbytes})

    def _add(self, category: str, name: str, start: float, end: float, thread: int, args: Event) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}
        self.events.append(event | {"pid": MAIN, "tid": thread, "args": args})

    def trace(self) -> Event:
        return {"traceEvents": self.events, "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 4}}


def two_units_in_two_steps(a: str = "a", b: str = "b") -> Event:
    """Two units, one whole step and the beginning of another.

    stream 7              aaaaaaaa        bbbbbbbb    bbbbbbbb     aaaaaaaa    adam              aaaaaaaa
    stream 13  .aaaaaaaaaa  bbbbbbbbbbbbbb         bbb                                 aaaaaaaaaa
    stream 17                                                 bbbbb        aaaaaa
    """
    maker = TraceMaker()
    maker.host("ProfilerStep#5", 0, 1000)
    maker.host(f"FSDP::pre_forward ({a})", 10, 60)
    maker.host("FSDP::root_pre_forward", 11, 12)
    maker.host(f"FSDP::all_gather ({a})", 15, 30)
    maker.kernel(CAST, 30, 40, GATHER, 16)
    message: dict[str, Any] = {"Collective name": "_allgather_base", "dtype": "BFloat16", "Group size": 4}
    message |= {"In msg nelems": 100_000, "Out msg nelems": 400_000}
    maker.kernel(ALL_GATHER, 40, 140, GATHER, 20, **message)
    maker.host(f"FSDP::forward_prefetch for {b}", 35, 55)
    maker.host(f"FSDP::all_gather ({b})", 36, 50)
    maker.kernel(ALL_GATHER, 150, 300, GATHER, 40)
    maker.kernel(MATMUL, 140, 240, COMPUTE, 70)
    maker.host(f"FSDP::post_forward ({a})", 100, 110)
    maker.host(f"FSDP::pre_forward ({b})", 120, 130)
    maker.kernel(MATMUL, 300, 400, COMPUTE, 140)
    maker.host(f"FSDP::post_forward ({b})", 180, 190)
    maker.host(f"FSDP::pre_backward ({b})", 300, 330, AUTOGRAD)
    maker.host(f"FSDP::all_gather ({b})", 302, 310, AUTOGRAD)
    maker.kernel(ALL_GATHER, 410, 450, GATHER, 305, AUTOGRAD)  # launched before the GPU went idle: the GPU's latency
    maker.kernel(MATMUL, 450, 550, COMPUTE, 340, AUTOGRAD)
    maker.host(f"FSDP::post_backward_reduce ({b})", 400, 420, AUTOGRAD)
    maker.kernel(REDUCE_SCATTER, 550, 600, REDUCE, 405, AUTOGRAD)
    maker.host(f"FSDP::pre_backward ({a})", 610, 620, AUTOGRAD)
    maker.kernel(MATMUL, 650, 750, COMPUTE, 640, AUTOGRAD)  # launched late, between two ranges of a
    maker.host(f"FSDP::post_backward_reduce ({a})", 660, 680, AUTOGRAD)
    maker.kernel(REDUCE_SCATTER, 740, 800, REDUCE, 670, AUTOGRAD)
    maker.host("FSDP::root_post_backward_callback", 690, 700, AUTOGRAD)
    maker.host("Optimizer.step#AdamW.step", 720, 760)
    maker.kernel(ADAM, 800, 900, COMPUTE, 730)
    maker.host("ProfilerStep#6", 1000, 1500)
    maker.host(f"FSDP::all_gather ({a})", 1005, 1015)
    maker.kernel(ALL_GATHER, 1020.5, 1120, GATHER, 1010, **message)
    maker.kernel(MATMUL, 1120, 1220.25, COMPUTE, 1030)
    return maker.trace()


def two_microbatches_of_two_layers() -> Event:
    """A schedule's forward alone, then a forward beside a backward, each with one exchange of tokens.

    stream 7   0000          00000000            0000
    stream 13      dddddddd      dddddddd  aaaa      cccccccc
    """
    maker = TraceMaker()
    maker.host("schedule::pre forward (layer 0)", 0, 10)
    maker.kernel(MATMUL, 20, 40, COMPUTE, 5)
    maker.host("schedule::dispatch forward (layer 0)", 10, 20)
    maker.kernel(ALL_TO_ALL, 40, 80, GATHER, 12)
    maker.kernel(ALL_TO_ALL, 90, 100, GATHER, 15)
    maker.host("schedule::pre forward (layer 0)", 20, 30)
    maker.kernel(MATMUL, 100, 140, COMPUTE, 25)
    maker.host("schedule::dispatch forward (layer 0)", 30, 50)
    maker.kernel(ALL_TO_ALL, 120, 160, GATHER, 35)
    maker.host("FSDP::all_gather (b)", 40, 45)
    maker.kernel(ALL_GATHER, 170, 180, GATHER, 42)
    maker.host("schedule::combine backward (layer 1)", 50, 70)
    maker.kernel(ALL_TO_ALL, 200, 240, GATHER, 60, AUTOGRAD)  # autograd's thread has no range
    maker.kernel(MATMUL, 190, 210, COMPUTE, 62)
    return maker.trace()
