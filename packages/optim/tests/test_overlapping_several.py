"""Steps hide gathers of several optimizers, and of several models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine_models import Net, local, rows_of_this_rank, shard
from optimizer_pairs import Overlapped, X, assert_same_weights, run_backward
from torch import nn
from torch.optim import Optimizer

from lamella_engine.testing import held_nbytes, record
from lamella_optim import overlap_optimizer
from lamella_testing import run_ranks


def _train_with(optimizers: Sequence[Optimizer], model: nn.Module, num_steps: int = 3) -> list[list[str]]:
    """The units gathered by each optimizer's last step."""
    log = record(model)
    for _ in range(num_steps):
        run_backward(model)
        gathered = []
        for optimizer in optimizers:
            log.clear()
            optimizer.step()
            optimizer.zero_grad()
            gathered.append(log.units_of("gather"))
    log.clear()
    run_backward(model)
    gathered.append(log.units_of("gather"))
    return gathered


@pytest.mark.parametrize("overlapped", [(True, True), (True, False), (False, True)])
def test_each_of_several_optimizers_gathers_the_units_that_are_all_its_own(overlapped: tuple[bool, bool]) -> None:
    def check() -> None:
        models, overlapped_units = [], []
        for overlaps in (False, True):
            torch.manual_seed(0)
            models.append(model := shard(Net()))
            inner = [p for layer in model.layers for p in layer.parameters()]
            outer = [p for p in model.parameters() if not any(p is other for other in inner)]
            optimizers = [torch.optim.AdamW([*outer, *inner[4:8]]), torch.optim.SGD([*inner[:4], *inner[8:]], lr=0.1)]
            for optimizer, names in zip(optimizers, overlapped, strict=True):
                if overlaps and names:
                    overlap_optimizer(optimizer)
            overlapped_units.append(_train_with(optimizers, model))
        assert_same_weights(*models)
        first, second, forward = overlapped_units[1]
        assert first == (["root"] if overlapped[0] else [])  # layers.0 belongs to the second optimizer
        assert second == []  # the second optimizer lacks the first unit, and gathers nothing early
        assert first + second + forward == overlapped_units[0][-1]  # gathers outlive the second step

    run_ranks(check, 2)


def test_a_unit_that_two_optimizers_share_is_not_gathered_in_the_step_of_either() -> None:
    def check() -> None:
        model = shard(Net())
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        optimizers = [torch.optim.AdamW(parameters) for parameters in (matrices, vectors)]
        for optimizer in optimizers:
            overlap_optimizer(optimizer)
        *gathered, _ = _train_with(optimizers, model)
        assert gathered == [[], []]

    run_ranks(check, 2)


class _OwnAdamW(torch.optim.AdamW):
    """Without torch's own optimizers: version counters of a step would reveal early gathers."""


def test_parameters_frozen_just_before_a_step_are_updated_before_their_gather() -> None:
    def check() -> None:
        pair = Overlapped(optimizer=lambda model: _OwnAdamW(model.parameters(), lr=1e-2, foreach=True))
        pair.train()
        pair.backward()
        for model in pair.models:
            for parameter in model.get_submodule("stem").parameters():
                parameter.requires_grad_(False)
        pair.step()
        pair.assert_looks_alike()

    run_ranks(check, 2)


def test_frozen_units_are_gathered_in_the_step_with_trained_units() -> None:
    def check() -> None:
        def apply(model: Net) -> None:
            for parameter in (*model.stem.parameters(), *model.head.parameters()):
                parameter.requires_grad_(False)
            shard(model)

        assert Overlapped(apply=apply).train() == ["root", "layers.0"]

    run_ranks(check, 2)


class _Residuals(Net):
    """Returns tensors of its input's shape: two generators can follow each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :3]


@pytest.mark.parametrize("freezes", [False, True])
def test_a_generator_and_its_discriminator_train_as_before(freezes: bool) -> None:
    def check() -> None:
        weights = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            generator, critic = shard(_Residuals()), shard(Net())
            steps = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (generator, critic)]
            log = record(critic)
            if overlaps:
                for optimizer in steps:
                    overlap_optimizer(optimizer)
            for _ in range(3):
                critic.requires_grad_(not freezes)
                critic(generator(rows_of_this_rank(X))).square().mean().backward()
                log.clear()
                steps[0].step()
                assert log.units_of("gather") == []  # none of the critic's
                critic.zero_grad()
                generator.zero_grad()
                critic.requires_grad_(True)
                critic(generator(rows_of_this_rank(X)).detach()).square().mean().neg().backward()
                steps[1].step()
                critic.zero_grad()
            weights.append([local(p) for model in (generator, critic) for p in model.parameters()])
            if overlaps:
                assert set(held_nbytes(generator)) == {"root"}  # kept for a backward after the last forward
                assert set(held_nbytes(critic)) == {"root", "layers.0"}
        for expected, got in zip(*weights, strict=True):
            assert torch.equal(expected, got)

    run_ranks(check, 2)
