"""Programs of `megatron.training` train on lamella over pipeline stages, by megatron's own 1F1B, as on one stage."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import megatron_lm
import pytest
from megatron_lm import SHARDED

import lamella_megatron
from lamella_testing import run_ranks

History = list[tuple[float, float]]
NUM_STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def programs(on_cpu: None) -> Iterator[None]:
    with megatron_lm.programs_on_cpu():
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, programs: None) -> tuple[Path, History]:
    """A checkpoint of one rank, whose weights all ranks begin with, and the rank's steps after the checkpoint."""
    directory = tmp_path_factory.mktemp("pipeline")
    return directory, run_ranks(_train, 1, directory, "--save")[0]


def _train(directory: Path, flag: str, *arguments: str) -> History:

    lamella_megatron.install()
    common = ("--save-interval", "2", "--clip-grad", "0.5", "--make-vocab-size-divisible-by", "4")
    state = megatron_lm.build(*SHARDED, *common, flag, str(directory), *arguments)
    if flag == "--save":
        megatron_lm.train(*state, num_steps=2)
        importlib.import_module("megatron.training.training").save_checkpoint(state[0].iteration, *state[1:], 0)
    return megatron_lm.train(*state, num_steps=NUM_STEPS)


@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        (2, "--data-parallel-sharding-strategy optim"),
        pytest.param(4, "--data-parallel-sharding-strategy optim_grads", marks=pytest.mark.slow),
        (4, "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ],
    ids=str,
)
def test_stages_have_the_losses_of_one(expected: tuple[Path, History], num_ranks: int, arguments: str) -> None:
    directory, history = expected
    pipeline = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1")
    stages = run_ranks(_train, num_ranks, directory, "--load", *pipeline, *arguments.split())
    losses, norms = zip(*history, strict=True)
    for i, of_rank in enumerate(stages):
        assert [norm for _, norm in of_rank] == pytest.approx(norms, rel=1e-5)
        if i >= num_ranks // 2:  # the last stage
            assert [loss for loss, _ in of_rank] == pytest.approx(losses, rel=1e-5)
