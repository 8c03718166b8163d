"""The programs of examples/megatron on CPU ranks: all but `pretrain` itself, which asks for GPUs."""

from __future__ import annotations

import importlib
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_lm
import pytest
from megatron_lm import SHARDED

from lamella_testing import run_ranks
from lamella_testing.megatron import _hybrid_spec

EXAMPLES = Path(__file__).parents[4] / "examples" / "megatron"
MAMBA = "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-num-heads 8"
HYBRID = f"--hybrid-layer-pattern M*- {MAMBA}"
WITH_EXPERTS = (
    f"--hybrid-layer-pattern M*EME {MAMBA} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-router-load-balancing-type none"
)


@pytest.fixture(scope="module", autouse=True)
def programs(on_cpu: None) -> Iterator[None]:
    with megatron_lm.programs_on_cpu():
        # A shuffle of all 100000 mock documents, in sequences of 8 tokens, takes each rank a second.
        mock = importlib.import_module("megatron.core.datasets.gpt_dataset").MockGPTLowLevelDataset
        with patch.object(mock, "size", 1000):
            yield


def _run(script: str, arguments: list[str]) -> tuple[str, list[float], float]:
    """The wrapper's class, the losses of three steps, and the loss of an evaluation."""
    training = importlib.import_module("megatron.training.training")
    results: list[Any] = []

    def pretrain(container: Any, build_datasets: Any, kind: Any, forward_step: Any) -> None:
        importlib.import_module("megatron.training.initialize").initialize_megatron(allow_no_cuda=True)
        if hasattr(container.model, "hybrid_layer_pattern"):
            container.model.hybrid_stack_spec = _hybrid_spec()
        groups = training.ProcessGroupCollection.use_mpu_process_groups()
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            kind, cfg_container=container, pg_collection=groups
        )
        args = importlib.import_module("megatron.training").get_args()
        train, valid, _ = training.build_train_valid_test_data_iterators(build_datasets)
        results.append(type(model[0]).__name__)
        steps = (args, model, optimizer, scheduler)
        results.append([loss for loss, _ in megatron_lm.train(*steps, num_steps=3, forward=forward_step, data=train)])
        config = importlib.import_module("megatron.core.utils").get_model_config(model[0])
        losses, *_ = training.evaluate(forward_step, valid, model, None, config)
        results.append(float(losses["lm loss"]))

    package = importlib.import_module("megatron.training")
    with (
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        patch.object(package, "pretrain", pretrain),
        megatron_lm.launched(script, *megatron_lm.COMMON, *arguments),
    ):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    wrapper, losses, evaluated = results
    return wrapper, losses, evaluated


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize(
    ("script", "arguments"),
    [("pretrain_gpt.py", "--num-layers 2"), ("pretrain_hybrid.py", HYBRID), ("pretrain_hybrid.py", WITH_EXPERTS)],
)
def test_a_program_trains_and_evaluates_as_over_ddp(script: str, arguments: str) -> None:
    line = shlex.split(f"{arguments} --num-workers 0 --eval-iters 1 --eval-interval 5")
    sharded, replicated = run_ranks(_run, 2, script, [*SHARDED, *line]), run_ranks(_run, 2, script, line)
    for (wrapper, losses, evaluated), (_, *expected) in zip(sharded, replicated, strict=True):
        assert wrapper == "WrapperInPlace"
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(expected[0], rel=1e-5) and evaluated == pytest.approx(expected[1], rel=1e-5)
