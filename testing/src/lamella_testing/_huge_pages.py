"""Huge pages under a process that forks ranks.

A fork copies an entry for each written page, the child's end takes the entry back, and both visit the
kernel's record of the page: 70,000 pages of a process with torch cost a rank 25 ms in the kernel. A huge page counts
once for 512, and leaves 12 ms.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_HUGE = 2 << 20  # bytes; on machines with other huge pages the kernel refuses, and pages stay unchanged
_MADV_COLLAPSE = 25
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 +(?:\[heap\])?\n(?:\w+:.*\n)*?Anonymous: +(\d+) kB\n")


def collapse() -> None:
    """Put the heap of this process, as far as the kernel can, on huge pages.

    Effects: copies the heap once, 0.3 s for a process with torch and its compiler.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for begin, end in _heap():
        for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            madvise(address, _HUGE, _MADV_COLLAPSE)  # No errors: without a huge page the process works as before.


def _heap() -> Iterator[tuple[int, int]]:
    """Return begin and end of each mapping of written memory; threads' stacks, mostly unwritten, are left out."""
    for begin, end, written in _MAPPING.findall(Path("/proc/self/smaps").read_text()):
        where = int(begin, 16), int(end, 16)
        if int(written) << 10 > (where[1] - where[0]) // 2:
            yield where
