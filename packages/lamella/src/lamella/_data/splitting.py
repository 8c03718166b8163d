"""The split of files into training files and held-out files, by their names and sizes alone."""

import hashlib
import os
from collections.abc import Iterable, Sequence

from lamella._data.tables import SourceFile


def split(files: Sequence[SourceFile], fraction: float) -> tuple[Iterable[SourceFile], Iterable[SourceFile]]:
    """Hold out whole files, in the order of their names' hashes, up to the fraction; cut a single file in two."""
    if len(files) == 1:
        return files[0].cut(fraction)
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
