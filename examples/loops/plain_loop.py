"""A training loop in plain torch: sharded units, clipping, checkpoints in the background, and a resume.

    torchrun --nproc-per-node 2 examples/loops/plain_loop.py --folder /tmp/plain --steps 40

Run again with more steps, on any number of ranks, it goes on from the newest checkpoint. The lines that name lamella
are all that differs from the loop on FSDP2.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lamella_checkpoint import CheckpointDirectory, load
from lamella_engine import MixedPrecisionPolicy, fully_shard


def build(width: int = 64, depth: int = 4) -> nn.Sequential:
    """Build the model from one seed: sharding keeps each rank's rows of its own values, and broadcasts nothing."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def batch_of(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (64, 64) inputs and (64, 1) targets, a pure function of step and rank: a resume sees the same batches."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(64, 64, generator=generator)
    return inputs.to(device), inputs[:, :8].sum(dim=1, keepdim=True).sin().to(device)


def main() -> None:
    """Train from the newest checkpoint on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()

    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with CheckpointDirectory(options.folder, keep=2) as checkpoints:
        newest, first = checkpoints.latest(), 0
        if newest is not None:
            first = load(newest, model=model, optimizer=optimizer)["step"]
        for step in range(first, options.steps):
            inputs, targets = batch_of(step, dist.get_rank(), device)
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 10 == 0:
                dist.all_reduce(mean := loss.detach() / dist.get_world_size())
                if dist.get_rank() == 0:
                    print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)
                checkpoints.save_async(step + 1, model=model, optimizer=optimizer, extra={"step": step + 1})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
