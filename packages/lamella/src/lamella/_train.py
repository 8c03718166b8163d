"""The training loop of one rank."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lamella_optim  # Its import has optimizers step on plain shards.
from lamella._agreement import Agreement, agreed_error, from_first_rank
from lamella._config import Config, OptimConfig, ParallelConfig
from lamella._directory import RunDirectory
from lamella._endings import LossNotFiniteError, StorageError
from lamella._float8 import in_float8, told_of_products, told_of_scales
from lamella._measure import Interval, Speed, peak_flops
from lamella._models import load_spec
from lamella._output import say
from lamella._place import Rank
from lamella._pretrained import pretrained_directory
from lamella._profile import profiled
from lamella._report import Progress, Record, StepRecord, ValidationRecord, append, plot, read
from lamella._resume import damage_in, damaged, stream_settings
from lamella._saves import TRY, Saves, reason_of
from lamella._stop import StopRequests
from lamella._tokens import BatchStream, inputs_and_targets, load_tokens, sequences, validation_indices
from lamella_checkpoint import CheckpointDamaged, CheckpointDirectory, CheckpointFailed, load
from lamella_engine import FSDPModule, MixedPrecisionPolicy, fully_shard, load_scaling_state, scaling_state
from lamella_transformers import (
    LossFunction,
    ModelLoss,
    ModelSpec,
    balance_coefficient,
    build_model,
    build_without_parameters,
    choose_loss,
    flops_per_token,
    fp32_parameters,
    load_weights,
    loss_of_logits,
    materialise,
    sharding_units,
    target_losses,
    use_kernels,
)


def learning_rate(step: int, optim: OptimConfig) -> float:
    """Return the learning rate of step `step`, from 0 on: linear warm-up, then a cosine down to the final fraction."""
    warmup = optim.num_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, optim.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return optim.lr * (optim.final_lr_fraction + (1 - optim.final_lr_fraction) * cosine)


def shard(model: nn.Module, spec: ModelSpec, parallel: ParallelConfig) -> list[nn.Module]:
    """Shard each unit, then the root module with the remaining parameters.

    Returns:
        The units but the root.

    Effects: collective over all ranks.
    """
    mesh = init_device_mesh(parallel.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if parallel.precision == "bf16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            param_dtype_override_fn=fp32_parameters(model),
        )
    units = sharding_units(model)
    of_units = policy if parallel.float8 == "no" else in_float8(units, policy, parallel)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=of_units, reshard_after_forward=parallel.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return units


def compile_units(units: Sequence[nn.Module], parallel: ParallelConfig) -> None:
    """Compile each unit at its next forward, where the settings ask for it."""
    for unit in units if parallel.compile else ():
        unit.compile()


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Make an AdamW with weight decay on matrices and none on vectors (norms, biases)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    return torch.optim.AdamW(kept, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


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
        self._stream = BatchStream(
            tokens=self._data.train,
            sequence_length=config.data.sequence_length,
            batch_size=config.optim.batch_size,
            seed=config.run.seed,
            is_masked=self._data.is_masked,
        )
        self._spec = load_spec(str(directory.model))
        self._pretrained = pretrained_directory(config.model.name)
        self._model = self._build()
        self._speed = self._measure(self._spec)
        self._replacements = use_kernels(self._model, config.model.kernels, is_compiled=config.parallel.compile)
        self._units = shard(self._model, self._spec, config.parallel)
        if self._pretrained is not None:
            materialise(self._model, rank.device)
        self._optimizer = make_optimizer(self._model, config.optim)
        self._loss: LossFunction = loss_of_logits
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

    def _build(self) -> nn.Module:
        if self._pretrained is None:
            return build_model(self._spec, self._rank.device, self._config.run.seed)
        return build_without_parameters(self._spec, self._rank.device)

    def _measure(self, spec: ModelSpec) -> Speed:
        config = self._config
        peak = peak_flops(self._rank.device, config.parallel.precision)
        return Speed(
            tokens_per_step=config.optim.batch_size * config.data.sequence_length,
            flops_per_token=flops_per_token(self._model, spec, config.data.sequence_length),
            peak_flops=peak and peak * self._rank.num_ranks,
        )

    def train(self) -> int:
        """Train from the latest checkpoint, or from the start, to the last step or to a stop request.

        Returns:
            The signal of a stop request, after the step in progress has been saved; 0 after the last step. The same on
            every rank.

        Raises:
            ConfigError: The latest checkpoint is damaged.
            LossNotFiniteError: The loss, the gradient or a weight is not finite.
            StorageError: A checkpoint or a record cannot be written.

        Effects: collective over all ranks. Rank 0 prints, and writes metrics, plot and profile. All ranks write
            checkpoints, in the background; the call waits for the last checkpoint.
        """
        try:
            return self._train()
        finally:
            self._replacements.undo()

    def _train(self) -> int:
        first_step, told = self._restore()
        progress = Progress(first_step, self._config.optim.steps, enabled=self._rank.is_first)
        told_of_loss = self._choose_loss()
        for line in (*told_of_products(self._config.parallel, self._rank.device), *told, told_of_loss):
            progress.say(line)
        if first_step == 0:
            self._report([self._validate(0)], progress)
        with profiled(self._config.run.profile, self._directory, self._rank, progress.say) as end_step:
            signum = self._train_from(first_step, progress, end_step)
        progress.close()
        with self._rank.pulse.saving():
            self._saves.close()
        return signum

    def _train_from(self, first_step: int, progress: Progress, end_step: Callable[[], None]) -> int:
        self._requests.wait_from_now_on()  # From here on a stop request waits for the step in progress to be saved.
        interval = Interval(first_step)
        for step in range(first_step, self._config.optim.steps):
            self._rank.pulse.begin_step(step + 1)
            interval.add(*self._step(step))
            signum = self._agreement.answer()
            end_step()
            progress.advance()
            stopping = signum != 0 and step + 1 < self._config.optim.steps
            if stopping or self._is_due(step + 1):
                self._finish_interval(step + 1, interval, progress, stopping=stopping)
                interval = Interval(step + 1)
            if stopping:
                return signum
        return 0

    def _choose_loss(self) -> str:
        """Choose the loss function, then compile the units; return a line to print. Effects: as `choose_loss`."""
        device = self._rank.device
        coefficient, has_kernels = balance_coefficient(self._spec), self._config.model.kernels != "none"
        self._loss = choose_loss(self._model, self._spec.vocab_size, coefficient, device, is_fused=has_kernels)
        # After the trial, whose few tokens would be a first shape: the next shape would compile for any shape.
        compile_units(self._units, self._config.parallel)
        kernels = f", with kernels of {self._config.model.kernels}" if has_kernels else ""
        if isinstance(self._loss, ModelLoss):
            return f"loss: the model's own{', logits a piece at a time' if self._loss.is_chunked else kernels}"
        return f"loss: over the logits; {self._spec.model_type!r} does not heed the arguments of its own{kernels}"

    def _restore(self) -> tuple[int, list[str]]:
        """Load the latest checkpoint, or the weights to start from; return the steps done, and lines to print."""
        checkpoints = CheckpointDirectory(self._directory.checkpoints)
        # Both ways from here run collectives, and a network file system may show ranks different directories.
        latest = from_first_rank(checkpoints.latest())
        if latest is None:
            if self._pretrained is not None:
                load_weights(self._pretrained, self._model, self._spec)
            return 0, []
        groups = self._optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        try:
            extra = load(latest, model=self._model, optimizer=self._optimizer)
            step = int(extra["step"])
            for group, own in zip(groups, settings, strict=True):
                group.update(own)  # The checkpoint has options too; the run's settings were printed, and count.
            return step, told_of_scales(load_scaling_state(self._model, extra.get("scaling", {})), step)
        except (CheckpointDamaged, CheckpointFailed) as error:
            if (problem := damage_in(error)) is None:
                raise
            raise damaged(checkpoints, latest, problem) from error

    def _step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Run one optimizer step; return this rank's loss and the gradient's norm, 0-D on the device, and the rate."""
        optim = self._config.optim
        torch.manual_seed(seed_of(self._config.run.seed, step, self._rank.rank))
        batch = self._stream.batch(step, self._rank.rank, self._rank.num_ranks)
        microbatches = self._on_device(batch).chunk(optim.accumulation)
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

    def _on_device(self, batch: torch.Tensor) -> torch.Tensor:
        """Copy a batch to the device. Effects: no host sync; from pageable memory the host would wait for all work."""
        if self._rank.device.type == "cpu":
            return batch
        return batch.pin_memory().to(self._rank.device, non_blocking=True)

    def _backward(self, microbatch: torch.Tensor, num_targets: float, *, is_last: bool) -> torch.Tensor:
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(is_last)
        objective, balance = self._loss(self._model, *inputs_and_targets(microbatch), num_targets)
        loss = objective.detach()
        if balance is not None:  # a mean over the tokens of one microbatch
            objective = objective + balance_coefficient(self._spec) / self._config.optim.accumulation * balance
        objective.backward()  # type: ignore[no-untyped-call]
        return loss

    def _is_due(self, step: int) -> bool:
        run = self._config.run
        intervals = (run.log_interval, run.validation_interval, run.checkpoint_interval)
        return step == 1 or any(self._is_every(interval, step) for interval in intervals)

    def _is_every(self, interval: int, step: int) -> bool:
        return step % interval == 0 or step == self._config.optim.steps

    def _finish_interval(self, step: int, interval: Interval, progress: Progress, *, stopping: bool) -> None:
        run = self._config.run
        self._report_steps(interval.records(self._rank.device, self._speed), progress)
        if stopping:  # Before the validation: a scheduler may kill the run before a long validation ends.
            self._save(step, progress, wait=True)
        if self._is_every(run.validation_interval, step):
            self._report([self._validate(step)], progress)
        is_due = self._is_every(run.checkpoint_interval, step)
        if is_due and not stopping:
            self._save(step, progress, wait=step == self._config.optim.steps)  # No step is left to overlap with.
        if is_due or stopping:
            self._write(self._directory.plot, lambda: plot(read(self._directory.metrics), self._directory.plot))

    def _report_steps(self, steps: list[StepRecord], progress: Progress) -> None:
        """Report the steps, up to the first with a loss or gradient norm that is not finite; then raise."""
        names = ("loss", "gradient norm")
        for index, record in enumerate(steps):
            for name, value in zip(names, (record.loss, record.grad_norm), strict=True):
                if not math.isfinite(value):
                    self._report([*steps[:index]], progress)
                    failure = self._saves.settle()
                    raise LossNotFiniteError(
                        f"Expected a finite {name}, got {value} at step {record.step}. "
                        f"{f'{failure} ' if failure else ''}{self._saves.told_of_last()} {TRY}"
                    )
        self._report([*steps], progress)

    def _report(self, records: list[Record], progress: Progress) -> None:
        """Write all records, and print the last of each kind."""
        self._write(self._directory.metrics, lambda: append(self._directory.metrics, records))
        for record in {type(record): record for record in records}.values():
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

    def _save(self, step: int, progress: Progress, *, wait: bool) -> None:
        extra = stream_settings(self._config) | {"fingerprint": self._data.fingerprint, "step": step}
        if scaling := scaling_state(self._model):
            extra["scaling"] = scaling
        with self._rank.pulse.saving():
            self._saves.save(step, extra, progress.say, wait=wait)

    @torch.no_grad()
    def _validate(self, step: int) -> ValidationRecord:
        """Compute the loss on the held-out text. Effects: collective over all ranks; waits for the device."""
        self._model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._rank.device)
        for batch, weights in self._validation_batches():
            inputs, targets = inputs_and_targets(self._on_device(batch))
            losses = target_losses(self._model, inputs, targets)[0].double().sum(1)
            num_units = self._data.num_units(inputs_and_targets(batch)[1])
            sums += torch.stack([losses, num_units.to(losses)]) @ weights.to(losses)
        self._model.train()
        dist.all_reduce(sums)
        nats, num_units_in_all = sums.tolist()
        return ValidationRecord.of(step, nats / max(1, num_units_in_all), self._data.unit)

    def _validation_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's sequences and their weights.

        Every rank runs the same number of forwards, or their all-gathers would hang: padding repeats a sequence at
        weight 0.
        """
        config, rank = self._config, self._rank
        length = config.data.sequence_length
        indices = validation_indices(self._data.validation, length, config.run.validation_sequences)
        weights = torch.ones(len(indices), dtype=torch.float64)
        padding = -len(indices) % rank.num_ranks
        indices = torch.cat([indices, indices[:1].expand(padding)])[rank.rank :: rank.num_ranks]
        weights = torch.cat([weights, weights.new_zeros(padding)])[rank.rank :: rank.num_ranks]
        share = max(1, config.optim.batch_size // (rank.num_ranks * config.optim.accumulation))
        for start in range(0, len(indices), share):
            part = indices[start : start + share]
            yield sequences(self._data.validation, part, length), weights[start : start + share]
