"""A run of adapters trains as peft does on one process, and is exported as peft's folder or merged."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from trained_runs import Run, TrainOn
from transformers import AutoConfig, AutoModelForCausalLM

from lamella import Config, ConfigError
from lamella._data.order import BatchStream
from lamella._data.text import collect
from lamella._data.tokenizer import train_tokenizer
from lamella._data.tokens import load_tokens
from lamella._inference.trained_model import open_model
from lamella._model.lora import lora_settings
from lamella._processes.placement import place
from lamella._training.preparation import prepare
from lamella.cli import main
from lamella_checkpoint import fill
from lamella_convert import open_checkpoint
from lamella_transformers import FreshLora, LoraSettings, lora_config, lora_layers

CPU = torch.device("cpu")

OTHER_MODELS: Mapping[str, Mapping[str, object]] = {
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 8,
        "mlp_only_layers": [0],
    },
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1},
}
"""Models with layers that peft takes for others, or refuses."""

# peft asks a model by a name that transformers renames.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def adapted(shared_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The settings of a run with adapters on a published model with untied weights in fp32."""
    spec = AutoConfig.for_model(**json.loads(Path(shared_config.model.name).read_text(encoding="utf-8")))
    return adapted_run(shared_config, spec, tmp_path_factory.mktemp("published"))


def adapted_run(config: Config, spec: Any, folder: Path) -> Config:
    """Write a model with a tokenizer, and return the settings of a run with adapters on it."""
    torch.manual_seed(0)
    cast(Any, AutoModelForCausalLM).from_config(spec).save_pretrained(folder)
    tokenizer = train_tokenizer(collect(list(config.data.paths), 0.05).train, 290)
    assert tokenizer.backend is not None
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return replace(
        config,
        model=replace(config.model, name=str(folder), lora_rank=4, lora_alpha=12.0),
        optim=replace(config.optim, lr=1e-2),
        run=replace(config.run, directory=str(folder / "run"), checkpoint_interval=3),
    )


def with_model(config: Config, directory: Path, **fields: Any) -> Config:
    run = replace(config.run, directory=str(directory))
    return replace(config, model=replace(config.model, **fields), run=run)


@pytest.fixture(scope="module")
def lora_run(adapted: Config, train: TrainOn) -> Run:
    return train(adapted, 2)


def peft_model(config: Config) -> nn.Module:
    """The model as peft wraps it, with the adapters that a run of the settings starts from."""
    settings = cast(LoraSettings, lora_settings(config.model))
    base = cast(nn.Module, AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32))
    layers = lora_layers(base, settings.targets)
    source = FreshLora(open_checkpoint(config.model.name).source, layers, settings, config.run.seed, "model.")
    model = cast(nn.Module, get_peft_model(cast(Any, base), lora_config(base, settings)))
    prefix = "base_model.model."
    fill(
        {
            "model": {
                n.removeprefix(prefix): p for n, p in model.named_parameters() if ".lora_" in n and "lora_m" not in n
            }
        },
        source,
    )
    return model


def losses_of_peft(config: Config, run: Run, steps: int) -> list[float]:
    """The losses of plain AdamW steps on the run's batches."""
    optim, data = config.optim, load_tokens(run.directory.tokens)
    model = peft_model(config)
    sequences = data.sequences("train", config.data.sequence_length)
    stream = BatchStream(sequences=sequences, batch_size=optim.batch_size, seed=config.run.seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    losses = []
    for step in range(steps):
        batch = stream.batch(step, 0, 1)
        logits = model(batch.inputs).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapter_losses_are_those_of_peft_on_one_process(adapted: Config, lora_run: Run) -> None:
    expected = losses_of_peft(adapted, lora_run, 3)
    assert [lora_run.losses[step] for step in (1, 2, 3)] == pytest.approx(expected, rel=1e-5)


def test_adapters_alone_are_trained_and_have_optimizer_state(lora_run: Run) -> None:
    before, after = (open_checkpoint(lora_run.directory.checkpoints / f"step_{step:08}").source for step in (3, 6))
    names = [name for name in after.tensors if name.startswith("model.")]
    changed = {name for name in names if not torch.equal(tensor(before, name), tensor(after, name))}
    assert changed == {name for name in names if ".lora_" in name} and len(changed) == 28
    states = {name for name in after.tensors if name.startswith("optimizer.state.")}
    assert states and all(".lora_" in name for name in states)


def tensor(source: Any, name: str) -> torch.Tensor:
    numbers = torch.empty(source.tensors[name].shape)
    parts: dict[str, Any] = {name: numbers}
    fill(parts, source)
    return numbers


def test_a_run_resumes_on_other_ranks_and_refuses_other_adapters(
    adapted: Config, lora_run: Run, train: TrainOn
) -> None:
    for fields, expected in (
        ({"lora_rank": 8}, "Expected model.lora_rank to stay 4 as in the run to be resumed, got 8."),
        ({"lora_alpha": None}, "Expected model.lora_alpha to stay 12.0 as in the run to be resumed, got None."),
        ({"dora": True}, "Expected model.dora to stay False as in the run to be resumed, got True."),
        ({"lora_rank": None, "lora_alpha": None}, "Expected model.lora_rank to stay 4 as in the run to be resumed"),
    ):
        with pytest.raises(ConfigError) as caught:
            prepare(place(with_model(adapted, lora_run.directory.root, **cast(Any, fields))))
        assert expected in str(caught.value)
    before = lora_run.losses
    resumed = train(replace(adapted, run=replace(adapted.run, from_step=3)), 1)
    assert resumed.losses == pytest.approx(before, rel=1e-5)


def test_a_run_resumes_with_the_default_alpha_passed(adapted: Config, train: TrainOn, tmp_path: Path) -> None:
    config = replace(adapted, optim=replace(adapted.optim, steps=2))
    for alpha, other in ((None, 8.0), (8.0, None)):
        directory = tmp_path / f"alpha-{alpha}"
        train(with_model(config, directory, lora_alpha=alpha), 1)
        assert prepare(place(with_model(adapted, directory, lora_alpha=other))).first_step == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--dora",), "Expected --lora-rank with --dora, got none. Pass --lora-rank 16, or leave --dora out."),
        (("--lora-alpha", "8"), "Expected --lora-rank with --lora-alpha, got none."),
        (("--lora-targets", "q_proj"), "Expected --lora-rank with --lora-targets, got none."),
        (("--lora-rank", "4", "--train", "*norm*"), "Expected --lora-rank without --train, since adapters alone"),
        (("--lora-rank", "4", "--float8", "row"), "Expected --lora-rank without --float8, got both, 4 and row."),
        (("--lora-rank", "0"), "Expected --lora-rank of at least 1, got 0."),
        (
            ("--lora-rank", "4", "--lora-targets", "qproj"),
            "Expected adapters in layers of torch.nn.Linear, got 'qproj'.",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    options: list[str], flags: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, *flags]) != 0
    assert expected in capsys.readouterr().err


def test_a_missing_peft_is_one_error_that_names_the_extra(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lamella._model.lora.has_peft", lambda: False)
    assert main([*options, "--lora-rank", "4"]) != 0
    assert "Expected peft to be installed for adapters (--lora-rank 4), got none." in capsys.readouterr().err


def test_merging_without_adapters_is_refused(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained.directory.root), "--merge"]) != 0
    assert "Expected a run with --lora-rank for --merge, got none" in capsys.readouterr().err


def test_peft_is_asked_for_by_an_export_of_adapters_alone(
    lora_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lamella._model.lora.has_peft", lambda: False)
    assert main(["export", str(lora_run.directory.root)]) != 0
    assert "Expected peft to be installed for adapters (--lora-rank 4), got none." in capsys.readouterr().err


@pytest.mark.parametrize("dora", [False, True])
def test_exports_are_peft_s(
    adapted: Config, lora_run: Run, train: TrainOn, tmp_path: Path, dora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lora_run
    if dora:
        config = with_model(adapted, tmp_path / "dora", dora=True, lora_targets=("q_proj", "model.layers.1.mlp.*"))
        run = train(config, 2)
        expected = losses_of_peft(config, run, 3)
        assert [run.losses[step] for step in (1, 2, 3)] == pytest.approx(expected, rel=1e-5)
    folder, adapters, whole = str(run.directory.root), tmp_path / "adapters", tmp_path / "whole"
    assert main(["export", folder, str(adapters)]) == 0
    card = (adapters / "README.md").read_text()
    figures = (
        "| rank | `4` |",
        f"{'DoRA' if dora else 'LoRA'} adapters for `{Path(adapted.model.name).name}`",
        "nats/token",
    )
    assert all(figure in card for figure in figures) and card.startswith("---\nbase_model: ")
    assert main(["export", folder, str(whole), "--merge"]) == 0
    base = AutoModelForCausalLM.from_pretrained(adapted.model.name, dtype=torch.float32)
    opened = PeftModel.from_pretrained(cast(Any, base), str(adapters))
    stored = load_file(adapters / "adapter_model.safetensors")
    assert stored.keys() == get_peft_model_state_dict(opened).keys()
    assert any("magnitude" in name for name in stored) is dora
    merged = cast(nn.Module, cast(Any, opened).merge_and_unload())
    exported = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    used = open_model(run.directory.root, None, CPU).model
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(exported.get_parameter(name), parameter, rtol=0, atol=1e-6)
        torch.testing.assert_close(used.get_parameter(name), parameter, rtol=0, atol=1e-6)


def other_run(config: Config, model_type: str, folder: Path, **fields: Any) -> Config:
    """Settings of two steps with adapters on one of the other models."""
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    values = {**sizes, "intermediate_size": 24, "num_key_value_heads": 2, **OTHER_MODELS[model_type]}
    adapted = adapted_run(config, AutoConfig.for_model(model_type, **values), folder)
    return with_model(replace(adapted, optim=replace(adapted.optim, steps=2)), folder / "run", **fields)


@pytest.mark.parametrize("model_type", OTHER_MODELS)
def test_adapters_are_in_called_linear_layers_beside_stacked_experts_and_in_mamba(
    model_type: str, config: Config, train: TrainOn, tmp_path: Path
) -> None:
    config = other_run(config, model_type, tmp_path / "published")
    run = train(config, 2)
    base = cast(Any, AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32))
    linear = {name for name, module in base.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    read_past = ("out_proj", "dt_proj") if "mamba" in model_type else ()
    source = open_checkpoint(run.directory.checkpoints / "step_00000002").source
    adapters = {name.removeprefix("model.") for name in source.tensors if name.endswith(".lora_A.default.weight")}
    assert {name.rpartition(".lora_A")[0] for name in adapters} == {n for n in linear if not n.endswith(read_past)}

    assert main(["export", str(run.directory.root), str(tmp_path / "adapters")]) == 0
    assert main(["export", str(run.directory.root), str(tmp_path / "whole"), "--merge"]) == 0
    whole = cast(Any, AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32))
    tokens = torch.arange(48).reshape(2, 24)
    of_base = base(tokens).logits
    opened = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    expected = whole(tokens).logits
    torch.testing.assert_close(cast(Any, opened)(tokens).logits, expected, rtol=0, atol=1e-5)
    assert (of_base - expected).abs().max() > 1e-3


def test_magnitudes_beside_stacked_experts_are_exported_merged_alone(
    config: Config, train: TrainOn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ("gate_proj", "self_attn.*")
    run = train(other_run(config, "qwen3_moe", tmp_path / "published", dora=True, lora_targets=targets), 1)
    assert main(["export", str(run.directory.root), str(tmp_path / "adapters")]) == 2
    assert "Expected LoRA in 'model.layers.0.mlp.gate_proj', whose weight peft adapts" in capsys.readouterr().err
    assert not (tmp_path / "adapters").exists()
    assert main(["export", str(run.directory.root), str(tmp_path / "whole"), "--merge"]) == 0


def test_a_layer_of_mamba_that_gets_no_adapter_is_refused(config: Config, tmp_path: Path) -> None:
    settings = other_run(config, "mamba", tmp_path / "published", lora_targets=("out_proj",))
    with pytest.raises(ConfigError, match="got 'out_proj'.* 'mamba' gets none in dt_proj and out_proj"):
        prepare(place(settings))


@pytest.mark.parametrize(
    ("model_type", "layer"),
    [("bamba", "out_proj"), ("granitemoehybrid", "out_proj"), ("zamba2", "out_proj"), ("jamba", "dt_proj")],
)
def test_a_layer_whose_weight_mamba_s_kernels_read_gets_no_adapter(model_type: str, layer: str) -> None:
    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM).from_config(AutoConfig.for_model(model_type))
    assert any(name.endswith(layer) for name, _ in model.named_modules())
    names = lora_layers(model, ["all-linear"])
    assert names and not any(name.endswith(layer) for name in names)
