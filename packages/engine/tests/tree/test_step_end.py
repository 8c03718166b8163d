"""The phases of a step's end: the programs that pass through each, and an error for every other transition."""

from __future__ import annotations

from typing import Any

import pytest
from engine_models import Net, fsdp, inputs, rows_of_this_rank, shard
from schedule_models import Stack, backward_dw, delay
from torch import nn

from lamella_engine import fully_shard
from lamella_engine._tree.step_end import StepEnd, StepPhase
from lamella_engine.extending import Listener, Tree, finish_deferred
from lamella_engine.testing import tree_of
from lamella_testing import run_ranks

OPEN, UNFINALIZED, ENDED, DEFERRED, REOPENED = StepPhase


class _Defers(Listener):
    def gradients_final(self, tree: Tree) -> None:
        tree.step_end.defers_wait = True


def _backward(model: nn.Module) -> None:
    loss: Any = model(rows_of_this_rank(inputs())).square().mean()
    loss.backward()


def _step_end(model: nn.Module) -> StepEnd:
    return tree_of(model).step_end


def test_a_backward_that_hooks_end_waits_for_its_reductions() -> None:
    def check() -> None:
        model = shard(Net())
        for is_last in (False, True):
            fsdp(model).set_is_last_backward(is_last)
            _backward(model)
            assert _step_end(model).phase is OPEN

    run_ranks(check, 1)


def test_backwards_that_are_finalized_by_hand_stay_unfinalized_until_then() -> None:
    def check() -> None:
        model = shard(Net())
        fsdp(model).set_manual_backward_finalization(True)
        for _ in range(2):
            _backward(model)
            assert _step_end(model).phase is UNFINALIZED
        handle = fsdp(model).finalize_backward(async_op=True)
        assert _step_end(model).phase is DEFERRED
        handle.wait()
        assert _step_end(model).phase is OPEN

    run_ranks(check, 1)


def test_a_further_backward_without_a_forward_forgets_neither_its_finalization_nor_the_deferred_wait() -> None:
    def check() -> None:
        model = shard(Net())
        fsdp(model).set_manual_backward_finalization(True)
        loss: Any = model(rows_of_this_rank(inputs())).square().mean()
        loss.backward(retain_graph=True)
        fsdp(model).finalize_backward(async_op=True)
        loss.backward()
        assert _step_end(model).phase is REOPENED
        finish_deferred()
        assert _step_end(model).phase is UNFINALIZED
        fsdp(model).finalize_backward()
        assert _step_end(model).phase is OPEN

    run_ranks(check, 1)


@pytest.mark.parametrize("defers", [False, True])
def test_a_last_backward_is_open_again_when_its_delayed_gradients_have_come(defers: bool) -> None:
    def check() -> None:
        model = Stack()
        for module in (*model.layers, model):
            fully_shard(module)
        delay(model)
        listener = _Defers()
        if defers:
            tree_of(model).listen(listener)
        model(inputs()).backward()
        assert _step_end(model).phase is ENDED
        with pytest.raises(RuntimeError, match="set_manual_backward_finalization cannot change mode"):
            fsdp(model).set_manual_backward_finalization(True)
        backward_dw(model)
        assert _step_end(model).phase is OPEN  # outside a backward the wait is not the optimizer's step's

    run_ranks(check, 1)


def test_a_wait_that_a_listener_defers_is_made_by_the_next_forward() -> None:
    def check() -> None:
        model = shard(Net())
        listener = _Defers()
        tree_of(model).listen(listener)
        _backward(model)
        assert _step_end(model).phase is DEFERRED
        model(rows_of_this_rank(inputs()))
        assert _step_end(model).phase is OPEN

    run_ranks(check, 1)


@pytest.mark.parametrize("phase", StepPhase)
def test_a_reset_leads_from_every_phase_to_the_begin(phase: StepPhase) -> None:
    def check() -> None:
        model = shard(Net())
        _step_end(model).phase = phase
        fsdp(model).reset_iter_state()
        assert _step_end(model).phase is OPEN
        _backward(model)

    run_ranks(check, 1)


@pytest.mark.parametrize(("phase", "to"), [(OPEN, DEFERRED), (UNFINALIZED, REOPENED), (DEFERRED, UNFINALIZED)])
def test_an_illegal_transition_is_one_error_with_both_phases_and_the_way_out(phase: StepPhase, to: StepPhase) -> None:
    def check() -> None:
        end = _step_end(shard(Net()))
        end.phase = phase
        with pytest.raises(RuntimeError, match=rf"phase {phase.name} .* got {to.name} .*reset_iter_state\(\)"):
            end._become(to)
        assert end.phase is phase

    run_ranks(check, 1)
