"""The text of a run, split into training text and held-out text.

The split is a function of the files' names and contents and of the configuration, the same on any machine: a resumed
run finds the same text. `Corpus.fingerprint` identifies the text. Files are read in blocks, never whole.
"""

import codecs
import hashlib
import mmap
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lamella._data.json_files import Form, elements, form_of
from lamella._settings.named_texts import named_texts
from lamella._settings.options import ConfigError

_BLOCK_NBYTES: Final = 1 << 20
_PIECE_LENGTH: Final = 1 << 16
_NAMES_OF_MARKS: Final = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"\x1f\x8b": "gzip",
    b"PA": "Parquet; pandas writes JSON lines: read_parquet(...).to_json('data.jsonl', orient='records', lines=True)",
}


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A UTF-8 text file, or a byte range of a file.

    Attributes:
        name: Path relative to the searched folder, and so independent of the machine.
        path: The file.
        start: First byte of the range.
        stop: Byte after the last.
        digest: SHA-256 of the range's bytes, in hexadecimal digits.
        form: How documents lie in the file.
        num_elements_before: Elements of an array before the range.
        source: The name of the source or validation set that the file is of; empty without names.
    """

    name: str
    path: Path
    start: int = field(default=0)
    stop: int
    digest: str
    form: Form = "text"
    num_elements_before: int = 0
    source: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.stop - self.start

    def num_records_before(self) -> int:
        """Return the number of lines or elements before the range. Effects: may read the file up to the range."""
        if self.form == "array" or not self.start:
            return self.num_elements_before
        return sum(block.count(b"\n") for block in _blocks(self.path, 0, self.start))

    def records(self) -> Iterator[str]:
        """Yield the JSON texts of the documents: lines, some of them blank, or elements of the array.

        Raises:
            ConfigError: The file has changed since its digest was computed.
        """
        return (element.text for element in elements(self._texts())) if self.form == "array" else self.lines()

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces of at most 65,536 characters, cut at line ends unless a line is longer.

        Raises:
            ConfigError: The file has changed since its digest was computed.
        """
        remainder = ""
        for text in self._texts():
            remainder += text
            while len(remainder) > _PIECE_LENGTH:
                end = remainder.rfind("\n", 0, _PIECE_LENGTH) + 1 or _PIECE_LENGTH
                yield remainder[:end]
                remainder = remainder[end:]
        if remainder:
            yield remainder

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text, without line ends and byte order mark.

        Raises:
            ConfigError: The file has changed since its digest was computed.
        """
        remainder, is_first = "", True
        for text in self._texts():
            *lines, remainder = (remainder + (text.removeprefix("\ufeff") if is_first else text)).split("\n")
            is_first = False
            yield from lines
        if remainder:
            yield remainder

    def _texts(self) -> Iterator[str]:
        digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
        try:
            for block in _blocks(self.path, self.start, self.stop):
                digest.update(block)
                yield decoder.decode(block)
            decoder.decode(b"", final=True)
        except (OSError, UnicodeDecodeError) as error:
            raise _changed(self.path) from error
        if digest.hexdigest() != self.digest:
            raise _changed(self.path)


def _changed(path: Path) -> ConfigError:
    return ConfigError(f"Expected {str(path)!r} to stay as it was while it is read, got another content. Run again.")


def _blocks(path: Path, start: int, stop: int | None = None) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(_BLOCK_NBYTES if stop is None else min(_BLOCK_NBYTES, stop - file.tell())):
            yield block


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files in a fixed order, split into training files and held-out files.

    Attributes:
        source: A description of the training text.
        train: The training files.
        validation: The held-out files, or those of texts for validation.
        num_skipped: Files that are not text.
        validation_source: A description of the texts for validation; None where a part of the text is held out.
    """

    source: str
    train: tuple[TextFile, ...]
    validation: tuple[TextFile, ...]
    num_skipped: int
    validation_source: str | None = None

    def fingerprint(self) -> str:
        """Return a hash of the names, contents and split."""
        digest = hashlib.sha256()
        for file in (*self.train, None, *self.validation):
            digest.update(b"\0split\0" if file is None else _identity(file).encode(errors="surrogateescape"))
        return digest.hexdigest()

    def describe(self) -> str:
        """Return one line on the files, bytes and source of the text."""
        skipped = f"; skipped {self.num_skipped} that are not text" if self.num_skipped else ""
        if self.validation_source is None:
            size = _size((*self.train, *self.validation))
            return f"{size} of {self.source} ({len(self.validation):,} held out){skipped}"
        validation = f"validation on {_size(self.validation)} of {self.validation_source}"
        return f"{_size(self.train)} of {self.source}; {validation}{skipped}"


def _identity(file: TextFile) -> str:
    source = f"\0source {file.source}" if file.source else ""
    return f"{source}\0{file.name}\0{file.nbytes}\0{file.digest}"


def _size(files: Sequence[TextFile]) -> str:
    return f"{len(files):,} files, {sum(file.nbytes for file in files):,} bytes"


def by_source(files: Iterable[TextFile]) -> Mapping[str, tuple[TextFile, ...]]:
    """Return the files of each source, in the order of the sources."""
    sources: dict[str, list[TextFile]] = {}
    for file in files:
        sources.setdefault(file.source, []).append(file)
    return {source: tuple(files_of_source) for source, files_of_source in sources.items()}


def collect(
    paths: Sequence[str],
    validation_fraction: float,
    *,
    validation_paths: Sequence[str] = (),
    without: Path | None = None,
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

    Raises:
        ConfigError: A path does not exist, cannot be read or is not text, or all files are empty.

    Effects: reads every file once, for its digest.
    """
    search = _Search(without)
    validation = search.texts("--validation-data", validation_paths) if validation_paths else []
    sources = by_source(search.texts("--data", paths))
    train: list[TextFile] = []
    for files in sources.values():
        if validation_paths:
            train += files
        else:
            first, second = _split(files, validation_fraction)
            train += first
            validation += second
    return Corpus(
        source=_description(paths),
        train=tuple(train),
        validation=tuple(validation),
        num_skipped=search.num_skipped,
        validation_source=", ".join(validation_paths) or None,
    )


def _description(paths: Sequence[str]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join(paths) if paths else f"the Python {version} standard library"


class _Search:
    """The search for text files by name of the source, which finds no file twice.

    Args:
        without: Folder to leave out.

    Attributes:
        num_skipped: Files so far that are not text.
    """

    def __init__(self, without: Path | None) -> None:
        self.num_skipped = 0
        self._real_paths: set[str] = set() if without is None else {os.path.realpath(without)}
        self._claimed: list[TextFile] = []

    def texts(self, flag: str, paths: Sequence[str]) -> list[TextFile]:
        """Return the files of all sources, in the order of names, the sources one after another.

        Raises:
            ConfigError: As `collect` does.
        """
        sources = named_texts(flag, paths) or {"": ()}
        return [file for source, named in sources.items() for file in self._texts_of(source, named, flag)]

    def _texts_of(self, source: str, paths: Sequence[str], flag: str) -> list[TextFile]:
        files = list(_find(paths, self._real_paths, flag))
        texts = [replace(file, source=source) for file in files if file is not None and file.nbytes]
        if not texts:
            elsewhere = " apart from the files that other names or --validation-data hold" if self._claimed else ""
            raise ConfigError(
                f"Expected text in {_description(paths)}{elsewhere}, got {len(files)} files with no text in them."
            )
        self._claimed += texts
        self.num_skipped += files.count(None)
        return sorted(texts, key=lambda file: file.name)


def _find(paths: Sequence[str], real_paths: set[str], flag: str) -> Iterator[TextFile | None]:
    if not paths:
        # Tests hold generated tables, and some distributions leave them out; site-packages is not the library.
        skip = ("site-packages", "dist-packages", "test", "tests", "idle_test")
        yield from _walk(Path(sysconfig.get_path("stdlib")), set(), suffix=".py", skip=skip)
    for path in map(Path, paths):
        if path.is_dir():
            yield from _walk(path, real_paths)
        elif _is_new(path, real_paths):
            yield _named(path, flag)


def _is_new(path: Path, real_paths: set[str]) -> bool:
    """True when no earlier path led to `path`; records files. Folders may be visited again for their files."""
    real = os.path.realpath(path)
    is_new = real not in real_paths
    if not os.path.isdir(real):
        real_paths.add(real)
    return is_new


def _named(path: Path, flag: str) -> TextFile:
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(
            f"Expected a text file or a folder as {flag}, got {str(path)!r}, which does not exist."
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(kind):  # Reading a pipe waits for the writer, and a pipe cannot be read twice.
        raise ConfigError(f"Expected a text file or a folder as {flag}, got {str(path)!r}, which is neither.")
    file = _scan(path.name, path, is_named=True)
    if file is None:
        raise ConfigError(
            f"Expected UTF-8 text in {str(path)!r}, got other bytes{_hint(path)}. Convert the file, or leave it out."
        )
    return file


def _hint(path: Path) -> str:
    """Guess the file's encoding or compression from its first two bytes."""
    with path.open("rb") as file:
        begins = file.read(2)
    return f" ({_NAMES_OF_MARKS[begins]})" if begins in _NAMES_OF_MARKS else ""


def _walk(root: Path, real_paths: set[str], *, suffix: str = "", skip: Sequence[str] = ()) -> Iterator[TextFile | None]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
        subfolders[:] = [name for name in subfolders if _is_new(Path(folder, name), real_paths)]
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(suffix)):
            if path.is_file() and _is_new(path, real_paths):  # Pipes are skipped: reading a pipe waits for the writer.
                yield _scan(path.relative_to(root).as_posix(), path)


def _scan(name: str, path: Path, *, is_named: bool = False) -> TextFile | None:
    """Return the file if all its bytes are UTF-8 text without NUL, else None. Effects: reads the file."""
    digest, decoder, nbytes = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for block in _blocks(path, 0):
            if b"\0" in block:
                return None
            decoder.decode(block)
            digest.update(block)
            nbytes += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    form = form_of(path.suffix.lower(), _decoded(path, 0, nbytes), is_named=is_named)
    return TextFile(name=name, path=path, stop=nbytes, digest=digest.hexdigest(), form=form)


def _decoded(path: Path, start: int, stop: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    return (decoder.decode(block) for block in _blocks(path, start, stop))


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"Expected to read {str(path)!r}, got {error.strerror}.")


def _split(files: Sequence[TextFile], fraction: float) -> tuple[Iterable[TextFile], Iterable[TextFile]]:
    """Hold out whole files, in the order of their names' hashes, up to the fraction; cut a single file in two."""
    if len(files) == 1:
        return _cut(files[0], fraction)
    total = sum(file.nbytes for file in files)
    held_out: set[int] = set()
    nbytes = 0
    for index in sorted(range(len(files)), key=lambda index: _hash(files[index].name)):
        # A file with more than half of all bytes always goes to training: held out, little text would be left.
        if nbytes < fraction * total and 2 * files[index].nbytes <= total:
            held_out.add(index)
            nbytes += files[index].nbytes
    train = [file for index, file in enumerate(files) if index not in held_out]
    return train, [files[index] for index in sorted(held_out)]


def _hash(name: str) -> bytes:
    return hashlib.sha256(os.fsencode(name)).digest()


def _cut(file: TextFile, fraction: float) -> tuple[Iterable[TextFile], Iterable[TextFile]]:
    """Split a file into its first and its last lines, or elements."""
    at = round(file.nbytes * (1 - fraction))
    if file.form == "array":
        return _parts(file, *_element_end(file, at))
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if line := content.rfind(b"\n", 0, at) + 1:
            at = line
        elif file.form == "lines":  # Half a document is none.
            at = content.find(b"\n", at) + 1 or file.nbytes
        while at and content[at : at + 1] and content[at] & 0xC0 == 0x80:  # a continuation byte of a character
            at -= 1
    return _parts(file, at)


def _element_end(file: TextFile, at: int) -> tuple[int, int]:
    """Return where the last element ends that ends by `at`, or else the first, and the number of elements to there."""
    end = num_elements = 0
    for element in elements(_decoded(file.path, 0, file.nbytes)):
        if num_elements and element.stop > at:
            break
        end, num_elements = element.stop, num_elements + 1
    return end, num_elements


def _parts(file: TextFile, at: int, num_elements: int = 0) -> tuple[list[TextFile], list[TextFile]]:
    ranges = ((0, at, 0), (at, file.nbytes, num_elements))
    first, *second = (
        replace(
            file,
            start=start,
            stop=stop,
            digest=_digest(file.path, start, stop),
            num_elements_before=num_elements_before,
        )
        for start, stop, num_elements_before in ranges
        if stop > start
    )
    return [first], second


def _digest(path: Path, start: int, stop: int) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path, start, stop):
        digest.update(block)
    return digest.hexdigest()
