"""Captured steps: on the CPU nothing is captured, and inputs and settings are checked as on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from trained_runs import TrainOn

from lamella import Config
from lamella._model.capture import captures_by_default
from lamella._settings.capture import check_capturable
from lamella._settings.config import resolve
from lamella._settings.options import ConfigError
from lamella._settings.sections import ParallelConfig
from lamella._training import steps


def changed(config: Config, name: str, *, capture: bool) -> Config:
    root = Path(str(config.run.directory)).parent
    return replace(
        config,
        parallel=replace(config.parallel, capture=capture),
        run=replace(config.run, directory=str(root / name), checkpoint_interval=3),
    )


def test_captured_steps_train_as_others_and_go_on_as_others(
    shared_config: Config, train: TrainOn, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = train(changed(shared_config, "plain", capture=False), 2)
    captured = train(changed(shared_config, "captured", capture=True), 2)
    expected = pytest.approx(plain.losses, rel=1e-5)  # a captured learning rate is in fp32
    assert captured.losses == expected
    for run, capture in ((plain, True), (captured, False)):
        other = changed(shared_config, run.directory.root.name, capture=capture)
        assert train(replace(other, run=replace(other.run, from_step=3)), 2).losses == expected
    assert capfd.readouterr().out.count("steps: no graph on the CPU") == 2


@pytest.mark.parametrize(
    ("section", "option"),
    [
        ({"data": {"packing": "none"}}, "--packing none, whose batches differ in shape"),
        ({"parallel": {"rest": "cpu"}}, "without --rest cpu, where the host steps"),
        ({"parallel": {"experts": 2}}, "without --experts 2, whose numbers of tokens the host reads"),
        ({"parallel": {"offload_activations": True}}, "without --offload-activations"),
        ({"parallel": {"tensor_parallel": 2}}, "without --tensor-parallel"),
        ({"parallel": {"context_parallel": 2}}, "without --context-parallel"),
        ({"optim": {"optimizer": "muon"}}, "without --optimizer muon"),
        ({"optim": {"states": "bf16"}}, "without --states bf16"),
    ],
)
def test_options_that_no_graph_holds_are_refused(section: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"Expected --capture .*{option}.*Leave"):
        resolve({"model": {"name": "llama-small"}, "parallel": {"capture": True}}, section)


@pytest.fixture
def captures() -> Callable[..., bool]:
    def captures(sections: dict[str, Any], model_type: str = "llama", *, is_plain_stream: bool = True) -> bool:
        parallel: dict[str, object] = {"device": "cuda", "ranks": 1}
        on_gpu: dict[str, dict[str, object]] = {"model": {"name": "llama-small"}, "parallel": parallel}
        weights = nn.Linear(100, 1000, bias=False, device="meta")
        return captures_by_default(resolve(on_gpu, sections), weights, model_type, is_plain_stream=is_plain_stream)

    return captures


@pytest.mark.parametrize(
    ("section", "model_type"),
    [
        ({"parallel": {"device": "cpu"}}, "llama"),
        ({}, "mamba2"),
        ({"parallel": {"capture": False}}, "llama"),
        ({"parallel": {"rest": "cpu"}}, "llama"),
        ({"parallel": {"recompute": "full"}}, "llama"),
        ({"parallel": {"float8": "tensor"}}, "llama"),
        ({"parallel": {"ranks": 2}}, "llama"),
        ({"model": {"kernels": "liger"}}, "llama"),
        ({"model": {"lora_rank": 4}}, "llama"),
        ({"run": {"deterministic": True}}, "llama"),
        ({"run": {"profile": 2}}, "llama"),
    ],
)
def test_small_models_on_gpus_are_captured_unless_a_setting_was_not_measured(
    section: dict[str, Any], model_type: str, captures: Callable[..., bool]
) -> None:
    for measured in ({}, {"parallel": {"compile": True}}, {"run": {"sample": ("def",)}}):
        assert captures(measured)
    assert not captures(section, model_type)
    assert not captures({}, is_plain_stream=False)


def test_large_models_are_not_captured_by_default(
    captures: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._model.capture._MOST_WEIGHTS", 100_000)
    assert captures({})
    monkeypatch.setattr("lamella._model.capture._MOST_WEIGHTS", 99_999)
    assert not captures({})


def test_texts_with_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="got conversations or completions"):
        check_capturable("stream", ParallelConfig(capture=True), has_answers=True)


def test_an_operation_that_no_graph_holds_is_one_line() -> None:
    def raised(text: str) -> Callable[[], None]:
        def step() -> None:
            with steps._errors_of_capture():
                raise RuntimeError(text)

        return step

    with pytest.raises(ConfigError, match="operation not permitted when stream is capturing.*Pass --no-capture"):
        raised("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors ...")()
    with pytest.raises(RuntimeError, match="out of memory"):
        raised("CUDA out of memory")()
