"""Which text a run reads, and how it is split into what is trained on and what is held out.

Everything here follows from the files' names and contents and from the configuration, on any machine, so that a resumed
run finds the same text. `Corpus.fingerprint` says which text it is. Files are read in blocks, and none is held whole.
"""

import codecs
import hashlib
import mmap
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lamella._options import ConfigError

_BLOCK_NBYTES: Final = 1 << 20
_PIECE_LENGTH: Final = 1 << 16
_NAMES_OF_MARKS: Final = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16", b"\x1f\x8b": "gzip"}


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file of UTF-8 text, or a part of one.

    Attributes:
        name: Relative to the folder that the file was found in, so that the name does not depend on the machine.
        path: Where the file is.
        start: The part's first byte.
        stop: The byte after the part's last.
        digest: SHA-256 of the part's bytes, in hexadecimal digits.
    """

    name: str
    path: Path
    start: int = field(default=0)
    stop: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.stop - self.start

    def pieces(self) -> Iterator[str]:
        """The text in pieces of some 64 thousand characters, which end where a line ends unless a line is longer.

        Raises:
            ConfigError: The file is no longer what it was.
        """
        rest = ""
        for text in self._texts():
            rest += text
            while len(rest) > _PIECE_LENGTH:
                end = rest.rfind("\n", 0, _PIECE_LENGTH) + 1 or _PIECE_LENGTH
                yield rest[:end]
                rest = rest[end:]
        if rest:
            yield rest

    def lines(self) -> Iterator[str]:
        """The lines of the text, without the line ends and without a byte order mark.

        Raises:
            ConfigError: The file is no longer what it was.
        """
        rest, is_first = "", True
        for text in self._texts():
            *lines, rest = (rest + (text.removeprefix("\ufeff") if is_first else text)).split("\n")
            is_first = False
            yield from lines
        if rest:
            yield rest

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
    """Files in a fixed order, split into those to train on and those held out."""

    source: str
    train: tuple[TextFile, ...]
    validation: tuple[TextFile, ...]
    num_skipped: int

    def fingerprint(self) -> str:
        """Hash of the names, contents and split."""
        digest = hashlib.sha256()
        for file in (*self.train, None, *self.validation):
            digest.update(b"\0split\0" if file is None else f"\0{file.name}\0{file.nbytes}\0{file.digest}".encode())
        return digest.hexdigest()

    def describe(self) -> str:
        """What was read, in one line."""
        files = (*self.train, *self.validation)
        nbytes = sum(file.nbytes for file in files)
        skipped = f"; skipped {self.num_skipped} that are not text" if self.num_skipped else ""
        return f"{len(files):,} files, {nbytes:,} bytes of {self.source} ({len(self.validation):,} held out){skipped}"


def collect(paths: Sequence[str], validation_fraction: float, *, without: Path | None = None) -> Corpus:
    """Find the text files under `paths`, or the standard library's sources if there are none, and split them.

    Files that are not UTF-8 text are skipped in folders and refused when named. A file that several paths lead to is
    read once: read twice, its text could be trained on and held out.

    Args:
        without: A folder that is left out: the run's own, whose files change while the run goes on.

    Raises:
        ConfigError: A path does not exist, cannot be read or is not text, or nothing with a byte in it was found.
    """
    files = list(_find(paths, without))
    texts = [file for file in files if file is not None and file.nbytes]
    if not texts:
        raise ConfigError(f"Expected text in {_names(paths)}, got {len(files)} files with no text in them.")
    train, validation = _split(sorted(texts, key=lambda file: file.name), validation_fraction)
    return Corpus(source=_names(paths), train=tuple(train), validation=tuple(validation), num_skipped=files.count(None))


def _names(paths: Sequence[str]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join(paths) if paths else f"the Python {version} standard library"


def _find(paths: Sequence[str], without: Path | None) -> Iterator[TextFile | None]:
    if not paths:
        # Tests hold generated tables, and some distributions leave them out; site-packages is not the library.
        skip = ("site-packages", "dist-packages", "test", "tests", "idle_test")
        yield from _walk(Path(sysconfig.get_path("stdlib")), set(), suffix=".py", skip=skip)
    found: set[str] = set() if without is None else {os.path.realpath(without)}
    for path in map(Path, paths):
        if path.is_dir():
            yield from _walk(path, found)
        elif _is_new(path, found):
            yield _named(path)


def _is_new(path: Path, found: set[str]) -> bool:
    """Whether no path led to a file or folder before; notes that one does now."""
    real = os.path.realpath(path)
    is_new = real not in found
    if not os.path.isdir(real):
        found.add(real)
    return is_new


def _named(path: Path) -> TextFile:
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(
            f"Expected a text file or a folder as --data, got {str(path)!r}, which does not exist."
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(kind):  # Reading a pipe waits for its writer, and it cannot be read again.
        raise ConfigError(f"Expected a text file or a folder as --data, got {str(path)!r}, which is neither.")
    file = _scan(path.name, path)
    if file is None:
        raise ConfigError(
            f"Expected UTF-8 text in {str(path)!r}, got other bytes{_hint(path)}. Convert the file, or leave it out."
        )
    return file


def _hint(path: Path) -> str:
    """What the bytes may be, by how they begin."""
    with path.open("rb") as file:
        begins = file.read(2)
    return f" ({_NAMES_OF_MARKS[begins]})" if begins in _NAMES_OF_MARKS else ""


def _walk(root: Path, found: set[str], *, suffix: str = "", skip: Sequence[str] = ()) -> Iterator[TextFile | None]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
        subfolders[:] = [name for name in subfolders if _is_new(Path(folder, name), found)]
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(suffix)):
            if path.is_file() and _is_new(path, found):  # Not a pipe: reading one waits for its writer.
                yield _scan(path.relative_to(root).as_posix(), path)


def _scan(name: str, path: Path) -> TextFile | None:
    """A file, if all of it is text. Effects: reads it."""
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
    return TextFile(name=name, path=path, stop=nbytes, digest=digest.hexdigest())


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"Expected to read {str(path)!r}, got {error.strerror}.")


def _split(files: list[TextFile], fraction: float) -> tuple[Iterable[TextFile], Iterable[TextFile]]:
    """Whole files, in the order of their names' hashes, until the fraction is held out; one file alone is cut."""
    if len(files) == 1:
        return _cut(files[0], fraction)
    total = sum(file.nbytes for file in files)
    held_out: set[int] = set()
    nbytes = 0
    for index in sorted(range(len(files)), key=lambda index: _hash(files[index].name)):
        # A file with more than half of all bytes is what the run is about: it is trained on.
        if nbytes < fraction * total and 2 * files[index].nbytes <= total:
            held_out.add(index)
            nbytes += files[index].nbytes
    train = [file for index, file in enumerate(files) if index not in held_out]
    return train, [files[index] for index in sorted(held_out)]


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _cut(file: TextFile, fraction: float) -> tuple[Iterable[TextFile], Iterable[TextFile]]:
    """The file's first lines, and its last ones."""
    at = round(file.nbytes * (1 - fraction))
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if line := content.rfind(b"\n", 0, at) + 1:
            at = line
        while at and content[at : at + 1] and content[at] & 0xC0 == 0x80:  # Inside a character.
            at -= 1
    parts = ((start, stop) for start, stop in ((0, at), (at, file.nbytes)) if stop > start)
    first, *second = (
        replace(file, start=start, stop=stop, digest=_digest(file.path, start, stop)) for start, stop in parts
    )
    return [first], second


def _digest(path: Path, start: int, stop: int) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path, start, stop):
        digest.update(block)
    return digest.hexdigest()
