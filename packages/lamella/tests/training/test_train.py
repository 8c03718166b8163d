"""The training loop in forked ranks: independent of the number of ranks, resumable, and learning."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from trained_runs import Run, TrainOn

from lamella import Config, MixedPrecisionPolicy, OptimConfig, ParallelConfig
from lamella._data.order import BatchStream
from lamella._data.tokens import load_tokens
from lamella._model.compilation import compile_units, compiles_by_default
from lamella._model.float8 import in_float8
from lamella._model.sharding import shard
from lamella._model.spec import load_spec
from lamella._processes.placement import Rank, place
from lamella._record.metrics import StepRecord, read
from lamella._settings.config import resolve
from lamella._training.optimizer import learning_rate
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella_precision import Float8Linear
from lamella_testing import RankFailure, load_compiler, run_ranks
from lamella_transformers import build_model, target_losses

LONG_RUN: Final[Mapping[str, Mapping[str, object]]] = {
    "model": {"name": "llama-small"},
    "parallel": {"device": "cuda"},
    "optim": {"steps": 1000},
}


def in_folder(config: Config, name: str) -> Config:
    root = Path(str(config.run.directory)).parent
    return replace(config, run=replace(config.run, directory=str(root / name)))


@pytest.fixture(scope="module")
def exact(shared_config: Config, train: TrainOn) -> Run:
    """A run in fp32 with a further checkpoint on the way, written by a process beside each rank."""
    return train(replace(shared_config, run=replace(shared_config.run, checkpoint_interval=3)), 2)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_losses_do_not_depend_on_the_number_of_ranks(
    config: Config, exact: Run, train: TrainOn, num_ranks: int
) -> None:
    assert len(exact.losses) == 6 and exact.losses[6] < exact.losses[1] - 0.1
    run = train(config, num_ranks)
    assert run.losses == pytest.approx(exact.losses, rel=1e-5)
    assert run.validations == pytest.approx(exact.validations, rel=1e-5)


def test_microbatches_add_up_to_the_batch(config: Config, exact: Run, train: TrainOn) -> None:
    split = replace(config, optim=replace(config.optim, accumulation=4))
    assert train(split, 2).losses == pytest.approx(exact.losses, rel=1e-5)


def test_an_infinite_norm_to_clip_to_leaves_the_gradients(config: Config, train: TrainOn) -> None:
    runs = [
        train(replace(in_folder(config, name), optim=replace(config.optim, clip_norm=clip_norm)), 1)
        for name, clip_norm in (("large", 1e9), ("infinite", math.inf))
    ]
    assert runs[0].losses == runs[1].losses
    norms = [
        [record.grad_norm for record in read(run.directory.metrics) if isinstance(record, StepRecord)] for run in runs
    ]
    assert norms[0] == norms[1] and len(norms[0]) == 6


def test_the_first_loss_is_that_of_guessing(exact: Run) -> None:
    assert exact.losses[1] == pytest.approx(math.log(300), rel=0.02)
    metrics = json.loads((exact.directory.model / "config.json").read_text())
    assert metrics["vocab_size"] == 300


def resumed_at_3(config: Config, run: Run, root: Path) -> Config:
    """Settings of a copy of a run after its third step."""
    run.copy_at_3(root)
    return replace(config, run=replace(config.run, directory=str(root)))


@pytest.mark.parametrize(("num_ranks", "tolerance"), [(2, 1e-7), (1, 1e-5), (4, 1e-5)])
def test_a_resumed_run_equals_an_uninterrupted_one_on_any_number_of_ranks(
    shared_config: Config, exact: Run, train: TrainOn, tmp_path: Path, num_ranks: int, tolerance: float
) -> None:
    run = train(resumed_at_3(shared_config, exact, tmp_path / "resumed"), num_ranks)
    assert run.losses == pytest.approx(exact.losses, rel=tolerance)
    assert run.validations == pytest.approx(exact.validations, rel=tolerance)
    steps = [record.step for record in read(run.directory.metrics)]
    assert steps == sorted(steps)  # Records after the checkpoint have been dropped.


def test_bfloat16_compute_stays_close_to_float32(config: Config, exact: Run, train: TrainOn) -> None:
    run = train(replace(config, parallel=replace(config.parallel, precision="bf16")), 2)
    assert run.losses != exact.losses
    assert run.losses == pytest.approx(exact.losses, rel=0.01)  # bfloat16 has 8 bits.


@pytest.mark.parametrize("kind", ["tensor", "delayed", "row", "block"])
def test_a_run_resumed_in_float8_stays_close_to_the_exact_run(
    shared_config: Config, exact: Run, train: TrainOn, tmp_path: Path, kind: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    quantised = replace(shared_config, parallel=replace(shared_config.parallel, float8=kind))
    run = train(resumed_at_3(quantised, exact, tmp_path / "resumed"), 2)
    assert run.losses[3] == exact.losses[3]
    assert run.losses[6] != exact.losses[6]
    assert run.losses == pytest.approx(exact.losses, rel=0.02)
    assert run.validations == pytest.approx(exact.validations, rel=0.02)
    output = capfd.readouterr().out
    assert output.count(f"float8: cpu here has no float8 products for --float8 {kind}") == 1
    has_history = kind == "delayed"  # the only kind with numbers of its own in a checkpoint
    assert ("float8: step 3 was saved without past amaxes of 14 matrices" in output) == has_history


def test_float8_with_past_amaxes_goes_on_to_the_bit(
    shared_config: Config, exact: Run, train: TrainOn, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    quantised = replace(
        shared_config,
        parallel=replace(shared_config.parallel, float8="delayed"),
        run=replace(shared_config.run, directory=str(tmp_path / "run"), checkpoint_interval=3),
    )
    run = train(quantised, 2)
    assert run.losses != exact.losses
    assert run.losses == pytest.approx(exact.losses, rel=0.02)
    assert run.validations == pytest.approx(exact.validations, rel=0.02)
    assert train(resumed_at_3(quantised, run, tmp_path / "resumed"), 2).losses == run.losses
    assert "saved without past amaxes" not in capfd.readouterr().out


def test_float8_leaves_out_routers_and_layers_that_the_user_excludes() -> None:
    def block() -> nn.ModuleDict:
        layers = {name: nn.Linear(16, 16) for name in ("attn", "experts", "gate")}
        return nn.ModuleDict({**layers, "down": nn.Linear(16, 5)})

    units = [block(), block()]
    parallel = ParallelConfig(float8="tensor", float8_except=("attn.*",))
    policy = in_float8(units, MixedPrecisionPolicy(torch.bfloat16), parallel)
    for unit in units:
        assert [name for name, layer in unit.items() if isinstance(layer, Float8Linear)] == ["experts"]
        chosen = {name for name, p in unit.named_parameters() if policy.resolved_for(p).recipe is not None}
        assert chosen == {"experts.weight", "down.weight"}


def test_compiled_layers_are_the_sharded_units(shared_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        parallel = shared_config.parallel
        model = build_model(load_spec(shared_config.model.name, 300), torch.device("cpu"), seed=0)
        calls: list[nn.Module] = []
        monkeypatch.setattr(nn.Module, "compile", lambda module, **_: calls.append(module))
        compile_units(shard(model, parallel).units, has_fixed_shapes=False)
        names = [name for name, module in model.named_modules() if module in calls]
        assert names == ["model.layers.0", "model.layers.1"]

    run_ranks(check, 1)


@pytest.mark.parametrize(
    ("settings", "model_type", "packing"),
    [
        ({"parallel": {"device": "cpu"}}, "llama", "stream"),
        ({"optim": {"steps": 999}}, "llama", "stream"),
        ({}, "mamba2", "stream"),
        ({}, "llama", "none"),
        ({"model": {"kernels": "liger"}}, "llama", "stream"),
        ({"model": {"attention": "sdpa"}}, "llama", "documents"),
        ({"parallel": {"float8": "row"}}, "llama", "stream"),
        ({"parallel": {"offload_activations": True}}, "llama", "stream"),
        ({"run": {"deterministic": True}}, "llama", "stream"),
        ({"run": {"sample": ("def",)}}, "llama", "stream"),
    ],
)
def test_long_runs_on_gpus_compile_layers_unless_a_setting_needs_eager_layers(
    settings: dict[str, dict[str, object]], model_type: str, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._model.compilation._missing_for", lambda parallel: None)
    for chosen in ({}, {"model": {"lora_rank": 8}}, {"model": {"attention": "documents"}}):
        assert compiles_by_default(resolve(LONG_RUN, chosen), "llama", "documents")
    assert not compiles_by_default(resolve(LONG_RUN, settings), model_type, packing)


def test_a_long_run_without_a_compiler_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "absent-gcc")
    assert not compiles_by_default(resolve(LONG_RUN), "llama", "stream")


@pytest.mark.filterwarnings("default")  # Dynamo reads deprecated attributes, which warn.
@pytest.mark.parametrize("num_sequences", [7, 12], ids=["fewer than training's", "with a remainder"])
def test_layers_are_compiled_once_for_training_and_once_for_validation(
    config: Config, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._model.compilation._missing_for", lambda parallel: None)
    run = replace(config.run, validation_sequences=num_sequences)
    optim = replace(config.optim, steps=2)
    config = replace(config, run=run, optim=optim, parallel=replace(config.parallel, compile=True))
    directory = prepare(place(config)).directory
    load_compiler()

    def on_rank() -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def backend(graph: Any, inputs: list[Any]) -> Any:
            shapes.append(max(tuple(map(int, tensor.shape)) for tensor in inputs if isinstance(tensor, torch.Tensor)))
            assert all(isinstance(size, int) for tensor in inputs for size in getattr(tensor, "shape", (tensor,)))
            return graph.forward

        compile_with = nn.Module.compile
        monkeypatch.setattr(
            nn.Module, "compile", lambda unit, **options: compile_with(unit, backend=backend, **options)
        )
        Trainer(config, directory, Rank(rank=0, num_ranks=1, device=torch.device("cpu"))).train()
        return shapes

    [shapes] = run_ranks(on_rank, 1)
    assert len(shapes) == 2, shapes


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Dynamo reads deprecated attributes, which warn.
@pytest.mark.parametrize("kind", ["no", "tensor"])
def test_compiled_layers_train_alike(config: Config, train: TrainOn, kind: Any) -> None:
    eager = replace(in_folder(config, "eager"), parallel=replace(config.parallel, float8=kind))
    compiled = replace(in_folder(config, "compiled"), parallel=replace(eager.parallel, compile=True))
    expected, run = train(eager, 2), train(compiled, 2)
    assert run.losses == pytest.approx(expected.losses, rel=1e-3 if kind == "tensor" else 1e-5)
    assert run.validations == pytest.approx(expected.validations, rel=1e-3 if kind == "tensor" else 1e-5)


def test_a_tiny_qwen_trains(config: Config, train: TrainOn) -> None:
    qwen = replace(config, model=replace(config.model, name="qwen3.5-tiny"), optim=replace(config.optim, lr=1e-2))
    run = train(qwen, 2)
    assert run.losses[6] < run.losses[1] - 0.1


@pytest.mark.parametrize(("lr", "name"), [(1e30, "gradient norm"), (1e39, "loss")])
def test_a_loss_or_a_gradient_that_is_not_finite_ends_the_run(
    config: Config, train: TrainOn, lr: float, name: str
) -> None:
    wild = replace(config, optim=replace(config.optim, lr=lr))
    with pytest.raises(RankFailure, match=f"Expected a finite {name}, got nan at step 2. There is .* smaller --lr"):
        train(wild, 1)


def test_the_learning_rate_warms_up_and_decays_to_its_final_fraction() -> None:
    optim = OptimConfig(steps=100, lr=1.0, warmup_steps=10, final_lr_fraction=0.1)
    rates = [learning_rate(step, optim) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == 1.0 and sorted(rates[10:], reverse=True) == rates[10:]
    assert learning_rate(100, optim) == pytest.approx(0.1)
    assert torch.tensor(rates).isfinite().all()


def test_gradients_include_the_auxiliary_router_loss_that_the_config_asks_for(
    config: Config, train: TrainOn, tmp_path: Path
) -> None:
    file = tmp_path / "experts.json"
    sizes = {"num_local_experts": 4, "router_aux_loss_coef": 5.0, "output_router_logits": True}
    file.write_text(json.dumps(json.loads(Path(config.model.name).read_text()) | sizes | {"model_type": "mixtral"}))
    config = replace(
        config, model=replace(config.model, name=str(file)), optim=replace(config.optim, steps=1, warmup_steps=0)
    )
    run = train(config, 1)
    model = build_model(load_spec(str(run.directory.model)), torch.device("cpu"), config.run.seed)
    sequences = load_tokens(run.directory.tokens).sequences("train", 32)
    batch = BatchStream(sequences=sequences, batch_size=8, seed=config.run.seed).batch(0, 0, 1)
    targets = batch.targets.contiguous()
    outputs = model(input_ids=batch.inputs, labels=targets, shift_labels=targets, use_cache=False)
    outputs.loss.backward()
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    )
    [step] = [record for record in read(run.directory.metrics) if isinstance(record, StepRecord)]
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert step.loss == pytest.approx((outputs.loss - 5.0 * outputs.aux_loss).item(), rel=1e-5)


def test_parameters_of_a_state_space_model_compute_in_fp32_beside_bf16(tmp_path: Path) -> None:
    sizes = {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "expand": 2}
    values = {"model_type": "mamba2", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1} | sizes
    (tmp_path / "config.json").write_text(json.dumps(values))

    def on_rank() -> dict[str, torch.dtype]:
        spec = load_spec(str(tmp_path))
        model = build_model(spec, torch.device("cpu"), seed=0)
        shard(model, ParallelConfig(device="cpu", precision="bf16"))
        seen: dict[str, torch.dtype] = {}
        [mixer] = [module for module in model.modules() if hasattr(module, "A_log")]
        mixer.register_forward_pre_hook(
            lambda module, _: seen.update({name: parameter.dtype for name, parameter in module.named_parameters()})
        )
        losses, _ = target_losses(model, torch.arange(16).view(2, 8), torch.arange(1, 17).view(2, 8))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        return seen

    for seen in run_ranks(on_rank, 2):
        assert {name for name, dtype in seen.items() if dtype == torch.float32} == {"A_log", "D", "dt_bias"}
