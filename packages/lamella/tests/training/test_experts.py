"""`--experts N`: losses of the run without, with other options too, resumed on another N, and exported."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trained_runs import Run, TrainOn

from lamella import Config, ConfigError
from lamella._processes.placement import place
from lamella._settings.config import resolve
from lamella._training.preparation import prepare
from lamella.cli import main
from lamella_convert import open_checkpoint

_SIZES: Mapping[str, object] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24, "output_router_logits": True},
}


def changed(config: Config, name: str, model_type: str = "qwen3_moe", **parallel: Any) -> Config:
    root = Path(str(config.run.directory)).parent
    path = root / f"{model_type}.json"
    path.write_text(json.dumps({"model_type": model_type, **_SIZES, **MODELS[model_type]}), encoding="utf-8")
    return replace(
        config,
        model=replace(config.model, name=str(path)),
        parallel=replace(config.parallel, **parallel),
        run=replace(config.run, directory=str(root / name), log_interval=1),
    )


@pytest.fixture(scope="module")
def plain(shared_config: Config, train: TrainOn) -> Run:
    return train(changed(shared_config, "plain"), 2)


@pytest.fixture(scope="module")
def spread(shared_config: Config, train: TrainOn) -> Run:
    """A run with a further checkpoint on the way."""
    config = replace(shared_config, run=replace(shared_config.run, checkpoint_interval=3))
    return train(changed(config, "spread", experts=2), 2)


def test_expert_parallel_losses_are_those_without_expert_parallelism(plain: Run, spread: Run) -> None:
    assert plain.losses[6] < plain.losses[1] - 0.05
    assert spread.losses == pytest.approx(plain.losses, rel=1e-5)
    assert spread.validations == pytest.approx(plain.validations, rel=1e-5)


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "stage-1, recompute": {"stage": 1, "recompute": "full", "offload_activations": True},
    "rest": {"rest": "cpu", "keep_budget": "1MiB"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_memory_options_change_no_loss_of_expert_parallel_runs(
    shared_config: Config, plain: Run, train: TrainOn, name: str
) -> None:
    run = train(changed(shared_config, name, experts=2, **OPTIONS[name]), 2)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)


def test_mixtral_on_four_ranks_that_share_experts_in_twos(shared_config: Config, train: TrainOn) -> None:
    expected, spread = (
        train(changed(shared_config, f"mixtral-{experts}", "mixtral", experts=experts, stage=2), 4)
        for experts in (1, 2)
    )
    assert spread.losses == pytest.approx(expected.losses, rel=1e-5)


def test_muon_steps_the_matrices_of_each_ranks_experts(shared_config: Config, train: TrainOn) -> None:
    expected, spread = (
        train(_with_muon(changed(shared_config, f"muon-{experts}", experts=experts)), 2) for experts in (1, 2)
    )
    assert spread.losses == pytest.approx(expected.losses, rel=1e-5)


def _with_muon(config: Config) -> Config:
    return replace(config, optim=replace(config.optim, optimizer="muon"))


def test_a_run_resumes_on_another_number_of_ranks_that_share(
    shared_config: Config, spread: Run, plain: Run, train: TrainOn
) -> None:
    for experts, num_ranks in ((1, 1), (4, 4)):
        config = changed(shared_config, "spread", experts=experts, ranks=num_ranks)
        resumed = train(replace(config, run=replace(config.run, from_step=3)), num_ranks)
        assert resumed.losses == pytest.approx(plain.losses, rel=2e-5)


def test_delayed_scales_of_all_experts_go_on_to_the_bit_and_on_ranks_with_other_experts(
    shared_config: Config, train: TrainOn, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(shared_config, run=replace(shared_config.run, checkpoint_interval=3))
    plain, spread = (
        train(changed(config, f"float8-{experts}", experts=experts, float8="delayed", reshard_after_forward=False), 2)
        for experts in (1, 2)
    )
    plain_state, state = (
        open_checkpoint(run.directory.checkpoints / "step_00000003").extra["scaling"] for run in (plain, spread)
    )
    assert [*state] == [*plain_state]
    for name, rows in plain_state.items():  # Each expert has amaxes of its own, so another order would show.
        torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(rows), rtol=1e-3, atol=0, msg=name)
    for experts, num_ranks, tolerance in ((2, 2, 0.0), (1, 1, 1e-4), (2, 4, 1e-4)):
        resumed_config = changed(config, "float8-2", experts=experts, ranks=num_ranks, float8="delayed")
        resumed = train(replace(resumed_config, run=replace(resumed_config.run, from_step=3)), num_ranks)
        assert resumed.losses == pytest.approx(spread.losses, rel=tolerance, abs=0.0)
    assert "saved without past amaxes" not in capfd.readouterr().out


def test_the_exported_folder_has_all_experts_under_published_names(plain: Run, spread: Run, tmp_path: Path) -> None:
    folders = []
    for name, run in (("plain", plain), ("spread", spread)):
        assert main(["export", str(run.directory.root), str(tmp_path / name)]) == 0
        folders.append(load_file(tmp_path / name / "model.safetensors"))
    expected, exported = folders
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_models_without_experts_and_numbers_that_do_not_divide_are_one_line(config: Config) -> None:
    three = changed(config, "three", experts=3, ranks=3)
    refusals = [
        (replace(config, parallel=replace(config.parallel, experts=2)), "got LlamaForCausalLM (llama), with --experts"),
        (
            replace(three, optim=replace(three.optim, batch_size=9)),
            "divide among the 3 ranks that share them, got 4, with --experts",
        ),
    ]
    for refused, expected in refusals:
        with pytest.raises(ConfigError) as caught:
            prepare(place(refused))
        assert "\n" not in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"experts": 2, "ranks": 3}, "Expected --experts to divide the 3 ranks, got 2. Pass a divisor"),
        ({"experts": 2, "ranks": 4, "replicate": 2}, "Expected --experts without --replicate"),
        ({"experts": 2, "compile": True}, "Expected --experts without --compile"),
    ],
)
def test_options_that_do_not_go_with_experts_are_one_line(parallel: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"model": {"name": "x"}, "parallel": parallel})
    assert "\n" not in str(caught.value) and expected in str(caught.value)
