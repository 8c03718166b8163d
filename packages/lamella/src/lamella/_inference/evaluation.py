"""The loss of a trained model on texts, by the validation of training."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from lamella._data.batches import StreamSequences
from lamella._data.order import validation_indices
from lamella._data.search import Search, SourceScanner, description
from lamella._data.sources import data_lines, text_source
from lamella._data.text import Corpus
from lamella._data.token_checks import without_targets
from lamella._data.tokens import TokenData, load_tokens, prepare_tokens
from lamella._inference.trained_model import TrainedModel
from lamella._model.spec import check_context
from lamella._processes.placement import Rank
from lamella._record.metrics import ValidationRecord
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sections import DataConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from lamella._training.validation import Validation
from lamella_transformers import num_positions, separates_documents

_SEQUENCE_LENGTH: Final = 1024


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The options of an evaluation on texts.

    Attributes:
        paths: Text files and folders; empty for the text that the run held out.
        sequence_length: Tokens predicted in a sequence; None for the run's, or 1,024 and at most the model's positions.
        num_sequences: Sequences that are evaluated, at most; None for all of `paths`, or the run's number.
    """

    paths: tuple[str, ...]
    sequence_length: int | None
    num_sequences: int | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss of a model on texts.

    Attributes:
        record: The loss, as a validation's record.
        num_sequences: The number of sequences.
        sequence_length: Tokens predicted in a sequence.
        text: A description of the texts.
        lines: Lines to print on the tokens in the loss.
    """

    record: ValidationRecord
    num_sequences: int
    sequence_length: int
    text: str
    lines: tuple[str, ...]


def evaluate(trained: TrainedModel, options: EvaluationOptions) -> list[Evaluation]:
    """Return the loss of a model on texts, one for each validation set or named text.

    Raises:
        ConfigError: A text cannot be read, is shorter than a sequence or has no targets, or no text is there.

    Effects: makes a process group of this process alone for the time of the call; writes tokens to a temporary folder.
    """
    length = options.sequence_length or _sequence_length(trained)
    check_context(trained.spec, length)
    with _tokens(trained, options, length) as (tokens, text, lines):
        texts = [f"{text}, {name}" if name else text for name in tokens.validation_sets]
        counts = [
            _count(trained, options, tokens, name, text)
            for name, text in zip(tokens.validation_sets, texts, strict=True)
        ]
        config, rank = _settings(trained, length, max(counts)), Rank(rank=0, num_ranks=1, device=trained.device)
        with _process_group_of_one(trained.device):
            records = Validation(config, tokens, rank).records(trained.model, trained.run.step if trained.run else 0)
        trained.model.eval()
    return [
        Evaluation(record=record, num_sequences=count, sequence_length=length, text=text, lines=lines)
        for record, count, text in zip(records, counts, texts, strict=True)
    ]


def _count(trained: TrainedModel, options: EvaluationOptions, tokens: TokenData, name: str, text: str) -> int:
    """Return the number of sequences of a validation set that are evaluated."""
    length = options.sequence_length or _sequence_length(trained)
    sequences = tokens.sequences("validation", length, name)
    if (got := without_targets(sequences)) is not None:
        raise ConfigError(
            f"Expected tokens of an answer in {text}, got none in {got}. Pass conversations with messages of the role "
            "'assistant' as --data, or a larger --sequence-length."
        )
    if not len(sequences):
        num_tokens = len(sequences.tokens) if isinstance(sequences, StreamSequences) else 0
        least, way_out = (2, "more text") if options.paths else (length + 1, "a smaller --sequence-length")
        raise ConfigError(f"Expected at least {least} tokens in {text}, got {num_tokens}. Pass {way_out}.")
    at_most = options.num_sequences or _num_sequences(trained, options) or len(sequences)
    return len(validation_indices(sequences, at_most))


def _sequence_length(trained: TrainedModel) -> int:
    if trained.run is not None:
        return trained.run.config.data.sequence_length
    return min(_SEQUENCE_LENGTH, num_positions(trained.spec) or _SEQUENCE_LENGTH)


def _num_sequences(trained: TrainedModel, options: EvaluationOptions) -> int | None:
    """Return the run's number of sequences for the text that it held out: the loss is then its own validation's."""
    return None if trained.run is None or options.paths else trained.run.config.run.validation_sequences


def _settings(trained: TrainedModel, length: int, num_sequences: int) -> Config:
    """Return settings for the validation: of the run, and with the sequences of one rank in a forward."""
    config = Config(model=ModelConfig(name=trained.name)) if trained.run is None else trained.run.config
    num_microbatches = config.parallel.num_data_ranks * config.optim.accumulation
    batch_size = 1 if trained.run is None else config.optim.batch_size // num_microbatches
    return replace(
        config,
        data=replace(config.data, sequence_length=length),
        # Not the run's others: a rank alone has no instances, no parts of experts and no pieces of sequences.
        parallel=ParallelConfig(ranks=1, device=config.parallel.device, precision=config.parallel.precision),
        optim=replace(OptimConfig(), batch_size=max(1, batch_size)),
        run=replace(RunConfig(), validation_sequences=num_sequences),
    )


@contextmanager
def _tokens(
    trained: TrainedModel, options: EvaluationOptions, length: int
) -> Iterator[tuple[TokenData, str, tuple[str, ...]]]:
    """Yield the tokens to evaluate on, with a description, and with lines on the loss."""
    if not options.paths:
        yield _held_out(trained, length), "the text that the run held out", ()
        return
    settings = DataConfig(sequence_length=length) if trained.run is None else trained.run.config.data
    source = text_source(
        _all_of(options.paths),
        trained.tokenizer,
        replace(settings, sequence_length=length),
        separates_documents=separates_documents(trained.model),
    )
    with tempfile.TemporaryDirectory(prefix="lamella-") as folder:
        form = source.form._replace(pads_stream=True)
        tokens = prepare_tokens(source.corpus, trained.tokenizer, form, Path(folder, "tokens"), Path(folder))
        yield tokens, ", ".join(options.paths), tuple(data_lines(source))


def _held_out(trained: TrainedModel, length: int) -> TokenData:
    if trained.run is None:
        raise ConfigError(
            f"Expected --data or --tasks with {trained.name!r}, which has no held-out text as a run has, got none."
        )
    folder = trained.run.directory.tokens
    if not (folder / "index.pt").is_file():
        raise ConfigError(f"Expected the tokens of the run in {str(folder)!r}, got none. Pass --data.")
    tokens, bound = load_tokens(folder), trained.run.config.data.sequence_length
    if length != bound and (reason := _bound_by(tokens, bound)) is not None:
        raise ConfigError(
            f"Expected the --sequence-length of the run, {bound}, at which its {reason}, got {length}. "
            "Leave --sequence-length out, or pass the text as --data."
        )
    return tokens


def _bound_by(tokens: TokenData, length: int) -> str | None:
    """Return the reason that held-out tokens have sequences of one length; None if they may be cut at any."""
    if tokens.packing != "stream":
        return "documents were packed"
    sequences = (tokens.sequences("validation", length, name) for name in tokens.validation_sets)
    has_counts = any(text.target_counts is not None for text in sequences)
    return "answers were counted" if has_counts else None


def _all_of(paths: Sequence[str]) -> Corpus:
    """Return the text in files and folders, all of it held out."""
    search = Search(None)
    files = search.texts("--data", paths, SourceScanner())
    return Corpus(source=description(paths), train=(), validation=tuple(files), num_skipped=search.num_skipped)


@contextmanager
def _process_group_of_one(device: torch.device) -> Iterator[None]:
    """Give the validation, which sums over ranks, a group of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch.distributed has the name, and does not list it.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
