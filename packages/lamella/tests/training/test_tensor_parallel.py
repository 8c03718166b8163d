"""`--tensor-parallel N`: losses, weights and norms of the run on one rank, resumed on other ranks, and refusals."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_runs import SIZES, assert_equal, changed, norms
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from trained_runs import Run, TrainOn

from lamella import Config, ConfigError
from lamella._model.building import build
from lamella._processes.placement import Rank, place
from lamella._settings.config import resolve
from lamella._streaming.batches import ScatteredBatches
from lamella._training.preparation import prepare
from lamella.cli import main
from lamella_testing import run_ranks

for module in ("torch.distributed.tensor.parallel", "transformers.models.qwen3.modeling_qwen3"):
    importlib.import_module(module)  # Once here, and not in each forked rank.


@pytest.fixture(scope="module")
def plain(shared_config: Config, train: TrainOn) -> Run:
    return train(changed(shared_config, "plain"), 1)


@pytest.fixture(scope="module")
def cut(shared_config: Config, train: TrainOn) -> Run:
    """A run with a further checkpoint on the way."""
    config = changed(shared_config, "cut", tensor_parallel=2, ranks=4)
    return train(replace(config, run=replace(config.run, checkpoint_interval=3)), 4)


def _copy_at_3(run: Run, name: str) -> None:
    run.copy_at_3(run.directory.root.with_name(name))


def test_tensor_parallel_losses_norms_and_exports_are_those_of_one_rank(plain: Run, cut: Run, tmp_path: Path) -> None:
    assert_equal(cut, plain, tmp_path)


def test_tensor_parallel_llamas_train_as_on_one_rank(shared_config: Config, train: TrainOn, tmp_path: Path) -> None:
    plain = train(changed(shared_config, "plain-llama", "llama"), 1)
    cut = train(changed(shared_config, "cut-llama", "llama", tensor_parallel=2, ranks=2), 2)
    assert_equal(cut, plain, tmp_path)


@pytest.mark.parametrize(("num_ranks", "tensor_parallel"), [pytest.param(4, 1, marks=pytest.mark.slow), (2, 2), (1, 1)])
def test_a_run_resumes_on_other_ranks(
    shared_config: Config, plain: Run, cut: Run, train: TrainOn, num_ranks: int, tensor_parallel: int
) -> None:
    name = f"on-{num_ranks}-{tensor_parallel}"
    _copy_at_3(cut, name)
    resumed = train(changed(shared_config, name, tensor_parallel=tensor_parallel, ranks=num_ranks), num_ranks)
    assert resumed.losses == pytest.approx(plain.losses, rel=2e-5)


@pytest.mark.slow
def test_a_run_resumed_on_the_same_ranks_is_the_uninterrupted_run(
    shared_config: Config, cut: Run, train: TrainOn
) -> None:
    _copy_at_3(cut, "again")
    resumed = train(changed(shared_config, "again", tensor_parallel=2, ranks=4), 4)
    assert resumed.losses == cut.losses
    assert norms(resumed) == norms(cut)


def test_options_of_memory_samples_and_streamed_text_change_no_loss(
    shared_config: Config, tmp_path: Path, train: TrainOn
) -> None:
    memory: dict[str, Any] = {"stage": 2, "rest": "cpu", "recompute": "selective", "offload_activations": True}
    variants: tuple[tuple[int, dict[str, Any]], ...] = ((1, {}), (2, {"tensor_parallel": 2, **memory}))
    expected, run = (
        train(_streamed(changed(shared_config, f"streamed-{num_ranks}", **options, ranks=num_ranks)), num_ranks)
        for num_ranks, options in variants
    )
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    for metrics in (expected.directory.metrics, run.directory.metrics):
        assert '"text"' in metrics.read_text(encoding="utf-8")


def _streamed(config: Config) -> Config:
    return replace(
        config,
        optim=replace(config.optim, steps=3),
        data=replace(config.data, streaming=True, shuffle_buffer=64),
        run=replace(config.run, sample=("1: ",), sample_interval=3, sample_tokens=2),
    )


def test_neighbours_read_the_same_sequences_of_a_stream() -> None:
    class Reader:
        def batch(self, step: int) -> Any:
            from lamella._data.batches import TokenBatch

            return TokenBatch(torch.arange(4 * 4).view(4, 4))

    def on_rank() -> list[list[int]]:
        rank = dist.get_rank()
        reader: Any = Reader() if rank == 0 else None
        batches = ScatteredBatches(reader, sequence_length=3, batch_size=4, is_packed=False)
        rows: list[list[int]] = batches.batch(0, rank // 2, 2).tokens.tolist()
        return rows

    first, second, third, fourth = run_ranks(on_rank, 4)
    assert first == second and third == fourth
    assert [*first, *third] == torch.arange(16).view(4, 4).tolist()


def test_matrices_are_cut_over_both_axes_and_all_else_over_all_ranks(shared_config: Config) -> None:
    config = place(changed(shared_config, "placements", tensor_parallel=2, ranks=4))
    directory = prepare(config).directory

    def on_rank() -> None:
        device = torch.device("cpu")
        rank = Rank(rank=dist.get_rank(), num_ranks=4, device=device)
        assert rank.share(config.parallel) == (dist.get_rank() // 2, 2)
        run_model = build(config, directory.model, device)
        placements: dict[str, Any] = {
            name: parameter.placements
            for name, parameter in run_model.module.named_parameters()
            if isinstance(parameter, DTensor)
        }
        layer = "model.layers.0"
        assert placements[f"{layer}.self_attn.q_proj.weight"] == (_StridedShard(0, split_factor=2), Shard(0))
        assert placements[f"{layer}.mlp.down_proj.weight"] == (Shard(0), Shard(1))
        for name in ("lm_head.weight", "model.embed_tokens.weight", f"{layer}.self_attn.q_norm.weight"):
            assert placements[name] == (Shard(0),)

    run_ranks(on_rank, 4)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"parallel": {"ranks": 3}}, "Expected --tensor-parallel to divide the 3 ranks, got 2. Pass a divisor"),
        ({"parallel": {"experts": 2}}, "Expected --tensor-parallel without --experts 2"),
        ({"parallel": {"replicate": 2}}, "Expected --tensor-parallel without --replicate 2"),
        ({"parallel": {"float8": "tensor"}}, "Expected --tensor-parallel without --float8 tensor"),
        ({"model": {"lora_rank": 4}}, "Expected --tensor-parallel without --lora-rank 4"),
        ({"parallel": {"compile": True}}, "Expected --tensor-parallel without --compile"),
        ({"optim": {"optimizer": "muon"}}, "Expected --tensor-parallel without --optimizer muon"),
    ],
)
def test_options_that_do_not_go_with_cut_matrices_are_one_line(
    section: dict[str, dict[str, Any]], expected: str
) -> None:
    settings = {
        "model": {"name": "x", **section.get("model", {})},
        "optim": section.get("optim", {}),
        "parallel": {"ranks": 4, "tensor_parallel": 2, **section.get("parallel", {})},
    }
    with pytest.raises(ConfigError) as caught:
        resolve(settings)
    assert "\n" not in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}, "got 'gpt2', which has none, with --tensor"),
        ({"model_type": "llama", **SIZES, "num_key_value_heads": 1}, "got num_key_value_heads 1, with --tensor"),
        (
            {"model_type": "llama", **SIZES, "intermediate_size": 41},
            "'model.layers.0.mlp.gate_proj' that divide among",
        ),
        (
            {"model_type": "mixtral", **SIZES, "num_local_experts": 2},
            "got the style 'packed_colwise' for 'model.layers.0.mlp.experts.gate_up_proj'",
        ),
    ],
)
def test_models_that_no_plan_cuts_are_one_line(config: Config, model: dict[str, Any], expected: str) -> None:
    refused = changed(config, "refused", tensor_parallel=2, ranks=2)
    Path(refused.model.name).write_text(json.dumps({"vocab_size": 301, **model}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        prepare(place(refused))
    assert "\n" not in str(caught.value) and expected in str(caught.value)


def test_a_batch_is_shared_out_among_ranks_with_sequences_of_their_own(config: Config) -> None:
    two = changed(config, "shares", tensor_parallel=2, ranks=4)
    assert place(replace(two, optim=replace(two.optim, batch_size=4))).parallel.num_data_ranks == 2
    with pytest.raises(ConfigError, match="multiple of ranks over --tensor-parallel times --accumulation, 2"):
        place(replace(two, optim=replace(two.optim, batch_size=6)))


def test_eval_of_a_run_on_neighbouring_ranks_gives_its_last_validation(
    cut: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", str(cut.directory.root), "--device", "cpu", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["nats_per_byte"] == pytest.approx(cut.nats_per_byte(6), rel=1e-5)
