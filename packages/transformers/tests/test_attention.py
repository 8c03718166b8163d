"""Implementations of attention, and attention within documents beside attention with masks."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from lamella_testing.varlen_attention import varlen_attention, varlen_attention_without_groups
from lamella_transformers import (
    IGNORED,
    ModelError,
    build_model,
    check_attention,
    document_arguments,
    document_starts,
    set_attention,
    target_losses,
)

Values = dict[str, Any]

LENGTHS = ((5, 1, 6), (12,), (3, 9), (7, 5))
INPUTS = torch.randint(3, 300, (4, 12), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
STARTS = [0, 5, 6, 12, 24, 27, 36, 43]
TARGETS = INPUTS.roll(-1, 1).masked_fill(POSITIONS.roll(-1, 1) == 0, IGNORED)
TARGETS[3, 7:] = IGNORED  # The last document of the last row is padding.

SIZES: Values = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS: Values = {
    "experts_implementation": "eager",  # grouped products take no fp64
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
MODELS: dict[str, Values] = {
    "llama": {"num_key_value_heads": 4},
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"attention_multiplier": 0.2},
    "qwen3_moe": EXPERTS,
}


def spec_of(model_type: str, **values: Any) -> Any:
    tokens = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2} if model_type == "gpt2" else SIZES
    return AutoConfig.for_model(model_type, **(sizes | tokens | values))


def model_by(attention: str, model_type: str, **values: Any) -> nn.Module:
    spec = spec_of(model_type, initializer_range=0.3, **values)
    set_attention(spec, attention)
    return build_model(spec, torch.device("cpu"), 0)


@pytest.fixture(params=[varlen_attention, varlen_attention_without_groups], ids=["2.13", "2.11"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """A reference in the place of torch's kernel, with the arguments of one torch and another."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", request.param)
    reference: Callable[..., torch.Tensor] = request.param
    return reference


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("model_type", MODELS)
def test_document_attention_has_the_losses_and_gradients_of_masked_attention(model_type: str) -> None:
    losses, gradients = [], []
    for attention in ("sdpa", "documents"):
        model = model_by(attention, model_type, **MODELS[model_type]).double()  # fp32 would round by the CPU's kernels
        starts = document_starts(POSITIONS) if attention == "documents" else None
        loss, _ = target_losses(model, INPUTS, TARGETS, POSITIONS, starts)
        loss.sum().backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[0].count_nonzero() == (TARGETS != IGNORED).sum()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6 * float(losses[0].max()))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert actual is not None and expected is not None
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_a_sequence_without_positions_is_one_document() -> None:
    logits = []
    for attention in ("sdpa", "documents"):
        model: Any = model_by(attention, "qwen3")
        logits.append(model(**document_arguments(model, INPUTS, None), use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-6, atol=1e-6 * float(logits[0].abs().max()))


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_starts_are_computed_from_positions_where_none_are_passed() -> None:
    model = model_by("documents", "llama")
    expected, _ = target_losses(model, INPUTS, TARGETS, POSITIONS, document_starts(POSITIONS))
    assert target_losses(model, INPUTS, TARGETS, POSITIONS)[0].equal(expected)


def test_starts_end_with_the_number_of_tokens() -> None:
    starts = document_starts(POSITIONS)
    assert starts.dtype == torch.int32 and starts.tolist() == [*STARTS, POSITIONS.numel()]


def test_a_row_begins_a_document_whatever_its_first_position() -> None:
    positions = torch.tensor([[3, 4, 5], [0, 1, 0]])
    assert sorted({*document_starts(positions).tolist()}) == [0, 3, 5, 6]
    assert positions[0, 0] == 3


def test_the_attention_function_is_registered_when_asked_for_and_has_no_mask() -> None:
    set_attention(spec_of("llama"), "sdpa")
    set_attention(spec := spec_of("llama"), "documents")
    functions, masks = (registry().valid_keys() for registry in cast(Any, (AttentionInterface, AttentionMaskInterface)))
    assert spec._attn_implementation in functions and spec._attn_implementation not in masks
    assert "lamella" not in str(spec.to_dict())


@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa", "flex_attention", "documents"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_models_take_implementations(model_type: str, attention: str) -> None:
    check_attention(spec_of(model_type), attention)


@pytest.mark.parametrize(
    ("model_type", "values", "attention", "expected"),
    [
        ("llama", {}, "flash_attention_2", "'flash_attention_2' in a model of type 'llama', got: "),
        ("gpt2", {}, "flex_attention", "'flex_attention' in a model of type 'gpt2', got: GPT2LMHeadModel does not"),
        ("llama", {}, "nonesuch", "'nonesuch' in a model of type 'llama', got: Specified"),
        ("llama", {"attention_dropout": 0.1}, "documents", "without dropout, got a rate of 0.1, in a model of type 'l"),
        ("gemma2", {}, "documents", "by scaled products alone, got 'softcap', in a model of type 'gemma2'"),
        ("gpt_oss", {"num_local_experts": 4}, "documents", "products alone, got 's_aux', in a model of type 'gpt_oss'"),
        ("stablelm", {}, "documents", "the starts of documents on to its attention, got none, in a model of type 'st"),
        ("llama4_text", {"num_local_experts": 4}, "documents", "got 'chunked_attention', in a model of type 'llama4"),
        ("llama", {"sliding_window": 4}, "documents", "window of its mask as `sliding_window`, got a mask alone, in a"),
        ("llama", {"head_dim": 12}, "documents", "a multiple of 8 and at most 256, values' too, got 12 and 12"),
        ("bloom", {"n_head": 2}, "documents", "reaches an attention function of transformers, got attention of its"),
    ],
)
def test_an_implementation_that_a_model_does_not_take_is_refused(
    model_type: str, values: Values, attention: str, expected: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        check_attention(spec_of(model_type, **values), attention)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.usefixtures("kernel")
def test_attention_within_documents_raises_where_a_forward_has_no_starts() -> None:
    model: Any = model_by("documents", "llama")
    with pytest.raises(ModelError, match="Expected a forward that passes the starts of documents on"):
        model(input_ids=INPUTS, use_cache=False)


@pytest.mark.filterwarnings("default")  # Dynamo reads deprecated attributes, which warn.
def test_layers_with_torchs_kernel_compile_in_one_graph_for_all_numbers_of_documents() -> None:
    set_attention(spec := spec_of("qwen3"), "documents")
    model: Any = build_model(spec, torch.device("meta"), 0)
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend, dynamic=False)
    inputs, positions = INPUTS.to("meta"), POSITIONS.to("meta")
    for num_documents in (8, 1, 4, 48):
        starts = torch.zeros(num_documents + 1, dtype=torch.int32, device="meta")
        logits = model(**document_arguments(model, inputs, positions, starts), use_cache=False).logits
        logits.sum().backward()
    assert logits.shape == (4, 12, 300) and all(parameter.grad is not None for parameter in model.parameters())
    assert backend.frame_count == 1


@pytest.mark.gpu1
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_the_document_attention_kernel_has_losses_and_norms_of_masked_attention(model_type: str) -> None:
    losses, norms = [], []
    for attention in ("sdpa", "documents"):
        model = model_by(attention, model_type, **MODELS[model_type]).to("cuda", torch.bfloat16)
        starts = document_starts(POSITIONS).cuda() if attention == "documents" else None
        loss, _ = target_losses(model, INPUTS.cuda(), TARGETS.cuda(), POSITIONS.cuda(), starts)
        loss.sum().backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(torch.stack([gradient.float().norm() for gradient in gradients]))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.05 * float(losses[0].max()))
    torch.testing.assert_close(norms[1], norms[0], rtol=0.05, atol=0.02 * float(norms[0].max()))
