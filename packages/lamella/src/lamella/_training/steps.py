"""The optimizer steps of a run on one rank: from a batch to the model's next weights."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

import lamella_optim
from lamella._data.batches import TokenBatch
from lamella._data.tokens import TokenData
from lamella._model.building import RunModel
from lamella._model.capture import captures_by_default
from lamella._model.compilation import compile_units, compiles_by_default, has_fixed_shapes
from lamella._model.spec import refused_models
from lamella._model.trained_parameters import freeze, trained_patterns
from lamella._processes.placement import Rank
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._training.optimizer import learning_rate, make_optimizer
from lamella_engine import FSDPModule
from lamella_optim import capture_step
from lamella_transformers import (
    LossFunction,
    ModelLoss,
    balance_coefficient,
    check_pieces,
    choose_loss,
    loss_of_logits,
)


def seed_of(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's dropout on a rank: of a resumed run's step as of an uninterrupted run's."""
    return random.Random(f"{seed} {step} {rank}").getrandbits(63)


class FinishedStep(NamedTuple):
    """The measures of a step.

    Attributes:
        loss: The sum over this rank's targets, divided by the mean number of targets of a rank: 0-D, on the device. The
            mean over the ranks is the loss of the step.
        grad_norm: The norm of the gradient over all ranks before clipping, 0-D.
        lr: The learning rate of the update.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    lr: float


@contextmanager
def _errors_of_capture() -> Iterator[None]:
    """Raise torch's errors about an operation that no CUDA graph can hold as one line."""
    try:
        yield
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"Expected a model whose steps a CUDA graph can hold, got {reason!r}. Pass --no-capture."
        ) from error


class Steps:
    """The steps of one model under one optimizer, which the constructor makes.

    Args:
        config: The run's settings.
        run_model: The sharded model. Parameters that the run does not train are frozen.
        rank: This process among the workers.
        tokens: The run's tokens, by whose form the default captures steps and compiles layers, or not.

    Attributes:
        optimizer: Over the trained parameters. The learning rates of captured steps are tensors.
    """

    def __init__(self, config: Config, run_model: RunModel, rank: Rank, tokens: TokenData) -> None:
        self._config, self._run_model, self._rank, self._packing = config, run_model, rank, tokens.packing
        self._share = rank.share(config.parallel)
        # Ranks of tensor parallelism drop the same elements of equal activations.
        self._seed_index = rank.rank // config.parallel.tensor_parallel
        lamella_optim.install()
        freeze(run_model.module, trained_patterns(config))
        self._has_one_length = tokens.has_one_length(config.data.sequence_length)
        self._captures_by_default = captures_by_default(
            config,
            run_model.module,
            run_model.spec,
            is_plain_stream=tokens.packing == "stream" and self._has_one_length,
        )
        is_captured = config.parallel.capture or self._captures_by_default
        self.optimizer = make_optimizer(run_model.module, config.optim, run_model.matrices, is_captured=is_captured)
        self._captured = capture_step(self._update, self.optimizer) if is_captured else None
        self._loss: LossFunction = loss_of_logits

    @property
    def will_be_captured(self) -> bool:
        """Whether a later step is captured in a CUDA graph."""
        captured = self._captured
        return captured is not None and captured.is_on_cuda and not captured.is_captured

    def close(self) -> None:
        """Give back the graph of a captured step, for whose end the end of the process group would wait."""
        if self._captured is not None:
            self._captured.reset()

    def choose_loss(self) -> list[str]:
        """Choose the loss function, then compile the units; return lines to print.

        Effects: collective over all ranks: up to three forwards of a few tokens and an all-reduce for each loss tried;
            waits for the device. May replace the forward of the model's head.
        """
        spec, device = self._run_model.spec, self._rank.device
        coefficient, has_kernels = balance_coefficient(spec), self._config.model.kernels != "none"
        module, pieces = self._run_model.module, self._run_model.pieces
        if pieces is not None:
            with refused_models():
                check_pieces(module, pieces, spec.vocab_size, device)
        self._loss = choose_loss(module, spec.vocab_size, coefficient, device, self._run_model.shared_rows)
        lines = self._compile()
        if self._captured is not None:
            kind = "one CUDA graph, from the fourth on" if self._captured.is_on_cuda else "no graph on the CPU"
            lines.append(f"steps: {kind}{' (--no-capture)' if self._captures_by_default else ''}")
        kernels = f", with kernels of {self._config.model.kernels}" if has_kernels else ""
        if isinstance(self._loss, ModelLoss):
            lines.append(f"loss: the model's own{', logits a piece at a time' if self._loss.is_chunked else kernels}")
        else:
            reason = f"{spec.model_type!r} does not heed the arguments of its own"
            lines.append(f"loss: over the logits; {reason}{kernels}")
        return lines

    def _compile(self) -> list[str]:
        """Compile the layers where the settings, or the default, say so; return a line where the default does."""
        config, spec = self._config, self._run_model.spec
        by_default = compiles_by_default(config, spec.model_type, self._packing)
        if config.parallel.compile or by_default:
            # After the trial, whose few tokens would be a first shape: the next shape would compile for any shape.
            is_fixed = has_fixed_shapes(config, spec, has_one_length=self._has_one_length)
            has_autograd_functions = config.parallel.float8 != "no" or config.model.kernels != "none"
            compile_units(
                self._run_model.units, has_fixed_shapes=is_fixed, has_autograd_functions=has_autograd_functions
            )
        if by_default:
            return ["layers: compiled, for a long run (the first step takes longer; --no-compile)"]
        return []

    def run(self, step: int, batch: TokenBatch, num_targets: int, before_update: Callable[[], object]) -> FinishedStep:
        """Run one optimizer step, from forward to update.

        Args:
            step: The number of the step, from 0 on.
            batch: This rank's part of the step.
            num_targets: The targets in the loss over all ranks.
            before_update: Called between backward and clipping, to begin an exchange between hosts that overlaps with
                clipping and update.

        Effects: collective over all ranks; seeds torch's generators for the step's dropout; no host sync.
        """
        optim = self._config.optim
        torch.manual_seed(seed_of(self._config.run.seed, step, self._seed_index))
        parts = batch.microbatches(optim.accumulation, has_starts=self._config.model.attention == "documents")
        microbatches = [part.on_device(self._rank.device) for part in parts]
        # Gradients are averaged over ranks with unequal numbers of targets: a mean over all targets divides by
        # the targets of all ranks over the number of ranks with losses of their own, on each rank alike.
        mean_targets = num_targets / (self._share.num_shares * self._config.parallel.context_parallel)
        lr = learning_rate(step, optim)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self._captured is None:
            return FinishedStep(*self._update(microbatches, mean_targets, before_update), lr)
        before_update()  # no Python runs in a graph
        with _errors_of_capture():
            return FinishedStep(*self._captured(microbatches, mean_targets), lr)

    def _update(
        self,
        microbatches: list[TokenBatch],
        mean_targets: float,
        before_update: Callable[[], object] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run forward, backward and update; return loss and gradient norm as `FinishedStep` has them."""
        losses = [
            self._backward(microbatch, mean_targets, is_last=index == len(microbatches) - 1)
            for index, microbatch in enumerate(microbatches)
        ]
        if before_update is not None:
            before_update()
        clip_norm = self._config.optim.clip_norm
        grad_norm = lamella_optim.clip_grad_norm_(self._run_model.module.parameters(), clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum(), grad_norm

    def _backward(self, microbatch: TokenBatch, num_targets: float, *, is_last: bool) -> torch.Tensor:
        model = self._run_model.module
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(is_last)
        inputs, targets, positions, starts = microbatch.arguments(self._run_model.pieces)
        objective, balance = self._loss(model, inputs, targets, num_targets, positions, starts)
        loss = objective.detach()
        if balance is not None:  # a mean over the tokens of one microbatch
            coefficient = balance_coefficient(self._run_model.spec)
            objective = objective + coefficient / self._config.optim.accumulation * balance
        objective.backward()  # type: ignore[no-untyped-call]
        return loss
