"""The validation of a run: the loss of its model on the held-out text, or on each of several texts."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from lamella._data.batches import Sequences, TokenBatch
from lamella._data.order import validation_indices
from lamella._data.tokens import TokenData
from lamella._processes.placement import Rank
from lamella._record.metrics import ValidationRecord
from lamella._settings.config import Config
from lamella_transformers import SequencePieces, target_losses


class Validation:
    """The held-out sequences of one rank.

    Args:
        config: The run's settings.
        tokens: The tokens of the run.
        rank: This process among the workers.
    """

    def __init__(self, config: Config, tokens: TokenData, rank: Rank) -> None:
        self._config, self._tokens, self._rank = config, tokens, rank
        length = config.data.sequence_length
        self._sets = {name: tokens.sequences("validation", length, name) for name in tokens.validation_sets}

    @torch.no_grad()
    def records(self, model: nn.Module, step: int, pieces: SequencePieces | None = None) -> list[ValidationRecord]:
        """Return the loss of a model after `step` steps on each validation set, the same on every rank.

        Args:
            model: The model, sharded.
            step: The steps done.
            pieces: This rank's pieces of sequences, where they are cut.

        Effects: collective over all ranks; waits for the device; leaves the model in training mode.
        """
        model.eval()
        records = [self._record(model, step, name, pieces) for name in self._sets]
        model.train()
        return records

    def _record(self, model: nn.Module, step: int, name: str, pieces: SequencePieces | None) -> ValidationRecord:
        sums = torch.zeros(2, dtype=torch.float64, device=self._rank.device)
        for batch, weights in self._batches(self._sets[name]):
            copies = batch.on_device(self._rank.device)
            losses = target_losses(model, *copies.arguments(pieces))[0].double().sum(1)
            num_units = self._tokens.num_units(batch.arguments(pieces).targets)
            sums += torch.stack([losses, num_units.to(losses)]) @ weights.to(losses)
            # The forwards of a single rank or of stages 1 and 2 run no collective: the watch would see no progress.
            self._rank.pulse.num_batches += 1
        dist.all_reduce(sums)
        nats, num_units_in_all = sums.tolist()
        return ValidationRecord.of(step, nats / max(1, num_units_in_all), self._tokens.unit, name or None)

    def _batches(self, sequences: Sequences) -> Iterator[tuple[TokenBatch, torch.Tensor]]:
        """Yield this rank's sequences and their weights.

        Every rank runs the same number of forwards, or their all-gathers would hang, each with the same number of
        sequences, or compiled layers would compile again for the last: padding repeats a sequence at weight 0.
        """
        config, (index, count) = self._config, self._rank.share(self._config.parallel)
        indices = validation_indices(sequences, config.run.validation_sequences)
        weights = torch.ones(len(indices), dtype=torch.float64)
        share = max(1, config.optim.batch_size // (count * config.optim.accumulation))
        share = min(share, math.ceil(len(indices) / count))
        padding = -len(indices) % (count * share)
        indices = torch.cat([indices, indices[:1].expand(padding)])[index::count]
        weights = torch.cat([weights, weights.new_zeros(padding)])[index::count]
        for start in range(0, len(indices), share):
            rows = sequences.batch(indices[start : start + share])
            [batch] = rows.microbatches(1, has_starts=config.model.attention == "documents")
            yield batch, weights[start : start + share]
