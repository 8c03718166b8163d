"""`--deterministic`: runs of one seed and a resumed run are equal bit for bit; what cannot be is refused by name."""

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from lamella import Config, ConfigError
from lamella._model.tuned_functions import check_tuned_functions
from lamella._processes.determinism import deterministic
from lamella._processes.placement import Rank, place
from lamella._record.metrics import StepRecord, ValidationRecord, read
from lamella._settings.config import resolve
from lamella._settings.sections import RunConfig
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella.cli import main
from lamella_testing import run_ranks

ON_GPUS = [pytest.param(1, marks=pytest.mark.gpu1), pytest.param(2, marks=pytest.mark.gpu2)]
RUN = RunConfig(deterministic=True)


def numbers(root: Path) -> list[tuple[float, ...]]:
    """Every loss, gradient norm and validation of a run, with all bits."""
    return [
        (record.loss, record.grad_norm) if isinstance(record, StepRecord) else (record.nats,)
        for record in read(root / "metrics.jsonl")
        if isinstance(record, StepRecord | ValidationRecord)
    ]


def trained(config: Config, name: str, steps: int = 6) -> list[tuple[float, ...]]:
    """The numbers of a deterministic run on two CPU ranks, in a folder of its own."""
    root = Path(str(config.run.directory)).parent / name
    run = replace(config.run, directory=str(root), deterministic=True)
    # At a constant rate, which a cosine over more steps would change.
    config = place(replace(config, run=run, optim=replace(config.optim, steps=steps, schedule="constant")))
    directory = prepare(config).directory

    def on_rank() -> None:
        rank = Rank(rank=dist.get_rank(), num_ranks=2, device=torch.device("cpu"))
        with deterministic(run):
            Trainer(config, directory, rank).train()

    run_ranks(on_rank, 2)
    return numbers(root)


def test_two_runs_and_a_resumed_run_are_bit_identical(config: Config, capfd: pytest.CaptureFixture[str]) -> None:
    first = trained(config, "first")
    assert len(first) == 9 and capfd.readouterr().out.count("deterministic: a run of the same settings") == 1
    assert trained(config, "second") == first
    trained(config, "resumed", steps=3)
    assert trained(config, "resumed") == first


@pytest.mark.parametrize("num_gpus", ON_GPUS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_runs_and_a_resumed_run_are_bit_identical_on_gpus(
    options: list[str], tmp_path: Path, num_gpus: int, precision: str
) -> None:
    wide: Sequence[str] = ["--sequence-length", "256", "--batch-size", "16", "--checkpoint-interval", "3"]
    command = [*options, *wide, "--device", "cuda", "--ranks", str(num_gpus), "--precision", precision]
    command += ["--deterministic"]
    for name in ("first", "second"):
        assert main([*command, "--run-dir", str(tmp_path / name)]) == 0
    assert numbers(tmp_path / "second") == numbers(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_00000006")
    assert main([*command, "--run-dir", str(tmp_path / "resumed")]) == 0
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "first")


def switches() -> tuple[bool, ...]:
    """Deterministic algorithms, cuDNN's determinism, cuDNN's attention, and the filling of memory."""
    memory: Any = importlib.import_module("torch.utils.deterministic")
    cuda, cudnn = cast(Any, torch.backends.cuda), torch.backends.cudnn
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return is_deterministic, cudnn.deterministic, cuda.cudnn_sdp_enabled(), memory.fill_uninitialized_memory


def test_deterministic_restores_the_settings_of_the_process_after_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    before = switches()
    assert before == (False, False, True, True)
    with deterministic(RUN):
        assert switches() == (True, True, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert switches() == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ and os.environ["NCCL_NVLS_ENABLE"] == "1"
    with deterministic(RunConfig()):
        assert switches() == before


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    refusal = "avg_pool3d_backward_cuda does not have a deterministic implementation, but you set"
    with pytest.raises(ConfigError, match="got: avg_pool3d_backward_cuda does not have"), deterministic(RUN):
        raise RuntimeError(refusal)
    with pytest.raises(RuntimeError, match="another"), deterministic(RUN):
        raise RuntimeError("another")


def test_contradictions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for group, setting, flag in (
        ("model", {"kernels": "liger"}, "--kernels liger"),
        ("parallel", {"compile": True}, "--compile"),
    ):
        with pytest.raises(ConfigError, match=f"Expected --deterministic without {flag}, .*, got both"):
            resolve({"model": {"name": "llama-small"}, "run": {"deterministic": True}}, {group: setting})
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with (
        pytest.raises(ConfigError, match="Expected CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8"),
        deterministic(RUN),
    ):
        pass


def test_functions_that_each_process_tunes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own file, imported where flash-linear-attention is installed, and where it is not."""
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("def chunk_gated_delta_rule(query, key, value, g, beta): ...\n")
    original = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    config = AutoConfig.for_model("qwen3_5_text", hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    spec = importlib.util.spec_from_file_location(f"{original.__name__}_again", original.__file__)
    assert spec is not None and spec.loader is not None
    again: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    with torch.device("meta"):
        layers = nn.ModuleList([nn.Linear(2, 2), again.Qwen3_5GatedDeltaNet(config, layer_idx=0)])
        check_tuned_functions(RUN, nn.ModuleList([original.Qwen3_5GatedDeltaNet(config, layer_idx=0)]))
    check_tuned_functions(RunConfig(), layers)
    refusal = "got functions of flash-linear-attention in Qwen3_5GatedDeltaNet, whose kernels each process"
    with pytest.raises(ConfigError, match=refusal):
        check_tuned_functions(RUN, layers)

    function = again.torch_chunk_gated_delta_rule

    class Wrapper(nn.Module):
        """Of the library `kernels`, for a function."""

        def forward(self, *args: Any) -> Any:
            return function(*args)

    again.torch_chunk_gated_delta_rule = Wrapper()
    with pytest.raises(ConfigError, match=refusal):
        check_tuned_functions(RUN, layers)
