"""Sequences of equal length, cut from a stream of tokens; their inputs and targets."""

import torch

from lamella._data.tokens import IGNORED


def num_sequences(tokens: torch.Tensor, sequence_length: int) -> int:
    """Count the sequences of a stream: each predicts `sequence_length` tokens, and no token is predicted twice."""
    return max(0, len(tokens) - 1) // sequence_length


def sequences(tokens: torch.Tensor, indices: torch.Tensor, sequence_length: int) -> torch.Tensor:
    """Return the sequences at `indices`, (num_indices, sequence_length + 1) int64: the inputs and one more token."""
    positions = indices[:, None] * sequence_length + torch.arange(sequence_length + 1)
    return tokens[positions].long()


def inputs_and_targets(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a batch of `sequences` into inputs and targets, each (num_sequences, sequence_length) int64."""
    is_ignored = batch < 0
    inputs, targets = torch.where(is_ignored, ~batch, batch), torch.where(is_ignored, IGNORED, batch)
    return inputs[:, :-1], targets[:, 1:]


def on_device(batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a batch to a device. Effects: no host sync; from pageable memory the host would wait for all work."""
    if device.type == "cpu":
        return batch
    return batch.pin_memory().to(device, non_blocking=True)
