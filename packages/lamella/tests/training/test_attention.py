"""`--attention`: within documents as with masks, by other implementations, and refused where it cannot be."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._data.batches import TokenBatch
from lamella._inference.trained_model import open_model
from lamella._model.activations import recompute
from lamella._model.attention import check_attention, inference_attention, with_default_attention
from lamella._model.spec import load_spec
from lamella._processes.placement import place
from lamella._record.metrics import SampleRecord, read
from lamella._settings.attention import check_documents
from lamella._settings.config import Values, resolve
from lamella._settings.sections import Attention, ModelConfig, Packing, ParallelConfig
from lamella._training.preparation import prepare
from lamella.cli import main
from lamella_testing.varlen_attention import varlen_attention
from lamella_transformers import build_model, document_arguments, set_attention

ON_CPU = ParallelConfig(device="cpu", precision="bf16")
ON_A_GPU = ParallelConfig(device="cuda", precision="bf16")


def pairs(num_pairs: int) -> Iterator[dict[str, str]]:
    """Prompts and completions of different lengths."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdef", k=3)) for _ in range(20)]
    for _ in range(num_pairs):
        prompt, completion = (" ".join(draw.choices(words, k=draw.randint(1, 5))) for _ in range(2))
        yield {"prompt": f"{prompt} ", "completion": completion}


@pytest.fixture
def packed_config(config: Config, tmp_path: Path) -> Config:
    """Sequences of several documents, and two microbatches in a step of two ranks."""
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs(400)))
    data = replace(config.data, paths=(str(file),), packing="documents", sequence_length=48)
    return replace(config, data=data, optim=replace(config.optim, accumulation=2))


def with_attention(config: Config, attention: Attention, name: str, steps: int = 6) -> Config:
    root = Path(str(config.run.directory)).parent / name
    return replace(
        config,
        model=replace(config.model, attention=attention),
        optim=replace(config.optim, steps=steps, schedule="constant"),
        run=replace(config.run, directory=str(root), sample=("abc ",), sample_interval=3, sample_tokens=4),
    )


def opened_attention(root: Path) -> str:
    """The implementation of attention in a run's model, opened to generate."""
    model: Any = open_model(root, None, torch.device("cpu")).model
    return str(model.config._attn_implementation)


@pytest.fixture
def kernel_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference in the place of torch's kernel, and no refusal of the CPU."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attention)
    monkeypatch.setattr("lamella._model.checks.check_attention", lambda *_: None)


@pytest.mark.usefixtures("kernel_on_the_cpu")
def test_a_run_with_attention_within_documents_is_one_with_masks(packed_config: Config, train: TrainOn) -> None:
    expected = train(with_attention(packed_config, "sdpa", "masks"), 2)
    first = train(with_attention(packed_config, "documents", "documents", steps=3), 2)
    assert len(first.losses) == 3
    run = train(with_attention(packed_config, "documents", "documents"), 2)
    assert opened_attention(run.directory.root) == "sdpa"
    resumed = train(with_attention(packed_config, "eager", "documents", steps=8), 2)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.validations == pytest.approx(expected.validations, rel=1e-5)
    assert len(resumed.losses) == 8
    samples = [
        [record.text for record in read(finished.directory.metrics) if isinstance(record, SampleRecord)]
        for finished in (expected, run)
    ]
    assert samples[0] == samples[1][:2] and len(samples[0]) == 2


def test_a_run_in_eager_attention_is_one_in_transformers_choice(config: Config, train: TrainOn) -> None:
    expected = train(with_attention(config, "auto", "auto"), 1)
    run = train(with_attention(config, "eager", "eager"), 1)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert opened_attention(run.directory.root) == "eager"


def test_microbatches_have_the_starts_of_their_own_documents() -> None:
    positions = torch.tensor([[0, 1, 2], [0, 0, 1], [0, 1, 0], [0, 1, 2]])
    batch = TokenBatch(torch.zeros(4, 4, dtype=torch.int64), positions)
    assert all(part.starts is None for part in batch.microbatches(2))
    starts = [part.arguments().starts for part in batch.microbatches(2, has_starts=True)]
    assert [sorted({*part.tolist()}) for part in starts if part is not None] == [[0, 3, 4, 6], [0, 2, 3, 6]]


@pytest.mark.parametrize(
    ("attention", "section", "expected"),
    [
        ("documents", {"data": {"packing": "stream"}}, "with --packing documents, got --packing stream"),
        ("documents", {"data": {"packing": "none"}}, "with --packing documents, got --packing none"),
        ("documents", {"parallel": {"tensor_parallel": 2}}, "--attention documents without --tensor-parallel"),
        ("documents", {"parallel": {"context_parallel": 2}}, "--attention documents without --context-parallel"),
        ("eager", {"parallel": {"context_parallel": 2}}, "--attention eager without --context-parallel"),
        ("documents", {"parallel": {"capture": True}}, "--attention documents without --capture"),
        ("documents", {"run": {"deterministic": True}}, "--deterministic without --attention documents"),
        ("flex_attention", {"run": {"deterministic": True}}, "--deterministic without --attention flex_attention"),
        ("fast", {}, "to be one of 'auto', 'documents'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(attention: str, section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve({"model": {"name": "llama-small", "attention": attention}}, section)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("attention", "model", "parallel", "expected"),
    [
        (
            "documents",
            "llama-small",
            ON_CPU,
            "Expected --device cuda for --att",
        ),
        ("flash_attention_2", "llama-small", ON_CPU, "Expected --device cuda"),
        ("flex_attention", "llama-small", ON_CPU, "Expected --device cuda"),
        (
            "documents",
            "llama-small",
            replace(ON_A_GPU, precision="fp32"),
            "documents, whose kernels take no fp32. Pa",
        ),
        ("flash_attention_2", "llama-small", ON_A_GPU, "Expected flash-attn to be installed for --attention flash_att"),
        ("flash_attention_3", "llama-small", ON_A_GPU, "Expected flash-attn-3 to be installed for --attention flash_a"),
        ("documents", "qwen3.5-tiny", ON_A_GPU, "got 'linear_attention', in a model of type 'qwen3_5_text'."),
        ("flex_attention", "qwen3.5-tiny", ON_A_GPU, "'flex_attention' in a model of type 'qwen3_5_text', got: "),
    ],
)
def test_attention_that_a_machine_or_a_model_has_not_is_refused(
    attention: Attention, model: str, parallel: ParallelConfig, expected: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_attention(ModelConfig(name=model, attention=attention), load_spec(model), parallel)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


def test_flash_attention_in_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    model = ModelConfig(name="llama-small", attention="flash_attention_2")
    with pytest.raises(ConfigError, match="Expected --precision bf16 for --attention flash_attention_2, whose kernels"):
        check_attention(model, load_spec("llama-small"), replace(ON_A_GPU, precision="fp32"))


def test_attention_within_documents_passes_on_a_gpu_in_bf16() -> None:
    check_attention(ModelConfig(name="llama-small", attention="documents"), load_spec("llama-small"), ON_A_GPU)
    check_documents("documents", ModelConfig(name="llama-small", attention="documents"))


def test_the_command_refuses_in_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--attention", "documents"]) == 2
    refused = capsys.readouterr().err
    assert "Expected --device cuda for --attention documents, got 'cpu'. Pass --attention auto." in refused


@pytest.mark.usefixtures("kernel_on_the_cpu")
def test_text_that_is_packed_as_a_stream_is_refused_before_the_run(config: Config) -> None:
    with pytest.raises(ConfigError, match="Expected --attention documents with --packing documents, got --packing st"):
        prepare(place(with_attention(config, "documents", "refused")))


@pytest.mark.parametrize(
    ("attention", "device", "expected"),
    [
        ("documents", "cuda", "auto"),
        ("flash_attention_2", "cpu", "auto"),
        ("flash_attention_2", "cuda", "auto"),  # not installed
        ("flex_attention", "cuda", "flex_attention"),
        ("eager", "cpu", "eager"),
    ],
)
def test_inference_uses_the_attention_of_the_run_where_available(
    attention: Attention, device: str, expected: str
) -> None:
    assert inference_attention(attention, device) == expected


@pytest.mark.parametrize(
    ("model", "packing", "settings", "expected"),
    [
        pytest.param("llama-small", "documents", {}, "documents", id="packed documents"),
        pytest.param("llama-small", "stream", {}, "auto", id="a stream"),
        pytest.param("llama-small", "none", {}, "auto", id="a document a row"),
        pytest.param("qwen3.5-tiny", "documents", {}, "auto", id="a model that does not take it"),
        pytest.param("llama-small", "documents", {"model": {"attention": "sdpa"}}, "sdpa", id="another choice"),
        pytest.param("llama-small", "documents", {"parallel": {"precision": "fp32"}}, "auto", id="fp32"),
        pytest.param("llama-small", "documents", {"parallel": {"capture": True}}, "auto", id="captured steps"),
        pytest.param("llama-small", "documents", {"parallel": {"compile": True}}, "documents", id="compiled layers"),
        pytest.param("llama-small", "documents", {"run": {"deterministic": True}}, "auto", id="deterministic sums"),
        pytest.param("llama-small", "documents", {"parallel": {"device": "cpu"}}, "auto", id="no GPU"),
    ],
)
def test_layers_on_gpus_attend_within_packed_documents_by_default(
    model: str, packing: Packing, settings: Values, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    on_a_gpu: Values = {"parallel": {"device": "cuda", "precision": "bf16"}}
    config = resolve({"model": {"name": model}}, on_a_gpu, settings)
    chosen = with_default_attention(config, model, packing)
    assert chosen.model.attention == expected
    assert chosen == replace(config, model=chosen.model)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert with_default_attention(config, model, packing) == config


def test_selective_recomputation_saves_attention_within_documents() -> None:
    spec = load_spec("llama-small")
    set_attention(spec, "documents")
    model: Any = build_model(spec, torch.device("meta"), 0)
    recompute(model.model.layers, "selective")
    inputs = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    calls = CountedCalls()
    with calls:
        model(**document_arguments(model, inputs, None), use_cache=False).logits.sum().backward()
    assert calls.names.count("torch_attn._varlen_attn.default") == len(model.model.layers)
    assert calls.names.count("torch_attn._varlen_attn_backward.default") == len(model.model.layers)


class CountedCalls(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))
