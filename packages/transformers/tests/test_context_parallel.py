"""Sequences cut over ranks: logits and gradients are those on whole sequences, or the model is refused."""

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_models import GROUPED_SIZES, make_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lamella_testing import run_ranks
from lamella_transformers import IGNORED, ModelError, SequencePieces, check_pieces, check_sequences, cut_sequences

importlib.import_module("torch._dynamo")  # Once here, and not in each forked rank.

CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.parametrize(("model_type", "num_ranks", "length"), [("llama", 2, 16), ("qwen3", 3, 13), ("gpt2", 2, 5)])
def test_logits_and_gradients_on_sequence_pieces_are_those_on_whole_sequences(
    model_type: str, num_ranks: int, length: int
) -> None:
    changes = GROUPED_SIZES if model_type == "llama" else {}
    model: Any = make_model(model_type, **changes).eval()  # GPT-2 has dropout, whose masks are a rank's own.
    tokens = torch.randint(300, (2, length + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[1, :3] = IGNORED

    def on_rank() -> None:
        cut = copy.deepcopy(model)
        pieces = SequencePieces(world())
        cut_sequences(cut, pieces)
        check_pieces(cut, pieces, 300, CPU)
        expected = model(input_ids=inputs, use_cache=False).logits
        logits = cut(input_ids=pieces.of(inputs, 0), position_ids=pieces.positions(inputs), use_cache=False).logits
        columns = pieces.positions(inputs)[0]
        is_token = columns < length
        torch.testing.assert_close(logits[:, is_token], expected[:, columns[is_token]])
        for module, outputs, labels in ((model, expected, targets), (cut, logits, pieces.of(targets, IGNORED))):
            module.zero_grad()
            F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum").backward()  # type: ignore[no-untyped-call]
        for (name, parameter), part in zip(model.named_parameters(), cut.parameters(), strict=True):
            dist.all_reduce(part.grad)
            torch.testing.assert_close(part.grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(on_rank, num_ranks)


def test_pieces_are_dealt_out_from_both_ends() -> None:
    def on_rank() -> list[int]:
        columns: list[int] = SequencePieces(world()).of(torch.arange(7)[None], -1)[0].tolist()
        return columns

    assert run_ranks(on_rank, 2) == [[0, 1, 6, -1], [2, 3, 4, 5]]


class Shifting(nn.Module):
    """Adds to each token the token before it, as a short convolution does."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + F.pad(inputs, (0, 0, 1, 0))[:, :-1]


def test_a_model_that_mixes_tokens_outside_attention_is_refused_on_every_rank() -> None:
    def on_rank() -> None:
        model: Any = make_model("llama")
        model.model.norm = nn.Sequential(Shifting(), model.model.norm)
        pieces = SequencePieces(world())
        cut_sequences(model, pieces)
        with pytest.raises(ModelError, match="tokens meet in causal attention alone, got 'llama'"):
            check_pieces(model, pieces, 300, CPU)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(("model_type", "name"), [("gpt_oss", "s_aux"), ("gemma2", "softcap")])
def test_models_that_change_the_scores_of_attention_are_refused_by_the_argument(model_type: str, name: str) -> None:
    def on_rank() -> None:
        layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**GROUPED_SIZES, **layers}))  # type: ignore[no-untyped-call]
        check_sequences(model)
        pieces = SequencePieces(world())
        cut_sequences(model, pieces)
        with pytest.raises(ModelError, match=f"on pieces of sequences by scaled products alone, got '{name}'"):
            check_pieces(model, pieces, 300, CPU)

    run_ranks(on_rank, 2)


def test_layers_with_windows_are_refused_by_their_kind() -> None:
    with pytest.raises(ModelError, match="full attention alone, got 'sliding_attention' in 'gemma3_text'"):
        check_sequences(make_model("gemma3_text"))


def test_a_window_of_all_layers_is_refused_since_the_trial_is_shorter() -> None:
    with_window, without = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **GROUPED_SIZES, sliding_window=window))  # type: ignore[no-untyped-call]
        for window in (32, None)
    )
    with pytest.raises(ModelError, match="full attention alone, got 'sliding_attention' in 'mistral'"):
        check_sequences(with_window)
    check_sequences(without)
