"""Every stored item has a checksum in a side file, and the loss of the side file is noticed."""

import io
import json
import zlib
from pathlib import Path

import pytest

from lamella_checkpoint import CheckpointDamaged
from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._formats.checksums import (
    CHECKSUMS_FILE,
    ByteSpan,
    Checksums,
    ChecksumStream,
    whole_file_checksum,
)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    stream = ChecksumStream(file := io.BytesIO())
    items = {}
    for parts in ([b"abc", b"", b"de"], [b"f" * 10_000], []):
        for part in parts:
            assert stream.write(part) == len(part)
        span, checksum = stream.end_item()
        items[span] = checksum
    (tmp_path / "data").write_bytes(file.getvalue())
    Manifest(extra={}, num_ranks=1, optimizer=None, checksums=CHECKSUMS_FILE).write(tmp_path)
    Checksums(files={"data": items, "lamella.json": whole_file_checksum(tmp_path / "lamella.json")}).write(tmp_path)
    return tmp_path


def checksums_of(path: Path) -> Checksums:
    checksums = Checksums.of(path)
    assert checksums is not None
    return checksums


def test_items_written_in_pieces_have_the_checksum_of_the_whole(stored: Path) -> None:
    checksums = checksums_of(stored)
    assert [*checksums.files["data"]] == [ByteSpan(0, 5), ByteSpan(5, 10_000), ByteSpan(10_005, 0)]
    assert checksums.expected("data", 0, 5) == zlib.crc32(b"abcde")
    content = (stored / "data").read_bytes()
    for span in checksums.files["data"]:
        checksums.check(stored / "data", span.offset, content[span.offset :][: span.length])
    checksums.check(stored / "lamella.json", 0, (stored / "lamella.json").read_bytes())


def test_a_flipped_bit_is_found_and_its_file_named(stored: Path) -> None:
    with pytest.raises(CheckpointDamaged, match="/data'.*of the 5 bytes at 0, got") as info:
        checksums_of(stored).check(stored / "data", 0, b"abcdd")
    assert info.value.file == str(stored / "data")


def test_bytes_that_were_not_written_as_one_item_are_refused(stored: Path) -> None:
    checksums = checksums_of(stored)
    for file, offset, data in [("data", 1, b"bcde"), ("data", 0, b"abcd"), ("other", 0, b"abcde")]:
        with pytest.raises(CheckpointDamaged, match="no checksum"):
            checksums.check(stored / file, offset, data)


def test_a_checkpoint_without_checksums_has_none(tmp_path: Path) -> None:
    assert Checksums.of(tmp_path) is None
    Manifest(extra={}, num_ranks=1, optimizer=None).write(tmp_path)
    assert Checksums.of(tmp_path) is None
    older = json.loads((tmp_path / "lamella.json").read_text())
    del older["checksums"]
    (tmp_path / "lamella.json").write_text(json.dumps(older))
    assert Checksums.of(tmp_path) is None


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"algorithm": "sha"}', '{"algorithm": "crc32", "files": 1}'])
def test_lost_or_unreadable_checksums_are_damage(stored: Path, content: str | None) -> None:
    (stored / CHECKSUMS_FILE).unlink() if content is None else (stored / CHECKSUMS_FILE).write_text(content)
    with pytest.raises(CheckpointDamaged, match=CHECKSUMS_FILE):
        Checksums.of(stored)
