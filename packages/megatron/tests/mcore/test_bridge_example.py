"""examples/megatron/train_with_bridge.py on CPU ranks, with tests' models in the place of Megatron-Bridge's."""

from __future__ import annotations

import contextlib
import importlib
import io
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_lm import launched
from qwen_models import make_qwen
from resuming import World

from lamella_testing import run_ranks
from lamella_testing.megatron import LENGTH, VOCAB_SIZE

EXAMPLE = Path(__file__).parents[4] / "examples" / "megatron" / "train_with_bridge.py"


class _Provider(SimpleNamespace):
    """Bridge's provider: the program sets fields, and asks for a model."""

    def finalize(self) -> None:
        assert not self.gradient_accumulation_fusion
        # Experts refuse tensor-parallel training without sequence parallelism. `make_qwen` would hide a missing field.
        assert self.sequence_parallel == (self.tensor_model_parallel_size > 1)

    def initialize_model_parallel(self, seed: int) -> None:
        self.seed = seed
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )

    def provide_distributed_model(self, *, wrap_with_ddp: bool, bf16: bool) -> list[Any]:
        assert not wrap_with_ddp and not bf16
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()  # `make_qwen` makes groups.
        tp, ep = self.tensor_model_parallel_size, self.expert_model_parallel_size
        world = World(dist.get_world_size(), tp=tp, ep=ep, etp=self.expert_tensor_parallel_size)
        return [make_qwen(world, self.published, self.seed if self.load_weights else self.seed + 1)]


class _AutoBridge:
    """Bridge: weights drawn by a seed stand for the folder's weights."""

    def __init__(self, published: Any) -> None:
        self.hf_pretrained = SimpleNamespace(config=published)
        self.exports: list[tuple[str, str]] = []

    def to_megatron_provider(self, load_weights: bool = True) -> _Provider:
        return _Provider(published=self.hf_pretrained.config, load_weights=load_weights)

    def save_megatron_model(self, model: list[Any], path: str) -> None:
        """Write `torch_dist` by megatron-core, as Bridge does, with a file of the model's sizes."""
        checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
        groups = importlib.import_module("megatron.core.parallel_state")
        metadata = {"dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True)}
        folder = Path(path) / "iter_0000000"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"checkpoint_version": 3.0, "iteration": 0, "model": model[0].sharded_state_dict(metadata=metadata)}
        checkpointing.save(state, str(folder))
        (folder / "run_config.yaml").write_text("model:\n  tensor_model_parallel_size: 1\n", encoding="utf-8")

    def export_ckpt(self, path: str, folder: str) -> None:
        self.exports.append((path, folder))


def _run(published: Any, arguments: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The output of the program on this rank, and what the program let Bridge publish."""
    bridge, output = _AutoBridge(published), io.StringIO()
    package = ModuleType("megatron.bridge")
    package.AutoBridge = SimpleNamespace(from_hf_pretrained=lambda _: bridge)  # type: ignore[attr-defined]
    with (
        patch.dict(sys.modules, {"megatron.bridge": package}),
        patch.multiple(dist, init_process_group=lambda: None, destroy_process_group=lambda *_: None),
        patch.object(torch.cuda, "set_device"),
        launched("train_with_bridge.py", *arguments, "--length", str(LENGTH)),
        contextlib.redirect_stdout(output),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return output.getvalue(), bridge.exports


def _published() -> Any:
    """transformers' config of a mixture of experts."""
    from lamella_testing.qwen import make_config  # imports transformers, which interpreters of GPUs may lack

    return make_config("moe", vocab_size=VOCAB_SIZE, head_dim=16)


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about their own code
def test_the_program_goes_on_from_its_newest_checkpoint_on_other_parallel_sizes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["folder", str(run), "--steps", "4", "--save-interval", "2"]
    (run / "imported" / "iter_0000000").mkdir(parents=True)  # The leftover of a killed import,
    (straight, _), *_ = run_ranks(_run, 2, _published(), [*arguments, "--expert-parallel", "2"])
    (run / "iter_0000004").rename(run / "iter_0000004.saving-00000000")  # of a killed save,
    shutil.copytree(run / "iter_0000002", run / "iter_0000003")
    (run / "iter_0000003" / "run_config.yaml").unlink()  # and of a save killed before the last file.
    (resumed, _), *_ = run_ranks(_run, 2, _published(), [*arguments, "--tensor-parallel", "2"])
    assert [line.split()[1] for line in straight.splitlines()] == ["1", "2", "3", "4"]
    assert _losses(resumed) == pytest.approx(_losses(straight)[2:], abs=1e-5)
    _, exports = run_ranks(_run, 1, _published(), ["folder", str(run), "--publish", "trained"])[0]
    assert exports == [(str(run / "iter_0000004"), "trained")]


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "3"], "by the 2 data-parallel ranks and --length by the 1 tensor-parallel ranks, got 3 and 16"),
        (["--publish", "trained"], "Expected a checkpoint to publish, got none in "),
    ],
)
def test_the_bridge_example_refuses_indivisible_rows_and_missing_checkpoints(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    for error in run_ranks(_error, 2, _published(), ["folder", str(tmp_path), *arguments]):
        assert message in error


@pytest.mark.filterwarnings("ignore::Warning")
def test_the_program_refuses_a_model_with_vision(tmp_path: Path) -> None:
    published = SimpleNamespace(vision_config={})
    (error,) = run_ranks(_error, 1, published, ["folder", str(tmp_path)])
    assert "Expected a text model, got one with vision: folder" in error


def _error(published: Any, arguments: list[str]) -> str:
    """The line with which the program ends."""
    errors = io.StringIO()
    with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(errors):
        _run(published, arguments)
    return errors.getvalue() + str(end.value)


def _losses(output: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in output.splitlines()]
