"""Megatron's own loop, `train`, over lamella's shards: killed and resumed to the bit, and logged as over `ddp`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import megatron_lm
import pytest
import torch
from megatron_lm import SHARDED
from torch.distributed.tensor import DTensor

import lamella_megatron
from lamella_testing import RankFailure, run_ranks

NUM_STEPS, KILLED_AT = 20, 15
FLAGS = shlex.split(
    "--hidden-dropout 0.1 --attention-dropout 0.1 --log-interval 1 --log-params-norm --manual-gc "
    "--manual-gc-interval 3 --eval-interval 4 --eval-iters 2 --no-check-for-nan-in-loss-and-grad"
)


class Run(NamedTuple):
    """What a run of the loop leaves.

    Attributes:
        logged: Loss and norm of weights by iteration, as text; on the last rank.
        evaluated: The loss of each evaluation by iteration, as text.
        weights: The whole weights at the end.
        collects: Whether Python's collector was on during a step.
    """

    logged: dict[int, tuple[str, str]]
    evaluated: dict[int, str]
    weights: dict[str, torch.Tensor]
    collects: set[bool]


@pytest.fixture(scope="module", autouse=True)
def programs(on_cpu: None) -> Iterator[None]:
    with megatron_lm.programs_on_cpu():
        yield


@pytest.fixture(scope="module")
def unbroken(programs: None) -> list[Run]:
    return run_ranks(_run_installed, 2, FLAGS)


def _run(arguments: Sequence[str], on_step: Callable[[int], float] = lambda iteration: 1.0) -> Run:
    """Train to the last iteration by megatron's loop; `on_step` gives a factor of the loss."""
    args, model, optimizer, scheduler = megatron_lm.build(*arguments)
    training = importlib.import_module("megatron.training.training")
    wrap = importlib.import_module("megatron.core.rerun_state_machine").RerunDataIterator
    config = importlib.import_module("megatron.core.utils").get_model_config(model[0])
    args.do_valid = True  # set by megatron where it builds datasets
    collects: set[bool] = set()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        losses, loss_of = megatron_lm.forward_step(iterator, chunk)
        collects.add(gc.isenabled())
        return losses * (on_step(args.curr_iteration) if chunk.training else 1.0), loss_of

    data = wrap(megatron_lm.batches(args, first_step=args.iteration))
    held_out = wrap(megatron_lm.batches(args, first_step=0))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        training.train(forward_step, model, optimizer, scheduler, data, held_out, None, config, {}, None)
    gc.enable()
    weights = {
        name.removeprefix("module."): p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model[0].named_parameters()
    }
    return Run(*_read(output.getvalue()), weights, collects)


def _read(output: str) -> tuple[dict[int, tuple[str, str]], dict[int, str]]:
    number = r"([\d.E+-]+)"
    line = rf"iteration +(\d+)/.*?lm loss: {number}.*?params norm: {number}"
    logged = {int(iteration): (loss, norm) for iteration, loss, norm in re.findall(line, output)}
    return logged, {int(i): loss for i, loss in re.findall(rf"at iteration (\d+) .*?lm loss value: {number}", output)}


def _run_installed(arguments: Sequence[str], **how: Any) -> Run:
    with lamella_megatron.install():
        return _run([*SHARDED, *arguments], **how)


def _run_until_killed(arguments: Sequence[str]) -> None:
    def kill(iteration: int) -> float:
        if iteration == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    _run_installed(arguments, on_step=kill)


def test_a_killed_run_goes_on_to_the_bit(unbroken: list[Run], tmp_path: Path) -> None:
    saves = ("--save", str(tmp_path), "--save-interval", "6")
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(_run_until_killed, 2, [*FLAGS, *saves])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    resumed = run_ranks(_run_installed, 2, [*FLAGS, *saves, "--load", str(tmp_path)])
    for run, expected in zip(resumed, unbroken, strict=True):
        assert all(torch.equal(weight, expected.weights[name]) for name, weight in run.weights.items())
    # Megatron's line of a run's second iteration has the mean loss of the first two.
    assert sorted(resumed[-1].logged) == list(range(13, NUM_STEPS + 1))
    for iteration in (13, *range(15, NUM_STEPS + 1)):
        assert resumed[-1].logged[iteration] == unbroken[-1].logged[iteration]


def test_megatrons_loop_logs_the_losses_norms_and_evaluations_of_ddp(unbroken: list[Run]) -> None:
    """Losses, norms of weights (`--log-params-norm`), and evaluations; `--manual-gc` is obeyed."""
    expected, run = run_ranks(_run, 2, FLAGS)[-1], unbroken[-1]
    assert sorted(run.logged) == sorted(expected.logged) == list(range(1, NUM_STEPS + 1))
    for iteration, numbers in run.logged.items():
        assert list(map(float, numbers)) == pytest.approx(list(map(float, expected.logged[iteration])), rel=1e-4)
    assert sorted(run.evaluated) == [4, 8, 12, 16, 20]
    for iteration, loss in run.evaluated.items():
        assert float(loss) == pytest.approx(float(expected.evaluated[iteration]), rel=1e-4)
    assert run.collects == {False}


def _run_with_nan(arguments: Sequence[str]) -> Run:
    return _run_installed([*arguments, "--train-iters", "3"], on_step=lambda i: float("nan") if i == 1 else 1.0)


def test_nan_ends_a_run_but_with_no_check_for_nan_in_loss_and_grad() -> None:
    flags = ["--log-interval", "1", "--log-params-norm", "--eval-interval", "4", "--eval-iters", "0"]
    with pytest.raises(RankFailure, match="(?i)nan"):
        run_ranks(_run_with_nan, 1, flags)
    [run] = run_ranks(_run_with_nan, 1, [*flags, "--no-check-for-nan-in-loss-and-grad"])
    assert any(weight.isnan().any() for weight in run.weights.values()), "the run went on to its end"
