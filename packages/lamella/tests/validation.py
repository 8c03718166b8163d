"""A validation of the fixture's configuration, by transformers alone."""

import torch
import torch.nn.functional as F
from torch import nn

from lamella._directory import RunDirectory
from lamella._tokens import load_tokens, sequences, validation_indices


def nats_per_byte(model: nn.Module, directory: RunDirectory) -> float:
    data = load_tokens(directory.tokens)
    batch = sequences(data.validation, validation_indices(data.validation, 32, 7), 32)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch[:, :-1]).logits
    nats = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="sum")
    return float(nats / data.units[batch[:, 1:]].sum())
