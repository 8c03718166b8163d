"""A plan's bytes and operations are those of arithmetic, and its times are ordered as they must be."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from conftest import TINY_LLAMA

import lamella
from lamella._command.estimate import placed
from lamella._plan.cluster import Cluster
from lamella._plan.recorded_works import record_works
from lamella._plan.run_plan import plan_run
from lamella._plan.search import instances_of
from lamella._plan.step_plan import plan_of
from lamella._plan.works import Work, WorkKind
from lamella._settings.config import resolve
from lamella_buffers import FakeCollective

_LENGTH, _WIDTH, _HIDDEN, _VOCABULARY, _LAYERS = 64, 16, 40, 300, 2
_LAYER_MATRICES = 2 * _WIDTH**2 + 2 * _WIDTH * _WIDTH // 2 + 3 * _WIDTH * _HIDDEN
_CLUSTER = Cluster(gpus_a_host=4)
# The wires decide: a model this small would wait for its host.
_QUICK_HOST = replace(_CLUSTER, launch_us=0, view_us=0, collective_launch_us=0, slowdown=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY_LLAMA))
    return path


def _works(model: Path, *, ranks: int = 4, optim: dict[str, object] | None = None, **parallel: object) -> list[Work]:
    settings: Mapping[str, Mapping[str, object]] = {
        "model": {"name": str(model)},
        "data": {"sequence_length": _LENGTH},
        "optim": {"batch_size": 2 * ranks, "lr": 1e-3, **(optim or {})},
        "parallel": {"ranks": ranks, **parallel},
    }
    return _recorded(placed(resolve(settings))).works


_recorded = cache(record_works)


def _layer_nbytes(works: list[Work], kind: WorkKind) -> list[int]:
    return [
        work.collective.whole_nbytes
        for work in works
        if work.collective is not None and work.kind is kind and "layers.0" in work.unit
    ]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_layers_that_run_again_alone_take_the_host_further_time(model: Path, kind: str) -> None:
    hooked = {work.moment for work in _works(model, recompute=kind, recompute_layers=1) if work.hooks}
    assert hooked == {"forward model.layers.0"}
    hooked = {work.moment for work in _works(model, recompute=kind) if work.hooks}
    assert hooked == {"forward model.layers.0", "forward model.layers.1"}
    assert not any(work.hooks for work in _works(model))


@pytest.mark.parametrize(("ranks", "stage", "num_gathers"), [(2, 3, 2), (8, 3, 2), (16, 2, 1), (4, 1, 1)])
def test_a_layer_is_gathered_and_reduced_as_often_as_its_stage_says(
    model: Path, ranks: int, stage: int, num_gathers: int
) -> None:
    works = _works(model, ranks=ranks, stage=stage, reduce="bf16")
    numel = _LAYER_MATRICES + 2 * _WIDTH  # its matrices, and two norms
    gathers, reductions = _layer_nbytes(works, WorkKind.GATHER), _layer_nbytes(works, WorkKind.REDUCE)
    assert gathers == [pytest.approx(2 * numel, rel=0.35)] * num_gathers  # rows are padded to equal shards
    assert reductions == [pytest.approx(2 * numel, rel=0.35)]
    traffic = plan_of(works, _CLUSTER).units
    assert sum(traffic[next(unit for unit in traffic if "layers.0" in unit)].sent_nbytes.values()) == pytest.approx(
        (sum(gathers) + sum(reductions)) * (ranks - 1) / ranks
    )


def test_planned_flops_are_those_of_the_formula(model: Path) -> None:
    tokens = 2 * _LENGTH
    products = 6 * tokens * (_LAYERS * _LAYER_MATRICES + _WIDTH * _VOCABULARY)
    attention = 3.5 * 4 * 2 * _LENGTH**2 * _WIDTH / 2 * _LAYERS  # forward once, backward two and a half times, causal
    plain, recomputed = _works(model), _works(model, recompute="full")
    by_kind = {kind: sum(w.flops for w in plain if w.kind is kind) for kind in (WorkKind.MATMUL, WorkKind.ATTENTION)}
    assert by_kind[WorkKind.MATMUL] == pytest.approx(products, rel=0.02)
    assert by_kind[WorkKind.ATTENTION] == pytest.approx(attention)
    again = sum(work.flops for work in recomputed if work.kind is WorkKind.MATMUL) - by_kind[WorkKind.MATMUL]
    # A recomputation ends before a layer's last product, whose output backward does not read.
    assert again == pytest.approx(2 * tokens * _LAYERS * (_LAYER_MATRICES - _WIDTH * _HIDDEN))


def test_exposed_time_is_within_the_communication_and_more_bandwidth_is_never_slower(model: Path) -> None:
    works = _works(model, ranks=8)
    before = None
    for factor in (1, 3, 30, 3000):
        wires = {"gather_gb_s": factor / 1e4, "reduce_gb_s": factor / 1e4, "network_gb_s": factor / 5e4}
        cluster = _QUICK_HOST.with_rates(wires)
        plan = plan_of(works, cluster)
        for traffic in plan.units.values():
            for kind, seconds in traffic.seconds.items():
                assert -1e-12 <= traffic.exposed_seconds[kind] <= seconds + 1e-12
        assert plan.exposed_seconds <= plan.communication_seconds
        if before is not None:
            assert plan.seconds < before.seconds
        before = plan


def test_planned_time_grows_linearly_beyond_the_recorded_microbatches(model: Path) -> None:
    def seconds(count: int) -> float:
        works = _works(model, ranks=2, optim={"batch_size": 2 * count, "accumulation": count})
        return plan_of(works, replace(_CLUSTER, memory_gb_s=1.0, matmul_tflops=0.01)).seconds

    three, four, seven = seconds(3), seconds(4), seconds(7)
    assert seven - four == pytest.approx(3 * (four - three), rel=0.01)
    assert four > three


def test_a_plan_over_two_hosts_is_slower_and_instances_gather_within_hosts(model: Path) -> None:
    slow = replace(_QUICK_HOST, network_gb_s=1e-5)
    apart, instances = _works(model, ranks=8), _works(model, ranks=8, replicate=2)
    assert plan_of(apart, slow).seconds > plan_of(apart, replace(slow, gpus_a_host=8)).seconds
    inside, between = (
        sum(traffic.seconds["gather"] for traffic in plan_of(works, slow).units.values())
        for works in (instances, apart)
    )
    assert inside < between / 100


def test_a_ring_between_hosts_crosses_once_for_each_gpu_of_a_host() -> None:
    cluster = Cluster(gpus_a_host=2, gather_gb_s=100.0, network_gb_s=10.0, nvlink_us=0.0, network_us=0.0)
    gather = FakeCollective("all_gather", 8_000_000_000, (0, 1, 2, 3))
    assert cluster.collective_seconds(gather) == pytest.approx(6e9 / 2 / 10e9)
    # The ring of three GPUs crosses between the hosts over one card of each.
    assert cluster.collective_seconds(gather._replace(ranks=(0, 1, 2))) == pytest.approx(8e9 * 2 / 3 / 10e9)
    assert cluster.collective_seconds(gather._replace(ranks=(0, 1))) == pytest.approx(4e9 / 100e9)
    assert cluster.collective_seconds(gather._replace(ranks=(1, 3), kind="all_reduce")) == pytest.approx(8e9 / 10e9)


def test_meshes_to_try_have_whole_hosts() -> None:
    assert instances_of(64, 8) == [1, 2, 4, 8]
    assert instances_of(2, 8) == [1]
    assert instances_of(24, 8) == [1, 3]


def test_the_memory_of_a_plan_is_the_estimate_without_a_validation(model: Path) -> None:
    config = placed(
        resolve({"model": {"name": str(model)}, "data": {"sequence_length": _LENGTH}, "optim": {"batch_size": 8}})
    )
    plan, estimate = plan_run(config, _CLUSTER), lamella.estimate(config)
    moments = [moment.name for moment in estimate.moments if moment.name != "validation"]
    assert [moment.name for moment in plan.estimate.moments] == moments
    assert plan.estimate.at_rest == estimate.at_rest
    assert plan.fits
