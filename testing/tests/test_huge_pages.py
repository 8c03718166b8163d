import ctypes
import mmap

from lamella_testing import _huge_pages

MIB = 1 << 20


def _pages(mebibytes: int) -> mmap.mmap:
    return mmap.mmap(-1, mebibytes * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _in_heap(pages: mmap.mmap) -> bool:
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    last = first + len(pages) - 1
    return any(begin <= first and last < end for begin, end in _huge_pages._heap())


def test_written_memory_is_moved_and_keeps_its_values() -> None:
    pages = _pages(16)
    values = bytes(range(256)) * (len(pages) // 256)
    pages[:] = values
    assert _in_heap(pages)
    _huge_pages.collapse()
    assert pages[:] == values


def test_unwritten_memory_stays_unwritten() -> None:
    assert not _in_heap(_pages(1024))
