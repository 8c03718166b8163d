"""Records go to the files of a run and to its trackers; a tracker that fails leaves the run alone."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._processes.placement import place
from lamella._record.metrics import Record, SampleRecord, StepRecord, ValidationRecord, read
from lamella._record.stream import MetricsFile, RecordStream
from lamella._record.trackers import TRACKERS, TrackedRun, numbers, open_trackers
from lamella._settings.sections import RunConfig
from lamella._training.preparation import prepare

STEP = StepRecord(step=3, loss=2.5, grad_norm=0.5, lr=1e-3, tokens_per_s=10.0, memory_nbytes=4, mfu=None)
VALIDATION = ValidationRecord.of(3, 1.25, "byte")
NUMBERS = {
    "train/loss": 2.5,
    "train/grad_norm": 0.5,
    "train/lr": 1e-3,
    "train/tokens_per_s": 10.0,
    "train/memory_nbytes": 4.0,
}


class Library(ModuleType):
    """A stand-in for a tracker's library, which notes its calls."""

    def __init__(self, name: str, calls: list[tuple[str, Any]]) -> None:
        super().__init__(name)
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*positional: Any, **arguments: Any) -> Any:
            self._calls.append((name, {**arguments, **({"values": positional[0]} if positional else {})}))
            run = SimpleNamespace(run_id=f"run-{len(self._calls)}")
            return SimpleNamespace(id=run.run_id, info=run, log=self.log, finish=self.finish)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    calls: list[tuple[str, Any]] = []
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, Library(name, calls))
    return calls


def tracked(root: Path, first_step: int = 0) -> TrackedRun:
    root.mkdir(exist_ok=True)
    return TrackedRun(root=root, settings={"optim": {"lr": 1e-3}, "data": {"paths": ("a",)}}, first_step=first_step)


def test_tracked_numbers_are_named_by_record_kind_and_omit_unknown_values() -> None:
    assert numbers(STEP) == NUMBERS
    assert numbers(VALIDATION) == {"validation/nats_per_byte": 1.25}


@pytest.mark.parametrize(
    ("name", "log", "end"),
    [("wandb", "log", "finish"), ("mlflow", "log_metrics", "end_run"), ("trackio", "log", "finish")],
)
def test_a_tracker_gets_settings_numbers_and_an_end(
    calls: list[tuple[str, Any]], tmp_path: Path, name: str, log: str, end: str
) -> None:
    stream = RecordStream(open_trackers([name], tracked(tmp_path / "mine"), pytest.fail), pytest.fail)
    stream.write([STEP, VALIDATION])
    stream.flush()
    stream.close()
    arguments = [call for _, call in calls]
    assert any({"optim.lr": 1e-3, "data.paths": ("a",)} in call.values() for call in arguments)
    assert any("mine" in call.values() for call in arguments)
    assert any("lamella" in call.values() for call in arguments)
    assert calls[-3:] == [
        (log, {"values": NUMBERS, "step": 3}),
        (log, {"values": {"validation/nats_per_byte": 1.25}, "step": 3}),
        (end, {}),
    ]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("wandb", ("log", {"values": {"sample/2": "def f(x):"}, "step": 3})),
        ("mlflow", ("log_text", {"values": "def f(x):"})),
        ("trackio", ("log", {"values": {"sample/2": "def f(x):"}, "step": 3})),
    ],
)
def test_a_tracker_gets_samples_as_texts(
    calls: list[tuple[str, Any]], tmp_path: Path, name: str, call: tuple[str, Any]
) -> None:
    stream = RecordStream(open_trackers([name], tracked(tmp_path / "mine"), pytest.fail), pytest.fail)
    stream.write([SampleRecord(step=3, number=2, prompt="def ", text="f(x):")])
    assert calls[-1] == call


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("mlflow", "run_id")])
def test_a_resumed_run_goes_on_in_its_run_of_the_tracker(
    calls: list[tuple[str, Any]], tmp_path: Path, name: str, key: str
) -> None:
    [*open_trackers([name], tracked(tmp_path / "mine"), pytest.fail)]
    identity = (tmp_path / "mine" / f"{name}.id").read_text()
    assert identity.startswith("run-")
    calls.clear()
    [*open_trackers([name], tracked(tmp_path / "mine", first_step=3), pytest.fail)]
    assert calls[0][1][key] == identity


class Failing:
    """A tracker that fails at its second call."""

    is_file = False

    def __init__(self, run: TrackedRun | None = None) -> None:
        self.records: list[Record] = []

    def write(self, records: list[Record]) -> None:
        if self.records:
            raise ConnectionError("no route\nto the server")
        self.records += records

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_a_tracker_that_fails_is_left_out_with_one_line_and_files_go_on(tmp_path: Path) -> None:
    lines: list[str] = []
    metrics, failing = tmp_path / "metrics.jsonl", Failing()
    stream = RecordStream((failing, MetricsFile(metrics)), lines.append)  # type: ignore[arg-type]
    for record in (STEP, VALIDATION, STEP):
        stream.write([record])
    assert failing.records == [STEP] and read(metrics) == [STEP, VALIDATION, STEP]
    assert lines == ["Failing: ConnectionError: no route to the server. The run goes on without this tracker."]


def test_a_file_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        RecordStream([MetricsFile(tmp_path / "absent" / "metrics.jsonl")], pytest.fail).write([STEP])


def test_a_tracker_that_cannot_start_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    lines: list[str] = []
    assert [*open_trackers(["wandb"], tracked(tmp_path / "mine"), lines.append)] == []
    assert lines[0].startswith("wandb: ModuleNotFoundError: ") and lines[0].endswith("without this tracker.")


def test_names_may_be_joined_by_commas() -> None:
    assert RunConfig(trackers=("tensorboard,wandb", "mlflow", " wandb ")).tracker_names == (
        "tensorboard",
        "wandb",
        "mlflow",
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("tensorbord", "Expected --trackers to be of tensorboard, wandb, mlflow, trackio, got 'tensorbord'. Did you"),
        ("wandb", "got none. Install it from a clone: uv pip install './packages/lamella[wandb]'"),
    ],
)
def test_unknown_and_absent_trackers_are_refused_before_the_run(
    config: Config, names: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # as W&B leaves in the current folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if names == "wandb":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=None))
    with pytest.raises(ConfigError) as caught:
        prepare(place(replace(config, run=replace(config.run, trackers=(names,)))))
    assert expected in str(caught.value)


def scalars(folder: Path, name: str) -> dict[int, float]:
    """The numbers that TensorBoard shows: of a step that was taken twice, the last."""
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


@pytest.mark.filterwarnings("ignore")  # TensorBoard's libraries warn of each other.
def test_tensorboard_shows_a_run_and_its_resumption(config: Config, train: TrainOn) -> None:
    pytest.importorskip("tensorboard")
    config = replace(config, run=replace(config.run, trackers=("tensorboard",), checkpoint_interval=3))
    run = train(config, 2)
    folder = run.directory.root / "tensorboard"
    assert scalars(folder, "train/loss") == pytest.approx(run.losses)
    again = train(replace(config, run=replace(config.run, from_step=3)), 1)
    assert scalars(folder, "train/loss") == pytest.approx(again.losses)
    assert scalars(folder, "validation/nats_per_byte") == pytest.approx(again.validations)


def test_every_tracker_has_an_optional_dependency_group() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for name in TRACKERS:
        assert f"\n{name} = [" in text
