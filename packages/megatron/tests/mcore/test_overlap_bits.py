"""An overlapped step is a step of one microbatch after the other, bit by bit: megatron-core's models on CPU ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from overlap_runs import (
    DATA,
    Case,
    Trained,
    all_cases,
    assert_equal_bits,
    model_of,
    one_after_the_other,
    overlapped,
    train,
)
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_testing import run_ranks

KINDS = [
    ("moe", None),
    ("*E*E", None),
    ("*E*E", "[*E][*E]"),
    ("M*EM*E", "[M*E][M*E]"),
    ("MM*-E", "M[M*]-E"),
    ("MM*-E", "M[M*-]E"),
    ("M*M*", "[M*]M*"),
]
PREDICTIONS = [  # of several tokens
    ("moe-mtp", None),
    ("*E/*E", None),
    ("*E/*E/*E", "[*E]"),
    ("*E/E*E-", None),
]


ALL = all_cases(KINDS, (2, 4)) + all_cases(PREDICTIONS, (2,))
SOME = [
    Case(kind="M*EM*E", groups="[M*E][M*E]", delays=True, early=True, recomputes="layernorm"),
    Case(kind="MM*-E", groups="M[M*]-E", stage="ZeRO-1", delays=True, recomputes="layernorm"),
    Case(kind="M*M*", groups="[M*]M*"),
    Case(kind="moe-mtp", stage="ZeRO-1", shares=True, early=True, recomputes="layernorm", balances=True),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_overlapped_steps_have_the_bits_of_sequential_microbatches(case: Case) -> None:
    assert_equal_bits(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in SOME], ids=str)
def test_overlapped_steps_of_all_cases_have_the_bits_of_sequential_microbatches(case: Case) -> None:
    assert_equal_bits(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(kind="moe-mtp", option="mtp_detach_heads"),
        Case(kind="moe-mtp", pads=True),
        Case(kind="*E/*E/*E", option="mtp_use_repeated_layer"),
        Case(kind="moe-mtp", num_ranks=4, tp=2),
    ],
    ids=str,
)
def test_options_of_predictions_have_their_bits(case: Case) -> None:
    assert_equal_bits(case)


@pytest.mark.parametrize("case", [Case(kind="mtp"), Case(kind="tied", stage="ZeRO-1")], ids=str)
def test_an_embedding_that_is_read_twice_is_right(case: Case) -> None:
    assert_equal_bits(case)


@pytest.mark.parametrize(("kind", "groups"), [pytest.param("moe", None, marks=pytest.mark.slow), ("*E*E", "[*E][*E]")])
def test_tensor_parallel_ranks_overlap(kind: str, groups: str | None) -> None:
    assert_equal_bits(Case(kind=kind, groups=groups, num_ranks=4, tp=2))


@pytest.mark.parametrize(
    "case",
    [
        Case(kind="moe", expert_stage="ZeRO-1", shares=True),
        Case(kind="*E*E", groups="[*E][*E]", stage="ZeRO-1", expert_stage="ZeRO-3", early=True),
        Case(kind="*E*E", groups="[*E][*E]", expert_stage="ZeRO-1", delays=True, num_ranks=4),
        pytest.param(Case(kind="*E/*E", expert_stage="ZeRO-3", delays=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_in_a_stage_of_their_own_overlap(case: Case) -> None:
    assert_equal_bits(case)


def test_an_exception_leaves_the_model_at_rest() -> None:
    case = Case(kind="*E*E", groups="[*E][*E]")

    def on_each_rank() -> Trained:
        model = model_of(case)
        experts = model.decoder.layers[1].mlp
        inner, calls = experts.routed_experts_compute, itertools.count()

        def fail_third(*args: Any) -> Any:
            if next(calls) == 2:
                raise ZeroDivisionError
            return inner(*args)

        experts.routed_experts_compute = fail_third
        with pytest.raises(ZeroDivisionError):
            overlapped(model, DATA[0], case)
        experts.routed_experts_compute = inner
        assert not any(isinstance(p, nn.Parameter) and not isinstance(p, DTensor) for p in model.parameters())
        assert "forward" not in vars(model.decoder)
        model.zero_grad()
        losses = [loss.item() for loss in overlapped(model, DATA[0], case)]
        return [losses], {}

    expected = run_ranks(train, 2, case, one_after_the_other)
    for (losses, _), (expected_losses, _) in zip(run_ranks(on_each_rank, 2), expected, strict=True):
        assert losses == expected_losses[:1]
