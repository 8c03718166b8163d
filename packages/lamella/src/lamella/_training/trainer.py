"""The training loop of one rank."""

import math
from collections.abc import Callable
from pathlib import Path

from lamella._data.batches import TokenBatch
from lamella._data.tokens import load_tokens
from lamella._model.attention import attention_lines, with_default_attention
from lamella._model.building import build
from lamella._model.float8 import gathered_scaling_state, load_gathered_scaling_state, product_lines, scale_lines
from lamella._model.published_dtype import recorded_dtype
from lamella._processes.agreement import Agreement, agreed_error, from_first_rank
from lamella._processes.determinism import deterministic_lines
from lamella._processes.endings import FAILED, LossNotFiniteError, StorageError
from lamella._processes.placement import Rank
from lamella._processes.stop import StopRequests
from lamella._record.measurements import Interval, Speed, peak_flops
from lamella._record.metrics import Record, StepRecord
from lamella._record.output import log
from lamella._record.profiling import profiled
from lamella._record.progress import ProgressBar
from lamella._record.run_directory import RunDirectory
from lamella._record.stream import LossPlot, MetricsFile, RecordStream
from lamella._record.trackers import TrackedRun, open_trackers
from lamella._settings.config import Config, to_values
from lamella._settings.options import ConfigError
from lamella._training.narrow_states import stored_states, take_states
from lamella._training.optimizer import constant_settings
from lamella._training.resume import damaged, stream_settings
from lamella._training.samples import Samples
from lamella._training.saves import TRY, Saves, reason_of
from lamella._training.steps import FinishedStep, Steps
from lamella._training.training_batches import training_batches
from lamella._training.validation import Validation
from lamella_checkpoint import CheckpointDamaged, CheckpointDirectory, load


class Trainer:
    """One rank's model, optimizer and share of the data."""

    def __init__(
        self, config: Config, directory: RunDirectory, rank: Rank, requests: StopRequests | None = None
    ) -> None:
        self._tokens = load_tokens(directory.tokens)
        config = with_default_attention(config, str(directory.model), self._tokens.packing)
        self._config, self._directory, self._rank = config, directory, rank
        self._share = rank.share(config.parallel)
        self._requests = requests or StopRequests()
        self._agreement = Agreement()
        self._validation = Validation(config, self._tokens, rank)
        self._run_model = build(config, directory.model, rank.device, recorded_dtype(directory.weights_dtype))
        self._model = self._run_model.module
        self._samples = (
            Samples(config.run, directory, self._run_model.spec, rank, self._share) if config.run.sample else None
        )
        self._batches = training_batches(config, directory, self._tokens, rank, self._run_model.spec.vocab_size)
        self._steps = Steps(config, self._run_model, rank, self._tokens)
        self._optimizer = self._steps.optimizer
        self._records, self._tokens_a_step = RecordStream(), 0
        self._saves = Saves(
            directory,
            config.run.keep_checkpoints,
            self._model,
            self._optimizer,
            timeout_s=config.run.timeout,
            print_line=self._print_line,
        )

    def _print_line(self, line: str) -> None:
        if self._rank.is_first:
            log([line])

    def _measure(self, step: int, progress: ProgressBar) -> Speed:
        config = self._config
        for line in self._batches.measure(step):
            progress.say(line)
        peak = peak_flops(self._rank.device, config.parallel.precision)
        self._tokens_a_step = round(config.optim.batch_size * self._batches.tokens_a_sequence)
        return Speed(
            tokens_per_step=self._tokens_a_step,
            flops_per_token=self._run_model.flops_per_token,
            peak_flops=peak and peak * self._rank.num_ranks,
        )

    def train(self) -> int:
        """Train from the latest checkpoint, or from the start, to the last step or to a stop request.

        Returns:
            The signal of a stop request, after the step in progress has been saved; 0 after the last step. The same on
            every rank.

        Raises:
            ConfigError: The latest checkpoint is damaged, or streamed text cannot be read.
            LossNotFiniteError: The loss, the gradient or a weight is not finite.
            StorageError: A checkpoint or a record cannot be written.

        Effects: collective over all ranks. Rank 0 prints, and writes metrics, plot and profile. All ranks write
            checkpoints, in the background; the call waits for the last checkpoint.
        """
        exit_code = FAILED
        try:
            signum = self._train()
            exit_code = signum and 128 + signum
            return signum
        finally:
            with self._rank.pulse.saving():  # Trackers have a limit of their own.
                self._records.close(exit_code)
            self._steps.close()
            self._run_model.replacements.undo()

    def _train(self) -> int:
        lines = [
            *attention_lines(self._config.model),
            *product_lines(self._config.parallel, self._rank.device),
            *deterministic_lines(self._config.run),
        ]
        first_step = self._restore(lines)
        progress = ProgressBar(first_step, self._config.optim.steps, enabled=self._rank.is_first)
        lines += self._steps.choose_loss()
        for line in lines:
            progress.say(line)
        self._records = self._open_records(first_step, progress)
        if first_step == 0:
            self._report([*self._validation.records(self._model, 0, self._run_model.pieces)], progress)
        num_profiled = self._config.run.profile if self._rank.is_first else None
        with profiled(num_profiled, self._directory, self._rank.device, progress.say) as end_step:
            signum = self._train_from(first_step, progress, end_step)
        progress.close()
        with self._rank.pulse.saving():
            self._saves.close()
        return signum

    def _train_from(self, first_step: int, progress: ProgressBar, end_step: Callable[[], None]) -> int:
        self._requests.wait_from_now_on()  # From here on a stop request waits for the step in progress to be saved.
        speed = self._measure(first_step, progress)
        interval = Interval(first_step)
        for step in range(first_step, self._config.optim.steps):
            self._rank.pulse.begin_step(step + 1)
            interval.add(*self._step(step))
            signum = self._agreement.answer()
            end_step()
            progress.advance()
            stopping = signum != 0 and step + 1 < self._config.optim.steps
            if stopping or self._is_due(step + 1):
                self._finish_interval(step + 1, interval.records(self._rank.device, speed), progress, stopping=stopping)
                interval = Interval(step + 1)
            if stopping:
                return signum
        return 0

    def _restore(self, lines: list[str]) -> int:
        """Load the latest checkpoint, or the weights to start from; return the steps done, and add lines to print."""
        checkpoints = CheckpointDirectory(self._directory.checkpoints)
        # Both ways from here run collectives, and a network file system may show ranks different directories.
        newest = from_first_rank(checkpoints.latest())
        if newest is None:
            self._batches.begin({})
            self._run_model.initialise(self._rank.device)
            return 0
        latest = checkpoints.root / newest.name  # The folder may have another path on rank 0's host.
        settings = constant_settings(self._optimizer, self._config.optim)
        try:
            stored = stored_states(self._optimizer)
            extra = load(latest, model=self._model, optimizer=stored)
            take_states(self._optimizer, stored)
            step = int(extra["step"])
            self._batches.begin(extra)
            for group, group_settings in zip(self._optimizer.param_groups, settings, strict=True):
                # The checkpoint has options too; the run's settings were printed, and count.
                group.update(group_settings)
            lines += scale_lines(load_gathered_scaling_state(self._model, extra.get("scaling", {})), step)
            return step
        except CheckpointDamaged as error:  # on every rank
            raise damaged(checkpoints, latest, f"{error}") from error

    def _batch(self, step: int) -> TokenBatch:
        """Return this rank's part of a step; where streamed text cannot be read, say where the run can go on."""
        try:
            return self._batches.batch(step, *self._share)
        except ConfigError as error:
            failure = self._saves.settle()
            lines = (f"{error}", failure or "", self._saves.last_checkpoint_line())
            raise ConfigError(" ".join(filter(None, lines))) from error

    def _step(self, step: int) -> FinishedStep:
        batch, num_targets = self._batch(step), self._batches.num_targets(step)
        return self._steps.run(step, batch, num_targets, lambda: self._agreement.ask(self._requests.signum))

    def _is_due(self, step: int) -> bool:
        run = self._config.run
        intervals = [run.log_interval, run.validation_interval, run.checkpoint_interval]
        intervals += [run.sample_interval] if self._samples else []
        return step == 1 or any(self._is_every(interval, step) for interval in intervals)

    def _is_every(self, interval: int, step: int) -> bool:
        return step % interval == 0 or step == self._config.optim.steps

    def _finish_interval(self, step: int, records: list[StepRecord], progress: ProgressBar, *, stopping: bool) -> None:
        run = self._config.run
        self._report_steps(records, progress)
        if stopping:  # Before the validation: a scheduler may kill the run before a long validation ends.
            self._save(step, progress, wait=True)
        if self._is_every(run.validation_interval, step):
            self._report([*self._validation.records(self._model, step, self._run_model.pieces)], progress)
        if self._samples is not None and self._is_every(run.sample_interval, step):
            self._report([*self._samples.records(self._model, step)], progress)
        is_due = self._is_every(run.checkpoint_interval, step)
        if is_due and not stopping:
            # No step is left to overlap with; and no capture can hold a wait for copies that are under way.
            self._save(step, progress, wait=step == self._config.optim.steps or self._steps.will_be_captured)
        if is_due or stopping:
            self._write(self._directory.plot, self._records.flush)

    def _open_records(self, first_step: int, progress: ProgressBar) -> RecordStream:
        """Return the stream of the run's records; without sinks on ranks but the first."""
        if not self._rank.is_first:
            return RecordStream()
        directory = self._directory
        run = TrackedRun(root=directory.root, settings=to_values(self._config), first_step=first_step)
        files = (MetricsFile(directory.metrics), LossPlot(directory.metrics, directory.plot))
        trackers = open_trackers(self._config.run.tracker_names, run, progress.say)
        return RecordStream((*files, *trackers), progress.say)

    def _report_steps(self, steps: list[StepRecord], progress: ProgressBar) -> None:
        """Report the steps, up to the first with a loss or gradient norm that is not finite; then raise."""
        names = ("loss", "gradient norm")
        for index, record in enumerate(steps):
            for name, value in zip(names, (record.loss, record.grad_norm), strict=True):
                if not math.isfinite(value):
                    self._report([*steps[:index]], progress)
                    failure = self._saves.settle()
                    raise LossNotFiniteError(
                        f"Expected a finite {name}, got {value} at step {record.step}. "
                        f"{f'{failure} ' if failure else ''}{self._saves.last_checkpoint_line()} {TRY}"
                    )
        self._report([*steps], progress)

    def _report(self, records: list[Record], progress: ProgressBar) -> None:
        """Write all records, and print those of the last step of each kind."""
        self._write(self._directory.metrics, lambda: self._records.write(records))
        steps = {type(record): record.step for record in records}
        for record in records:
            if record.step == steps[type(record)]:
                progress.say(record.line())

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        """Let rank 0 write a file; on failure raise `StorageError` on every rank. Effects: collective."""
        error = None
        if self._rank.is_first:
            try:
                write()
            except OSError as caught:
                error = self._saves.cannot_write(path.name, reason_of(caught))
        if (text := agreed_error(error)) is not None:
            raise StorageError(text)

    def _save(self, step: int, progress: ProgressBar, *, wait: bool) -> None:
        extra = stream_settings(self._config, self._tokens.packing) | {
            "fingerprint": self._tokens.fingerprint,
            "step": step,
            **self._batches.state(),
        }
        if not self._config.data.streaming:  # Another start of streamed text has another window's mean.
            extra["tokens_a_step"] = self._tokens_a_step
        if scaling := gathered_scaling_state(self._model):
            extra["scaling"] = scaling
        with self._rank.pulse.saving():
            self._saves.save(step, extra, progress.say, wait=wait)
