"""The rules give each tensor the name that Megatron-Bridge gives it, and leave no name of Bridge's out."""

import re

import pytest
from bridge_names import bridge_names
from qwen_tiny import config_of, mtp_of, one_by_one, weights_of

from lamella_qwen import megatron_rules
from lamella_testing.qwen import KINDS, Kind, make_model


@pytest.mark.parametrize(("packed", "packed_mtp"), [(True, False), (False, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_names_are_bridges(kind: Kind, packed: bool, packed_mtp: bool) -> None:
    weights = weights_of(make_model(kind))
    weights = (weights if packed else one_by_one(weights)) | mtp_of(kind, packed=packed_mtp)
    rules = megatron_rules(config_of(kind), packed_experts=packed, packed_mtp_experts=packed_mtp)
    names: dict[str, frozenset[str]] = {}
    for correspondence in rules.match({name: tuple(tensor.shape) for name, tensor in weights.items()}):
        for name in correspondence.right:
            pattern = _pattern(name)
            names[pattern] = names.get(pattern, frozenset()) | {_pattern(hf) for hf in correspondence.left}
    expected = bridge_names(kind, packed=packed, packed_mtp=packed_mtp)
    if kind == "vision":  # Tied embeddings: files have no tensor for the output.
        del expected["language_model.output_layer.weight"]
    assert names == expected


def _pattern(name: str) -> str:
    """A name with `*` for its numbers, and without the component of a fused tensor."""
    fused = re.sub(r"(in_proj|conv1d)\.weight\.\w+$", r"\1.weight", name)
    return re.sub(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$", "*", fused)
