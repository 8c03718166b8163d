"""Checkpoints of units in the flat layout: resumed in any layout and on any number of ranks, in both directions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamella_checkpoint import load, save
from lamella_engine import Rows, ShardingOptions, Whole, fully_shard
from lamella_engine.testing import flat_alignment
from lamella_integration.tasks import unsharded
from lamella_layout import Keep
from lamella_testing import run_ranks

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))

LAYOUTS: dict[str, Any] = {
    "unsharded": None,
    "even": fully_shard,
    "rows": lambda model: fully_shard(model, options=ShardingOptions(keep_together=Rows(1))),
    "both": lambda model: fully_shard(model, options=ShardingOptions(keep_together=_matrices_whole)),
}
WAYS = [("rows", target) for target in LAYOUTS] + [(source, "rows") for source in LAYOUTS if source != "rows"]


def _matrices_whole(parameter: nn.Parameter) -> Keep | None:
    return Whole() if parameter.ndim == 2 else None


@pytest.fixture(autouse=True)
def _small_parameters_are_cut() -> Iterator[None]:
    """At the engine's own alignment no parameter of the tests' models would be cut in the flat layout."""
    with flat_alignment(1):
        yield


def _training(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 13), nn.Tanh(), nn.Linear(13, 1))
    if (apply := LAYOUTS[layout]) is not None:
        apply(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_training_resumes_in_another_layout_on_another_number_of_ranks(tmp_path: Path) -> None:
    def write() -> list[torch.Tensor]:
        for layout in LAYOUTS:
            training = _training(layout, seed=1)
            _step(*training)
            save(tmp_path / layout, model=training[0], optimizer=training[1])
        _step(*training)
        return [unsharded(parameter.detach()) for parameter in training[0].parameters()]

    def resume() -> dict[str, list[torch.Tensor]]:
        weights_by_way = {}
        for source, target in WAYS:
            training = _training(target, seed=2)
            load(tmp_path / source, model=training[0], optimizer=training[1])
            _step(*training)
            weights_by_way[f"{source} to {target}"] = [unsharded(p.detach()) for p in training[0].parameters()]
        return weights_by_way

    expected = run_ranks(write, 3)[0]
    for weights_by_way in run_ranks(resume, 4):
        for way, weights in weights_by_way.items():
            for got, expected_weight in zip(weights, expected, strict=True):
                torch.testing.assert_close(
                    got, expected_weight, rtol=1e-5, atol=1e-6, msg=f"{way}: {got} instead of {expected_weight}"
                )
