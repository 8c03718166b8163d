"""The reader of a run's streamed text, from the files that the preparation wrote."""

from lamella._data.streamed_files import from_json
from lamella._data.tokenizer import read_tokenizer
from lamella._data.tokens import TokenForm
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config
from lamella._settings.sections import Packing
from lamella._streaming.reader import StreamReader


def read_stream(config: Config, directory: RunDirectory, packing: Packing, vocab_size: int) -> StreamReader:
    """Return the reader of a run's text.

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
        has_answers=True,
    )
    files = from_json(directory.streamed.read_text(encoding="utf-8"))
    return StreamReader.of(config, files, read_tokenizer(directory.model, vocab_size), form)
