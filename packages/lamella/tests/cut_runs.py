"""Runs of tiny models on conversations, to train on layers or sequences cut over ranks, and their comparison."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trained_runs import Run

from lamella import Config
from lamella._record.metrics import StepRecord, read
from lamella.cli import main

SIZES: Mapping[str, object] = {
    "vocab_size": 301,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def changed(config: Config, name: str, model_type: str = "qwen3", packing: Any = "none", **parallel: Any) -> Config:
    """Conversations of unequal lengths, a row each: ranks and microbatches have unequal numbers of targets."""
    root = Path(str(config.run.directory)).parent
    model, data, held_out = root / f"{model_type}.json", root / "rows.jsonl", root / "held_out.jsonl"
    model.write_text(json.dumps({"model_type": model_type, **SIZES}), encoding="utf-8")
    rows = [{"prompt": f"{number}: ", "completion": f"{number}, " * (number % 7 + 1)} for number in range(200)]
    data.write_text("\n".join(map(json.dumps, rows[:180])), encoding="utf-8")
    held_out.write_text("\n".join(map(json.dumps, rows[180:])), encoding="utf-8")
    # Rows of rare tokens have gradients near 1e-7, whose rounding a smaller `eps` would make steps of.
    optim = replace(config.optim, accumulation=2, eps=1e-5, schedule="constant")
    return replace(
        config,
        model=replace(config.model, name=str(model)),
        data=replace(config.data, paths=(str(data),), packing=packing, validation_paths=(str(held_out),)),
        optim=optim,
        parallel=replace(config.parallel, **parallel),
        run=replace(config.run, directory=str(root / name), checkpoint_interval=100, log_interval=1),
    )


def assert_equal(run: Run, plain: Run, folder: Path) -> None:
    assert plain.losses[6] < plain.losses[1] - 0.05
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.validations == pytest.approx(plain.validations, rel=1e-5)
    assert norms(run) == pytest.approx(norms(plain), rel=1e-5)
    expected, exported = (_exported(run, folder / name) for name, run in (("plain", plain), ("cut", run)))
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def norms(run: Run) -> list[float]:
    return [record.grad_norm for record in read(run.directory.metrics) if isinstance(record, StepRecord)]


def _exported(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    assert main(["export", str(run.directory.root), str(folder)]) == 0
    return load_file(folder / "model.safetensors")
