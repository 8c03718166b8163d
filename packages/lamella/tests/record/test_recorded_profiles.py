"""Profiles recorded on CPU ranks: `lamella_trace` reads the ranges of lamella, of FSDP2 and of a schedule."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile, schedule

from lamella_engine import fully_shard
from lamella_schedule import LayerSlots, ModelChunk, Splits, exchange, run
from lamella_testing import run_ranks
from lamella_trace import Role, as_text, overlap_report, read_trace


@pytest.mark.parametrize("shard", [fully_shard, torch_fully_shard], ids=["lamella", "fsdp2"])
def test_recorded_steps_of_lamella_and_of_fsdp2_are_read_alike(shard: Callable[..., object], tmp_path: Path) -> None:
    def record() -> None:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for layer in model:
            shard(layer)
        shard(model)
        when = schedule(wait=1, warmup=1, active=2, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=when, acc_events=True) as profiler:
            for _ in range(4):
                model(torch.ones(2, 8)).sum().backward()
                profiler.step()
        profiler.export_chrome_trace(str(tmp_path / f"trace-{dist.get_rank()}.json.gz"))

    run_ranks(record, 2)
    report = overlap_report(read_trace(tmp_path / "trace-1.json.gz"))
    assert (report.rank, report.num_ranks, report.on_gpu, len(report.steps)) == (1, 2, False, 2)
    for name in ("0", "1", "2"):
        [traffic] = [unit.traffic for unit in report.total.units if unit.unit == name]
        assert [traffic[role].num for role in (Role.FORWARD_GATHER, Role.REDUCE)] == [2, 2]
        assert traffic[Role.BACKWARD_GATHER].num == 2 or name == "2"
    for step in report.steps:
        assert step.compute + step.exposed + step.idle == pytest.approx(step.span)


def test_a_recorded_schedule_has_each_layers_exchanges(tmp_path: Path) -> None:
    def record() -> None:
        def exchanged(values: torch.Tensor) -> torch.Tensor:
            return exchange(values, Splits((2, 2), (2, 2), None))

        def chunk() -> ModelChunk:
            x = torch.ones(4, 8, requires_grad=True)
            layer = LayerSlots(pre=linear, dispatch=exchanged, experts=linear, combine=exchanged)
            return ModelChunk(lambda: x * 1, [layer, layer], lambda y: y.sum())

        linear = nn.Linear(8, 8)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            run([chunk(), chunk(), chunk()])
        profiler.export_chrome_trace(str(tmp_path / f"trace-{dist.get_rank()}.json.gz"))

    run_ranks(record, 2)
    report = overlap_report(read_trace(tmp_path / "trace-1.json.gz"))
    runs = {(node.layer, node.node): node.traffic.num for node in report.total.nodes}
    nodes = [f"{slot} {kind}" for slot in ("dispatch", "combine") for kind in ("forward", "backward")]
    assert runs == {(f"layer {i}", node): 3 for i in range(2) for node in nodes}
    assert "exposed" not in as_text(report).split("No GPU")[0]
