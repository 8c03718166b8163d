"""UTF-8 text files, read in blocks and never whole; `.gz` files are decompressed on the way."""

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final, cast

from lamella._data.json_files import Form, elements, form_of
from lamella._settings.options import ConfigError

_BLOCK_NBYTES: Final = 1 << 20
_PIECE_LENGTH: Final = 1 << 16
_GZIP_SUFFIX: Final = ".gz"
_GZIP_MARK: Final = b"\x1f\x8b"
_NAMES_OF_MARKS: Final = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    _GZIP_MARK: "gzip; a file whose name ends in .gz is decompressed",
    b"PA": "Parquet; a file whose name ends in .parquet is read as a table",
}


READ_ERRORS: Final = (OSError, EOFError, zlib.error)
"""The errors of reading a file that may be compressed."""


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A UTF-8 text file, or a byte range of a file. For a compressed file, bytes of the content.

    Attributes:
        name: Path relative to the searched folder, and so independent of the machine.
        path: The file.
        start: First byte of the range.
        stop: Byte after the last.
        digest: SHA-256 of the range's bytes, in hexadecimal digits.
        form: How documents lie in the file.
        num_elements_before: Elements of an array before the range.
        ends_file: The range goes up to the end of the file.
        source: The name of the file's source or validation set; empty without names.
    """

    name: str
    path: Path
    start: int = field(default=0)
    stop: int
    digest: str
    form: Form = "text"
    num_elements_before: int = 0
    ends_file: bool = True
    source: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.stop - self.start

    def num_records_before(self) -> int:
        """Return the number of lines or elements before the range. Effects: may read the file up to the range."""
        if self.form == "array" or not self.start:
            return self.num_elements_before
        return sum(block.count(b"\n") for block in blocks(self.path, 0, self.start))

    def records(self) -> Iterator[str]:
        """Yield the JSON texts of the documents: lines, some of them blank, or elements of the array.

        Raises:
            ConfigError: The file has changed since its digest was computed, or ends within its array.
        """
        if self.form != "array":
            return self.lines()
        return (element.text for element in elements(self._texts(), self.path if self.ends_file else None))

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces of at most 65,536 characters, cut at line ends unless a line is longer.

        Raises:
            ConfigError: The file has changed since its digest was computed.
        """
        return pieces_of(self._texts())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text, without line ends.

        Raises:
            ConfigError: The file has changed since its digest was computed.
        """
        remainder = ""
        for text in self._texts():
            *lines, remainder = (remainder + text).split("\n")
            yield from lines
        if remainder:
            yield remainder

    def cut(self, fraction: float) -> "tuple[list[TextFile], list[TextFile]]":
        """Split into the first lines, or elements, and a last part with about `fraction` of the bytes."""
        at = round(self.nbytes * (1 - fraction))
        if self.form == "array":
            return _parts(self, *_element_end(self, at))
        at = _line_end(self, at)
        return _parts(self, at - _num_continuation_bytes(self, at))

    def _texts(self) -> Iterator[str]:
        """Yield the text in pieces, without the byte order mark that a file may begin with."""
        digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8" if self.start else "utf-8-sig")()
        try:
            for block in blocks(self.path, self.start, self.stop):
                digest.update(block)
                yield decoder.decode(block)
            decoder.decode(b"", final=True)
        except (*READ_ERRORS, UnicodeDecodeError) as error:
            raise changed(self.path) from error
        if digest.hexdigest() != self.digest:
            raise changed(self.path)


def pieces_of(texts: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces of at most 65,536 characters, cut at line ends unless a line is longer."""
    remainder = ""
    for text in texts:
        remainder += text
        while len(remainder) > _PIECE_LENGTH:
            end = remainder.rfind("\n", 0, _PIECE_LENGTH) + 1 or _PIECE_LENGTH
            yield remainder[:end]
            remainder = remainder[end:]
    if remainder:
        yield remainder


def changed(location: object) -> ConfigError:
    """Return the refusal of a file that another program writes meanwhile."""
    return ConfigError(
        f"Expected {str(location)!r} to stay as it was while it is read, got another content. Run again."
    )


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's name in lower case, before the suffix of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [_GZIP_SUFFIX]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def opened(path: Path) -> BinaryIO:
    """Open a file's content; a `.gz` file without gzip's mark is read as plain bytes."""
    if path.suffix.lower() == _GZIP_SUFFIX and _mark(path) == _GZIP_MARK:
        return cast("BinaryIO", gzip.open(path, "rb"))
    return path.open("rb")


def _mark(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(2)


def blocks(path: Path, start: int, stop: int | None = None) -> Iterator[bytes]:
    """Yield a range of a file's content in blocks of at most 1 MiB."""
    with opened(path) as file:
        file.seek(start)
        while block := file.read(_BLOCK_NBYTES if stop is None else min(_BLOCK_NBYTES, stop - file.tell())):
            yield block


def scan_text(name: str, path: Path, *, is_named: bool) -> TextFile | None:
    """Return the file if all its bytes are UTF-8 text without NUL, else None.

    Args:
        name: Path relative to the searched folder.
        path: The file.
        is_named: The user named the file itself, not its folder.

    Raises:
        ConfigError: The file cannot be read, or is named and no text.

    Effects: reads the file.
    """
    digest, decoder, nbytes, num_lines = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0, 0
    try:
        with refused_damage(path):
            for block in blocks(path, 0):
                if (nul := block.find(b"\0")) >= 0:
                    raise UnicodeDecodeError("utf-8", block, nul, nul + 1, "NUL")
                decoder.decode(block)
                digest.update(block)
                nbytes += len(block)
                num_lines += block.count(b"\n")
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if is_named:
            line = num_lines + error.object[: error.start].count(b"\n") + 1
            raise no_text(path, f"line {line} of {str(path)!r}") from None
        return None
    form = form_of(path, suffix_of(path), decoded(path, 0, nbytes), is_named=is_named)
    return TextFile(name=name, path=path, stop=nbytes, digest=digest.hexdigest(), form=form)


def no_text(path: Path, position: str) -> ConfigError:
    """Return the refusal of a file that is no text, or no text at a position, in words."""
    return ConfigError(
        f"Expected UTF-8 text in {position}, got other bytes{_hint(path)}. Convert the file, or leave it out."
    )


def _hint(path: Path) -> str:
    """Guess the file's encoding or compression from its first two bytes."""
    mark = _mark(path)
    return f" ({_NAMES_OF_MARKS[mark]})" if mark in _NAMES_OF_MARKS and path.suffix.lower() != _GZIP_SUFFIX else ""


@contextmanager
def refused_damage(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into refusals.

    Raises:
        ConfigError: Names the file and the reason.
    """
    try:
        yield
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ConfigError:
    """Return the refusal of a file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
    return ConfigError(f"Expected to read {str(path)!r}, got {reason}.")


def decoded(path: Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield a range of a file's text, a block of at most 1 MiB at a time.

    Raises:
        UnicodeDecodeError: The range is no UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in blocks(path, start, stop):
        yield decoder.decode(block)
    decoder.decode(b"", final=True)


def nearest_end(ends: Iterable[int], at: int) -> tuple[int, int]:
    """Return the number of records to the end that is nearest to `at`, and the end; zeros without ends.

    The last end before `at` may lie far before, where a long record holds `at`.

    Args:
        ends: The end of each record, ascending.
        at: The place to be near to.
    """
    num_records = nearest = 0
    for number, end in enumerate(ends, start=1):
        if num_records and abs(end - at) >= abs(nearest - at):
            break
        num_records, nearest = number, end
    return num_records, nearest


def _line_end(file: TextFile, at: int) -> int:
    """Return the line end nearest to `at`, between lines with text; the end of a file of one line a document.

    A text is cut within the line, at `at`, where the line end would change the smaller part by more than half.
    """
    end = 0
    for start in (max(0, at - _BLOCK_NBYTES), 0):  # Nearly all lines are shorter than a block.
        _, end = nearest_end(_line_ends(file.path, start), at)
        if end and abs(end - at) <= at - start:
            break
    if file.form == "text" and (not end or 2 * abs(end - at) > min(at, file.nbytes - at)):
        return at
    return end or file.nbytes  # Half a document is none.


def _line_ends(path: Path, start: int) -> Iterator[int]:
    """Yield the end of each line that has text before and behind it; the text before a `start` above 0 counts."""
    ends: list[int] = []
    has_text = start > 0
    for block in blocks(path, start):
        for line in BytesIO(block):
            if line.strip():
                yield from ends if has_text else ()
                ends, has_text = [], True
            start += len(line)
            if line.endswith(b"\n"):
                ends.append(start)


def _num_continuation_bytes(file: TextFile, at: int) -> int:
    """Count the bytes before `at` of the character that a cut at `at` would split."""
    start = max(0, at - 3)
    content = b"".join(blocks(file.path, start, min(at + 1, file.nbytes)))
    index = at - start
    while 0 < index < len(content) and content[index] & 0xC0 == 0x80:
        index -= 1
    return at - start - index


def _element_end(file: TextFile, at: int) -> tuple[int, int]:
    """Return the end nearest to `at` of an element with another behind it, and the number of elements to there.

    The end of the file for an array of one element, which cannot be cut.
    """
    stops = (element.stop for element in elements(decoded(file.path, 0, file.nbytes)))
    num_elements, end = nearest_end((stop for stop, _ in pairwise(stops)), at)
    return end or file.nbytes, num_elements


def _parts(file: TextFile, at: int, num_elements: int = 0) -> tuple[list[TextFile], list[TextFile]]:
    ranges = ((0, at, 0), (at, file.nbytes, num_elements))
    first, *second = (
        replace(
            file,
            start=start,
            stop=stop,
            digest=_digest(file.path, start, stop),
            num_elements_before=num_elements_before,
            ends_file=stop == file.stop,
        )
        for start, stop, num_elements_before in ranges
        if stop > start
    )
    return [first], second


def _digest(path: Path, start: int, stop: int) -> str:
    digest = hashlib.sha256()
    for block in blocks(path, start, stop):
        digest.update(block)
    return digest.hexdigest()
