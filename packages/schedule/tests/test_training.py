"""A model trained by the schedule takes the steps of plain forward and backward, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from moe_toy import Model, microbatches

from lamella_schedule import run
from lamella_testing import run_ranks

STEPS, MICROBATCHES = 3, 4


def _train(
    pattern: str, is_delayed: bool, is_scheduled: bool, early_release: bool, num_layers_ahead: int
) -> list[torch.Tensor]:
    model = Model(pattern, is_delayed=is_delayed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        tokens = microbatches(step, MICROBATCHES)
        if is_scheduled:
            chunks = [model.chunk(microbatch, 1 / MICROBATCHES) for microbatch in tokens]
            losses += run(chunks, early_release=early_release, num_layers_ahead=num_layers_ahead)
        else:
            for microbatch in tokens:
                loss = model(microbatch, 1 / MICROBATCHES)
                loss.backward()
                model.finish_delayed()
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def _differences(pattern: str) -> Iterator[tuple[str, int, float]]:
    """For each way to train: how many losses and weights differ from plain training, and what was learned."""
    for is_delayed in (False, True):
        plain = _train(pattern, is_delayed, False, False, 1)
        losses = plain[: STEPS * MICROBATCHES]
        learned = sum(losses[:MICROBATCHES]) - sum(losses[-MICROBATCHES:])
        for early_release in (False, True):
            for num_layers_ahead in (0, 1):
                scheduled = _train(pattern, is_delayed, True, early_release, num_layers_ahead)
                num_unequal = sum(not torch.equal(a, b) for a, b in zip(plain, scheduled, strict=True))
                yield f"{is_delayed=} {early_release=} {num_layers_ahead=}", num_unequal, float(learned)


@pytest.mark.parametrize("pattern", ["EEE", "E-E", "E"])
def test_scheduled_training_has_the_losses_and_weights_of_plain_training(pattern: str) -> None:
    for differences in run_ranks(lambda: list(_differences(pattern)), 2):
        assert len(differences) == 8
        assert [(way, num_unequal) for way, num_unequal, _ in differences if num_unequal] == []
        assert all(learned > 0.1 for _, _, learned in differences), (
            "nothing was learned: equal bits would prove nothing"
        )
