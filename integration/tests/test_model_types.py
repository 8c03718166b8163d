"""Types whose layers, sizes or files are spelled in their own way train as in transformers, or are refused."""

import pytest

from lamella_integration.model_types import TypeRow, check_type, page
from lamella_integration.tiny_configs import tiny_config


# Nested classes in `_no_split_modules` and a tied embedding; an encoder as a decoder; a number of layers that is
# computed; layers that transformers does not name; projections that files keep as one tensor.
@pytest.mark.parametrize("model_type", ["mamba", "bert", "nemotron_h", "biogpt", "hrm_text"])
def test_a_type_trains_on_two_ranks_and_exports_as_in_transformers(model_type: str) -> None:
    row = check_type(model_type)
    assert row.outcome == "exact", row


def test_a_type_that_sees_ahead_is_refused_in_one_line() -> None:
    row = check_type("xlnet")
    assert row.outcome == "refused" and "whose positions see the tokens that they predict" in row.detail


def test_a_type_that_transformers_cannot_build_is_no_failure() -> None:
    assert check_type("got_ocr2").outcome == "not built"


def test_the_page_counts_outcomes() -> None:
    outcomes = ["exact", "exact", "differs", "refused", "failed", "not built"]
    rows = [TypeRow(model_type=f"type{index}", outcome=outcome) for index, outcome in enumerate(outcomes)]
    text = page(rows)
    assert "Of 6 types in transformers' table of causal language models, 5 were built" in text
    assert "2 exact, 1 refused with the reason, 2 neither." in text and "not tried: type5." in text


def test_tiny_configs_have_no_dropout_and_each_kind_of_layer() -> None:
    config = tiny_config("gpt2")
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.0
    assert tiny_config("qwen3_next").layer_types == ["linear_attention", "full_attention"]
