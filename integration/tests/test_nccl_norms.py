"""On GPUs over NCCL: norms and clipping use unsharded gradients, and NaN and infinity are located."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
import torch.distributed as dist
from four_gpus import Options, mesh
from late_streams import LONGEST_SLEEP
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import (
    HFSDP,
    ZERO3,
    MixedPrecisionPolicy,
    Rows,
    ShardingOptions,
    find_nonfinite,
    fully_shard,
    parameter_norms,
)
from lamella_engine.testing import tree_of
from lamella_integration.collectives import CollectiveCounter
from lamella_integration.tasks import TASKS, shard
from lamella_optim import clip_grad_norm_, overlap_optimizer
from lamella_testing import run_ranks

TASK = TASKS["odd"]  # on four ranks some own nothing of some parameters
TWO, FOUR = pytest.mark.gpu2, pytest.mark.gpu4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WAYS: dict[str, tuple[int, Options]] = {
    "even, two": (2, lambda: {"mesh": mesh(2)}),
    "flat, two": (2, lambda: {"mesh": mesh(2), "options": ShardingOptions(keep_together=Rows(1))}),
    "bf16, two": (2, lambda: {"mesh": mesh(2), "mp_policy": BF16}),
    "even, four": (4, lambda: {"mesh": mesh(4)}),
    "HSDP, four": (4, lambda: {"mesh": mesh(2, 2)}),
    "HFSDP, four": (4, lambda: {"mesh": mesh(2, 2), "options": ShardingOptions(placements=(HFSDP, ZERO3))}),
}
EVERY_WAY = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=TWO if num_ranks == 2 else FOUR) for way, (num_ranks, _) in WAYS.items()]
)


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _on_ranks(way: str, check: Callable[[], object]) -> None:
    run_ranks(check, WAYS[way][0], device="cuda")


def _sharded(way: str) -> nn.Module:
    return shard(TASK.model(device=_cuda()), fully_shard, **WAYS[way][1]())


def _backward(model: nn.Module, *, bad: float | None = None) -> None:
    """Run backward on this rank's rows; the first rank's rows hold the bad number."""
    x, y = (tensor.chunk(dist.get_world_size())[dist.get_rank()].to(_cuda()) for tensor in TASK.batch(0))
    if bad is not None and dist.get_rank() == 0:
        x[0, 0] = bad
    TASK.loss(model(x), y).backward()  # type: ignore[no-untyped-call]


def _whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Unsharded gradients by name, in float64; every parameter must have a gradient."""
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients[name] = parameter.grad.full_tensor().double()
    return gradients


@EVERY_WAY
def test_gradients_are_clipped_by_the_norm_of_all_gradients(way: str) -> None:
    def clipped(model: nn.Module, norm_type: float, clip: Any) -> None:
        _backward(model)
        before = _whole_gradients(model)
        expected = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in before.values()]), norm_type)
        max_norm = expected.item() / 4
        norm = clip(model.parameters(), max_norm, norm_type)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)
        for name, after in _whole_gradients(model).items():
            torch.testing.assert_close(after, before[name] / 4, rtol=1e-5, atol=1e-12)
        model.zero_grad()

    def check() -> None:
        model = _sharded(way)
        for norm_type in (1.0, 2.0, math.inf):
            clipped(model, norm_type, clip_grad_norm_)
            if norm_type < math.inf:  # torch's norm of an empty shard has no largest element
                clipped(model, norm_type, nn.utils.clip_grad_norm_)

    _on_ranks(way, check)


@pytest.mark.gpu2
@pytest.mark.parametrize("layout", ["even, two", "flat, two"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_clipping_is_one_collective_of_four_bytes_and_the_host_does_not_wait(layout: str) -> None:
    def check() -> None:
        model = _sharded(layout)
        for _ in range(2):  # first uses and one-time set-up may make the host wait
            _backward(model)
            with CollectiveCounter() as counter:
                clip_grad_norm_(model.parameters(), 0.1)
            assert [(call.kind, call.nbytes) for call in counter.calls] == [("all_reduce", 4)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        clip_grad_norm_(model.parameters(), 0.1)
        torch.cuda.set_sync_debug_mode("default")

    _on_ranks(layout, check)


@EVERY_WAY
def test_each_parameters_norm_is_the_norm_of_the_unsharded_gradient(way: str) -> None:
    def check() -> None:
        model = _sharded(way)
        _backward(model)
        expected = {name: gradient.norm().item() for name, gradient in _whole_gradients(model).items()}
        with CollectiveCounter() as counter:
            norms = parameter_norms(model)
        assert norms == pytest.approx(expected, rel=1e-12)
        if WAYS[way][0] == 2:
            assert [(call.kind, call.nbytes) for call in counter.calls] == [("all_reduce", 16 * len(norms))]

    _on_ranks(way, check)


@pytest.mark.gpu2
def test_norms_and_clipping_wait_for_late_gradients() -> None:
    def check() -> None:
        norms: list[tuple[float, dict[str, float], int]] = []
        for is_late in (False, True):
            model = _sharded("even, two")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            if is_late:
                overlap_optimizer(optimizer, late_gradients=True)
            tree = tree_of(model)
            streams = tree.streams
            for ask in (lambda model=model: clip_grad_norm_(model.parameters(), 1e9).item(), parameter_norms):
                with streams.on(streams.reduce_scatter_stream):
                    torch.cuda._sleep(50 * LONGEST_SLEEP)  # type: ignore[no-untyped-call]  # reductions come after 10 ms
                _backward(model)
                assert tree.step_end.is_deferred == is_late
                norms.append(ask(model) if ask is parameter_norms else ask())  # type: ignore[call-arg,arg-type]
                assert not tree.step_end.is_deferred
                model.zero_grad()
        assert norms[:2] == norms[2:]

    run_ranks(check, 2, device="cuda")


@EVERY_WAY
def test_nan_and_infinity_are_located_after_a_reduction_and_on_their_rank_before(way: str) -> None:
    def check_of(model: nn.Module, bad: float) -> None:
        _backward(model, bad=bad)
        nonfinite = find_nonfinite(model)
        weight = next(name for name, _ in model.named_parameters())
        assert weight in {report.name for report in nonfinite}
        full_gradient = dict(model.named_parameters())[weight].grad.full_tensor()  # type: ignore[union-attr]
        replicas = dist.get_world_size() // _num_shards(model)
        expected = replicas * int((~full_gradient.isfinite()).sum())
        assert sum(report.count for report in nonfinite if report.name == weight) == expected > 0
        assert find_nonfinite(model, of="weight") == []
        model.zero_grad()

        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        _backward(model, bad=bad)
        unreduced_reports = find_nonfinite(model, of="unreduced")
        assert {report.rank for report in unreduced_reports} == {0}
        if math.isnan(bad):  # infinity makes NaN of 0 and of other infinities
            assert {report.kind for report in unreduced_reports} == {"nan"}
        model.zero_grad()
        model.set_requires_gradient_sync(True)  # type: ignore[operator]

    def check() -> None:
        model = _sharded(way)
        _backward(model)
        assert find_nonfinite(model) == []
        model.zero_grad()
        for bad in (math.nan, math.inf):
            check_of(model, bad)

    _on_ranks(way, check)


def _num_shards(model: nn.Module) -> int:
    """Over how many ranks each gradient is cut."""
    gradient = next(model.parameters()).grad
    assert isinstance(gradient, DTensor)
    sizes = [
        gradient.device_mesh.size(i) for i, placement in enumerate(gradient.placements) if not placement.is_replicate()
    ]
    return math.prod(sizes)
