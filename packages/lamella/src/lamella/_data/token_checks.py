"""The check of a run's tokens: enough of them for a sequence, and targets among them."""

from collections.abc import Iterable

from lamella._data.batches import DocumentRows, Sequences, StreamSequences
from lamella._data.tokens import Split, TokenData
from lamella._settings.options import ConfigError
from lamella._settings.sections import DataConfig


def check_tokens(tokens: TokenData, config: DataConfig) -> None:
    """Refuse text shorter than one sequence, and text without targets.

    Raises:
        ConfigError: The training text, or that of a validation set, is too short or has no targets. Names the text and
            its length.
    """
    flag = "--validation-data" if config.validation_paths else "--data"
    fraction = None if config.validation_paths else "--validation-fraction"
    splits: tuple[tuple[Split, Iterable[str], str, str, str], ...] = (
        ("train", tokens.sources, "train on", "--data", f"a smaller {fraction}" if fraction else ""),
        ("validation", tokens.validation_sets, "validate on", flag, f"a larger {fraction}" if fraction else ""),
    )
    for split, sources, verb, option, share in splits:
        for source in sources:
            sequences = tokens.sequences(split, config.sequence_length, source)
            _check_sequences(sequences, f"{verb} in {source!r}" if source else verb, option, share)


def _check_sequences(sequences: Sequences, purpose: str, flag: str, share: str) -> None:
    _check_length(sequences, purpose, flag, share)
    counts = sequences.target_counts
    if counts is not None and not bool(counts.any()):
        raise ConfigError(
            f"Expected tokens of an answer to {purpose}, got none in {_described(sequences)}. Pass conversations "
            f"with messages of the role 'assistant' as {flag}, a larger --sequence-length, or --loss-on all."
        )


def _described(sequences: Sequences) -> str:
    if not isinstance(sequences, DocumentRows):
        return f"{len(sequences):,} sequences"
    lengths = sequences.document_starts.diff()
    return (
        f"the first {sequences.sequence_length:,} tokens of {len(lengths):,} documents of up to {int(lengths.max()):,}"
    )


def _check_length(sequences: Sequences, purpose: str, flag: str, share: str) -> None:
    if len(sequences):
        return
    if isinstance(sequences, StreamSequences):
        ways_out = ", ".join(filter(None, (f"more text as {flag}", share, "or a smaller --sequence-length")))
        raise ConfigError(
            f"Expected at least {sequences.sequence_length + 1} tokens to {purpose}, got {len(sequences.tokens)}. "
            f"Pass {ways_out}."
        )
    ways_out = " or ".join(filter(None, (f"more of them as {flag}", share)))
    raise ConfigError(f"Expected a document to {purpose}, got none. Pass {ways_out}.")
