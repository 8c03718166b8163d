"""Groups of layers in stacks of their own: a unit and a layer of the overlap schedule each."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from overlap_runs import (
    DATA,
    NUM_MICROBATCHES,
    Case,
    all_cases,
    assert_equal_bits,
    model_of,
    nest,
    one_after_the_other,
    overlapped,
)

from lamella_engine import FSDPModule
from lamella_testing import run_ranks
from lamella_testing.megatron_parity import make_model

KINDS = [("*E*E", "[*E][*E]"), ("M*EM*E", "[M*E][M*E]"), ("MM*-E", "M[M*-]E"), ("*E/*E", "[*E]"), ("+EGE", "[+E][GE]")]
SOME = [Case(kind="*E*E", groups="[*E][*E]", nests=True, delays=True)]
ALL = [case for case in all_cases(KINDS, (2,), nests=True) if case not in SOME]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_stacks_have_the_bits_of_one_microbatch_after_the_other(case: Case) -> None:
    assert_equal_bits(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", random.Random(0).sample(ALL, 48), ids=str)
def test_all_stacks_have_the_bits_of_one_microbatch_after_the_other(case: Case) -> None:
    assert_equal_bits(case)


def test_a_stack_steps_as_a_group_of_a_flat_model() -> None:
    def on_each_rank(nests: bool) -> tuple[list[float], list[str], int]:
        from lamella_megatron.training import overlapped_peak_nbytes

        case = Case(kind="*E*E", groups="[*E][*E]", nests=nests)
        model = model_of(case)
        units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        peak = overlapped_peak_nbytes(model, NUM_MICROBATCHES)
        return [loss.item() for loss in overlapped(model, DATA[0], case)], units, peak

    [(losses, units, peak), *_], [(flat_losses, _, flat_peak), *_] = (
        run_ranks(on_each_rank, 2, nests) for nests in (True, False)
    )
    assert losses == flat_losses
    assert units == ["", "decoder.layers.0", "decoder.layers.1"]
    assert peak == flat_peak


def test_layers_sharded_before_their_stack_are_gathered_with_it() -> None:
    case = Case(kind="*E*E", groups="[*E][*E]", nests=True)

    def build() -> Any:
        model = make_model(case.kind, case.layout)
        nest(model, "[*E][*E]")
        return model

    def on_each_rank() -> list[torch.Tensor]:
        from lamella_megatron import build_sharded_model

        model = build_sharded_model(build)
        units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        assert "decoder.layers.0" not in units and "decoder.layers.0.layers.0" in units
        return _losses_and_gradients(model, overlapped(model, DATA[0], case))

    def by_hooks() -> list[torch.Tensor]:
        model = model_of(case)
        return _losses_and_gradients(model, one_after_the_other(model, DATA[0], case))

    for trained, expected in zip(run_ranks(on_each_rank, 2), run_ranks(by_hooks, 2), strict=True):
        assert all(torch.equal(*pair) for pair in zip(trained, expected, strict=True))


def _losses_and_gradients(model: Any, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    model.wait_for_gradients()
    return [*losses, *(parameter.grad.full_tensor() for parameter in model.parameters())]


def test_layer_groups_of_stacks_are_refused() -> None:
    def on_one_rank() -> None:
        from lamella_megatron import fully_shard_model

        case = Case(kind="*E*E", groups="[*E][*E]", num_ranks=1)
        model = make_model(case.kind, case.layout)
        nest(model, "[*E][*E]")
        words = r"single layers for `layer_groups`, got one whose layer 0 is a group"
        with pytest.raises(ValueError, match=words):
            fully_shard_model(model, layer_groups="[*E][*E]")

    run_ranks(on_one_rank, 1)
