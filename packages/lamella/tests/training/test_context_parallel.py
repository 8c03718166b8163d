"""`--context-parallel N`: losses and weights of the run on one rank, resumed on other ranks, and refusals."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trained_runs import Run, TrainOn

from lamella import Config, ConfigError
from lamella._processes.placement import place
from lamella._record.metrics import StepRecord, read
from lamella._settings.config import resolve
from lamella._training.preparation import prepare
from lamella.cli import main

importlib.import_module("transformers.models.qwen3.modeling_qwen3")  # Once here, and not in each forked rank.

_SIZES = {
    "model_type": "qwen3",
    "vocab_size": 301,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def changed(config: Config, name: str, packing: Any = "none", **parallel: Any) -> Config:
    """Conversations of unequal lengths, a row each: ranks and microbatches have unequal numbers of targets."""
    root = Path(str(config.run.directory)).parent
    model, data, held_out = root / "qwen3.json", root / "rows.jsonl", root / "held_out.jsonl"
    model.write_text(json.dumps(_SIZES), encoding="utf-8")
    rows = [{"prompt": f"{number}: ", "completion": f"{number}, " * (number % 7 + 1)} for number in range(200)]
    data.write_text("\n".join(map(json.dumps, rows[:180])), encoding="utf-8")
    held_out.write_text("\n".join(map(json.dumps, rows[180:])), encoding="utf-8")
    return replace(
        config,
        model=replace(config.model, name=str(model)),
        data=replace(config.data, paths=(str(data),), packing=packing, validation_paths=(str(held_out),)),
        optim=replace(config.optim, accumulation=2, eps=1e-6, schedule="constant"),
        parallel=replace(config.parallel, **parallel),
        run=replace(config.run, directory=str(root / name), checkpoint_interval=100, log_interval=1),
    )


@pytest.fixture(scope="module")
def plain(shared_config: Config, train: TrainOn) -> Run:
    return train(changed(shared_config, "plain"), 1)


@pytest.fixture(scope="module")
def cut(shared_config: Config, train: TrainOn) -> Run:
    return train(changed(shared_config, "cut", context_parallel=2, ranks=4), 4)


def test_losses_norms_and_exported_weights_are_those_of_one_rank(plain: Run, cut: Run, tmp_path: Path) -> None:
    assert plain.losses[6] < plain.losses[1] - 0.05
    assert cut.losses == pytest.approx(plain.losses, rel=1e-5)
    assert cut.validations == pytest.approx(plain.validations, rel=1e-5)
    assert _norms(cut) == pytest.approx(_norms(plain), rel=1e-5)
    expected, exported = (_exported(run, tmp_path / name) for name, run in (("plain", plain), ("cut", cut)))
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def _norms(run: Run) -> list[float]:
    return [record.grad_norm for record in read(run.directory.metrics) if isinstance(record, StepRecord)]


def _exported(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    assert main(["export", str(run.directory.root), str(folder)]) == 0
    return load_file(folder / "model.safetensors")


def test_a_run_resumes_on_other_pieces_with_options_of_memory(
    shared_config: Config, plain: Run, train: TrainOn
) -> None:
    memory = {"stage": 2, "rest": "cpu", "recompute": "full", "offload_activations": True}
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
        prepare(place(changed(config, "packed", "auto", context_parallel=2, ranks=2)))


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
    Path(refused.model.name).write_text(json.dumps({**_SIZES, **model}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        prepare(place(refused))
    assert "\n" not in str(caught.value) and expected in str(caught.value)
