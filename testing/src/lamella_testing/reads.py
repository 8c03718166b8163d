"""Reads of files, counted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The number of bytes of each read at a file's own position (`os.preadv`) while the context lasts."""
    sizes: list[int] = []
    preadv = os.preadv

    def count(*args: Any) -> int:
        sizes.append(num_read := preadv(*args))
        return num_read

    with patch.object(os, "preadv", count):
        yield sizes
