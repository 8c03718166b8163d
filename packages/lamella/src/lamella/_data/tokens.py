"""The token files of a run: made from its text and mapped into memory.

Note [A complement is read and not predicted]
    A token outside the loss, such as a user's message to an assistant, is stored as its complement `~token`, a negative
    number. As an input the complement stands for the token, as a target for `IGNORED`. Plain text has no complements.
"""

import hashlib
import shutil
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from lamella._data.text import Corpus
from lamella._data.tokenizer import RunTokenizer, Unit, train_tokenizer
from lamella._settings.config import DataConfig
from lamella._settings.options import ConfigError

IGNORED: Final = -100
"""The target ignored by torch's cross entropy."""

_INDEX, _TRAIN, _VALIDATION = "index.pt", "train.bin", "validation.bin"


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """The token streams of a run, and the length of each token.

    Attributes:
        train: (num_tokens,) int32, memory-mapped; see Note [A complement is read and not predicted].
        validation: The held-out text, in the same form.
        units: (vocab_size,) int32: length of each token in `unit`.
        unit: "byte" or "token"; in tokens every length is 1.
        is_masked: True when a stream holds complements.
        fingerprint: Hash of the text, its split and the tokenizer.
    """

    train: torch.Tensor
    validation: torch.Tensor
    units: torch.Tensor
    unit: Unit
    is_masked: bool
    fingerprint: str

    def num_units(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the length of each sequence of targets in `unit`, (num_sequences,) int64, without ignored targets."""
        return torch.where(targets == IGNORED, 0, self.units[targets.clamp(min=0)]).sum(1)


def load_tokens(folder: Path) -> TokenData:
    """Map the token streams in `folder` into memory, without reading them."""
    index = torch.load(folder / _INDEX, weights_only=True)
    return TokenData(
        train=_mapped(folder / _TRAIN),
        validation=_mapped(folder / _VALIDATION),
        units=index["units"],
        unit=index["unit"],
        is_masked=index["is_masked"],
        fingerprint=index["fingerprint"],
    )


def _mapped(file: Path) -> torch.Tensor:
    num_tokens = file.stat().st_size // torch.int32.itemsize
    # An empty file cannot be mapped.
    return torch.from_file(str(file), size=num_tokens, dtype=torch.int32) if num_tokens else torch.empty(0).int()


def fingerprint(corpus: Corpus, tokenizer: RunTokenizer | int) -> str:
    """Return a hash of the tokens' sources: the text and the tokenizer, or the size of the tokenizer to train."""
    if isinstance(tokenizer, int):
        return f"{corpus.fingerprint()}-{tokenizer}"
    return f"{corpus.fingerprint()}-{hashlib.sha256(tokenizer.identity().encode()).hexdigest()}"


def prepare_tokens(corpus: Corpus, tokenizer: RunTokenizer | int, tokens: Path, model: Path) -> TokenData:
    """Return the tokens of `corpus`, from the folder `tokens` if its fingerprint matches, else newly made.

    Args:
        corpus: The text.
        tokenizer: A model's tokenizer; or the vocabulary size of a tokenizer to train on the text and save in `model`.
        tokens: Folder of the token files.
        model: Folder for a trained tokenizer.

    Raises:
        ConfigError: A document is damaged or cannot be rendered.

    Effects: may train a tokenizer; replaces the folder `tokens` once the new folder is complete.
    """
    expected = fingerprint(corpus, tokenizer)
    if not (tokens / _INDEX).exists() or load_tokens(tokens).fingerprint != expected:
        if isinstance(tokenizer, int):
            tokenizer = train_tokenizer(corpus.train, tokenizer)
            tokenizer.tokenizer.save_pretrained(model)
        _write_tokens(corpus, tokenizer, expected, tokens)
    return load_tokens(tokens)


def _write_tokens(corpus: Corpus, tokenizer: RunTokenizer, text_fingerprint: str, folder: Path) -> None:
    """Write the tokens of a corpus, batch by batch, to a second folder; then replace the old folder.

    A run killed during tokenization leaves the old folder as it was; one killed while the folder is replaced leaves no
    index, and the next run makes the tokens anew.
    """
    staged = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    masks = [
        _write(tokenizer.encode(files), staged / name)
        for files, name in ((corpus.train, _TRAIN), (corpus.validation, _VALIDATION))
    ]
    units = torch.tensor(tokenizer.units(), dtype=torch.int32)
    index = {"units": units, "unit": tokenizer.unit, "is_masked": any(masks), "fingerprint": text_fingerprint}
    torch.save(index, staged / _INDEX)
    (folder / _INDEX).unlink(missing_ok=True)  # first: an index beside token files that are gone would be trusted
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)


def _write(batches: Iterable[list[int]], file: Path) -> bool:
    """Write a stream of int32 tokens; return True if one is a complement."""
    is_masked = False
    with file.open("wb") as opened:
        for batch in batches:
            array("i", batch).tofile(opened)
            is_masked = is_masked or min(batch, default=0) < 0
    return is_masked


def check_tokens(data: TokenData, config: DataConfig) -> None:
    """Refuse text shorter than one sequence, and text without targets.

    Raises:
        ConfigError: The training or the held-out text is too short or has no targets. Names the text and its length.
    """
    needed = config.sequence_length + 1
    for name, tokens in (("train on", data.train), ("validate on", data.validation)):
        if len(tokens) < needed:
            raise ConfigError(
                f"Expected at least {needed} tokens to {name}, got {len(tokens)}. "
                "Pass more text as --data, or a smaller --sequence-length."
            )
        if data.is_masked and not any(bool((part >= 0).any()) for part in torch.split(tokens, 1 << 22)):
            raise ConfigError(
                f"Expected tokens of an assistant to {name}, got {len(tokens)} of others alone. Pass conversations "
                "with messages of the role 'assistant' as --data."
            )
