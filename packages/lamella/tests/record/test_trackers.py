"""Records go to the files of a run and to its trackers; a tracker that fails leaves the run alone."""

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._processes.endings import LossNotFiniteError
from lamella._processes.placement import place
from lamella._processes.pulse import Pulse, RunPhase
from lamella._record.metrics import Record, SampleRecord, StepRecord, ValidationRecord, read
from lamella._record.stream import MetricsFile, RecordStream, TrackerThread
from lamella._record.trackers import TRACKERS, TrackedRun, numbers, open_trackers
from lamella._settings.sections import RunConfig
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer

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
            methods = {name: getattr(self, name) for name in ("log", "finish", "define_metric")}
            return SimpleNamespace(id=run.run_id, info=run, **methods)

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
    [
        ("wandb", "log", ("finish", {"exit_code": 0})),
        ("mlflow", "log_metrics", ("end_run", {"status": "FINISHED"})),
        ("trackio", "log", ("finish", {})),
    ],
)
def test_a_tracker_gets_settings_numbers_and_an_end(
    calls: list[tuple[str, Any]], tmp_path: Path, name: str, log: str, end: tuple[str, Any]
) -> None:
    stream = RecordStream(open_trackers([name], tracked(tmp_path / "mine"), pytest.fail), pytest.fail)
    stream.write([STEP, VALIDATION])
    stream.flush()
    stream.close()
    arguments = [call for _, call in calls]
    assert any({"optim.lr": 1e-3, "data.paths": ("a",)} in call.values() for call in arguments)
    assert any(str(text).startswith("mine") for call in arguments for text in call.values())
    assert any("lamella" in call.values() for call in arguments)

    def logged(values: dict[str, float]) -> tuple[str, Any]:
        return log, {"values": {"step": 3, **values}} if name == "wandb" else {"values": values, "step": 3}

    assert calls[-3:] == [logged(NUMBERS), logged({"validation/nats_per_byte": 1.25}), end]


@pytest.mark.parametrize(("exit_code", "status"), [(1, "FAILED"), (143, "KILLED")])
def test_a_run_that_ends_early_is_not_finished_at_its_trackers(
    calls: list[tuple[str, Any]], tmp_path: Path, exit_code: int, status: str
) -> None:
    stream = RecordStream(open_trackers(["wandb", "mlflow"], tracked(tmp_path / "mine"), pytest.fail), pytest.fail)
    stream.close(exit_code)
    assert calls[-2:] == [("finish", {"exit_code": exit_code}), ("end_run", {"status": status})]


@pytest.mark.parametrize(("end", "exit_code"), [(0, 0), (signal.SIGTERM, 143), (LossNotFiniteError("nan"), 1)])
def test_the_exit_code_of_a_run_goes_to_its_trackers(end: object, exit_code: int) -> None:
    trainer = MagicMock(_train=Mock(side_effect=[end]))
    with suppress(LossNotFiniteError):
        Trainer.train(trainer)
    trainer._records.close.assert_called_once_with(exit_code)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("wandb", ("log", {"values": {"step": 3, "sample/2": "def f(x):"}})),
        ("mlflow", ("log_text", {"values": "def f(x):"})),
        ("trackio", ("log", {"values": {"sample/2": "def f(x):"}, "step": 3})),
    ],
)
def test_a_tracker_gets_samples_as_texts(
    calls: list[tuple[str, Any]], tmp_path: Path, name: str, call: tuple[str, Any]
) -> None:
    stream = RecordStream(open_trackers([name], tracked(tmp_path / "mine"), pytest.fail), pytest.fail)
    stream.write([SampleRecord(step=3, number=2, prompt="def ", text="f(x):")])
    stream.close()
    assert calls[-2] == call


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("mlflow", "run_id"), ("trackio", "name")])
def test_a_resumed_run_goes_on_in_its_run_of_the_tracker(
    calls: list[tuple[str, Any]], tmp_path: Path, name: str, key: str
) -> None:
    [*open_trackers([name], tracked(tmp_path / "mine"), pytest.fail)]
    identity = (tmp_path / "mine" / f"{name}.id").read_text()
    assert identity.startswith("mine-" if name == "trackio" else "run-")
    calls.clear()
    [*open_trackers([name], tracked(tmp_path / "mine", first_step=3), pytest.fail)]
    assert calls[0][1][key] == identity


class StepCounter:
    """A run of W&B, which drops values at a `step` behind the last one."""

    id = "run"

    def __init__(self) -> None:
        self.rows: list[float] = []
        self.axes: dict[str, str | None] = {}
        self._step = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        step = self._step + 1 if step is None else step
        if step >= self._step:
            self._step = step
            self.rows.append(values["train/loss"])


@pytest.mark.usefixtures("calls")
def test_wandb_keeps_the_records_of_a_run_that_goes_on_from_an_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StepCounter()
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **arguments: run, raising=False)
    for first_step, loss in ((0, 2.0), (1, 1.0)):
        tracker = TRACKERS["wandb"](tracked(tmp_path / "mine", first_step=first_step))
        tracker.write([replace(STEP, step=step, loss=loss) for step in range(first_step + 1, 4)])
    assert run.rows == [2.0, 2.0, 2.0, 1.0, 1.0]
    assert run.axes == {"step": None, "*": "step"}


def test_runs_in_folders_of_one_name_are_two_runs_of_trackio(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    for parent in ("one", "two"):
        (tmp_path / parent).mkdir()
        [*open_trackers(["trackio"], tracked(tmp_path / parent / "mine"), pytest.fail)]
    first, second = (call["name"] for _, call in calls)
    assert first != second


@pytest.mark.parametrize(
    ("uri", "store"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{folder}/mlflow.db"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("./mlruns", "{folder}/mlruns"),
        ("file:./mlruns", "{folder}/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("https://user:secret@host", None),
        ("databricks", None),
    ],
)
def test_a_run_goes_on_in_mlflows_store_of_its_first_start_wherever_it_is_resumed(
    calls: list[tuple[str, Any]],
    tmp_path: Path,
    uri: str,
    store: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["mlflow"], "get_tracking_uri", lambda: uri, raising=False)
    [*open_trackers(["mlflow"], tracked(tmp_path / "mine"), pytest.fail)]
    calls.clear()
    [*open_trackers(["mlflow"], tracked(tmp_path / "mine", first_step=3), pytest.fail)]
    stores = [call["values"] for name, call in calls if name == "set_tracking_uri"]
    assert stores == ([] if store is None else [store.format(folder=tmp_path)])


class _GoneError(Exception):
    """The error of MLflow for a run that is absent from the store."""

    error_code = "RESOURCE_DOES_NOT_EXIST"


@pytest.mark.usefixtures("calls")
def test_a_run_of_an_mlflow_that_does_not_answer_keeps_its_file_unnamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [*open_trackers(["mlflow"], tracked(tmp_path / "mine"), pytest.fail)]
    monkeypatch.setattr(sys.modules["mlflow"], "start_run", Mock(side_effect=OSError("refused")), raising=False)
    lines: list[str] = []
    assert [*open_trackers(["mlflow"], tracked(tmp_path / "mine", first_step=3), lines.append)] == []
    assert lines[0].startswith("mlflow: OSError: refused")


@pytest.mark.usefixtures("calls")
def test_a_run_that_is_gone_from_mlflow_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [*open_trackers(["mlflow"], tracked(tmp_path / "mine"), pytest.fail)]
    monkeypatch.setattr(sys.modules["mlflow"], "start_run", Mock(side_effect=_GoneError("no such run")), raising=False)
    lines: list[str] = []
    assert [*open_trackers(["mlflow"], tracked(tmp_path / "mine", first_step=3), lines.append)] == []
    assert lines[0].startswith(f"mlflow: LookupError: Delete {tmp_path / 'mine' / 'mlflow.id'} for a new run")


class Failing:
    """A tracker that fails at its second call."""

    def __init__(self, error: type[BaseException]) -> None:
        self.records: list[Record] = []
        self.exit_codes: list[int] = []
        self.error = error

    def write(self, records: Sequence[Record]) -> None:
        if self.records:
            raise self.error("no route\nto the server")
        self.records += records

    def flush(self) -> None: ...

    def close(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        raise self.error("still no route")


@pytest.mark.parametrize("error", [ConnectionError, SystemExit])
def test_a_tracker_that_fails_is_left_out_with_one_line_and_files_go_on(
    tmp_path: Path, error: type[BaseException]
) -> None:
    lines: list[str] = []
    metrics, failing = tmp_path / "metrics.jsonl", Failing(error)
    stream = RecordStream((TrackerThread("failing", lambda: failing), MetricsFile(metrics)), lines.append)
    for record in (STEP, VALIDATION, STEP):
        stream.write([record])
    stream.close()
    assert failing.records == [STEP] and read(metrics) == [STEP, VALIDATION, STEP]
    assert failing.exit_codes == [1]
    assert lines == [f"failing: {error.__name__}: no route to the server. The run goes on without this tracker."]


def test_a_tracker_that_fails_to_close_is_not_closed_again() -> None:
    lines: list[str] = []
    failing = Failing(ConnectionError)
    stream = RecordStream([TrackerThread("failing", lambda: failing)], lines.append)
    stream.close(143)
    assert failing.exit_codes == [143]
    assert lines == ["failing: ConnectionError: still no route. The run goes on without this tracker."]


class Waiting:
    """A tracker whose server answers once `answers` is set: calls of one kind wait for it."""

    def __init__(self, method: str) -> None:
        self.calls: list[object] = []
        self.answers, self.is_closed = Event(), Event()
        self._method = method

    def _note(self, method: str, argument: object) -> None:
        if method == self._method:
            self.answers.wait()
        self.calls.append(argument)

    def write(self, records: Sequence[Record]) -> None:
        self._note("write", records)

    def flush(self) -> None:
        self._note("flush", "flush")

    def close(self, exit_code: int) -> None:
        self._note("close", exit_code)
        self.is_closed.set()


def test_a_slow_tracker_gets_every_record_in_order_and_the_run_does_not_wait() -> None:
    tracker = Waiting("write")
    stream = RecordStream([TrackerThread("slow", lambda: tracker)], pytest.fail)
    for record in (STEP, VALIDATION):
        stream.write([record])
        stream.flush()
    assert tracker.calls == []
    tracker.answers.set()
    stream.close(143)
    assert tracker.calls == [[STEP], "flush", [VALIDATION], "flush", 143]


@pytest.mark.parametrize("method", ["write", "close"])
def test_a_tracker_without_an_answer_in_time_is_named_and_left_out(method: str) -> None:
    lines: list[str] = []
    tracker = Waiting(method)
    stream = RecordStream([TrackerThread("hung", lambda: tracker, limit_s=0.01)], lines.append)
    stream.write([STEP])
    stream.close()
    assert lines == [
        "hung: TimeoutError: Expected an answer within 0.01 s, got none. The run goes on without this tracker."
    ]
    tracker.answers.set()


def test_a_tracker_that_hangs_is_left_out_before_the_end_of_the_run() -> None:
    lines: list[str] = []
    tracker = Waiting("write")
    stream = RecordStream([TrackerThread("hung", lambda: tracker, limit_s=0.01)], lines.append)
    while not lines:
        stream.write([STEP])
    stream.close()
    assert len(lines) == 1 and lines[0].startswith("hung: TimeoutError: ")
    tracker.answers.set()
    assert tracker.is_closed.wait(60) and tracker.calls[-1] == 1


def test_a_tracker_that_does_not_start_in_time_is_refused() -> None:
    answers = Event()

    def start() -> Waiting:
        answers.wait()
        return Waiting("write")

    with pytest.raises(TimeoutError, match=r"Expected an answer within 0\.01 s, got none"):
        TrackerThread("hung", start, limit_s=0.01)
    answers.set()


def test_the_watch_does_not_limit_the_end_of_a_tracker() -> None:
    phases: list[RunPhase] = []
    pulse = Pulse()
    records = Mock(close=lambda exit_code: phases.append(pulse.phase))
    Trainer.train(Mock(_train=lambda: 0, _rank=Mock(pulse=pulse), _records=records))
    assert phases == [RunPhase.SAVING]


def test_a_file_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        RecordStream([MetricsFile(tmp_path / "absent" / "metrics.jsonl")], pytest.fail).write([STEP])


def test_a_tracker_that_cannot_start_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    lines: list[str] = []
    assert [*open_trackers(["wandb"], tracked(tmp_path / "mine"), lines.append)] == []
    assert lines[0].startswith("wandb: ModuleNotFoundError: ") and lines[0].endswith("without this tracker.")
    monkeypatch.setitem(TRACKERS, "wandb", Mock(side_effect=SystemExit("no key")))
    assert [*open_trackers(["wandb"], tracked(tmp_path / "mine"), lines.append)] == []
    assert lines[1] == "wandb: SystemExit: no key. The run goes on without this tracker."


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


@pytest.mark.filterwarnings("ignore")  # TensorBoard's libraries warn of each other.
def test_tensorboard_hides_a_start_before_the_first_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for steps, loss in ((range(6), 1.0), (range(3), 2.0)):
        stream = RecordStream(open_trackers(["tensorboard"], tracked(tmp_path / "mine"), pytest.fail), pytest.fail)
        stream.write([replace(STEP, step=step, loss=loss) for step in steps])
        stream.close()
    assert scalars(tmp_path / "mine" / "tensorboard", "train/loss") == {0: 2.0, 1: 2.0, 2: 2.0}


def test_every_tracker_has_an_optional_dependency_group() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for name in TRACKERS:
        assert f"\n{name} = [" in text
