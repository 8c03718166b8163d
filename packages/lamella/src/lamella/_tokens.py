"""The token file of a run, and the sequences that ranks read from it.

Note [The stream does not know the ranks]
    Step s trains on sequences [s * batch_size, (s + 1) * batch_size) of one endless stream: the training text's
    sequences, shuffled anew in every pass by the seed and the pass alone. A rank takes its part of the step. So the
    number of ranks changes neither what a step sees nor what a resumed run sees next, and the step is all there is to
    remember.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lamella._config import DataConfig
from lamella._options import ConfigError
from lamella._text import END_OF_TEXT, Corpus, encode, read_tokenizer, token_nbytes, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """What a run reads: token streams, and how many bytes of text each token stands for.

    Attributes:
        train: (num_tokens,) int32, memory-mapped from the token file.
        validation: The same of the held-out text.
        token_nbytes: (vocab_size,) int32.
        fingerprint: Hash of the text, its split and the vocabulary.
    """

    train: torch.Tensor
    validation: torch.Tensor
    token_nbytes: torch.Tensor
    fingerprint: str


def load_tokens(path: Path) -> TokenData:
    """The token file at `path`, mapped into memory and not read."""
    return TokenData(**torch.load(path, mmap=True, weights_only=True))


def fingerprint(corpus: Corpus, vocab_size: int, given: Path | None = None) -> str:
    """What the tokens depend on: the text, and the tokenizer that is given or the size of the one to be trained."""
    if given is None:
        return f"{corpus.fingerprint()}-{vocab_size}"
    tokenizer, _ = read_tokenizer(given, vocab_size)
    return f"{corpus.fingerprint()}-{hashlib.sha256(tokenizer.to_str().encode()).hexdigest()}"


def prepare_tokens(
    corpus: Corpus, vocab_size: int, tokens: Path, tokenizer: Path, given: Path | None = None
) -> TokenData:
    """The token file of `corpus`: the one at `tokens` if it was made from the same text, else a new one.

    Args:
        given: A model's directory whose tokenizer is taken. None trains one of `vocab_size` tokens on the text.

    Raises:
        ConfigError: The tokenizer that is given cannot be used.

    Effects: may train a tokenizer and write both files, each at once.
    """
    wanted = fingerprint(corpus, vocab_size, given)
    if tokens.exists() and tokenizer.exists() and load_tokens(tokens).fingerprint == wanted:
        return load_tokens(tokens)
    if given is None:
        chosen, end = train_tokenizer(corpus.train, vocab_size), END_OF_TEXT
    else:
        chosen, end = read_tokenizer(given, vocab_size)
    data = TokenData(
        train=encode(chosen, corpus.train, end),
        validation=encode(chosen, corpus.validation, end),
        token_nbytes=token_nbytes(chosen, end),
        fingerprint=wanted,
    )
    _replace(tokenizer, lambda path: chosen.save(str(path)))
    _replace(tokens, lambda path: torch.save(asdict(data), path))
    return load_tokens(tokens)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that a reader, or a run killed meanwhile, finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    os.replace(partial, path)


def num_sequences(tokens: torch.Tensor, sequence_length: int) -> int:
    """How many sequences a stream holds: each predicts `sequence_length` tokens, and none is predicted twice."""
    return max(0, len(tokens) - 1) // sequence_length


def sequences(tokens: torch.Tensor, indices: torch.Tensor, sequence_length: int) -> torch.Tensor:
    """The sequences at `indices`, (num_indices, sequence_length + 1) int64: inputs, and the token after each."""
    positions = indices[:, None] * sequence_length + torch.arange(sequence_length + 1)
    return tokens[positions].long()


@dataclass(frozen=True, kw_only=True)
class BatchStream:
    """The training sequences of every step; see Note [The stream does not know the ranks]."""

    tokens: torch.Tensor
    sequence_length: int
    batch_size: int
    seed: int

    def batch(self, step: int, rank: int, num_ranks: int) -> torch.Tensor:
        """A rank's part of a step (the first is 0), (batch_size / num_ranks, sequence_length + 1) int64."""
        share = self.batch_size // num_ranks
        start = step * self.batch_size + rank * share
        indices = [self._index(position) for position in range(start, start + share)]
        return sequences(self.tokens, torch.tensor(indices), self.sequence_length)

    def _index(self, position: int) -> int:
        count = num_sequences(self.tokens, self.sequence_length)
        return int(_shuffled(count, self.seed, position // count)[position % count])


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator()
    generator.manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


def validation_indices(tokens: torch.Tensor, sequence_length: int, at_most: int) -> torch.Tensor:
    """Sequences to validate on: evenly spaced over the held-out text, the same every time."""
    count = num_sequences(tokens, sequence_length)
    chosen = min(count, at_most)
    return torch.arange(chosen) * count // chosen


def check_tokens(data: TokenData, config: DataConfig) -> None:
    """Refuse text that does not fill one sequence.

    Raises:
        ConfigError: The training or the held-out text is too short; says which and by how much.
    """
    needed = config.sequence_length + 1
    for name, tokens in (("train on", data.train), ("validate on", data.validation)):
        if len(tokens) < needed:
            raise ConfigError(
                f"Expected at least {needed} tokens to {name}, got {len(tokens)}. "
                "Pass more text as --data, or a smaller --sequence-length."
            )
