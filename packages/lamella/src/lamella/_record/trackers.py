"""Trackers of experiments, which a run's records go to: TensorBoard, W&B, MLflow and trackio."""

import importlib.util
import os
import secrets
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lamella._record.metrics import Record, SampleRecord, StepRecord, ValidationRecord
from lamella._record.stream import Sink, Tracker, TrackerThread, dropped_line
from lamella._settings.options import ConfigError, nearest

_PROJECT: Final = "lamella"
_SQLITE: Final = "sqlite:///"
_SIGNALLED: Final = 128


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The facts of a run that trackers show.

    Attributes:
        root: The run's folder, for the trackers' files.
        settings: The settings of the run: group -> field -> setting.
        first_step: Steps completed before this start of the run.
    """

    root: Path
    settings: Mapping[str, Mapping[str, object]]
    first_step: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.root.resolve().name

    @property
    def flat_settings(self) -> dict[str, object]:
        """The settings by dotted name."""
        return {
            f"{group}.{name}": setting for group, fields in self.settings.items() for name, setting in fields.items()
        }

    def identity(self, tracker: str) -> Path:
        """Return the file with the run's identity in a tracker, by which a resumed run goes on."""
        return self.root / f"{tracker}.id"


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that lamella does not know, or whose library is not installed.

    Raises:
        ConfigError: Names the tracker and the way out.

    Effects: imports nothing.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"Expected --trackers to be of {', '.join(TRACKERS)}, got {name!r}.{nearest(name, TRACKERS)}"
            )
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # A folder by a library's name is no library: W&B writes one.
            raise ConfigError(
                f"Expected {name} to be installed for --trackers {name}, got none. Install it from a clone: uv pip "
                f"install './packages/lamella[{name}]'"
            )


def open_trackers(names: Sequence[str], run: TrackedRun, print_line: Callable[[str], object]) -> Iterator[Sink]:
    """Yield a sink a tracker; a tracker that cannot start is left out, with a line.

    Effects: starts a thread a tracker, which may talk to its server.
    """
    for name in names:
        try:
            yield TrackerThread(name, partial(TRACKERS[name], run))
        except (Exception, SystemExit) as error:  # noqa: BLE001  Trackers are foreign programs, and talk to servers.
            print_line(dropped_line(name, error))


def numbers(record: Record) -> dict[str, float]:
    """Return the known numbers of a record by a name with its kind, `train/loss`.

    A validation set with a name has it in the kind, `validation/wiki/nats_per_byte`.
    """
    if isinstance(record, SampleRecord):
        return {}
    kind = "train" if isinstance(record, StepRecord) else "validation"
    if isinstance(record, ValidationRecord) and record.name is not None:
        kind = f"{kind}/{record.name}"
    fields = {
        name: number for name, number in asdict(record).items() if name not in ("step", "name") and number is not None
    }
    return {f"{kind}/{name}": float(number) for name, number in fields.items()}


def texts(record: Record) -> dict[str, str]:
    """Return the text of a sample, prompt and continuation, under `sample/` and its number; none for other records."""
    return {f"sample/{record.number}": record.prompt + record.text} if isinstance(record, SampleRecord) else {}


class TensorBoard:
    """TensorBoard's event files, in the folder `tensorboard` of the run.

    At another start of the run, TensorBoard hides the steps after the checkpoint; all of them without a checkpoint.
    """

    def __init__(self, run: TrackedRun) -> None:
        summary_writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        folder = run.root / "tensorboard"
        # The validation before the first step is of step 0.
        purged_from = run.first_step and run.first_step + 1
        self._writer = summary_writer(log_dir=str(folder), purge_step=purged_from if folder.exists() else None)

    def write(self, records: Sequence[Record]) -> None:
        """Add a scalar a number, and a text a sample."""
        for record in records:
            for name, number in numbers(record).items():
                self._writer.add_scalar(name, number, record.step)
            for name, text in texts(record).items():
                self._writer.add_text(
                    name, textwrap.indent(text, "    ", lambda _: True), record.step
                )  # Markdown: code

    def flush(self) -> None:
        """Write pending records to the disk."""
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        """Close the event file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, in the project `lamella` or `WANDB_PROJECT`; a resumed run goes on in it.

    A record's step is a number of its own, `step`, which charts have as their x axis: W&B drops a record at a step of
    its own behind the last one, as those of a run that goes on from an earlier checkpoint.
    """

    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = import_module("wandb")
        file = run.identity("wandb")
        tracked = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            id=file.read_text(encoding="utf-8") if file.is_file() else None,
            resume="allow",
            dir=str(run.root),
            config=run.flat_settings,
        )
        file.write_text(str(tracked.id), encoding="utf-8")
        tracked.define_metric("step")
        tracked.define_metric("*", step_metric="step")
        self._run = tracked

    def write(self, records: Sequence[Record]) -> None:
        """Log the numbers and texts of each record, with its step."""
        for record in records:
            self._run.log({"step": record.step, **numbers(record), **texts(record)})

    def flush(self) -> None:
        """Nothing: W&B sends by itself."""

    def close(self, exit_code: int) -> None:
        """Finish the run at the tracker, which shows a run with an exit code as failed."""
        self._run.finish(exit_code=exit_code)


class MLflow:
    """A run of MLflow, in the experiment `lamella` or `MLFLOW_EXPERIMENT_NAME`; a resumed run goes on in it.

    The run's file has the run's id, and on a second line the place of a store of files.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow: Any = import_module("mlflow")
        file = run.identity("mlflow")
        if file.is_file():
            self._go_on(file)
            return
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        started = self._mlflow.start_run(run_name=run.name)
        store = _absolute_store(str(self._mlflow.get_tracking_uri()))
        file.write_text("\n".join(filter(None, (str(started.info.run_id), store))), encoding="utf-8")
        self._mlflow.log_params(run.flat_settings)  # Once: MLflow refuses another value of a parameter.

    def _go_on(self, file: Path) -> None:
        """Go on in the run of a file.

        Raises:
            LookupError: The store has no such run. Names the file.
            Exception: Any other of MLflow's.
        """
        run_id, _, store = file.read_text(encoding="utf-8").partition("\n")
        if store:
            self._mlflow.set_tracking_uri(store)
        try:
            self._mlflow.start_run(run_id=run_id)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":  # A server that is down keeps the run.
                raise
            raise LookupError(f"Delete {file} for a new run, or bring back the run in it, {run_id}: {error}") from error

    def write(self, records: Sequence[Record]) -> None:
        """Log the numbers of each record at its step, and a sample as a file of the run."""
        for record in records:
            if measured := numbers(record):
                self._mlflow.log_metrics(measured, step=record.step)
            for name, text in texts(record).items():
                self._mlflow.log_text(text, f"{name}/step_{record.step:08}.txt")

    def flush(self) -> None:
        """Nothing: MLflow has the numbers."""

    def close(self, exit_code: int) -> None:
        """End the run at the tracker: finished, killed by a stop request, or failed."""
        self._mlflow.end_run(status="KILLED" if exit_code > _SIGNALLED else "FAILED" if exit_code else "FINISHED")


def _absolute_store(uri: str) -> str:
    """Return the address of a store in files, valid in any working directory; empty for a server's.

    The default store lies in the working directory of a run's first start. Addresses of servers, which may hold
    passwords, are the environment's.
    """
    if uri.startswith(_SQLITE):
        return f"{_SQLITE}{Path(uri.removeprefix(_SQLITE)).absolute()}"
    if uri.startswith("file://"):
        return uri
    return str(Path(uri.removeprefix("file:")).absolute()) if "/" in uri and "://" not in uri else ""


class Trackio:
    """A run of trackio, in the project `lamella` or `TRACKIO_PROJECT`; a resumed run goes on in it.

    Runs of trackio are told apart by their names alone: the name has a random part, which the run's file keeps.
    """

    def __init__(self, run: TrackedRun) -> None:
        trackio: Any = import_module("trackio")
        project, file = os.environ.get("TRACKIO_PROJECT", _PROJECT), run.identity("trackio")
        name = file.read_text(encoding="utf-8") if file.is_file() else f"{run.name}-{secrets.token_hex(4)}"
        self._run = trackio.init(project=project, name=name, config=run.flat_settings, resume="allow")
        file.write_text(name, encoding="utf-8")

    def write(self, records: Sequence[Record]) -> None:
        """Log the numbers and texts of each record at its step."""
        for record in records:
            self._run.log({**numbers(record), **texts(record)}, step=record.step)

    def flush(self) -> None:
        """Nothing: trackio sends by itself."""

    def close(self, exit_code: int) -> None:
        """Finish the run at the tracker."""
        self._run.finish()


TRACKERS: Final[Mapping[str, Callable[[TrackedRun], Tracker]]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""The class of each tracker, under the name of its library."""
