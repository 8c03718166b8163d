"""The split of files into training files and held-out files, by their names and sizes alone."""

import hashlib
import os
from collections.abc import Iterable, Sequence

from lamella._data.tables import SourceFile


def split(files: Sequence[SourceFile], fraction: float) -> tuple[Iterable[SourceFile], Iterable[SourceFile]]:
    """Hold out a fraction of the bytes: files in the order of their names' hashes, without those that are too large.

    Where these files fall short of the fraction, the end of the largest file makes up the rest.
    """
    total = sum(file.nbytes for file in files)
    # With few files, a whole one may be many times the fraction: text that the user meant to train on.
    bound = min(2 * fraction, (1 + fraction) / 2) * total
    held_out: set[int] = set()
    nbytes = 0
    for index in sorted(range(len(files)), key=lambda index: _hash(files[index].name)):
        if nbytes < fraction * total and nbytes + files[index].nbytes <= bound:
            held_out.add(index)
            nbytes += files[index].nbytes
    parts = [([], [file]) if index in held_out else ([file], []) for index, file in enumerate(files)]
    if (missing_nbytes := fraction * total - nbytes) >= 1:
        trained = [index for index in range(len(files)) if index not in held_out]
        largest = max(trained, key=lambda index: files[index].nbytes)
        train, validation = files[largest].cut(missing_nbytes / files[largest].nbytes)
        parts[largest] = [*train], [*validation]
    return [file for train, _ in parts for file in train], [file for _, validation in parts for file in validation]


def _hash(name: str) -> bytes:
    return hashlib.sha256(os.fsencode(name)).digest()
