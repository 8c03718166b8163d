"""Options are chosen by the host's time for a step too: of its operators, and of the hooks of recomputed layers."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path

import pytest
from conftest import TINY_LLAMA

import lamella
from lamella._command import fitting
from lamella._command.estimate import placed
from lamella._estimate.choice import FittingOptions
from lamella._estimate.host_times import ASSUMED_HOST, IDLE_HOST, HostTimes, measured_host
from lamella._estimate.memory_options import MemoryOptions
from lamella._estimate.recorded_options import RecordedOptions
from lamella._model.spec import NAMED
from lamella._settings.config import Config, resolve

_SLOW_HOST = HostTimes(operator_seconds=36e-6, hook_seconds={"no": 0.0, "full": 54e-6, "selective": 176e-6})
"""The times of `measured_host` on a machine with a CPU alone, 2.7 times."""

_BENCHMARK_0025 = {"no": 0.163, "full": 0.226, "selective": 0.250}
"""Seconds of a step by the kind of recomputation."""


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Return a function that returns settings of a run of a model."""

    def config_of(model: Mapping[str, object], batch_size: int, length: int, **parallel: object) -> Config:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(dict(model)))
        settings: Mapping[str, Mapping[str, object]] = {
            "model": {"name": str(path)},
            "data": {"sequence_length": length},
            "optim": {"batch_size": batch_size},
            "parallel": {"ranks": 2, "capture": False, **parallel},
        }
        return placed(resolve(settings))

    return config_of


@pytest.mark.slow
def test_a_slow_host_explains_the_steps_of_docs_benchmarks_0025(config: Callable[..., Config]) -> None:
    recorded = RecordedOptions(config(NAMED["llama-1b"].config, 8, 2048), _SLOW_HOST)
    on_slow_host = [recorded.seconds(MemoryOptions(recompute=kind)) for kind in _BENCHMARK_0025]
    assert on_slow_host == pytest.approx([*_BENCHMARK_0025.values()], rel=0.15)
    assert on_slow_host == sorted(on_slow_host)


@pytest.mark.usefixtures("estimated_once")
def test_no_options_are_chosen_that_make_the_step_wait_for_the_host(config: Callable[..., Config]) -> None:
    """7 % less memory than without options are not enough for resharding, and for either recomputation of a layer."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    model = config({**TINY_LLAMA, **sizes}, 16, 2048)
    plain = lamella.estimate(model).needed_nbytes
    for host, kind in ((_SLOW_HOST, "full"), (IDLE_HOST, "selective")):
        options = lamella.fit_options(model, str(int(0.93 * plain)), host)
        assert options.chosen.fields.recompute == kind
        fitting_costs = [
            alternative.cost
            for alternative in options.alternatives
            if alternative.estimate.needed_nbytes <= options.memory_nbytes
        ]
        assert options.chosen.cost == min(fitting_costs)


def test_hooks_take_the_host_time_for_recomputed_layers_alone(config: Callable[..., Config]) -> None:
    """With hooks alone a step's time beyond the GPU's grows by equal layers, and microbatches."""
    hooks = HostTimes(operator_seconds=0.0, hook_seconds={"no": 0.0, "full": 1.0, "selective": 2.0})
    recorded = RecordedOptions(config(TINY_LLAMA, 16, 64), hooks)
    one, two = (recorded.seconds(MemoryOptions(recompute="full", num_recomputed=number)) for number in (1, None))
    assert one > 10.0
    assert two == pytest.approx(2 * one, rel=1e-3)
    assert recorded.seconds(MemoryOptions(recompute="selective")) == pytest.approx(2 * two, rel=1e-3)
    assert recorded.seconds(MemoryOptions(offload_activations=True)) == pytest.approx(two, rel=1e-3)
    assert recorded.seconds(MemoryOptions()) < 1.0


@pytest.mark.usefixtures("estimated_once")
def test_a_graph_waits_for_no_host(config: Callable[..., Config]) -> None:
    model = config(TINY_LLAMA, 16, 64, device="cuda")
    captured = replace(model, parallel=replace(model.parallel, capture=True))
    compiled = replace(model, parallel=replace(model.parallel, compile=True))
    for graph in (captured, compiled):
        hosts = (_SLOW_HOST, IDLE_HOST)
        with_slow, with_idle = (RecordedOptions(graph, host).seconds(MemoryOptions()) for host in hosts)
        assert with_slow == with_idle
    assert RecordedOptions(model, _SLOW_HOST).seconds(MemoryOptions()) > 2 * with_idle


def test_a_trial_gives_medians_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a plain trial takes 1 s, a full one 3 s and a selective one 5 s, but two late ones."""
    durations = [second for seconds in (1.0, 3.0, 5.0) for second in (*[seconds] * 29, 90.0, 90.0)]
    pairs = zip(durations, accumulate(durations), strict=True)
    readings = iter([*chain.from_iterable((end - seconds, end) for seconds, end in pairs)])
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    host = measured_host()
    assert next(readings, None) is None
    num_operators = 3.0 / host.operator_seconds  # a run's operator takes three times the trial's
    assert num_operators == pytest.approx(round(num_operators))
    assert 40 < num_operators < 150
    # Operators that run again, less than a third of all, are no hooks: of full ones 3 s less 1 to 1.33 are.
    ratio = host.hook_seconds["selective"] / host.hook_seconds["full"]
    assert (5.0 - 1.33) / (3.0 - 1.0) < ratio < (5.0 - 1.0) / (3.0 - 1.33)


def test_ranks_of_torchrun_choose_by_one_host(config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[HostTimes | None] = []

    def options_of(settings: Config, memory: str, host: HostTimes | None) -> FittingOptions:
        hosts.append(host)
        return FittingOptions(config=settings, chosen=None, alternatives=[], memory_nbytes=0)  # type: ignore[arg-type]

    monkeypatch.setattr(fitting, "fit_options", options_of)
    model = config(TINY_LLAMA, 16, 64, device="cpu")
    fitting.fitted(model, "1GiB")
    for name, text in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_PORT", "29500")
    fitting.fitted(model, "1GiB")
    assert hosts == [None, ASSUMED_HOST]
