"""`matrices_of` chooses the matrices that layers multiply by, and refuses a choice of nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lamella_precision import Float8Recipe, matrices_of


class _Stacked(nn.Module):
    """Experts in stacks, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 8, 4))
        self.mix = nn.Parameter(torch.zeros(1, 1, 4))  # broadcasts


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


class _Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(8, 4))
        self.conv1d = nn.Conv1d(4, 4, 2, groups=4)
        self.in_proj = nn.Linear(4, 8)


def _dense() -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("gate", "up_proj")})


def _block() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "table": nn.Embedding(4, 4),
            "norm": nn.LayerNorm(4),
            "mlp": _dense(),
            "foreign": _Router(),  # a linear layer of another library is no nn.Linear
            "mixer": _Mamba(),
            "stacked": nn.ModuleDict(
                {"gate": _Router(), "experts": _Stacked(), "shared_expert_gate": nn.Linear(4, 1), "shared": _dense()}
            ),
            "listed": nn.ModuleDict(
                {"gate": nn.ModuleDict({"wg": nn.Linear(4, 2)}), "experts": nn.ModuleList([_dense(), _dense()])}
            ),
            "cased": nn.ModuleDict({"router": nn.ModuleDict({"layer": nn.Linear(4, 2)}), "input_linear": _Stacked()}),
        }
    )


MULTIPLIED = {
    "foreign.weight",
    "mlp.gate.weight",
    "mlp.up_proj.weight",
    "mixer.in_proj.weight",
    "stacked.experts.up",
    "stacked.shared.gate.weight",
    "stacked.shared.up_proj.weight",
    "listed.experts.0.gate.weight",
    "listed.experts.0.up_proj.weight",
    "listed.experts.1.gate.weight",
    "listed.experts.1.up_proj.weight",
    "cased.input_linear.up",
}


def _chosen(model: nn.Module, **names: Any) -> set[str]:
    choose = matrices_of(model, Float8Recipe(), **names)
    return {name for name, parameter in model.named_parameters() if choose(parameter) is not None}


def test_matrices_that_layers_multiply_by_are_chosen_and_routers_are_not() -> None:
    model = _block()
    assert _chosen(model) == MULTIPLIED
    model["mlp"]["up_proj"].weight = model["table"].weight  # type: ignore[index]
    assert _chosen(model) == MULTIPLIED - {"mlp.up_proj.weight"}


def test_names_choose_among_the_matrices_and_except_names_leave_some_out() -> None:
    assert _chosen(_block(), names="mlp.*") == {"mlp.gate.weight", "mlp.up_proj.weight"}
    chosen = _chosen(_block(), except_names=["*experts*", "stacked.gate.weight", "*up_proj*"])
    assert chosen == {
        "mlp.gate.weight",
        "foreign.weight",
        "mixer.in_proj.weight",
        "stacked.shared.gate.weight",
        "cased.input_linear.up",
    }
    model = nn.ModuleList([_block(), nn.Sequential(_dense())])
    choose = matrices_of([model[0], model[0].mlp, model[1]], Float8Recipe(), except_names="mlp.gate.*")  # type: ignore[list-item]
    assert choose(model[0].mlp.gate.weight) is None, "a name in the outer module leaves out for the inner one too"  # type: ignore[arg-type,union-attr]
    assert choose(model[0].mlp.up_proj.weight) is not None  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ({"names": ["mlp.*", "mpl.*"]}, r"`names` to match a matrix of the modules, got none for \['mpl\.\*'\]"),
        ({"names": "stacked.gate.weight"}, "`names` to match a matrix"),
        ({"except_names": "mpl.*"}, r"`except_names` to match a parameter of the modules, got none for \['mpl\.\*'\]"),
        ({"except_names": "*"}, r"Expected weights of two dims or stacks of matrices in \['ModuleDict'\]"),
    ],
)
def test_a_pattern_without_a_matrix_and_a_choice_of_nothing_are_refused(names: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        matrices_of(_block(), Float8Recipe(), **names)


def test_a_choice_of_matrices_refuses_replaced_but_not_sharded_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = matrices_of(model, Float8Recipe())
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match="other objects in the place of all 2. Call matrices_of after"):
        before(model.get_parameter("0.weight"))
    choose = matrices_of(model, Float8Recipe())
    for layer in model:
        assert choose(layer.get_parameter("weight")) is not None
        layer.weight = nn.Parameter(torch.zeros(4, 4))  # as `fully_shard` leaves it
    assert choose(model.get_parameter("0.weight")) is None
