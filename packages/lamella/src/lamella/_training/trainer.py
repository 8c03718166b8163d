"""The training loop of one rank."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import lamella_optim
from lamella._data.batches import TokenBatch
from lamella._data.tokens import load_tokens
from lamella._model.building import build
from lamella._model.compilation import compile_units, compiles_by_default, has_fixed_shapes
from lamella._model.float8 import product_lines, scale_lines
from lamella._processes.agreement import Agreement, agreed_error, from_first_rank
from lamella._processes.determinism import deterministic_lines
from lamella._processes.endings import LossNotFiniteError, StorageError
from lamella._processes.placement import Rank
from lamella._processes.stop import StopRequests
from lamella._record.measurements import Interval, Speed, peak_flops
from lamella._record.metrics import Record, StepRecord
from lamella._record.output import say
from lamella._record.profiling import profiled
from lamella._record.progress import ProgressBar
from lamella._record.run_directory import RunDirectory
from lamella._record.stream import LossPlot, MetricsFile, RecordStream
from lamella._record.trackers import TrackedRun, open_trackers
from lamella._settings.config import Config, to_values
from lamella._settings.options import ConfigError
from lamella._streaming.batches import ScatteredBatches
from lamella._training.narrow_states import stored_states, take_states
from lamella._training.optimizer import constant_settings, learning_rate, make_optimizer
from lamella._training.resume import damage_in, damaged, stream_settings
from lamella._training.samples import Samples
from lamella._training.saves import TRY, Saves, reason_of
from lamella._training.trained_parameters import freeze, trained_patterns
from lamella._training.training_batches import training_batches
from lamella._training.validation import Validation
from lamella_checkpoint import CheckpointDamaged, CheckpointDirectory, CheckpointFailed, load
from lamella_engine import FSDPModule, load_scaling_state, scaling_state
from lamella_transformers import (
    LossFunction,
    ModelLoss,
    balance_coefficient,
    choose_loss,
    loss_of_logits,
)


def seed_of(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's dropout on a rank: of a resumed run's step as of an uninterrupted run's."""
    return random.Random(f"{seed} {step} {rank}").getrandbits(63)


class Trainer:
    """One rank's model, optimizer and share of the data."""

    def __init__(
        self, config: Config, directory: RunDirectory, rank: Rank, requests: StopRequests | None = None
    ) -> None:
        self._config, self._directory, self._rank = config, directory, rank
        self._requests = requests or StopRequests()
        self._agreement = Agreement()
        self._data = load_tokens(directory.tokens)
        self._validation = Validation(config, self._data, rank)
        self._run_model = build(config, directory.model, rank.device)
        self._model = self._run_model.module
        self._samples = Samples(config.run, directory, self._run_model.spec, rank) if config.run.sample else None
        self._stream = training_batches(config, directory, self._data, rank, self._run_model.spec.vocab_size)
        lamella_optim.install()
        freeze(self._model, trained_patterns(config))
        self._optimizer = make_optimizer(self._model, config.optim, self._run_model.matrices)
        self._loss: LossFunction = loss_of_logits
        self._records = RecordStream()
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
            say([line])

    def _measure(self, step: int, progress: ProgressBar) -> Speed:
        config = self._config
        if isinstance(self._stream, ScatteredBatches):
            for line in self._stream.measure(step):
                progress.say(line)
        peak = peak_flops(self._rank.device, config.parallel.precision)
        return Speed(
            tokens_per_step=round(config.optim.batch_size * self._stream.tokens_a_sequence),
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
        try:
            return self._train()
        finally:
            self._records.close()
            self._run_model.replacements.undo()

    def _train(self) -> int:
        lines = [
            *product_lines(self._config.parallel, self._rank.device),
            *deterministic_lines(self._config.run),
        ]
        first_step = self._restore(lines)
        progress = ProgressBar(first_step, self._config.optim.steps, enabled=self._rank.is_first)
        self._choose_loss(lines)
        for line in lines:
            progress.say(line)
        self._records = self._open_records(first_step, progress)
        if first_step == 0:
            self._report([*self._validation.records(self._model, 0)], progress)
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

    def _choose_loss(self, lines: list[str]) -> None:
        """Choose the loss function, then compile the units; add a line to print. Effects: as `choose_loss`."""
        spec, device = self._run_model.spec, self._rank.device
        coefficient, has_kernels = balance_coefficient(spec), self._config.model.kernels != "none"
        self._loss = choose_loss(self._model, spec.vocab_size, coefficient, device)
        if self._compiles(lines):
            # After the trial, whose few tokens would be a first shape: the next shape would compile for any shape.
            has_one_length = self._data.has_one_length(self._config.data.sequence_length)
            is_fixed = has_fixed_shapes(self._config, spec, has_one_length=has_one_length)
            compile_units(self._run_model.units, has_fixed_shapes=is_fixed)
        kernels = f", with kernels of {self._config.model.kernels}" if has_kernels else ""
        if isinstance(self._loss, ModelLoss):
            lines.append(f"loss: the model's own{', logits a piece at a time' if self._loss.is_chunked else kernels}")
        else:
            reason = f"{spec.model_type!r} does not heed the arguments of its own"
            lines.append(f"loss: over the logits; {reason}{kernels}")

    def _compiles(self, lines: list[str]) -> bool:
        """Return whether the layers are to be compiled; add a line to print where the default says so."""
        is_asked = self._config.parallel.compile
        if is_asked is not None:
            return is_asked
        if compiles_by_default(self._config, self._run_model.spec.model_type, self._data.packing):
            lines.append("layers: compiled, for a long run (the first step takes longer; --no-compile)")
            return True
        return False

    def _restore(self, lines: list[str]) -> int:
        """Load the latest checkpoint, or the weights to start from; return the steps done, and add lines to print."""
        checkpoints = CheckpointDirectory(self._directory.checkpoints)
        # Both ways from here run collectives, and a network file system may show ranks different directories.
        newest = from_first_rank(checkpoints.latest())
        if newest is None:
            self._begin_stream({})
            self._run_model.initialise(self._rank.device)
            return 0
        latest = checkpoints.root / newest.name  # The folder may have another path on rank 0's host.
        settings = constant_settings(self._optimizer, self._config.optim)
        try:
            stored = stored_states(self._optimizer)
            extra = load(latest, model=self._model, optimizer=stored)
            take_states(self._optimizer, stored)
            step = int(extra["step"])
            self._begin_stream(extra)
            for group, group_settings in zip(self._optimizer.param_groups, settings, strict=True):
                group.update(
                    group_settings
                )  # The checkpoint has options too; the run's settings were printed, and count.
            lines += scale_lines(load_scaling_state(self._model, extra.get("scaling", {})), step)
            return step
        except (CheckpointDamaged, CheckpointFailed) as error:
            if (problem := damage_in(error)) is None:
                raise
            raise damaged(checkpoints, latest, problem) from error

    def _begin_stream(self, extra: Mapping[str, Any]) -> None:
        if isinstance(self._stream, ScatteredBatches):
            self._stream.begin(extra)

    def _batch(self, step: int) -> TokenBatch:
        """Return this rank's part of a step; where streamed text cannot be read, say where the run can go on."""
        try:
            return self._stream.batch(step, self._rank.rank, self._rank.num_ranks)
        except ConfigError as error:
            failure = self._saves.settle()
            lines = (f"{error}", failure or "", self._saves.last_checkpoint_line())
            raise ConfigError(" ".join(filter(None, lines))) from error

    def _step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Run one optimizer step; return this rank's loss and the gradient's norm, 0-D on the device, and the rate."""
        optim = self._config.optim
        torch.manual_seed(seed_of(self._config.run.seed, step, self._rank.rank))
        batch = self._batch(step)
        microbatches = [part.on_device(self._rank.device) for part in batch.microbatches(optim.accumulation)]
        # Gradients are averaged over ranks with unequal numbers of targets: a mean over all targets divides by
        # the targets of all ranks over the number of ranks, on each rank alike.
        num_targets = self._stream.num_targets(step) / self._rank.num_ranks
        losses = [
            self._backward(microbatch, num_targets, is_last=index == len(microbatches) - 1)
            for index, microbatch in enumerate(microbatches)
        ]
        self._agreement.ask(self._requests.signum)  # Overlaps with the optimizer step; see Agreement.
        grad_norm = lamella_optim.clip_grad_norm_(self._model.parameters(), optim.clip_norm)
        lr = learning_rate(step, optim)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).sum(), grad_norm, lr

    def _backward(self, microbatch: TokenBatch, num_targets: float, *, is_last: bool) -> torch.Tensor:
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(is_last)
        objective, balance = self._loss(
            self._model, microbatch.inputs, microbatch.targets, num_targets, microbatch.positions
        )
        loss = objective.detach()
        if balance is not None:  # a mean over the tokens of one microbatch
            coefficient = balance_coefficient(self._run_model.spec)
            objective = objective + coefficient / self._config.optim.accumulation * balance
        objective.backward()  # type: ignore[no-untyped-call]
        return loss

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
            self._report([*self._validation.records(self._model, step)], progress)
        if self._samples is not None and self._is_every(run.sample_interval, step):
            self._report([*self._samples.records(self._model, step)], progress)
        is_due = self._is_every(run.checkpoint_interval, step)
        if is_due and not stopping:
            self._save(step, progress, wait=step == self._config.optim.steps)  # No step is left to overlap with.
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
        extra = stream_settings(self._config, self._data.packing) | {
            "fingerprint": self._data.fingerprint,
            "step": step,
        }
        if isinstance(self._stream, ScatteredBatches):
            extra |= self._stream.state(step)
        if scaling := scaling_state(self._model):
            extra["scaling"] = scaling
        with self._rank.pulse.saving():
            self._saves.save(step, extra, progress.say, wait=wait)


class BareSteps(NamedTuple):
    """The steps of a run and nothing else: no validation, record or checkpoint.

    Attributes:
        model: The root unit.
        units: The units but the root.
        step: Runs the optimizer step of a number, from 0 on; returns this rank's loss, 0-D on the device.
    """

    model: nn.Module
    units: Sequence[nn.Module]
    step: Callable[[int], torch.Tensor]


@contextmanager
def bare_steps(config: Config, directory: RunDirectory, rank: Rank) -> Iterator[BareSteps]:
    """Make a run's model with fresh weights, and yield its steps, for measurements.

    Args:
        config: The run's settings.
        directory: Holds the tokens and the model's config.
        rank: This process among the workers.

    Effects: collective over all ranks; writes nothing.
    """
    trainer = Trainer(config, directory, rank)
    try:
        trainer._run_model.initialise(rank.device)
        trainer._choose_loss([])

        def step(number: int) -> torch.Tensor:
            loss, _, _ = trainer._step(number)
            trainer._agreement.answer()
            return loss

        yield BareSteps(trainer._model, trainer._run_model.units, step)
    finally:
        trainer._run_model.replacements.undo()
