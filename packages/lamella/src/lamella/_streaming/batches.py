"""The batches of streamed text on every rank: rank 0 reads, and scatters the sequences.

Note [One rank reads]
    Text of the Hub read by every rank would travel once for each rank, and each rank would make all tokens of a step
    to use a share. Rank 0 alone reads, in a thread, and a scatter gives each rank a share of the sequences: 4 bytes a
    token, and 4 more for positions in packed rows. The batch of a step is therefore the same on any number of ranks,
    and the places in the text are rank 0's, in checkpoints too. The ranks wait for rank 0 alone.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from lamella._data.batches import TokenBatch
from lamella._processes.agreement import from_first_rank
from lamella._settings.options import ConfigError
from lamella._streaming.reader import StreamReader, WindowMeasure

_REFUSED: Final = -1


class ScatteredBatches:
    """The batches of a rank; see Note [One rank reads].

    Args:
        reader: Reads the batches; None on all ranks but the first.
        sequence_length: Tokens predicted in a sequence.
        batch_size: The sequences of a step over all ranks.
        is_packed: Sequences hold several documents each.
    """

    def __init__(self, reader: StreamReader | None, *, sequence_length: int, batch_size: int, is_packed: bool) -> None:
        self._reader, self._is_packed = reader, is_packed
        self._sequence_length, self._batch_size = sequence_length, batch_size
        self._num_targets: tuple[int, int] | None = None
        self.tokens_a_sequence = float(sequence_length)

    def begin(self, state: Mapping[str, Any]) -> None:
        """Begin to read, at the place in a checkpoint, if any. Effects: rank 0 starts a thread a source."""
        if self._reader is not None:
            self._reader.begin(state.get("stream"))

    def state(self) -> dict[str, object]:
        """Return the place in the text after the batches so far for a checkpoint, on rank 0 alone."""
        return {} if self._reader is None else {"stream": self._reader.state()}

    def measure(self, step: int) -> tuple[str, ...]:
        """Set `tokens_a_sequence`, of the text at the beginning of a step, and return lines to print on the packing.

        Raises:
            ConfigError: Rank 0 cannot read the text. On every rank.

        Effects: rank 0 waits for its threads; collective broadcast of an object between hosts.
        """
        outcome: WindowMeasure | ConfigError | None = None
        if self._reader is not None:
            try:
                outcome = self._reader.measure(step)
            except ConfigError as refusal:
                outcome = refusal
        outcome = from_first_rank(outcome)
        if not isinstance(outcome, WindowMeasure):
            raise outcome or AssertionError("the first rank reads")
        self.tokens_a_sequence = outcome.tokens_a_sequence
        return outcome.lines

    def batch(self, step: int, rank: int, num_ranks: int) -> TokenBatch:
        """Return a part of step `step`: batch_size / num_ranks sequences. Steps are read in their order.

        Args:
            step: The step, from 0 on.
            rank: The number of the part, shared by neighbouring ranks if parts are fewer.
            num_ranks: The number of parts.

        Raises:
            ConfigError: Rank 0 cannot read the text. On every rank.

        Effects: collective scatter of int32 between hosts; rank 0 may wait for its threads.
        """
        share, length = self._batch_size // num_ranks, self._sequence_length
        width = length + 1 + (length if self._is_packed else 0)
        # The first row holds the number of targets of all ranks' sequences, or a refusal.
        received = torch.empty(share + 1, width, dtype=torch.int32)
        payloads, error = None, ""
        if self._reader is not None:
            try:
                parts = _payloads(self._reader.batch(step), num_ranks, width)
            except ConfigError as refusal:
                parts, error = [torch.full_like(received, _REFUSED)] * num_ranks, f"{refusal}"
            num_copies = dist.get_world_size() // num_ranks
            payloads = [part for part in parts for _ in range(num_copies)]
        dist.scatter(received, payloads)
        num_targets = int(received[0, 0])
        if num_targets == _REFUSED:
            raise ConfigError(from_first_rank(error))
        self._num_targets = step, num_targets
        positions = received[1:, length + 1 :].long() if self._is_packed else None
        return TokenBatch(received[1:, : length + 1].long(), positions)

    def num_targets(self, step: int) -> int:
        """Count the targets in the loss of a step over all ranks, at least 1. The step must be the last `batch`'s."""
        assert self._num_targets is not None and self._num_targets[0] == step
        return max(1, self._num_targets[1])


def _payloads(batch: TokenBatch, num_ranks: int, width: int) -> list[torch.Tensor]:
    rows = batch.tokens if batch.positions is None else torch.cat([batch.tokens, batch.positions], dim=1)
    header = torch.full((1, width), int((batch.targets >= 0).sum()))
    return [torch.cat([header, part]).int() for part in rows.chunk(num_ranks)]
