"""Samples of text that is streamed: documents for a survey of their kinds, and text to train a tokenizer on."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import torch

from lamella._data.documents import Part, text_of
from lamella._data.order import shuffled
from lamella._data.records import Survey, survey_parts
from lamella._data.streamed_files import StreamedSource, documents_of
from lamella._data.text import by_source

_NUM_SURVEYED: Final = 256


def survey_stream(files: Sequence[StreamedSource], kinds: Survey) -> Survey:
    """Return the kinds of the first documents of each source, beside kinds that are there already.

    Raises:
        ConfigError: A file cannot be read, or one of the records holds no document.

    Effects: reads 256 documents of each source.
    """
    for files_of_source in by_source(files).values():
        kinds = survey_parts(islice(_parts(files_of_source), _NUM_SURVEYED), kinds)
    return kinds


def sample_stream(files: Sequence[StreamedSource], length: int) -> Iterator[str]:
    """Yield text of about `length` characters: as much of each source, from the beginnings of files in a fixed order.

    Raises:
        ConfigError: A file cannot be read, or a record holds no document.
    """
    sources = by_source(files).values()
    for files_of_source in sources:
        count, due = len(files_of_source), length / len(sources)
        order = shuffled(torch.arange(count), count, seed=0, epoch=0).tolist()
        for part in _parts([files_of_source[index] for index in order]):
            if text := text_of(part):
                yield text
                due -= len(text)
            if due <= 0:
                break


def _parts(files: Sequence[StreamedSource]) -> Iterator[Part]:
    return (part for document in documents_of(files) for part in document.parts)
