"""A validation of the fixture's configuration, by transformers alone."""

import torch
import torch.nn.functional as F
from torch import nn

from lamella._data.order import validation_indices
from lamella._data.tokens import load_tokens
from lamella._record.run_directory import RunDirectory


def nats_per_byte(model: nn.Module, directory: RunDirectory) -> float:
    data = load_tokens(directory.tokens)
    sequences = data.sequences("validation", 32)
    batch = sequences.batch(validation_indices(sequences, 7))
    with torch.no_grad():
        logits = model.eval()(input_ids=batch.inputs).logits
    nats = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="sum")
    return float(nats / data.units[batch.targets].sum())
