"""peft's adapters on a frozen base that is sharded: trained, saved, and loaded into another base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from client_models import tiny_llama, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lamella_integration.in_place import Device, run_in_both, units, unsharded_copy


def adapted() -> Any:
    torch.manual_seed(1)
    return get_peft_model(tiny_llama(), LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"]))


def trained_and_saved(folder: Path) -> object:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    model = adapted().to(device)
    for layer in model.base_model.model.model.layers:
        torch.distributed.fsdp.fully_shard(layer)
    torch.distributed.fsdp.fully_shard(model)
    names = units(model)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    before: Any = unsharded_copy(frozen)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    ids = tokens().to(device).chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    after: Any = unsharded_copy(frozen)
    assert all(torch.equal(before[name], after[name]) for name in before)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapters = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=adapters)
    dist.barrier()
    loaded = PeftModel.from_pretrained(tiny_llama().to(device), folder)
    again = loaded(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(again, model(input_ids=ids, labels=ids).loss)  # unsharded: sums may be rounded otherwise
    return [
        names,
        unsharded_copy(losses),
        unsharded_copy(again),
        adapters,
        sorted(path.name for path in folder.iterdir()),
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
def test_adapters_train_and_are_saved(device: Device) -> None:
    run_in_both(trained_and_saved, device=device)
