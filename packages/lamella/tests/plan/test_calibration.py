"""Calibration: rates come back from the profile of a step that has them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamella._plan.calibration import calibrate
from lamella._plan.cluster import Cluster
from lamella._plan.pricing import operations_of
from lamella._plan.profiled_host import PROFILED_HOST
from lamella._plan.step_plan import plan_of
from lamella._plan.text import calibration_lines
from lamella._plan.works import Work, WorkKind
from lamella._settings.options import ConfigError
from lamella_buffers import FakeCollective
from lamella_schedule import simulate_streams
from lamella_trace import Trace

_NAMES = {
    WorkKind.MATMUL: "nvjet_tst_256x128",
    WorkKind.ATTENTION: "pytorch_flash::flash_fwd_kernel",
    WorkKind.SOFTMAX: "cunn_SoftMaxForward",
    WorkKind.COPY: "bfloat16_copy_kernel_cuda",
    WorkKind.ELEMENTWISE: "vectorized_elementwise_kernel<CUDAFunctor_add>",
    WorkKind.OPTIMIZER: "multi_tensor_apply_kernel<FusedAdamMathFunctor>",
    WorkKind.GATHER: "ncclDevKernel_AllGather_RING_LL",
    WorkKind.REDUCE: "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
}
_RANGES = {WorkKind.GATHER: "FSDP::all_gather (unit)", WorkKind.REDUCE: "FSDP::post_backward_reduce (unit)"}


def _work(kind: WorkKind, stream: int = 0, after: tuple[int, ...] = (), **amounts: Any) -> Work:
    amounts = {"flops": 0.0, "nbytes": 0.0} | amounts
    return Work(kind=kind, name=kind.value, stream=stream, after=after, moment="forward", unit="unit", **amounts)


def _layers(count: int) -> list[Work]:
    """A step of layers, each with a gather in front, a few kernels, and a reduction behind."""
    works: list[Work] = []
    for _ in range(count):
        gathered = FakeCollective("all_gather", 200 << 20, (0, 1))
        works.append(_work(WorkKind.GATHER, 1, tuple([len(works) - 3] if works else []), collective=gathered))
        works.append(_work(WorkKind.MATMUL, after=(len(works) - 1,), flops=2e12, nbytes=1e8, dtype="bfloat16"))
        works.append(_work(WorkKind.ATTENTION, flops=4e11, nbytes=1e8))
        works += [_work(WorkKind.ELEMENTWISE, nbytes=6e8) for _ in range(4)]
        works.append(_work(WorkKind.COPY, nbytes=8e8))
        reduced = FakeCollective("reduce_scatter", 200 << 20, (0, 1))
        works.append(_work(WorkKind.REDUCE, 2, (len(works) - 1,), collective=reduced))
    works += [_work(WorkKind.SOFTMAX, nbytes=4e9), _work(WorkKind.OPTIMIZER, nbytes=8e9)]
    return works


def _profile(works: list[Work], cluster: Cluster, num_steps: int = 2) -> Trace:
    """Return the profile of steps as they are simulated, with a host that is as slow as a profiler makes it."""
    events: list[dict[str, Any]] = []
    slow = replace(cluster, **{name: getattr(cluster, name) * PROFILED_HOST for name in _HOST_TIMES})
    operations = operations_of(works, slow)
    num = len(works)
    steps = [replace(o, after=tuple(i + num * k for i in o.after)) for k in range(num_steps) for o in operations]
    spans = simulate_streams(steps, slowdown=cluster.slowdown)
    for index, (work, operation, span) in enumerate(zip(works * num_steps, steps, spans, strict=True)):
        launched = span.launched * 1e6 + 1000
        if index % num == 0:
            events.append(_event("user_annotation", f"ProfilerStep#{index // num}", launched - 1, 1))
        if work.collective is not None:
            duration = operation.launch_seconds * 1e6
            events.append(_event("user_annotation", _RANGES[work.kind], launched - duration + 0.1, duration - 0.05))
        events.append(_event("cuda_runtime", "cudaLaunchKernel", launched, 0.005, correlation=index))
        message = {}
        if work.collective is not None:
            numel = work.collective.whole_nbytes // 2
            message = {"Group size": 2, "dtype": "BFloat16", "Out msg nelems": numel, "Collective name": work.name}
        start, duration = span.start * 1e6 + 1000, (span.stop - span.start) * 1e6
        numbers = {"stream": 7 + work.stream, "correlation": index, "External id": index}
        events.append(_event("kernel", _NAMES[work.kind], start, duration, **numbers, **message))
    return {"traceEvents": events, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}}


_HOST_TIMES = ("launch_us", "view_us", "collective_launch_us")


def _event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 1, "args": args}


def test_a_profile_of_known_rates_gives_these_rates_back() -> None:
    works = _layers(6)
    actual = Cluster(
        matmul_tflops=500, attention_tflops=300, memory_gb_s=1500, copy_gb_s=1200, softmax_gb_s=900, gather_gb_s=120
    )
    seconds = plan_of(works, actual).seconds
    fitted = calibrate(_profile(works, actual), works, Cluster(), step_seconds=seconds).cluster
    for name in ("matmul_tflops", "attention_tflops", "memory_gb_s", "copy_gb_s", "softmax_gb_s", "optimizer_gb_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(actual, name), rel=0.06), name
    assert fitted.gather_gb_s == pytest.approx(actual.gather_gb_s, rel=0.06)
    assert plan_of(works, fitted).seconds == pytest.approx(seconds, rel=0.01)
    assert plan_of(_layers(12), fitted).seconds == pytest.approx(plan_of(_layers(12), actual).seconds, rel=0.03)


def test_a_step_that_waits_for_its_host_gives_the_hosts_time() -> None:
    works = [work._replace(flops=work.flops / 1e3, nbytes=work.nbytes / 1e3) for work in _layers(6)]
    works = [w._replace(collective=w.collective and w.collective._replace(whole_nbytes=5 << 20)) for w in works]
    actual = Cluster(launch_us=30.0, collective_launch_us=900.0)
    seconds = plan_of(works, actual).seconds
    calibration = calibrate(_profile(works, actual), works, Cluster(), step_seconds=seconds)
    assert calibration.predicted_seconds == pytest.approx(seconds, rel=0.02)
    assert plan_of(works, calibration.cluster).host_seconds == pytest.approx(
        plan_of(works, actual).host_seconds, rel=0.05
    )


def test_a_step_time_that_no_rates_explain_is_noted() -> None:
    works = _layers(2)
    seconds = plan_of(works, Cluster()).seconds
    for factor, is_noted in ((1, False), (1000, True)):
        calibration = calibrate(_profile(works, Cluster()), works, Cluster(), step_seconds=factor * seconds)
        assert any("no likely rates" in line for line in calibration_lines(calibration)) is is_noted


def test_a_profile_of_a_cpu_is_refused() -> None:
    events = [_event("user_annotation", "FSDP::all_gather (unit)", 0, 9), _event("cpu_op", "aten::mm", 1, 2)]
    with pytest.raises(ConfigError, match="profile of steps on GPUs in 'run', got one of a CPU"):
        calibrate({"traceEvents": events}, _layers(1), Cluster(), source="run")


def test_the_example_of_a_cluster_is_read_back(tmp_path: Path) -> None:
    from lamella._plan.cluster import read_cluster

    path = tmp_path / "cluster.json"
    path.write_text(Cluster(gpus_a_host=4, network_gb_s=25).to_json())
    assert read_cluster(str(path)) == Cluster(gpus_a_host=4, network_gb_s=25)
