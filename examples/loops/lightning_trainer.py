"""Lightning's Trainer with a module that shards itself by lamella.

    python examples/loops/lightning_trainer.py --folder /tmp/lightning --devices 2

`configure_model` is where Lightning's ModelParallelStrategy expects a module to call `fully_shard`.
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lamella_engine


class Regression(lightning.LightningModule):
    """Three blocks, each a unit, trained to predict the sine of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)))

    def configure_model(self) -> None:
        """Make each block a unit, and the rest another."""
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            lamella_engine.fully_shard(block, mesh=mesh)
        lamella_engine.fully_shard(self.blocks, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of (rows, 8) inputs."""
        (inputs,) = batch
        loss = nn.functional.mse_loss(self.blocks(inputs), inputs.sin())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train for ten epochs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()

    lamella_engine.install()  # Lightning asks torch's names whether a module is sharded.
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=options.devices,
        strategy=ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1),
        max_epochs=10,
        default_root_dir=options.folder,
        enable_progress_bar=False,
        logger=False,
    )
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Regression(), DataLoader(TensorDataset(inputs), batch_size=16))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss'].item():.4f}", flush=True)


if __name__ == "__main__":
    main()
