"""Hugging Face Accelerate with its plugin for FSDP2: prepared, trained, clipped, saved and loaded by Accelerate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from client_models import let_accelerate_shard_on_cpus, tiny_llama, tokens
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lamella_integration.in_place import Device, run_in_both, units, unsharded_copy


def accelerator_for(**options: Any) -> Accelerator:
    let_accelerate_shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **{"reshard_after_forward": True, **options},
    )
    return Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any, Any]:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    loader = DataLoader(TensorDataset(tokens()), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    return model, optimizer, loader, scheduler


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[object]:
    """Losses over all ranks and the norms of clipped gradients, of one pass over the rows, two microbatches a step."""
    losses, norms = [], []
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()))
    return [unsharded_copy(losses), unsharded_copy(norms)]


def trained_and_saved(folder: Path, *, options: dict[str, Any]) -> object:
    """A run that is saved and goes on; another that loads what was saved, and goes on as the first did."""
    accelerator = accelerator_for(**options)
    first = prepared(accelerator)
    before = train(accelerator, *first)
    accelerator.save_state(str(folder / "state"))
    after = train(accelerator, *first)
    full = accelerator.get_state_dict(first[0])
    names = units(first[0])
    assert accelerator.unwrap_model(first[0]) is first[0]
    assert all(isinstance(parameter, DTensor) for parameter in first[0].parameters())

    accelerator.free_memory()
    second = prepared(accelerator)
    train(accelerator, *second)
    accelerator.load_state(str(folder / "state"))
    again = train(accelerator, *second)
    assert str(again) == str(after)
    assert str(before) != str(after)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [names, before, after, unsharded_copy(full), files]


OPTIONS: dict[str, dict[str, Any]] = {
    "shards": {"state_dict_type": "SHARDED_STATE_DICT"},
    "whole": {"state_dict_type": "FULL_STATE_DICT"},
    "kept after forward": {"state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": False},
    "recomputed": {"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": True},
    "loaded by rank 0": {"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": True},
}
OFFLOADED = {"state_dict_type": "FULL_STATE_DICT", "cpu_offload": True}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_accelerate_trains_saves_and_loads(options: dict[str, Any], device: Device) -> None:
    run_in_both(partial(trained_and_saved, options=options), device=device)


@pytest.mark.gpu2
def test_accelerate_lets_shards_rest_on_the_cpu() -> None:
    # As Accelerate makes it for this: torch's clipping reduces the norms of DTensors on the CPU there.
    run_in_both(partial(trained_and_saved, options=OFFLOADED), device="cuda", backend="cpu:gloo,cuda:nccl")
