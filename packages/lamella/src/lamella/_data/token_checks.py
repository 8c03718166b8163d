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
    if (text := without_targets(sequences)) is not None:
        raise ConfigError(
            f"Expected tokens of an answer to {purpose}, got none in {text}. Pass conversations with messages of the "
            f"role 'assistant' as {flag}, a larger --sequence-length, or --loss-on all."
        )
    _check_length(sequences, purpose, flag, share)


def without_targets(sequences: Sequences) -> str | None:
    """Return the text of sequences in words if no token in it is a target; None for others, and without text."""
    counts = sequences.target_counts
    if counts is None or bool(counts.any()):
        return None
    if not isinstance(sequences, DocumentRows):
        return f"{len(sequences):,} sequences" if len(sequences) else None
    lengths, bound = sequences.document_starts.diff(), sequences.sequence_length
    longest = int(lengths.max()) if len(lengths) else 0
    return f"the first {bound:,} tokens of {len(lengths):,} documents of up to {longest:,}" if longest else None


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
