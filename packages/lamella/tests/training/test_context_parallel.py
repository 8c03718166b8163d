"""`--context-parallel N`: losses and weights of the run on one rank, resumed on other ranks, and refusals."""

import importlib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cut_runs import SIZES, assert_equal, changed
from trained_runs import Run, TrainOn

from lamella import Config, ConfigError
from lamella._processes.placement import place
from lamella._settings.config import resolve
from lamella._training.preparation import prepare

importlib.import_module("transformers.models.qwen3.modeling_qwen3")  # Once here, and not in each forked rank.


@pytest.fixture(scope="module")
def plain(shared_config: Config, train: TrainOn) -> Run:
    return train(changed(shared_config, "plain"), 1)


@pytest.fixture(scope="module")
def cut(shared_config: Config, train: TrainOn) -> Run:
    return train(changed(shared_config, "cut", context_parallel=2, ranks=4), 4)


def test_context_parallel_losses_norms_and_exports_are_those_of_one_rank(plain: Run, cut: Run, tmp_path: Path) -> None:
    assert_equal(cut, plain, tmp_path)


def test_a_run_resumes_on_other_pieces_with_options_of_memory(
    shared_config: Config, plain: Run, train: TrainOn
) -> None:
    memory: dict[str, Any] = {"stage": 2, "rest": "cpu", "recompute": "full", "offload_activations": True}
    config = changed(shared_config, "stopped", context_parallel=2, ranks=4)
    train(replace(config, optim=replace(config.optim, steps=3)), 4)
    resumed = train(changed(shared_config, "stopped", context_parallel=2, ranks=2, **memory), 2)
    assert resumed.losses == pytest.approx(plain.losses, rel=2e-5)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"parallel": {"ranks": 3}}, "Expected --context-parallel to divide the 3 ranks, got 2. Pass a divisor"),
        ({"parallel": {"tensor_parallel": 2}}, "Expected --context-parallel without --tensor-parallel 2"),
        ({"parallel": {"experts": 2}}, "Expected --context-parallel without --experts 2"),
        ({"parallel": {"compile": True}}, "Expected --context-parallel without --compile"),
        ({"run": {"sample": ("a",)}}, "Expected --context-parallel without --sample"),
        ({"data": {"packing": "documents"}}, "got packed documents, which a piece of a sequence cannot keep apart"),
    ],
)
def test_options_that_do_not_go_with_cut_sequences_are_one_line(
    section: dict[str, dict[str, Any]], expected: str
) -> None:
    parallel = {"ranks": 4, "context_parallel": 2, **section.get("parallel", {})}
    with pytest.raises(ConfigError) as caught:
        resolve({"model": {"name": "x"}, **section, "parallel": parallel})
    assert "\n" not in str(caught.value) and expected in str(caught.value)


def test_documents_that_would_be_packed_by_default_are_refused_with_the_way_out(config: Config) -> None:
    with pytest.raises(ConfigError, match="Pass --packing none or --packing stream"):
        prepare(place(changed(config, "packed", packing="auto", context_parallel=2, ranks=2)))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "got 'sliding_attention' in 'qwen3', with --context",
        ),
        ({"model_type": "mamba2", "num_heads": 4, "n_groups": 1}, "got 'mamba2', whose does not, with --context"),
    ],
)
def test_models_whose_tokens_meet_elsewhere_are_one_line(config: Config, model: dict[str, Any], expected: str) -> None:
    refused = changed(config, "refused", context_parallel=2, ranks=2)
    Path(refused.model.name).write_text(json.dumps({"model_type": "qwen3", **SIZES, **model}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        prepare(place(refused))
    assert "\n" not in str(caught.value) and expected in str(caught.value)


def test_a_loss_that_balances_experts_is_refused_and_its_coefficient_alone_is_not(config: Config) -> None:
    accepted = changed(config, "experts", context_parallel=2, ranks=2, packing="none")
    for has_loss in (False, True):
        values = {**SIZES, "model_type": "mixtral", "num_local_experts": 2, "output_router_logits": has_loss}
        Path(accepted.model.name).write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(ConfigError, match="without a loss that balances") if has_loss else nullcontext():
            prepare(place(accepted))
