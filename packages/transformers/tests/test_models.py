"""Models are built from configs with or without memory, refused unless causal, and counted."""

from typing import cast

import pytest
import torch
from tiny_models import make_model, make_spec
from transformers import AutoConfig

from lamella_transformers import (
    ModelError,
    ModelSpec,
    _causality,
    balance_coefficient,
    build_model,
    build_without_parameters,
    flops_per_token,
    materialise,
    num_positions,
    outline,
)

CPU = torch.device("cpu")


def test_weights_follow_from_the_seed_alone() -> None:
    spec = make_spec("llama")
    first, second, other = (build_model(spec, CPU, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_model_built_without_parameters_keeps_its_buffers_when_materialised() -> None:
    spec = make_spec("llama")
    buffers = dict(build_model(spec, CPU, 0).named_buffers())
    assert buffers
    model = build_without_parameters(spec, CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, CPU)
    assert not any(parameter.is_meta for parameter in model.parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_an_outline_has_no_memory() -> None:
    assert all(parameter.is_meta for parameter in outline(make_spec("llama")).parameters())


@pytest.mark.parametrize(
    ("model_type", "way_out"),
    [
        ("bert", 'Set "is_decoder": true in its config.'),
        ("megatron-bert", 'Set "is_decoder": true in its config.'),  # Its modules do not say what they see.
        ("xlm", 'Set "causal": true in its config.'),
        ("xlnet", "Train a model of another type."),
    ],
)
def test_a_model_that_sees_ahead_is_refused_by_trying(model_type: str, way_out: str) -> None:
    with pytest.raises(
        ModelError, match=f"got '{model_type}', whose positions see the tokens that they predict. {way_out}"
    ):
        outline(make_spec(model_type))


def test_causal_models_are_accepted_without_modules_marked_is_causal() -> None:
    model = outline(make_spec("bigbird_pegasus"))
    assert not any(module.is_causal for module in model.modules() if hasattr(module, "is_causal"))
    outline(make_spec("xlm", causal=True))
    outline(make_spec("megatron-bert", is_decoder=True))


def test_a_layer_of_a_large_model_is_tried_and_the_word_of_a_larger_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec("xlm")
    numel = sum(parameter.numel() for parameter in outline(spec, is_checked=True).parameters())
    monkeypatch.setattr(_causality, "_LARGEST_TRIAL_NUMEL", numel - 1)
    with pytest.raises(ModelError, match="got 'xlm', whose positions see"):
        outline(spec)
    monkeypatch.setattr(_causality, "_LARGEST_TRIAL_NUMEL", 0)
    outline(spec)  # XLM's modules say nothing.
    with pytest.raises(ModelError, match="got 'bert', whose positions see"):
        outline(make_spec("bert"))


def test_a_model_that_transformers_cannot_build_is_refused() -> None:
    with pytest.raises(ModelError, match="that transformers can build, got 'vit': Unrecognized configuration class"):
        outline(cast(ModelSpec, AutoConfig.for_model("vit")))


def test_operations_are_counted_without_the_input_embedding() -> None:
    model = make_model("llama")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    expected = 6 * (num_parameters - 300 * 16) + 12 * 16 * 2 * 64
    assert flops_per_token(model, model.config, 64) == expected  # type: ignore[arg-type]
    head = 300 * 16
    frozen = flops_per_token(model, model.config, 64, lambda name: name == "lm_head.weight")  # type: ignore[arg-type]
    assert frozen == expected - 2 * (num_parameters - 2 * head)


def test_of_stacked_experts_the_operations_of_a_tokens_own_are_counted() -> None:
    def operations(num_experts: int) -> float:
        model = make_model("mixtral", num_local_experts=num_experts, num_experts_per_tok=2)
        return flops_per_token(model, model.config, 64)  # type: ignore[arg-type]

    router_row = 6 * 16 * 2  # of each further expert, in two layers
    assert operations(16) == operations(2) + 14 * router_row


def test_the_number_of_positions_follows_the_config_and_its_rope_factor() -> None:
    assert num_positions(make_spec("llama", max_position_embeddings=31)) == 31
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}
    assert num_positions(make_spec("llama", max_position_embeddings=8, rope_parameters=rope)) == 16


def test_the_loss_that_balances_experts_has_the_weight_of_the_config() -> None:
    assert balance_coefficient(make_spec("mixtral", router_aux_loss_coef=0.5)) == 0.5
    assert balance_coefficient(make_spec("llama")) == 0.0
