"""The text of a run, split into training text and held-out text.

The split is a function of the files' names and contents and of the configuration, the same on any machine: a resumed
run finds the same text. `Corpus.fingerprint` identifies the text.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lamella._data.search import Search, SourceScanner, StreamScanner, description
from lamella._data.splitting import split
from lamella._data.streamed_files import StreamedSource
from lamella._data.tables import SourceFile

F = TypeVar("F", SourceFile, StreamedSource)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files in a fixed order, split into training files and held-out files.

    Attributes:
        source: A description of the training text.
        train: The training files; none where they are streamed.
        validation: The held-out files, or those of texts for validation.
        num_skipped: Files that are not text.
        validation_source: A description of the texts for validation; None where a part of the text is held out.
        streamed: The training files that are read as the run goes.
    """

    source: str
    train: tuple[SourceFile, ...]
    validation: tuple[SourceFile, ...]
    num_skipped: int
    validation_source: str | None = None
    streamed: tuple[StreamedSource, ...] = ()

    def fingerprint(self) -> str:
        """Return a hash of the names, contents and split; of files that are streamed, of the names alone."""
        digest = hashlib.sha256(streamed_identity(self.streamed).encode(errors="surrogateescape"))
        for file in (*self.train, None, *self.validation):
            digest.update(b"\0split\0" if file is None else _identity(file).encode(errors="surrogateescape"))
        return digest.hexdigest()

    def describe(self) -> str:
        """Return one line on the files, bytes and source of the text."""
        skipped = f"; skipped {self.num_skipped} that are not text" if self.num_skipped else ""
        if self.validation_source is None:
            files = (*self.train, *self.validation)
            share = sum(file.nbytes for file in self.validation) / sum(file.nbytes for file in files)
            return f"{_size(files)} of {self.source} ({share:.1%} held out){skipped}"
        validation = f"validation on {_size(self.validation)} of {self.validation_source}"
        if self.streamed:
            return f"streamed from {_size(self.streamed)} of {self.source}; {validation}{skipped}"
        return f"{_size(self.train)} of {self.source}; {validation}{skipped}"


def _identity(file: SourceFile) -> str:
    source = f"\0source {file.source}" if file.source else ""
    return f"{source}\0{file.name}\0{file.nbytes}\0{file.digest}"


def streamed_identity(files: Iterable[StreamedSource]) -> str:
    """Return a text that differs between streams of other files; empty without files."""
    return "".join(f"\0streamed {file.source}\0{file.name}" for file in files)


def _size(files: Sequence[SourceFile | StreamedSource]) -> str:
    sizes = [file.nbytes for file in files if file.nbytes is not None]
    num_files = len({(file.path, file.name) for file in files})  # of which one may be in two parts
    return f"{num_files:,} files{f', {sum(sizes):,} bytes' if len(sizes) == len(files) else ''}"


def by_source(files: Iterable[F]) -> Mapping[str, tuple[F, ...]]:
    """Return the files of each source, in the order of the sources."""
    sources: dict[str, list[F]] = {}
    for file in files:
        sources.setdefault(file.source, []).append(file)
    return {source: tuple(files_of_source) for source, files_of_source in sources.items()}


def collect(
    paths: Sequence[str],
    validation_fraction: float,
    *,
    validation_paths: Sequence[str] = (),
    without: Path | None = None,
    streaming: bool = False,
) -> Corpus:
    """Find and split the text files under `paths`; without paths, the standard library's sources.

    Files other than UTF-8 text are skipped in folders and refused when named. A file reached by several paths is read
    once; otherwise its text could be both trained on and held out.

    Args:
        paths: Text files and folders, with or without names of sources.
        validation_fraction: Share of the bytes of each source to hold out, unless there are texts for validation.
        validation_paths: Text files and folders for validation, with or without names. Their files are left out of
            training.
        without: Folder to leave out: the run's own, whose files change during the run.
        streaming: The training files are read as the run goes; there must be texts for validation.

    Raises:
        ConfigError: A path does not exist, cannot be read or is not text, or all files are empty.

    Effects: reads every file once, for its digest; of a file to stream the beginning.
    """
    search = Search(without)
    validation = search.texts("--validation-data", validation_paths, SourceScanner()) if validation_paths else []
    streamed = search.texts("--data", paths, StreamScanner()) if streaming else []
    sources = by_source([] if streaming else search.texts("--data", paths, SourceScanner()))
    train: list[SourceFile] = []
    for files in sources.values():
        if validation_paths:
            train += files
        else:
            first, second = split(files, validation_fraction)
            train += first
            validation += second
    return Corpus(
        source=description(paths),
        train=tuple(train),
        validation=tuple(validation),
        num_skipped=search.num_skipped,
        validation_source=", ".join(validation_paths) or None,
        streamed=tuple(streamed),
    )
