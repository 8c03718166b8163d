"""Several documents in one sequence: computed as each alone, by models that can, and told of models that cannot."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lamella_transformers import IGNORED, document_arguments, separates_documents, target_losses

LENGTHS = ((5, 1, 6), (12,), (3, 9))
INPUTS = torch.randint(3, 300, (3, 12), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])

Values = dict[str, Any]

SIZES: Values = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
GEMMA = LLAMA | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
GPT2: Values = {"n_embd": 16, "n_layer": 2, "n_head": 2}
MIXTRAL = LLAMA | {"num_local_experts": 4}
NEXT = LLAMA | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "moe_intermediate_size": 8}
NEXT |= {"num_experts_per_tok": 1}
MAMBA: Values = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 4,
    "n_groups": 1,
}
MODERNBERT = SIZES | {"local_attention": 4}
BLOOM: Values = {"hidden_size": 16, "n_layer": 1, "n_head": 2}

PACKED: dict[str, Values] = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "gemma3_text": GEMMA,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "modernbert-decoder": MODERNBERT,
}
CROSSED: dict[str, Values] = {
    "qwen3_next": NEXT,
    "mamba2": MAMBA,
    "bloom": BLOOM,
    "gpt_oss": GEMMA | {"num_local_experts": 4},
}


def causal_model(model_type: str, values: Values, implementation: str | None = None, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=0, **values)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model: nn.Module = make(config, attn_implementation=implementation)
    if device == "cpu":
        for parameter in model.parameters():  # Fresh weights are small: a token would hardly change another's logits.
            parameter.data.mul_(4)
    return model.eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", PACKED)
@torch.no_grad()
def test_logits_of_a_packed_document_are_those_of_the_document_alone(model_type: str, implementation: str) -> None:
    model: Any = causal_model(model_type, PACKED[model_type], implementation)
    packed = model(**document_arguments(model, INPUTS, POSITIONS), use_cache=False).logits
    largest = packed.abs().max().item()
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            alone = model(input_ids=INPUTS[row : row + 1, begin : begin + length], use_cache=False).logits[0]
            torch.testing.assert_close(packed[row, begin : begin + length], alone, rtol=0, atol=1e-6 * max(1, largest))
            begin += length


@pytest.mark.parametrize("model_type", [*PACKED, *CROSSED])
@torch.no_grad()
def test_separates_documents_is_true_only_of_models_that_keep_documents_apart(model_type: str) -> None:
    values = {**PACKED, **CROSSED}[model_type]
    is_separating = separates_documents(causal_model(model_type, values, device="meta"))
    assert is_separating == (model_type in PACKED)
    if model_type in ("qwen3_next", "gpt_oss"):
        model: Any = causal_model(model_type, values)
        changed = torch.cat([INPUTS[:, :3] + 1, INPUTS[:, 3:]], 1)
        logits = [model(input_ids=part, position_ids=POSITIONS, use_cache=False).logits for part in (INPUTS, changed)]
        assert (logits[0] - logits[1])[2, 3:].abs().max() > 1e-3


@torch.no_grad()
def test_losses_of_packed_documents_are_those_of_the_documents_alone() -> None:
    model = causal_model("llama", LLAMA)
    targets = INPUTS.roll(-1, 1)
    targets[:, -1] = IGNORED
    targets[:, :-1][POSITIONS[:, 1:] == 0] = IGNORED
    packed, _ = target_losses(model, INPUTS, targets, POSITIONS)
    begin = 0
    for length in LENGTHS[0]:
        part = slice(begin, begin + length)
        alone, _ = target_losses(model, INPUTS[:1, part], targets[:1, part])
        torch.testing.assert_close(packed[:1, part], alone, rtol=1e-5, atol=1e-6)
        begin += length


def test_rows_are_joined_for_flash_attention_which_finds_documents_in_one_row_alone() -> None:
    model: Any = causal_model("llama", LLAMA)
    model.config._attn_implementation = "flash_attention_2"
    arguments = document_arguments(model, INPUTS, POSITIONS)
    assert arguments["input_ids"].shape == arguments["position_ids"].shape == (1, 36)
    assert document_arguments(model, INPUTS, None) == {"input_ids": INPUTS}


@pytest.mark.gpu1
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers compiles masks of flex attention by old names
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@torch.no_grad()
def test_logits_of_packed_documents_on_a_gpu_are_those_of_documents_alone(implementation: str) -> None:
    model: Any = causal_model("llama", LLAMA | {"hidden_size": 64, "head_dim": 32}, implementation).cuda()
    inputs, positions = INPUTS.cuda(), POSITIONS.cuda()
    packed = model(**document_arguments(model, inputs, positions), use_cache=False).logits
    alone = model(input_ids=inputs[2:, 3:], use_cache=False).logits[0]
    torch.testing.assert_close(packed[2, 3:], alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max()))
