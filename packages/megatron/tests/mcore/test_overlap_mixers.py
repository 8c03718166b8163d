"""Bits of overlapped steps, mixer by mixer: gated delta nets, and attention in a latent space."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from overlap_runs import Case, all_cases, assert_equal_bits, delay_weight_gradients
from torch import nn

from lamella_megatron._overlap.layer_slots import SlottedLayers, delayable
from lamella_schedule import Slot
from lamella_testing import run_ranks
from lamella_testing.megatron_parity import Layout, make_model

KINDS = [
    ("moe-mla", None),
    ("+E+E", None),
    ("+E/+E/+E", "[+E]"),
    ("M+GE", "M[+GE]"),
    ("GE*E", "[GE][*E]"),
    ("*E/GE", None),
]
SOME = [
    Case(kind="moe-mla", stage="ZeRO-1", delays=True),
    Case(kind="+/+/+"),
    Case(kind="+GE", delays=True),
    Case(kind="GE", stage="ZeRO-1"),
]
MORE = [case for case in all_cases(KINDS, (2,)) if case not in SOME]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_mixers_have_the_bits_of_one_microbatch_after_the_other(case: Case) -> None:
    assert_equal_bits(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *random.Random(0).sample(MORE, 64),
        *(Case(kind=kind, groups=groups, num_ranks=4, delays=True) for kind, groups in KINDS),
        Case(kind="moe-mla", num_ranks=4, tp=2),
        Case(kind="GE*E", groups="[GE][*E]", num_ranks=4, tp=2),
        Case(kind="moe-mla", recomputes="mla_up_proj"),
        Case(kind="GE*E", recomputes="gdn_norm_out"),
    ],
    ids=str,
)
def test_all_mixers_have_the_bits_of_one_microbatch_after_the_other(case: Case) -> None:
    assert_equal_bits(case)


def test_weight_gradients_of_mixers_and_shared_experts_are_computed_after_pre() -> None:
    def on_one_rank() -> tuple[list[str], dict[Slot, list[str]]]:
        model: Any = make_model("M+GE", Layout(num_ranks=1), moe_shared_expert_intermediate_size=16)
        delay_weight_gradients(model)
        names, called = list[str](), list[str]()
        for name, module in model.decoder.layers.named_modules():
            if hasattr(module, "need_backward_dw"):
                names.append(name)
                module.backward_dw = partial(called.append, name)
        computed = {}
        layers = list(model.decoder.layers)
        for slot, compute in SlottedLayers(layers, {}, delayable(layers)).slots().delayed.items():
            called.clear()
            compute()
            computed[slot] = list(called)
        return names, computed

    [(names, computed)] = run_ranks(on_one_rank, 1)
    assert computed.keys() == {Slot.PRE, Slot.EXPERTS}
    assert sorted(computed[Slot.EXPERTS]) == sorted(name for name in names if ".experts." in name)
    assert sorted(computed[Slot.PRE]) == sorted(name for name in names if ".experts." not in name)
    layers = [int(name.split(".")[0]) for name in computed[Slot.PRE]]
    assert {0, 1, 2, 3} == set(layers), "each mixer, and the shared expert"


@pytest.mark.parametrize("needs", [True, False])
def test_layers_are_asked_every_microbatch_for_delayed_weight_gradients(needs: bool) -> None:
    layer: Any = nn.Linear(1, 1)
    layer.need_backward_dw = lambda: not needs
    item = SlottedLayers([layer], {}, delayable([layer]))
    layer.need_backward_dw = lambda: needs
    assert item.slots().delayed.keys() == ({Slot.PRE} if needs else set())
