"""On GPUs: a whole step captured as a CUDA graph and replayed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from torch import nn

from lamella_buffers import _driver
from lamella_checkpoint import CheckpointDirectory, load
from lamella_checkpoint._training import copies
from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_integration.backends import Workload, lamella
from lamella_integration.profile import PROOF, profile_steps
from lamella_integration.tasks import TASKS, shard, unsharded
from lamella_optim import _overlap, capture_step, overlap_optimizer
from lamella_testing import run_ranks
from lamella_trace import Kernel, KernelKind

ALL_RANKS = pytest.mark.parametrize(
    "num_ranks", [pytest.param(num, marks=getattr(pytest.mark, f"gpu{num}")) for num in (1, 2, 4)]
)
NUM_STEPS = 8
MANY_TOKENS = 32749  # so that a unit's matmuls take longer than the unit's copies


class GraphLoop:
    """A sharded model of several units and a training step, with a falling learning rate, and optional clipping."""

    def __init__(self, reduce_dtype: torch.dtype | None = None, *, max_norm: float | None = 0.5) -> None:
        self.max_norm = max_norm
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.task = TASKS["llama"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        self.model: nn.Module = shard(self.task.model(device=self.device), fully_shard, mp_policy=policy)
        rate: Any = torch.tensor(3e-3, device=self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True, capturable=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.task.loss(self.model(tokens), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def losses(self, step: Any) -> list[float]:
        losses = []
        for index in range(NUM_STEPS):
            tokens, labels = self.task.batch(index)  # On the host: a captured step copies batches to the device.
            if step == self.step:
                tokens, labels = tokens.to(self.device), labels.to(self.device)
            losses.append(step(tokens, labels))
            self.scheduler.step()
        return [loss.item() for loss in losses]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: unsharded(parameter.detach()).cpu() for name, parameter in self.model.named_parameters()}


@ALL_RANKS
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_captured_step_replays_as_the_eager_one(num_ranks: int, reduce_dtype: torch.dtype | None) -> None:
    def eager_and_captured() -> list[object]:
        eager = GraphLoop(reduce_dtype)
        expected = eager.losses(eager.step), eager.weights()
        loop = GraphLoop(reduce_dtype)
        step = capture_step(loop.step, loop.optimizer)
        captured = loop.losses(step), loop.weights()
        assert step.is_captured
        return [expected, captured]

    for eager, captured in run_ranks(eager_and_captured, num_ranks, device="cuda"):
        torch.testing.assert_close(captured, eager, rtol=0.0, atol=0.0)


@ALL_RANKS
def test_a_captured_step_updates_some_while_the_last_gradients_are_reduced(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[list[int]] = []
    step_some = _overlap._step

    def note(optimizer: torch.optim.Optimizer, part: Any) -> None:
        parts[-1].append(sum(map(len, part)))
        step_some(optimizer, part)

    def eager_and_captured() -> list[object]:
        eager = GraphLoop(max_norm=None)
        expected = eager.losses(eager.step), eager.weights()
        loop = GraphLoop(max_norm=None)
        overlap_optimizer(loop.optimizer, late_gradients=True)
        monkeypatch.setattr(_overlap, "_step", note)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            parts.append([])
            return loop.step(*batch)

        captured = loop.losses(capture_step(step, loop.optimizer)), loop.weights()
        *_, (num_early, num_gathered_first) = parts
        assert len(parts) == 4, "three eager steps, and the one that is captured"
        assert num_early > 0 and num_gathered_first == 0
        return [expected, captured]

    for eager, captured in run_ranks(eager_and_captured, num_ranks, device="cuda"):
        torch.testing.assert_close(captured, eager, rtol=0.0, atol=0.0)


CAPTURED_STEPS: list[Any] = []  # Alive at the end of a rank's process group, as a program's own variables are.


@ALL_RANKS
def test_a_reset_step_captures_another_graph_and_lets_the_group_end(num_ranks: int) -> None:
    def eager_and_captured() -> list[object]:
        eager = GraphLoop()
        expected = eager.losses(eager.step), eager.weights()
        loop = GraphLoop()
        step = capture_step(loop.step, loop.optimizer, num_eager_steps=2)
        CAPTURED_STEPS.append(step)
        losses = []
        for index in range(NUM_STEPS):
            if index == NUM_STEPS // 2:
                assert step.is_captured
                step.reset()
                assert not step.is_captured
            losses.append(step(*loop.task.batch(index)))
            loop.scheduler.step()
        captured = [loss.item() for loss in losses], loop.weights()
        assert step.is_captured
        step.reset()
        return [expected, captured]

    for eager, captured in run_ranks(eager_and_captured, num_ranks, device="cuda"):
        torch.testing.assert_close(captured, eager, rtol=0.0, atol=0.0)


@pytest.mark.gpu1
def test_hooks_that_wait_are_called_before_each_replay() -> None:
    def num_waits() -> int:
        loop = GraphLoop()
        waits: list[object] = []

        def wait(*_: object) -> None:
            waits.append(None)

        setattr(wait, "only_waits", True)  # noqa: B010  Type checkers know no attributes of functions.
        loop.optimizer.register_step_pre_hook(wait)
        step = capture_step(loop.step, loop.optimizer, num_eager_steps=2)
        loop.losses(step)
        return len(waits)

    assert run_ranks(num_waits, 1, device="cuda") == [2 + 1 + (NUM_STEPS - 2)]  # eager, in the capture, before replays


@pytest.mark.gpu1
def test_a_save_under_way_at_the_capture_has_the_weights_of_its_step(tmp_path: Path) -> None:
    num_eager_steps = 3

    def saved_and_expected() -> list[dict[str, torch.Tensor]]:
        loop = GraphLoop()
        step = capture_step(loop.step, loop.optimizer, num_eager_steps=num_eager_steps)
        checkpoints = CheckpointDirectory(tmp_path)
        with mock.patch.object(copies, "_PAUSE_S", 5.0):  # The copies count as under way until a pause is over.
            for index in range(NUM_STEPS):
                if index == num_eager_steps:
                    expected = loop.weights()
                    checkpoints.save_async(index, model=loop.model, optimizer=loop.optimizer)
                    assert copies._in_flight
                step(*loop.task.batch(index))
            checkpoints.wait()
        assert step.is_captured
        load(checkpoints.path(num_eager_steps), model=loop.model, optimizer=loop.optimizer)
        checkpoints.close()
        return [loop.weights(), expected]

    [(saved, expected)] = run_ranks(saved_and_expected, 1, device="cuda")
    torch.testing.assert_close(saved, expected, rtol=0.0, atol=0.0)


@pytest.mark.gpu1
def test_an_optimizer_that_cannot_be_captured_is_refused_at_the_call() -> None:
    def refuse() -> None:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, device="cuda"))])
        with pytest.raises(ValueError, match="AdamW built with `capturable=True`, got param group 0 without"):
            capture_step(lambda: None, optimizer)

    run_ranks(refuse, 1, device="cuda")


class _Rows(NamedTuple):
    """Copies of a capture: numbers of requested and of captured copies, and the bytes of either."""

    num_moves: int
    num_rows: int
    moved_nbytes: int
    row_nbytes: int


def _captured_kernels() -> tuple[list[Kernel], _Rows]:
    """The kernels of replayed steps, and how their copies to peers were captured."""
    captured: list[_Rows] = []
    as_rows = _driver._as_rows

    def noted(moves: Iterable[tuple[int, int, int]]) -> list[Any]:
        moves = list(moves)
        rows = list(as_rows(moves))
        sizes = sum(row.width * row.height for row in rows)
        captured.append(_Rows(len(moves), len(rows), sum(nbytes for _, _, nbytes in moves), sizes))
        return rows

    workload = Workload(config=PROOF, device=torch.device("cuda", torch.cuda.current_device()))
    with mock.patch.object(_driver, "_as_rows", noted):
        training = lamella(workload, graph=True)
        kernels = profile_steps(training, *workload.batch(MANY_TOKENS), num_warmup_steps=6)
    return kernels, _Rows(*map(sum, zip(*captured, strict=True)))


@pytest.mark.alone
@pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
def test_copies_of_a_replay_are_rows_and_hide_behind_compute(num_ranks: int) -> None:
    for kernels, rows in run_ranks(_captured_kernels, num_ranks, device="cuda"):
        assert rows.moved_nbytes == rows.row_nbytes
        assert 0 < rows.num_rows < rows.num_moves
        copies = [
            kernel for kernel in kernels if "memcpy" in kernel.name.lower() and kernel.kind is not KernelKind.TRANSFER
        ]
        computing = [kernel for kernel in kernels if kernel.kind in (KernelKind.MATMUL, KernelKind.ATTENTION)]
        names = sorted({kernel.name for kernel in copies})
        assert len(copies) >= rows.num_rows, f"{len(copies)} copies in the replays, of {names}"
        hidden = [a for a in copies if any(a.start_us < b.end_us and b.start_us < a.end_us for b in computing)]
        hidden_us, all_us = (sum(kernel.duration_us for kernel in group) for group in (hidden, copies))
        assert hidden_us >= all_us / 2, f"{hidden_us:.0f} us of {all_us:.0f}, {names}"
