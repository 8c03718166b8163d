"""The steps of a run without the run around them, for measurements."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from lamella._data.tokens import load_tokens
from lamella._model.attention import with_default_attention
from lamella._model.building import build
from lamella._model.published_dtype import recorded_dtype
from lamella._processes.agreement import Agreement
from lamella._processes.placement import Rank
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config
from lamella._training.steps import Steps
from lamella._training.training_batches import training_batches


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
    """Make a run's model with fresh weights, and yield its steps, for measurements: captured with `--capture` alone.

    Args:
        config: The run's settings.
        directory: Holds the tokens and the model's config.
        rank: This process among the workers.

    Effects: collective over all ranks; writes nothing.
    """
    tokens, agreement = load_tokens(directory.tokens), Agreement()
    config = with_default_attention(config, str(directory.model), tokens.packing)
    config = replace(config, parallel=replace(config.parallel, capture=bool(config.parallel.capture)))
    run_model = build(config, directory.model, rank.device, recorded_dtype(directory.weights_dtype))
    try:
        batches = training_batches(config, directory, tokens, rank, run_model.spec.vocab_size)
        with closing(Steps(config, run_model, rank, tokens)) as steps:
            batches.begin({})
            run_model.initialise(rank.device)
            steps.choose_loss()

            def step(number: int) -> torch.Tensor:
                batch = batches.batch(number, *rank.share(config.parallel))
                # The agreement of a run on stop requests, without a request: the collectives of a step are a run's.
                finished = steps.run(number, batch, batches.num_targets(number), lambda: agreement.ask(0))
                agreement.answer()
                return finished.loss

            yield BareSteps(run_model.module, run_model.units, step)
    finally:
        run_model.replacements.undo()
