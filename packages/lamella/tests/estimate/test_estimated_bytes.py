"""Estimated bytes are those of really sharded models: at rest on every rank, and moment by moment of a step."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import TINY_LLAMA
from layer_units import shard_layers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

import lamella
from lamella import Config, ConfigError
from lamella._estimate.api import estimate_run
from lamella._estimate.estimated_bytes import Estimate, estimate_of
from lamella._estimate.kinds import ACTIVATIONS, GATHERED, LIBRARIES, LOGITS, MAIN_WEIGHTS, OPTIMIZER_STATE, on_host
from lamella._estimate.live_bytes import LiveBytes
from lamella._estimate.recipe_step import training_step
from lamella._estimate.recorded_step import record
from lamella._model.spec import load_spec, outline
from lamella._settings.config import resolve
from lamella_engine import DDP, HFSDP, ZERO3, ShardingOptions, fully_shard
from lamella_testing import run_ranks

TINY = {
    **TINY_LLAMA,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-3": (3, {}),
    "zero-2": (2, {"stage": 2, "precision": "fp32"}),
    "hfsdp": (4, {"replicate": 2, "spread_states": True}),
    "rest cpu and one layer": (2, {"rest": "cpu", "recompute": "full", "recompute_layers": 1}),
    "full and keep budget and float8": (2, {"recompute": "full", "keep_budget": "150KiB", "float8": "tensor"}),
    "full and offload": (2, {"recompute": "full", "offload_activations": True, "reduce": "bf16"}),
    "cut layers, zero-2 and microbatches": (4, {"tensor_parallel": 2, "stage": 2, "accumulation": 2}),
    "cut sequences, zero-1 and selective": (4, {"context_parallel": 2, "stage": 1, "recompute": "selective"}),
    "the last layer alone": (2, {"train": ("model.layers.2.*", "lm_head.*")}),
}

FURTHER_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-1 and microbatches": (2, {"stage": 1, "accumulation": 2}),
    "hsdp": (4, {"replicate": 2}),
    "hsdp, zero-1 and microbatches": (4, {"replicate": 2, "stage": 1, "accumulation": 2}),
    "rest cpu": (2, {"rest": "cpu", "recompute": "selective"}),
    "keep budget": (2, {"keep_budget": "100KiB", "reduce": "bf16"}),
    "one layer": (2, {"recompute": "full", "recompute_layers": 1}),
    "full and keep budget": (2, {"recompute": "full", "keep_budget": "150KiB"}),
    "full and float8": (2, {"recompute": "full", "float8": "tensor"}),
    "float8": (2, {"float8": "tensor"}),
    "offload": (2, {"offload_activations": True}),
    "cut layers": (4, {"tensor_parallel": 2}),
    "cut layers and full": (2, {"tensor_parallel": 2, "recompute": "full", "rest": "cpu"}),
    "cut sequences": (4, {"context_parallel": 2}),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def config_of(
    model: Path, num_ranks: int, *, accumulation: int = 1, train: tuple[str, ...] = (), **parallel: Any
) -> Config:
    batch_size = 2 * num_ranks * accumulation
    return resolve(
        {
            "model": {"name": str(model)},
            "data": {"sequence_length": 64},
            "optim": {"batch_size": batch_size, "accumulation": accumulation, "steps": 2, "train": train},
            "parallel": {"device": "cpu", "precision": "bf16", "ranks": num_ranks} | parallel,
        }
    )


NUM_TRIALS = 4


def measured(config: Config, accepts: Callable[[list[Estimate]], bool]) -> list[Estimate]:
    """Replays of a step that really runs on ranks, one for each rank.

    A thread of gloo may free the buffers of a gather late on a busy machine: of a few steps the first that is accepted,
    or else the last.
    """
    for _ in range(NUM_TRIALS):
        by_rank = run_ranks(_measured, config.parallel.ranks or 1, config)
        if accepts(by_rank):
            break
    return by_rank


def fits(estimate: Estimate, actual: Estimate) -> bool:
    """Whether the bytes at rest are the estimated ones, and those of every moment within 3 %."""
    names = [[moment.name for moment in step.moments] for step in (estimate, actual)]
    at_rest = [(step.at_rest, step.host_at_rest) for step in (estimate, actual)]
    if names[0] != names[1] or at_rest[0] != at_rest[1]:
        return False
    pairs = [
        (moment.nbytes, expected.nbytes, moment.host_nbytes, expected.host_nbytes)
        for expected, moment in zip(actual.moments, estimate.moments, strict=True)
    ]
    return all(a == pytest.approx(b, rel=0.03) and c == pytest.approx(d, rel=0.03) for a, b, c, d in pairs)


def _measured(config: Config) -> Estimate:
    live = LiveBytes()
    with training_step(config, live) as step:
        with torch.no_grad():
            for parameter in step.model.parameters():
                parameter.fill_(0.01)
        recorded = record(step, live)
    return estimate_of(
        recorded,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        host=on_host(config.parallel.rest == "cpu"),
        context_nbytes=0,
    )


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER_CASES)])
def test_every_moment_of_a_step_has_the_bytes_of_a_real_one(model_folder: Path, name: str) -> None:
    num_ranks, parallel = (CASES | FURTHER_CASES)[name]
    config = config_of(model_folder, num_ranks, **parallel)
    ranks = {0, num_ranks - 1} if num_ranks > 2 else {1}  # Two ranks have shards of equal sizes.
    estimates = {rank: estimate_run(config, rank) for rank in ranks}

    def fit_all(by_rank: list[Estimate]) -> bool:
        return all(fits(estimate, by_rank[rank]) for rank, estimate in estimates.items())

    by_rank = measured(config, fit_all)
    assert fit_all(by_rank), (
        f"Expected the estimated bytes in one of {NUM_TRIALS} steps, got {estimates} and {by_rank}."
    )


def _numel(model_folder: Path) -> int:
    return sum(parameter.numel() for parameter in outline(load_spec(str(model_folder))).parameters())


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 3), pytest.param(2, 1, marks=pytest.mark.slow), (3, 2)])
def test_optimizer_states_of_all_ranks_are_two_for_each_parameter(
    model_folder: Path, num_ranks: int, stage: int
) -> None:
    config = config_of(model_folder, num_ranks, stage=stage)
    numel = _numel(model_folder)
    estimates = [estimate_run(config, rank) for rank in range(num_ranks)]
    states = sum(estimate.at_rest[OPTIMIZER_STATE] for estimate in estimates)
    num_steps = len(list(outline(load_spec(str(model_folder))).parameters()))  # AdamW counts steps by parameter
    assert states == 2 * 4 * numel + 4 * num_steps * num_ranks
    assert sum(estimate.at_rest[MAIN_WEIGHTS] for estimate in estimates) >= 4 * numel
    copies = 0 if stage == 3 or num_ranks == 1 else 2 * numel
    assert all(estimate.at_rest.get(GATHERED, 0) >= copies for estimate in estimates)


def test_the_matrices_of_muon_rest_as_in_a_real_run_with_one_state(model_folder: Path) -> None:
    config = config_of(model_folder, 2)
    config = replace(config, optim=replace(config.optim, optimizer="muon"))
    estimates = [estimate_run(config, rank) for rank in (0, 1)]

    def rests_alike(by_rank: list[Estimate]) -> bool:
        return [actual.at_rest for actual in by_rank] == [estimate.at_rest for estimate in estimates]

    assert rests_alike(measured(config, rests_alike))
    states = sum(estimate.at_rest[OPTIMIZER_STATE] for estimate in estimates)
    assert states < 2 * 4 * _numel(model_folder), "AdamW has two states for each parameter"


def test_a_rank_keeps_its_share_of_muons_matrices_on_many_ranks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "hidden_size": 256, "intermediate_size": 640, "vocab_size": 300}))
    config = config_of(path, 16)
    config = replace(config, optim=replace(config.optim, optimizer="muon"))
    share = 4 * _numel(path) / 16
    assert share <= estimate_run(config).at_rest[MAIN_WEIGHTS] < 1.2 * share


@pytest.mark.parametrize(
    ("model", "option", "expected"),
    [
        ({"num_key_value_heads": 1}, "tensor_parallel", "got num_key_value_heads 1, with --tensor-parallel 2"),
        ({"model_type": "gpt2"}, "tensor_parallel", "got 'gpt2', which has none, with --tensor-parallel 2"),
        ({"model_type": "mistral"}, "context_parallel", "got 'sliding_attention' in 'mistral', with --context-"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_in_one_line(
    tmp_path: Path, model: dict[str, Any], option: str, expected: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **model}))
    with pytest.raises(ConfigError) as caught:
        estimate_run(config_of(path, 2, **cast(Any, {option: 2})))
    assert "\n" not in str(caught.value) and expected in str(caught.value)


def test_ranks_gather_their_parts_of_cut_layers_alone(model_folder: Path) -> None:
    kinds = [
        {moment.name: moment.kinds for moment in estimate_run(config).moments}["forward model.layers.1"]
        for config in (config_of(model_folder, 4, device="cuda", tensor_parallel=count) for count in (1, 2))
    ]
    matrices = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    assert kinds[0][GATHERED] - kinds[1][GATHERED] == 2 * 2 * matrices // 2  # half of two layers, one on the way


def test_attention_over_cut_sequences_saves_no_mask_on_gpus(model_folder: Path) -> None:
    """A mask has the square of a sequence's length; a GPU's kernels need none."""
    config = config_of(model_folder, 4, device="cuda", context_parallel=2)
    long = replace(config, data=replace(config.data, sequence_length=128 * config.data.sequence_length))
    saved = [_saved_by_a_layer(estimate_run(run)) for run in (config, long)]
    assert saved[1] < 1.05 * 128 * saved[0]


def test_idle_windows_of_one_host_are_taken_beside_the_peak(tmp_path: Path) -> None:
    """Kept units leave their windows before the peak, and peers have mapped those: they serve nothing else."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 4}))
    layer_nbytes = 2 * (3 * 512 * 8192)
    full = config_of(path, 2, device="cuda", recompute="full")
    kept = replace(full, parallel=replace(full.parallel, keep_budget=f"{4 * layer_nbytes}"))
    estimates = [estimate_run(config) for config in (full, kept, config_of(path, 16, device="cuda"))]
    assert estimates[0].window_nbytes < estimates[1].window_nbytes - layer_nbytes
    assert estimates[2].window_nbytes == 0
    assert estimates[1].total_nbytes > estimates[1].allocated_nbytes + estimates[1].window_nbytes


@pytest.mark.parametrize("kind", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_further_recomputed_layers_take_no_more_memory(model_folder: Path, kind: str) -> None:
    numbers: list[dict[str, Any]] = [{}, *({"recompute": kind, "recompute_layers": number} for number in (1, 3))]
    peaks = [estimate_run(config_of(model_folder, 2, **number)).peak.nbytes for number in numbers]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]
    assert peaks[-1] == estimate_run(config_of(model_folder, 2, recompute=kind)).peak.nbytes


def test_more_recomputed_layers_than_the_model_has_are_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Expected --recompute-layers of at most 3, .* got 4\. Leave it out"):
        estimate_run(config_of(model_folder, 2, recompute="full", recompute_layers=4))
    with pytest.raises(ConfigError, match=r"^Expected --recompute-layers with --recompute selective or full"):
        config_of(model_folder, 2, recompute_layers=4)


def test_spread_experts_are_refused_in_one_line(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Expected an estimate without --experts, .* got 2\. Leave --experts out"):
        estimate_run(config_of(model_folder, 2, experts=2))


def test_attention_whose_kernels_have_no_estimate_is_refused_and_eager_attention_takes_more(model_folder: Path) -> None:
    def with_attention(attention: Any) -> Config:
        config = config_of(model_folder, 2, device="cuda")
        return replace(config, model=replace(config.model, attention=attention))

    for attention in ("documents", "flex_attention", "flash_attention_2"):
        with pytest.raises(ConfigError, match=f"^Expected an estimate with --attention auto, .* got '{attention}', w"):
            estimate_run(with_attention(attention))
    peaks = [estimate_run(with_attention(attention)).peak.nbytes for attention in ("auto", "sdpa", "eager")]
    assert peaks[0] == peaks[1] < peaks[2]


EXPERTS = {
    **TINY,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch multiplies experts in fp32 since 2.15")
def test_experts_in_fp32_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(EXPERTS))
    with pytest.raises(ConfigError, match=r"^Expected layers of .* that run in fp32 .* pass --precision bf16"):
        estimate_run(config_of(path, 2, device="cuda", precision="fp32"))
    assert estimate_run(config_of(path, 2, device="cuda")).allocated_nbytes > 0


def test_a_validation_holds_whole_logits(tmp_path: Path) -> None:
    path, vocab_size = tmp_path / "config.json", 8192
    path.write_text(json.dumps({**TINY, "vocab_size": vocab_size}))
    estimate = estimate_run(config_of(path, 2, recompute="full"))
    [validation] = [moment for moment in estimate.moments if moment.name == "validation"]
    assert validation.kinds[LOGITS] >= 2 * 64 * vocab_size * 2


def test_kernels_of_liger_save_less_and_leave_the_models_functions(model_folder: Path) -> None:
    """Of a layer's 128 tokens: input, norms, heads, and the gated product with its two factors, in bf16."""
    config = config_of(model_folder, 2, device="cuda")
    rotation = modeling_llama.apply_rotary_pos_emb
    eager, fused = (
        estimate_run(replace(config, model=replace(config.model, kernels=kernels))) for kernels in ("none", "liger")
    )
    assert modeling_llama.apply_rotary_pos_emb is rotation
    saved = [_saved_by_a_layer(estimate) for estimate in (eager, fused)]
    assert saved[1] < 0.75 * saved[0]


def _saved_by_a_layer(estimate: Estimate) -> int:
    by_name = {moment.name: moment.kinds.get(ACTIVATIONS, 0) for moment in estimate.moments}
    return by_name["forward model.layers.1"] - by_name["forward model.layers.0"]


@pytest.mark.parametrize(
    ("placements", "mesh", "kinds"),
    [
        (DDP, (8,), {MAIN_WEIGHTS: 64 * 64 * 4}),
        ((HFSDP, ZERO3), (2, 4), {MAIN_WEIGHTS: 64 * 64 * 4 // 8, GATHERED: 64 * 64 * 4 // 4}),
    ],
)
def test_weights_that_no_gather_copies_are_main_weights_and_copies_over_an_outer_axis_are_gathered(
    placements: Any, mesh: tuple[int, ...], kinds: dict[str, int]
) -> None:
    def shard(module: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(module, mesh=mesh, options=ShardingOptions(placements=placements))

    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
    estimate = lamella.estimate(model, shard=shard, loss=lambda module: module(torch.zeros(8, 64)).sum(), mesh=mesh)
    expected = {**kinds, OPTIMIZER_STATE: estimate.at_rest[OPTIMIZER_STATE], LIBRARIES: estimate.at_rest[LIBRARIES]}
    assert {kind: nbytes for kind, nbytes in estimate.at_rest.items() if nbytes} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 0}, "`num_microbatches` to be an int of at least 1, got 0"),
        ({"mesh": ()}, "`mesh` to be a sequence of numbers of ranks, each at least 1, got ()"),
        ({"mesh": 8}, "got 8. Pass (8,) for eight"),
        ({"mesh": (0,)}, "got (0,)"),
        ({"device": "tpu"}, "`device` to be 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_impossible_loops_are_refused_by_their_argument(options: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=re.escape(message)):
        lamella.estimate(model, shard=shard_layers, loss=lambda module: module(torch.zeros(1, 4)).sum(), **options)


def test_recomputed_layers_in_an_estimate_save_the_tensors_of_their_forward() -> None:
    """torch's norm saves other tensors on CPUs: an exchange by a mode would end where autograd leaves modes."""

    class Recomputed(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, checkpoint(super().forward, inputs, use_reentrant=False))

    with torch.device("meta"):
        model = nn.Sequential(*(Recomputed(nn.RMSNorm(64), nn.Linear(64, 64)) for _ in range(2)))

    estimate = lamella.estimate(
        model,
        shard=shard_layers,
        loss=lambda module: module(torch.zeros(8, 64)).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        mesh=(4,),
    )
    shards = sum(parameter.numel() for parameter in model.parameters()) * 4
    most = sum(estimate.at_rest.values()) + 1.1 * shards // 4  # gradients, and no temporaries of the optimizer
    assert all(moment.nbytes <= most for moment in estimate.moments if moment.name == "optimizer step")
