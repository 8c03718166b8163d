"""The options of streamed runs: what they need, what they refuse, and the lines at the start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._command.parser import config_of, parse
from lamella._training.preparation import prepare


@pytest.fixture
def streamed(config: Config, tmp_path: Path) -> Config:
    """Settings of a streamed run on JSON lines."""
    for name in ("train", "validation"):
        lines = (json.dumps({"text": f"{name} {row} words of a text"}) + "\n" for row in range(400))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    paths = {"paths": (str(tmp_path / "train.jsonl"),), "validation_paths": (str(tmp_path / "validation.jsonl"),)}
    return replace(config, data=replace(config.data, streaming=True, shuffle_buffer=64, **paths))  # type: ignore[arg-type]


def test_a_streamed_run_announces_its_files_and_writes_no_training_tokens(streamed: Config) -> None:
    run = prepare(streamed)
    [line] = [line for line in run.lines if line.startswith("data: ")]
    size = Path(streamed.data.paths[0]).stat().st_size
    assert line.startswith(f"data: streamed from 1 files, {size:,} bytes of {streamed.data.paths[0]}; validation on 1 ")
    expected = "streaming: rank 0 reads 64 documents at a time, and packs and shuffles them; the files are in another"
    assert [line for line in run.lines if line.startswith(expected)]
    assert not list(run.directory.tokens.glob("train*"))
    assert list(run.directory.tokens.glob("validation*"))


def test_the_tokenizer_of_a_fresh_model_is_trained_on_the_beginnings_of_the_sources(
    streamed: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._data.tokens.VOCABULARY_LENGTH", 4000)
    for name in ("one", "two"):
        head, tail = f"{name}head " * 20, f"{name}tail " * 20
        texts = [head] * 30 + [tail] * 100
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    paths = tuple(f"{name}={tmp_path / name}.jsonl" for name in ("one", "two"))
    run = prepare(replace(streamed, data=replace(streamed.data, paths=paths)))
    tokens = (run.directory.model / "tokenizer.json").read_text(encoding="utf-8")
    assert all(f'"\u0120{name}head"' in tokens and f"{name}tail" not in tokens for name in ("one", "two"))


def test_a_mixture_has_a_line_a_source(streamed: Config) -> None:
    [path] = streamed.data.paths
    [validation] = streamed.data.validation_paths
    data = replace(streamed.data, paths=(f"a={path}", f"b={validation}"), validation_paths=(path,))
    with pytest.raises(ConfigError, match="Expected text in"):  # The file is the validation's.
        prepare(replace(streamed, data=data))
    data = replace(streamed.data, paths=(f"a={path}",), mixture=("a=3",))
    assert [line for line in prepare(replace(streamed, data=data)).lines if line.startswith("mixture")] == [
        "mixture: 100.0% a"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Expected --steps with --streaming, .*, got none. Pass the number of steps in all."),
        (["--epochs", "2"], "Expected --steps with --streaming, .*, got --epochs 2.0. Pass --steps"),
        (["--steps", "9", "--no-streaming", "--shuffle-buffer", "9"], "Expected --streaming with --shuffle-buffer"),
        (["--steps", "9", "--shuffle-buffer", "0"], "Expected --shuffle-buffer of at least 1, got 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(options: list[str], message: str) -> None:
    command = ["train", "--data", "a", "--validation-data", "b", "--streaming", *options]
    with pytest.raises(ConfigError, match=message) as refusal:
        config_of(parse(command))
    assert "\n" not in str(refusal.value)


def test_texts_for_validation_and_steps_are_needed() -> None:
    with pytest.raises(ConfigError, match="Expected --validation-data with --streaming, .*, got none. Pass texts"):
        config_of(parse(["train", "--data", "a", "--streaming", "--steps", "9"]))
    config = config_of(parse(["train", "--data", "a", "--streaming", "--steps", "9", "--validation-data", "b"]))
    assert config.data.streaming
    assert config.data.shuffle_buffer == 2048
    with pytest.raises(ConfigError, match=r"got '--stream'. ?.*Pass --streaming"):
        parse(["train", "--stream", "a"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streaming": False, "shuffle_buffer": 2048}, "Expected data.streaming to stay True as in the run"),
        ({"shuffle_buffer": 65}, "Expected data.shuffle_buffer to stay 64 as in the run to be resumed, got 65"),
        (
            {"paths": ("{}/validation.jsonl",), "validation_paths": ("{}/train.jsonl",)},
            "Expected the text that the run",
        ),
    ],
)
def test_a_resume_with_another_stream_is_refused(
    streamed: Config, train: TrainOn, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    train(streamed, 1)
    paths: dict[str, Any] = {
        name: tuple(str(path).format(tmp_path) for path in setting) if isinstance(setting, tuple) else setting
        for name, setting in changes.items()
    }
    with pytest.raises(ConfigError, match=message):
        prepare(replace(streamed, data=replace(streamed.data, **paths), optim=replace(streamed.optim, steps=9)))
