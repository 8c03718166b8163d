"""The batches of a run whose text is streamed, as one process reads them."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch

from lamella._data.batches import DocumentRows, TokenBatch
from lamella._data.encoding import Encoder
from lamella._data.mixture import Mixture
from lamella._data.order import mixture_of
from lamella._data.streamed_files import StreamedSource
from lamella._data.text import by_source
from lamella._data.tokenizer import RunTokenizer
from lamella._data.tokens import TokenForm, row_lines
from lamella._settings.config import Config
from lamella._settings.mixture import mixture_weights
from lamella._settings.sections import DataConfig
from lamella._streaming.documents import DocumentStream
from lamella._streaming.sequences import WindowedSequences
from lamella._streaming.windows import WindowReader

WINDOW_ORDER = "windows-1"
"""The name of the order of streamed text, as `ORDER` is of prepared text."""


def streaming_lines(config: DataConfig) -> list[str]:
    """Return the lines to print on how streamed text is read, and on the shares of a mixture."""
    weights = mixture_weights(config)
    fractions = Mixture.of([*weights.values()]).fractions if weights else ()
    line = f"streaming: rank 0 reads {config.shuffle_buffer:,} documents at a time, and packs and shuffles them"
    return [
        f"{line}; the files are in another order in each epoch",
        *(f"mixture: {fraction:.1%} {name}" for fraction, name in zip(fractions, weights, strict=True)),
    ]


class WindowMeasure(NamedTuple):
    """The sequences of the windows in use.

    Attributes:
        tokens_a_sequence: The mean number of tokens in a sequence, without padding.
        lines: Lines to print on the rows of documents.
    """

    tokens_a_sequence: float
    lines: tuple[str, ...] = ()


class StreamReader:
    """The batch of every step, in the order of the steps.

    Args:
        sources: The sequences of each source; one for all without a mixture.
        batch_size: The sequences of a step over all ranks.
        mixture: The shares of the sources; None for one source.
    """

    def __init__(self, sources: Sequence[WindowedSequences], batch_size: int, mixture: Mixture | None = None) -> None:
        self._sources, self._batch_size = sources, batch_size
        self._mixture = mixture or Mixture.of([1.0])

    @classmethod
    def of(
        cls, config: Config, files: Sequence[StreamedSource], tokenizer: RunTokenizer, form: TokenForm
    ) -> "StreamReader":
        """Make a reader of files by the settings of a run."""
        mixture = mixture_of(config.data)
        sources = by_source(files) if mixture else {"": files}
        encoder = Encoder(
            tokenizer=tokenizer,
            loss_is_on_all=form.loss_on == "all",
            keeps_documents_apart=form.packing != "stream",
        )
        encoding = Lock()
        readers = [
            WindowReader(
                # Sources of as many files would be read in the same order otherwise; seeds of runs have 32 bits.
                documents=DocumentStream(files=files_of_source, seed=config.run.seed + (number << 32)),
                encoder=encoder,
                encoding=encoding,
                form=form,
                num_documents=config.data.shuffle_buffer,
                seed=config.run.seed + (number << 32),
                name=name,
            )
            for number, (name, files_of_source) in enumerate(sources.items())
        ]
        return cls([WindowedSequences(reader) for reader in readers], config.optim.batch_size, mixture)

    def begin(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Begin to read, at the places that `state` returned or at the beginning. Effects: starts a thread a source."""
        for number, source in enumerate(self._sources):
            source.begin(states[number] if states else None)

    def state(self) -> list[dict[str, object]]:
        """Return the place of each source after the batches read so far: plain data."""
        return [source.state() for source in self._sources]

    def measure(self, step: int) -> WindowMeasure:
        """Return the mean number of tokens in a sequence of the windows that a step begins in.

        Raises:
            ConfigError: The conditions of `batch`.

        Effects: waits for the first window of each source.
        """
        counts = self._draws(step * self._batch_size, 0)[0].tolist()
        tokens_a_sequence, lines = 0.0, []
        for fraction, source, count in zip(self._mixture.fractions, self._sources, counts, strict=True):
            window = source.window(count)
            tokens_a_sequence += fraction * window.sequences.tokens_a_sequence
            if isinstance(window.sequences, DocumentRows):
                topic = f"packing of the next {window.num_documents:,} documents"
                lines += row_lines(window.sequences, f"{topic} of {source.name}" if source.name else topic)
        return WindowMeasure(tokens_a_sequence, tuple(lines))

    def batch(self, step: int) -> TokenBatch:
        """Return all sequences of a step, from 0 on; the step after that of the last call, or after `begin`.

        Raises:
            ConfigError: A file cannot be read, a record holds no document, or the text at the place that the run was
                resumed from has changed.
        """
        draws = self._draws(step * self._batch_size, self._batch_size)
        tokens: torch.Tensor | None = None
        positions: torch.Tensor | None = None
        for number, source in enumerate(self._sources):
            is_drawn = draws[:, number].diff() > 0
            first, last = draws[0, number].item(), draws[-1, number].item()
            if first == last:
                continue
            batch = source.batch(int(first), int(last - first))
            if tokens is None:
                tokens = torch.empty(self._batch_size, batch.tokens.shape[1], dtype=torch.int64)
                positions = None if batch.positions is None else torch.empty_like(tokens[:, 1:])
            tokens[is_drawn] = batch.tokens
            if positions is not None and batch.positions is not None:
                positions[is_drawn] = batch.positions
        assert tokens is not None
        return TokenBatch(tokens, positions)

    def _draws(self, position: int, num_positions: int) -> torch.Tensor:
        return self._mixture.draws(torch.arange(position, position + num_positions + 1))
