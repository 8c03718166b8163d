"""Windows of a stream: documents read together, packed into sequences, and shuffled.

Note [A window follows from its beginning]
    A buffer whose documents are replaced one by one is in a checkpoint only with all the documents. A window is read
    whole and used up before the next: the sequences follow from the window's beginning in the stream, and from nothing
    read before but the tokens left over. A checkpoint therefore has the beginning of the window in use, a few numbers;
    a resumed run reads the window again, and no earlier text.
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

import torch

from lamella._data.batches import DocumentRows, Sequences, StreamSequences
from lamella._data.documents import Part, length_of
from lamella._data.encoding import Encoder
from lamella._data.order import shuffled
from lamella._data.rows import document_rows
from lamella._data.tokens import TokenForm
from lamella._settings.options import ConfigError
from lamella._streaming.documents import DocumentStream, StreamPosition

_DOCUMENT_LENGTH: Final = 4096
"""Characters of a document; a longer one counts as several, which bounds the memory of a window."""

_NUM_WITHOUT_TARGETS: Final = 100


class WindowStart(NamedTuple):
    """The beginning of a window: plain data, for checkpoints.

    Attributes:
        position: The place in the stream.
        carry: Tokens left over before the place, up to the length of a sequence.
        num_windows: The windows of the stream before.
        num_sequences: The sequences of the stream before, without those of windows that have no target.
    """

    position: StreamPosition = StreamPosition()
    carry: tuple[int, ...] = ()
    num_windows: int = 0
    num_sequences: int = 0


@dataclass(frozen=True, kw_only=True)
class StreamWindow:
    """The sequences of a window.

    Attributes:
        start: The beginning.
        after: The beginning of the next window.
        sequences: The sequences.
        order: (num_sequences,) int64: the sequences in the order of training.
        num_documents: The documents.
        digest: SHA-256 of the tokens, in hexadecimal digits.
    """

    start: WindowStart
    after: WindowStart
    sequences: Sequences
    order: torch.Tensor
    num_documents: int
    digest: str

    @property
    def has_targets(self) -> bool:
        """True when some token of a sequence is predicted."""
        counts = self.sequences.target_counts
        return len(self.order) > 0 and (counts is None or bool(counts.any()))


@dataclass(frozen=True, kw_only=True)
class WindowReader:
    """Reads the windows of a source; see Note [A window follows from its beginning].

    Attributes:
        documents: The documents of the source.
        encoder: Makes tokens.
        encoding: Held while tokens are made: a tokenizer in use by a thread may refuse another.
        form: How documents become sequences.
        num_documents: The documents of a window.
        seed: The seed of the order of a window's sequences.
        name: The name of the source; empty without names.
    """

    documents: DocumentStream
    encoder: Encoder
    encoding: Lock = field(default_factory=Lock)
    form: TokenForm
    num_documents: int
    seed: int
    name: str = ""

    def window_with_targets(self, start: WindowStart) -> StreamWindow:
        """Read the first window with tokens to predict, from a place on.

        Raises:
            ConfigError: A file cannot be read, a record holds no document, or an epoch has no tokens to predict.
        """
        num_documents = num_without_targets = 0
        epoch = start.position.epoch
        while num_without_targets < _NUM_WITHOUT_TARGETS and start.position.epoch <= epoch + 1:
            window = self._window(start)
            if window.has_targets:
                return window
            num_documents += window.num_documents
            # The sequences of a window that is passed over have no numbers: nothing is trained on them.
            start = window.after._replace(num_sequences=start.num_sequences)
            num_without_targets += all(token < 0 for token in start.carry)
        raise ConfigError(
            f"Expected a sequence of {self.form.sequence_length} tokens to train on{self._described()}, some of them "
            f"to predict, got none in {num_documents:,} documents. Pass more text as --data, a smaller "
            "--sequence-length, or --loss-on all."
        )

    def _described(self) -> str:
        return f" in {self.name!r}" if self.name else ""

    def _window(self, start: WindowStart) -> StreamWindow:
        parts, num_documents, position = self._read(start.position)
        tokens, starts = array("i", start.carry), array("q", [0])
        with self.encoding:
            for encoded in self.encoder.encode(parts, begins_document=start.position.begins_document):
                starts.extend(len(tokens) + stop for stop in encoded.stops)
                tokens.extend(encoded.tokens)
        sequences = self._sequences(_tensor(tokens, torch.int32), _tensor(starts, torch.int64))
        carry = tokens[len(sequences) * self.form.sequence_length :] if self.form.packing == "stream" else ()
        return StreamWindow(
            start=start,
            after=WindowStart(position, tuple(carry), start.num_windows + 1, start.num_sequences + len(sequences)),
            sequences=sequences,
            order=shuffled(torch.arange(len(sequences)), max(1, len(sequences)), self.seed, start.num_windows),
            num_documents=num_documents,
            digest=hashlib.sha256(tokens.tobytes()).hexdigest(),
        )

    def _read(self, start: StreamPosition) -> tuple[list[Part], int, StreamPosition]:
        """Return the parts of a window's documents, the number of documents, and the place behind the last.

        A window ends with the epoch. A full window ends between documents; in a stream of tokens between the pieces of
        a text too.
        """
        parts: list[Part] = []
        num_documents = length = 0
        for document, position in self.documents.documents(start):
            parts += document.parts
            num_documents += document.ends_document
            length += sum(map(length_of, document.parts))
            is_full = max(num_documents, length // _DOCUMENT_LENGTH) >= self.num_documents
            if is_full and (document.ends_document or self.form.packing == "stream"):
                return parts, num_documents, position
        return parts, num_documents, StreamPosition(start.epoch + 1)

    def _sequences(self, tokens: torch.Tensor, starts: torch.Tensor) -> DocumentRows | StreamSequences:
        length = self.form.sequence_length
        if self.form.packing != "stream":
            return document_rows(tokens, starts, self.form.packing, length)
        count = max(0, len(tokens) - 1) // length
        targets = tokens[1 : count * length + 1].view(count, length) >= 0
        return StreamSequences(tokens=tokens, sequence_length=length, target_counts=targets.sum(1))


def _tensor(numbers: "array[int]", dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
