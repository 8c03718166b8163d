"""Captured steps: on the CPU nothing is captured, and inputs and settings are checked as on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trained_runs import TrainOn

from lamella import Config
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


def test_texts_with_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="got conversations or completions"):
        check_capturable("stream", ParallelConfig(capture=True), has_answers=True)


def test_an_operation_that_no_graph_holds_is_one_line() -> None:
    def raised(text: str) -> Callable[[], None]:
        def step() -> None:
            with steps._errors_of_capture():
                raise RuntimeError(text)

        return step

    with pytest.raises(ConfigError, match="operation not permitted when stream is capturing.*Leave --capture out"):
        raised("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors ...")()
    with pytest.raises(RuntimeError, match="out of memory"):
        raised("CUDA out of memory")()
