"""A validation of the fixture's configuration, by transformers alone."""

import torch
import torch.nn.functional as F
from torch import nn

from lamella._data.order import validation_indices
from lamella._data.packing import sequences
from lamella._data.tokens import load_tokens
from lamella._record.run_directory import RunDirectory


def nats_per_byte(model: nn.Module, directory: RunDirectory) -> float:
    data = load_tokens(directory.tokens)
    batch = sequences(data.validation, validation_indices(data.validation, 32, 7), 32)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch[:, :-1]).logits
    nats = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="sum")
    return float(nats / data.units[batch[:, 1:]].sum())
