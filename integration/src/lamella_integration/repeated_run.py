"""A `lamella train` run that another program repeats: the device of a rank, and the run's batches."""

import os

import torch

from lamella import Config
from lamella.testing import BatchStream, RunDirectory, load_tokens


def take_device() -> torch.device:
    """Return this rank's GPU by torchrun's LOCAL_RANK, made the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def synchronize() -> None:
    """Wait for the current GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batches_of(run: Config, directory: RunDirectory) -> BatchStream:
    """Return the stream of a run's training batches."""
    return BatchStream(
        sequences=load_tokens(directory.tokens).sequences("train", run.data.sequence_length),
        batch_size=run.optim.batch_size,
        seed=run.run.seed,
    )
