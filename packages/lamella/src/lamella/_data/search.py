"""The search for the files of a text: folders are walked in the order of names, and no file is found twice."""

import glob
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from lamella._data.streamed_files import StreamedFile, StreamedSource, stream_file
from lamella._data.streamed_tables import StreamedTable, stream_hub
from lamella._data.tables import HUB, SourceFile, TableFile, is_table, scan_hub, scan_table
from lamella._data.text_files import TextFile, scan_text, unreadable
from lamella._settings.named_texts import named_texts
from lamella._settings.options import ConfigError
from lamella._settings.parsing import parse_json

_ARROW_SUFFIX: Final = ".arrow"
_STATE: Final = "state.json"
_BESIDE_ARROW: Final = ("dataset_info.json", _STATE)
_OVER_ARROW: Final = "dataset_dict.json"
_TRAIN: Final = "train"
_CACHE: Final = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
"""The files that `map` and `filter` of `datasets` write beside a data set's Arrow files, named by a fingerprint."""


F = TypeVar("F", TextFile | TableFile, StreamedFile | StreamedTable)
ScannedFile = TypeVar("ScannedFile", covariant=True)


class Scanner(Protocol[ScannedFile]):
    """Tells what a file is."""

    def file(self, name: str, path: Path, *, is_named: bool) -> ScannedFile | None:
        """Return a file of documents, or None for another that only its folder was named for.

        Args:
            name: Path relative to the searched folder.
            path: The file.
            is_named: The user named the file itself, not its folder.

        Raises:
            ConfigError: The file cannot be read, or is named and has no documents.
        """
        ...

    def data_set(self, name: str) -> Sequence[ScannedFile]:
        """Return the files of a data set of the Hub.

        Raises:
            ConfigError: The data set cannot be read.
        """
        ...


class SourceScanner:
    """Scans files that are read before a run. Effects: reads each file."""

    def file(self, name: str, path: Path, *, is_named: bool) -> SourceFile | None:
        """Return a file of documents, or None; see `Scanner`."""
        if is_table(path) and (table := scan_table(name, path, is_named=is_named)) is not None:
            return table
        return scan_text(name, path, is_named=is_named)

    def data_set(self, name: str) -> Sequence[SourceFile]:
        """Return the rows of a data set of the Hub as one file; see `Scanner`."""
        return [scan_hub(name)]


class StreamScanner:
    """Scans files that are read as a run goes. Effects: reads the beginning of each file."""

    def file(self, name: str, path: Path, *, is_named: bool) -> StreamedSource | None:
        """Return a file of documents, or None; see `Scanner`."""
        return stream_file(name, path, is_named=is_named)

    def data_set(self, name: str) -> Sequence[StreamedSource]:
        """Return the files of a data set of the Hub; see `Scanner`."""
        return stream_hub(name)


class Search:
    """The search for the files of several sources.

    Args:
        without: Folder to leave out.

    Attributes:
        num_skipped: Files so far that are not text.
    """

    def __init__(self, without: Path | None) -> None:
        self.num_skipped = 0
        self._visited: set[str] = set() if without is None else {os.path.realpath(without)}
        self._has_files = False

    def texts(self, flag: str, paths: Sequence[str], scanner: Scanner[F]) -> list[F]:
        """Return the files under paths, the sources one after another, the files of each in the order of names.

        Args:
            flag: The option that the paths come from.
            paths: Files and folders, with or without names of sources; none for the standard library's sources.
            scanner: Tells what each file is.

        Raises:
            ConfigError: A path does not exist, cannot be read or is not text, the files of a source are empty, or a
                data set of several splits has none to train on.

        Effects: reads files as the scanner does.
        """
        sources = named_texts(flag, paths) or {"": ()}
        return [file for source, named in sources.items() for file in self._texts_of(source, named, flag, scanner)]

    def _texts_of(self, source: str, paths: Sequence[str], flag: str, scanner: Scanner[F]) -> list[F]:
        files = list(self._files(paths, flag, scanner))
        texts = [replace(file, source=source) for file in files if file is not None and file.nbytes != 0]
        if not texts:
            elsewhere = " apart from the files that other names or --validation-data hold" if self._has_files else ""
            got = f"{len(files)} files{' with no text in them' if files else ''}"
            raise ConfigError(f"Expected text in {description(paths)}{elsewhere}, got {got}.")
        self._has_files = True
        self.num_skipped += files.count(None)
        return sorted(texts, key=lambda file: file.name)

    def _files(self, paths: Sequence[str], flag: str, scanner: Scanner[F]) -> Iterator[F | None]:
        """Yield the files; None for a file that is not text."""
        if not paths:
            # Tests hold generated tables, and some distributions leave them out; site-packages is not the library.
            skip = ("site-packages", "dist-packages", "test", "tests", "idle_test")
            yield from self._walk(Path(sysconfig.get_path("stdlib")), scanner, suffix=".py", skip=skip)
        for path in paths:
            if path.startswith(HUB):
                yield from self._data_set(path, scanner)
            elif os.path.isdir(path):
                yield from self._walk(Path(path), scanner)
            elif self._is_unvisited(Path(path)):
                yield _named(Path(path), flag, scanner)

    def _data_set(self, name: str, scanner: Scanner[F]) -> Iterator[F]:
        if name not in self._visited:
            self._visited.add(name)
            yield from scanner.data_set(name)

    def _is_unvisited(self, path: Path) -> bool:
        """True when no earlier path led to `path`; records files. Folders may be visited again for their files."""
        real = os.path.realpath(path)
        is_unvisited = real not in self._visited
        if not os.path.isdir(real):
            self._visited.add(real)
        return is_unvisited

    def _walk(
        self, root: Path, scanner: Scanner[F], *, suffix: str = "", skip: Sequence[str] = ()
    ) -> Iterator[F | None]:
        def refuse(error: OSError) -> None:
            raise unreadable(Path(error.filename), error) from error

        for folder, subfolders, names in os.walk(root, onerror=refuse):
            subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
            if _OVER_ARROW in names:
                subfolders[:] = [_train_split(Path(folder), subfolders)]
            subfolders[:] = [name for name in subfolders if self._is_unvisited(Path(folder, name))]
            for path in _documents(Path(folder), names):
                # Pipes are skipped: reading a pipe waits for the writer.
                if path.name.endswith(suffix) and path.is_file() and self._is_unvisited(path):
                    yield scanner.file(path.relative_to(root).as_posix(), path, is_named=False)


def description(paths: Sequence[str]) -> str:
    """Return the paths in words."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join(paths) if paths else f"the Python {version} standard library"


def _train_split(folder: Path, splits: Sequence[str]) -> str:
    """Return the split to read of a data set of several, as of a data set of the Hub: the others are for tests."""
    if _TRAIN not in splits:
        got = ", ".join(map(repr, splits)) or "none"
        raise ConfigError(
            f"Expected a split {_TRAIN!r} in the data set {str(folder)!r}, got {got}. Name the folder of a split."
        )
    return _TRAIN


def _documents(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield a folder's files in the order of names, but those that `datasets` writes beside a data set's rows."""
    left_out = {_OVER_ARROW}
    if tables := {name for name in names if name.endswith(_ARROW_SUFFIX)}:
        left_out |= {*_BESIDE_ARROW, *(tables - _shards(folder, tables))}
    return (folder / name for name in sorted(names) if name not in left_out)


def _shards(folder: Path, tables: AbstractSet[str]) -> AbstractSet[str]:
    """Return the Arrow files of a folder that hold the rows of its data set.

    The others hold the same rows again: cached results, and shards of a data set that was saved there before.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):  # A folder without a state, or with a damaged one
        state: Any = parse_json((folder / _STATE).read_text(encoding="utf-8"))
        shards = {file["filename"] for file in state["_data_files"]}
        if shards <= tables:
            return shards
    return {name for name in tables if not _CACHE.fullmatch(name)}


def _named(path: Path, flag: str, scanner: Scanner[F]) -> F:
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        is_pattern = glob.has_magic(str(path))
        way_out = (
            " Leave out the quotes, for the shell to expand the pattern, or name the folder." if is_pattern else ""
        )
        raise ConfigError(
            f"Expected a text file or a folder as {flag}, got {str(path)!r}, which does not exist.{way_out}"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(kind):  # Reading a pipe waits for the writer, and a pipe cannot be read twice.
        raise ConfigError(f"Expected a text file or a folder as {flag}, got {str(path)!r}, which is neither.")
    file = scanner.file(path.name, path, is_named=True)
    assert file is not None
    return file
