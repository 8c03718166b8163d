"""torchtitan's Llama, made parallel by torchtitan: on meta, recomputed, compiled block by block, replicated."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor._random
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

from lamella_integration.in_place import run_in_both, units, unsharded_copy

WITHOUT_OTHERS = {"cp": 1, "tp": 1, "pp": 1, "ep": 1}


def configuration() -> Any:
    """Two layers of torchtitan's own small model, with attention for a CPU."""
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def trained(
    folder: Path,
    *,
    num_replicas: int = 1,
    reshard: Any = "default",
    is_compiled: bool = False,
    recomputes: bool = False,
) -> object:
    parallel_dims.device_type = "cpu"  # else torchtitan takes a machine without GPUs for a machine with GPUs
    num_ranks = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=num_replicas,
        dp_shard=num_ranks // num_replicas,
        world_size=num_ranks,
        spmd_backend="partial_dtensor",
        **WITHOUT_OTHERS,
    )
    with torch.device("meta"):
        model: Any = configuration().build()
    parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward=reshard),
        compile_config=CompileConfig(enable=is_compiled, backend="aot_eager"),
        ac_config=FullAC.Config() if recomputes else None,  # type: ignore[arg-type]
        dump_folder=str(folder),
    )
    for unit in units(model):  # torchtitan divides losses, not gradients: gloo has no premultiplied sums
        model.get_submodule(unit).set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(2048, (2, 9), generator=draw)
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [units(model), unsharded_copy(losses), unsharded_copy(norms), unsharded_copy(model.state_dict())]


@pytest.mark.parametrize("reshard", ["default", "never"])
def test_torchtitans_llama_trains_as_under_fsdp2(reshard: str) -> None:
    run_in_both(partial(trained, reshard=reshard))


def test_torchtitans_llama_trains_with_recomputed_activations() -> None:
    run_in_both(partial(trained, recomputes=True))


def test_torchtitans_llama_trains_in_replicas() -> None:
    run_in_both(partial(trained, num_replicas=2), num_ranks=4)


@pytest.mark.parametrize("recomputes", [False, True])
def test_torchtitans_llama_trains_with_compiled_blocks(recomputes: bool) -> None:
    """torchtitan compiles each block with `fullgraph=True` before sharding."""
    run_in_both(partial(trained, is_compiled=True, recomputes=recomputes), timeout_s=300.0)
