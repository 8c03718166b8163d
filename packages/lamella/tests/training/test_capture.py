"""Captured steps: on the CPU nothing is captured, and inputs and settings are checked as on a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from trained_runs import TrainOn
from transformers import AutoConfig

from lamella import Config
from lamella._data.tokens import TokenData
from lamella._model.capture import captures, captures_by_default
from lamella._model.spec import load_spec
from lamella._settings.capture import check_capturable
from lamella._settings.config import resolve
from lamella._settings.options import ConfigError
from lamella._settings.sections import Packing, ParallelConfig
from lamella._training import steps


def changed(config: Config, name: str, *, capture: bool | None) -> Config:
    root = Path(str(config.run.directory)).parent
    return replace(
        config,
        parallel=replace(config.parallel, capture=capture),
        run=replace(config.run, directory=str(root / name), checkpoint_interval=3),
    )


def test_captured_steps_train_and_resume_as_uncaptured_steps(
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


ON_ONE_GPU: Mapping[str, Mapping[str, object]] = {
    "model": {"name": "llama-small"},
    "parallel": {"device": "cuda", "ranks": 1},
}
MATRIX = nn.Linear(100, 1000, bias=False, device="meta")


def is_captured(
    sections: Mapping[str, Mapping[str, object]], spec: Any = None, *, is_plain_stream: bool = True
) -> bool:
    spec = load_spec("llama-small") if spec is None else spec
    return captures_by_default(resolve(ON_ONE_GPU, sections), MATRIX, spec, is_plain_stream=is_plain_stream)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"compile": True}},
        {"parallel": {"stage": 2}},
        {"parallel": {"ranks": 2}},
        {"optim": {"accumulation": 2}},
    ],
)
def test_a_small_llama_on_one_or_two_gpus_is_captured(sections: dict[str, Any]) -> None:
    assert is_captured(sections)
    assert captures(resolve(ON_ONE_GPU, sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"device": "cpu"}},
        {"parallel": {"capture": False}},
        {"parallel": {"rest": "cpu"}},
        {"parallel": {"recompute": "full"}},
        {"parallel": {"float8": "tensor"}},
        {"parallel": {"ranks": 4}},
        {"parallel": {"ranks": 2, "stage": 2}},
        {"parallel": {"ranks": 2, "replicate": 2}},
        {"parallel": {"ranks": 2, "keep_budget": "1GiB"}},
        {"parallel": {"ranks": 2, "reshard_after_forward": False}},
        {"model": {"attention": "eager"}},
        {"model": {"kernels": "liger"}},
        {"model": {"lora_rank": 4}},
        {"run": {"deterministic": True}},
        {"run": {"profile": 2}},
    ],
)
def test_a_setting_that_was_not_measured_keeps_the_steps_eager(sections: dict[str, Any]) -> None:
    assert not is_captured(sections)
    assert not captures(resolve(ON_ONE_GPU, sections))


def test_two_hosts_of_one_gpu_each_keep_the_steps_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not is_captured({"parallel": {"ranks": 2}})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert is_captured({"parallel": {"ranks": 2}})


def test_steps_with_documents_mamba_or_dynamic_rope_are_not_captured_by_default() -> None:
    assert not is_captured({}, is_plain_stream=False)
    assert not is_captured({}, AutoConfig.for_model("mamba2"))
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not is_captured({}, AutoConfig.for_model("llama", rope_parameters=scaled))
    assert captures(resolve(ON_ONE_GPU, {"data": {"packing": "stream"}}))
    assert not captures(resolve(ON_ONE_GPU, {"data": {"packing": "documents"}}))


def test_large_models_are_not_captured_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella._model.capture._MOST_WEIGHTS", 100_000)
    assert is_captured({})
    monkeypatch.setattr("lamella._model.capture._MOST_WEIGHTS", 99_999)
    assert not is_captured({})


@pytest.mark.parametrize(
    ("packing", "has_one_length", "expected"),
    [("stream", True, "True"), ("stream", False, "False"), ("documents", True, "False")],
)
def test_a_run_asks_its_tokens_whether_all_batches_are_alike(
    shared_config: Config,
    train: TrainOn,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    packing: Packing,
    has_one_length: bool,
    expected: str,
) -> None:
    def answer(*_: object, is_plain_stream: bool) -> bool:  # in a forked rank
        (tmp_path / "is_plain_stream").write_text(str(is_plain_stream))
        return False

    monkeypatch.setattr(steps, "captures_by_default", answer)
    monkeypatch.setattr(TokenData, "has_one_length", lambda *_: has_one_length)
    config = changed(shared_config, f"{packing}-{has_one_length}", capture=None)
    train(replace(config, data=replace(config.data, packing=packing)), 1)
    assert (tmp_path / "is_plain_stream").read_text() == expected


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
