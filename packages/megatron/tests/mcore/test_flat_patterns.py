"""Patterns without brackets mean what they mean to megatron-core."""

from __future__ import annotations

import importlib
from itertools import product

import pytest

from lamella_megatron._model.patterns import parse_pattern

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of megatron-core's import


def test_short_patterns_are_accepted_and_refused_as_by_megatron_core() -> None:
    theirs = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_allocation")
    accepted = 0
    for length in range(5):
        for symbols in product("M*E+|/x", repeat=length):
            text = "".join(symbols)
            try:
                expected = theirs.parse_hybrid_pattern(text)
            except ValueError:
                with pytest.raises(ValueError, match="Expected"):
                    parse_pattern(text)
                continue
            pattern = parse_pattern(text)
            main = pattern.flat.partition("/")[0]
            assert (main or None, pattern.mtp or None, pattern.num_depths) == (
                expected.main_pattern or None,
                expected.mtp_pattern,
                expected.mtp_num_depths,
            ), text
            accepted += 1
    assert accepted > 500
