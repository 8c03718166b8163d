"""Lightning's `ModelParallelStrategy`, in Fabric and in the Trainer: the function that shards is the user's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor._random
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset

from lamella_integration.in_place import Device, run_in_both, units, unsharded_copy


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3)))


def shard(model: Any, mesh: DeviceMesh) -> Any:
    blocks = model.blocks if isinstance(model, Module) else model
    for block in blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh["data_parallel"])
    return torch.distributed.fsdp.fully_shard(blocks, mesh=mesh["data_parallel"]) and model


def rows() -> DataLoader[Any]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x), batch_size=2)


def hardware() -> dict[str, Any]:
    return {"accelerator": "cuda" if torch.cuda.is_available() else "cpu", "devices": 2}


# -- Fabric -----------------------------------------------------------------------------------------------------------


def with_fabric(folder: Path, *, is_distributed: bool) -> object:
    strategy = FabricStrategy(
        shard, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=is_distributed
    )
    fabric = lightning.Fabric(strategy=strategy, **hardware())
    fabric.launch()
    model, optimizer = set_up(fabric)
    loader = fabric.setup_dataloaders(rows())
    before = train(fabric, model, optimizer, loader)
    fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "epoch": 1})
    after = train(fabric, model, optimizer, loader)

    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, loader)
    checkpoint = {"model": model, "optimizer": optimizer, "epoch": 0}
    fabric.load(folder / "checkpoint", checkpoint)
    assert checkpoint["epoch"] == 1
    assert str(train(fabric, model, optimizer, loader)) == str(after)
    return [units(model.module), before, after, unsharded_copy(model.state_dict())]


def set_up(fabric: Any) -> tuple[Any, Any]:
    model = fabric.setup_module(layers())
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(fabric: Any, model: Any, optimizer: Any, loader: Any) -> list[object]:
    """One pass, two microbatches a step, of which the first is not reduced."""
    losses = []
    for i, (x,) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):
            loss = model(x).square().mean()
            fabric.backward(loss)
        losses.append(loss.detach())
        if i % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [unsharded_copy(losses)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
@pytest.mark.parametrize("is_distributed", [True, False], ids=["shards", "whole"])
def test_fabric_trains_saves_and_loads(is_distributed: bool, device: Device) -> None:
    run_in_both(partial(with_fabric, is_distributed=is_distributed), device=device)


# -- the Trainer ------------------------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    """Sharded where Lightning says so."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            assert self.device_mesh is not None
            self.blocks = layers().to(self.device)
            shard(self, self.device_mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.blocks(batch[0]).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def with_trainer(folder: Path, *, is_distributed: bool) -> object:
    first = fit(folder / "first", is_distributed, num_epochs=2)
    [checkpoint] = (folder / "first").glob("epoch=0*")
    second = fit(folder / "second", is_distributed, num_epochs=2, checkpoint=checkpoint)
    half = len(first.losses) // 2
    assert str(second.losses) == str(first.losses[half:])
    return [units(first), unsharded_copy(first.losses), unsharded_copy(first.state_dict())]


def fit(folder: Path, is_distributed: bool, *, num_epochs: int, checkpoint: Path | None = None) -> Module:
    model = Module()
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=is_distributed
    )
    trainer = lightning.Trainer(
        max_epochs=num_epochs,
        strategy=strategy,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, save_top_k=-1, every_n_epochs=1)],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **hardware(),
    )
    trainer.fit(model, rows(), ckpt_path=checkpoint)
    return model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
@pytest.mark.parametrize("is_distributed", [True, False], ids=["shards", "whole"])
def test_the_trainer_trains_saves_and_resumes(is_distributed: bool, device: Device) -> None:
    run_in_both(partial(with_trainer, is_distributed=is_distributed), device=device)
