"""Safetensors of sharded models, read by transformers; and transformers' safetensors, read by lamella."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers import quantizer_finegrained_fp8

from lamella_checkpoint import load, save
from lamella_convert import convert, save_safetensors
from lamella_engine import Rows, ShardingOptions, fully_shard
from lamella_testing import run_ranks

TOKENS = torch.arange(12)[None]


def _model(*, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=128,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


def _opened(path: Path) -> Any:
    opened: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, report = opened
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published")
    _model().save_pretrained(path)
    return path


@pytest.mark.parametrize("layout", ["even", "flat"])
@pytest.mark.parametrize("max_shard_nbytes", [1 << 30, 200_000])
def test_files_written_from_shards_give_the_same_logits(
    published: Path, tmp_path: Path, layout: str, max_shard_nbytes: int
) -> None:
    def write() -> None:
        model = _model()
        options: dict[str, Any] = {"options": ShardingOptions(keep_together=Rows(1))} if layout == "flat" else {}
        for layer in [*model.model.layers, model]:
            fully_shard(layer, **options)
        save_safetensors(tmp_path / "a", model=model, max_shard_nbytes=max_shard_nbytes, like=published)

    run_ranks(write, 3)
    assert torch.equal(_logits(_opened(tmp_path / "a")), _logits(_model()))


def test_rows_and_columns_of_tensor_parallel_ranks_give_the_same_logits(published: Path, tmp_path: Path) -> None:
    def write() -> None:
        model = _model()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            parallelize_module(layer, mesh["tp"], {**plan, "mlp.down_proj": RowwiseParallel()})
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        placed = model.model.layers[0].mlp.down_proj.weight
        assert isinstance(placed, DTensor) and len(placed.placements) == 2
        save_safetensors(tmp_path / "a", model=model, like=published)

    run_ranks(write, 4)
    assert torch.equal(_logits(_opened(tmp_path / "a")), _logits(_model()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_published_model_loaded_into_training_and_published_again_is_unchanged(tmp_path: Path, tied: bool) -> None:
    _model(tied=tied).save_pretrained(tmp_path / "a", max_shard_size="500KB")
    convert(tmp_path / "a", tmp_path / "b", to="dcp")

    def train() -> None:
        model = _model(tied=tied, seed=1)
        fully_shard(model)
        load(tmp_path / "b", model=model)
        save(tmp_path / "c", model=model)

    run_ranks(train, 2)
    report = convert(tmp_path / "c", tmp_path / "d", to="hf", like=tmp_path / "a", max_shard_nbytes=500_000)
    assert torch.equal(_logits(_opened(tmp_path / "d")), _logits(_model(tied=tied)))
    names = {file.name for file in (tmp_path / "a").iterdir() if file.suffix != ".safetensors"}
    assert names == {file.name for file in (tmp_path / "d").iterdir() if file.suffix != ".safetensors"}
    assert "config.json" in report.side_files


def test_a_published_model_converted_to_torch_save_loads_into_its_module(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "a.pt", to="torch")
    model = _model(seed=1)
    loaded = model.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True), strict=False)
    assert loaded.missing_keys == ["lm_head.weight"]  # Tied: published under a single name.
    assert torch.equal(_logits(model), _logits(_model()))


def test_transformers_reads_the_same_float8_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The quantizer requires accelerate, a package that places weights on accelerators.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *_: True)
    plain = _model(dtype=torch.bfloat16)
    with torch.no_grad():  # Rows differ in size, and float8 blocks with rows: a single scale would not suffice.
        for layer in plain.model.layers:
            layer.mlp.up_proj.weight *= torch.arange(1, 257)
    plain.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="hf", float8=True)
    convert(tmp_path / "b", tmp_path / "c", to="hf", float8=False)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = _opened(tmp_path / "c")
    num_changed = 0
    for before, (name, their), our in zip(
        plain.parameters(), theirs.named_parameters(), ours.parameters(), strict=True
    ):
        assert torch.equal(their, our), name
        num_changed += not torch.equal(our, before)
    assert num_changed == 2 * 7  # The linear layers of two blocks.
