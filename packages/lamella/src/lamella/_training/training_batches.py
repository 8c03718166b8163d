"""The batches of a run on a rank: of prepared tokens, or of text streamed by rank 0."""

from lamella._data.order import BatchStream, mixture_of
from lamella._data.streamed_files import from_json
from lamella._data.tokenizer import read_tokenizer
from lamella._data.tokens import TokenData, TokenForm
from lamella._processes.placement import Rank
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config
from lamella._settings.sections import Packing
from lamella._streaming.batches import ScatteredBatches
from lamella._streaming.reader import StreamReader


def training_batches(
    config: Config, directory: RunDirectory, tokens: TokenData, rank: Rank, vocab_size: int
) -> BatchStream | ScatteredBatches:
    """Return the batches of a run.

    Args:
        config: The run's settings.
        directory: The run's files.
        tokens: The run's tokens; for streamed text only the tokens of validation.
        rank: This process among the workers.
        vocab_size: The number of tokens of the model.

    Raises:
        ConfigError: The tokenizer cannot be read.
    """
    length, batch_size = config.data.sequence_length, config.optim.batch_size
    if not config.data.streaming:
        return BatchStream(
            sequences=tokens.sequences("train", length),
            batch_size=batch_size,
            seed=config.run.seed,
            mixture=mixture_of(config.data),
        )
    return ScatteredBatches(
        stream_reader(config, directory, tokens.packing, vocab_size) if rank.is_first else None,
        sequence_length=length,
        batch_size=batch_size,
        is_packed=tokens.packing == "documents",
    )


def stream_reader(config: Config, directory: RunDirectory, packing: Packing, vocab_size: int) -> StreamReader:
    """Return the reader of a run's text, of the files listed by the run's preparation.

    Args:
        config: The run's settings.
        directory: The run's files: the list of files to read, and the tokenizer.
        packing: How documents become sequences.
        vocab_size: The number of tokens of the model.

    Raises:
        ConfigError: The tokenizer cannot be read.
    """
    form = TokenForm(
        packing=packing,
        loss_on=config.data.loss_on,
        sequence_length=config.data.sequence_length,
        has_answers=True,  # Targets are always counted: a later document may have answers.
    )
    files = from_json(directory.streamed.read_text(encoding="utf-8"))
    return StreamReader.of(config, files, read_tokenizer(directory.model, vocab_size), form)
