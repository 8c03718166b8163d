"""A whole training run: prepare once, start the workers or join torchrun's, return the results."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from lamella._processes.agreement import from_first_rank
from lamella._processes.determinism import deterministic
from lamella._processes.endings import FAILED, Stopped
from lamella._processes.hosts import Hosts
from lamella._processes.launch import WorkerError, WorkerTimeoutError, print_stopping, run_workers
from lamella._processes.placement import place, process_group, under_torchrun
from lamella._processes.stop import StopRequests, interrupted, listening
from lamella._processes.watch import Watch, watched
from lamella._record.metrics import Record, ValidationRecord, last_validations, read
from lamella._record.output import log, refused_paths
from lamella._record.report import in_shell, reported_run
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config, to_toml
from lamella._settings.options import ConfigError
from lamella._training.checks import run_directory, run_root
from lamella._training.host_preparation import agreed_preparation, lock, num_preparations, prepare_on_hosts
from lamella._training.preparation import PreparedRun, prepare
from lamella_checkpoint import CheckpointDirectory


@dataclass(frozen=True, kw_only=True)
class LossChange:
    """The first and the last loss of a validation set.

    Attributes:
        first: Nats per `unit` before the first step.
        last: Nats per `unit` at the last validation.
        unit: "byte" or "token".
        title: The word "validation", with the name of the set if there is one.
    """

    first: float
    last: float
    unit: str = "byte"
    title: str = "validation"

    @property
    def ratio(self) -> float:
        """The last loss divided by the first."""
        return self.last / self.first

    def line(self) -> str:
        """Return the line to print."""
        losses = f"{self.first:.4f} -> {self.last:.4f} nats/{self.unit}"
        return f"{self.title}: {losses} ({self.ratio:.1%} of the first)"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The files of a run's results, and the losses of each validation set, in the order of the sets."""

    checkpoint: Path
    plot: Path
    metrics: Path
    report: Path
    validations: tuple[LossChange, ...]

    def lines(self) -> tuple[str, ...]:
        """Return the lines to print. Effects: looks whether the checkpoint is still in its place."""
        is_moved = not self.checkpoint.exists()
        next_line = f'next: lamella export {self._run}, or lamella generate {self._run} "..."'
        return (
            *(change.line() for change in self.validations),
            f"checkpoint: {self.checkpoint}{', moved or removed since it was saved' if is_moved else ''}",
            f"plot: {self.plot}",
            f"report: {self.report}",
            f"metrics: {self.metrics}",
            *(() if is_moved else (next_line,)),
        )

    @property
    def _run(self) -> str:
        """The run's folder, as a shell reads it."""
        return in_shell(str(self.metrics.parent))


def train(config: Config) -> Result:
    """Train from the start or from the run's latest checkpoint, and return the paths of the results.

    Under torchrun every rank calls `train`; otherwise the calling process starts the workers and waits for them.

    Raises:
        ConfigError: The settings cannot be met, another run holds the folder, or the checkpoint is damaged.
        LossNotFiniteError: The loss, the gradient or a weight is not finite.
        Stopped: SIGINT, SIGTERM or SIGHUP arrived, and the step in progress is saved. A second one stops the run at
            once.
        StorageError: A checkpoint, the metrics or the plot cannot be written.
        WorkerError: A worker died, and all other workers have been stopped.
        WorkerTimeoutError: A worker did not go on within `config.run.timeout`, and all workers have been stopped.

    Effects: prints the resolved configuration, progress and the result. Called in the main thread, handles SIGINT,
        SIGTERM and SIGHUP until the call ends.
    """
    config = place(config)
    if under_torchrun():
        return _train_as_rank(config)
    try:
        with interrupted() as requests:
            return _train_with_workers(config, requests)
    except WorkerTimeoutError as error:
        raise WorkerTimeoutError(f"{error} {_resumption_message(config)}", error.rank) from None
    except KeyboardInterrupt as interrupt:
        signum = interrupt.signum if isinstance(interrupt, Stopped) else signal.SIGINT
        raise Stopped(signum, _stop_message(config, signum)) from None


def _train_with_workers(config: Config, requests: StopRequests) -> Result:
    with ExitStack() as locks:
        descriptors = lock(config, locks)
        prepared = _prepare(config)
        if not prepared.is_complete:
            command = (sys.executable, "-P", "-m", "lamella._command.worker", str(prepared.directory.root))
            requests.wait_from_now_on()
            with _reported(config, prepared), _estimate_beside_error(config):
                run_workers(
                    command,
                    config.parallel.ranks or 1,
                    config.parallel.threads or 1,
                    requests=requests,
                    descriptors=descriptors,
                    limits=config.run.wait_limits,
                )
        return printed_result(prepared.directory)


@contextmanager
def _estimate_beside_error(config: Config) -> Iterator[None]:
    """Add the estimate of memory to the error of a worker that ran out of memory."""
    try:
        yield
    except WorkerError as error:
        from lamella._command.out_of_memory import with_estimate  # a run that ends well needs no estimate

        raise with_estimate(error, config) from None


def _train_as_rank(config: Config) -> Result:
    from lamella._training.trainer import Trainer

    is_first = os.environ["RANK"] == "0"

    def leave(signum: int, *, prints: bool = is_first) -> None:
        _exit(_stop_message(config, signum), 128 + signum, prints=prints)

    def end_wait(watch: Watch, signum: int, prints: bool) -> None:
        if (line := watch.abandons_step()) is not None:
            log([line] if prints else [])
            leave(signum, prints=prints)
        if (error := watch.timeout()) is not None:
            _exit(f"error: {error} {_resumption_message(config)}", FAILED, prints=prints)

    with ExitStack() as contexts:
        requests = contexts.enter_context(listening(leave, print_stopping if is_first else lambda _: None))
        contexts.enter_context(deterministic(config.run))
        # Before the process group, whose collectives have a limit: preparation has none.
        hosts = Hosts.joined()
        preparation = prepare_on_hosts(config, hosts, contexts, _prepare)
        signum, result = 0, None
        with process_group(config.parallel, config.run.wait_limits, hosts) as rank:
            prepared, directory = agreed_preparation(preparation), run_directory(config)
            num_folders = num_preparations(preparation)
            if is_first and num_folders > 1:
                log([f"hosts: {num_folders} run folders, prepared alike; checkpoints in {directory.checkpoints}"])
            if not prepared.is_complete:
                reported = _reported(config, prepared) if is_first else nullcontext()
                with reported, watched(rank, config.run.wait_limits, requests, end_wait):
                    # Steps may be rank 0's count of the epochs.
                    config = replace(config, optim=prepared.config.optim)
                    signum = Trainer(config, directory, rank, requests).train()
            if not signum:
                result = _agreed_result(directory, is_first=is_first)
        if result is None:
            raise Stopped(signum, _stop_message(config, signum))
        return result


def _exit(message: str, code: int, *, prints: bool) -> NoReturn:
    """End a rank whose main thread may be blocked."""
    if prints:
        with suppress(OSError):
            print(f"lamella: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def _stop_message(config: Config, signum: int) -> str:
    """Describe the last saved step of a stopped run, and the command to resume."""
    before = "" if _saved_steps(config) else " before a step was saved"
    return f"stopped by {signal.Signals(signum).name}{before}. {_resumption_message(config)}"


def _resumption_message(config: Config) -> str:
    """Name the last saved step of a run that has ended early, and the command to resume."""
    steps = _saved_steps(config)
    if not steps:
        return "There is nothing to go on from: the same command starts anew."
    without = " without --no-resume" if config.run.resume is False else ""
    folder = config.run.checkpoints or run_root(config)
    return f"Step {steps[-1]} is saved in {str(folder)!r}; the same command{without} goes on from it."


def _saved_steps(config: Config) -> list[int]:
    return CheckpointDirectory(run_directory(config).checkpoints).steps()


def _prepare(config: Config) -> PreparedRun:
    """Prepare, then print the settings and the lines of the start. A refused run prints nothing here."""
    with refused_paths():
        prepared = prepare(config)
    log([to_toml(prepared.config), *prepared.lines])
    return prepared


def _reported(config: Config, prepared: PreparedRun) -> AbstractContextManager[None]:
    """Record the start and the end of training in the run's folder, and write the report at the end."""
    parallel = config.parallel
    device = parallel.device if parallel.device != "cuda" else torch.cuda.get_device_name(0)
    facts = {"step": prepared.first_step, "ranks": parallel.ranks, "device": device}
    return reported_run(prepared.directory, facts, lambda line: log([line]))


def _agreed_result(directory: RunDirectory, *, is_first: bool) -> Result:
    """Return rank 0's result on every rank, or raise its error: the metrics are on rank 0's host.

    Effects: collective broadcast of an object between hosts.
    """
    outcome: Result | ConfigError | None = None
    if is_first:
        try:
            outcome = printed_result(directory)
        except ConfigError as error:
            outcome = error
    outcome = from_first_rank(outcome)
    if not isinstance(outcome, Result):
        raise outcome or AssertionError("the first rank has a result")
    return outcome


def printed_result(directory: RunDirectory) -> Result:
    """Print a complete run's results, and return them.

    Raises:
        ConfigError: The metrics have no validation.
    """
    records = read(directory.metrics)
    validations = _loss_changes(records)
    if not validations:
        raise ConfigError(f"Expected validations in {str(directory.metrics)!r}, got none.")
    checkpoints = CheckpointDirectory(directory.checkpoints)
    # An uploader may have moved every checkpoint away as soon as it was saved: the run is complete all the same.
    checkpoint = checkpoints.latest() or checkpoints.path(max(record.step for record in records))
    result = Result(
        checkpoint=directory.checkpoints / checkpoint.name,
        plot=directory.plot,
        metrics=directory.metrics,
        report=directory.report,
        validations=validations,
    )
    log(result.lines())
    return result


def _loss_changes(records: Sequence[Record]) -> tuple[LossChange, ...]:
    firsts = {record.name: record for record in reversed(records) if isinstance(record, ValidationRecord)}
    return tuple(
        LossChange(first=firsts[last.name].nats, last=last.nats, unit=last.unit, title=last.title)
        for last in last_validations(records)
    )
