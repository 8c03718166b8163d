"""Memory that changes hands between storages, so that every view of a storage follows."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING or hasattr(torch.UntypedStorage, "_swap_data_ptr_"):

    def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Exchange the memory of two storages on one device, and their sizes.

        Effects: none on a stream. Each memory is freed with the storage that holds it at the end.
        """
        storage._swap_data_ptr_(other)  # type: ignore[attr-defined]

    def can_swap_memory() -> bool:
        """Whether this torch can exchange the memory of two storages.

        Effects: none.
        """
        return True

else:  # torch before 2.12 has no call for it: the fields of the two C++ objects are exchanged.
    # A StorageImpl: its virtual table, its reference counts, then where the memory is, how and through what it is
    # freed, its device, and its size. Flags and the allocator, which grows the storage, follow and stay.
    _Fields = ctypes.c_uint64 * 5
    _NUM_BYTES_BEFORE = 16

    def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        mine, theirs = _fields_of(storage), _fields_of(other)
        mine[:], theirs[:] = theirs[:], mine[:]

    def can_swap_memory() -> bool:
        """Whether the fields are where they are looked for."""
        storages = [torch.UntypedStorage(num_bytes) for num_bytes in (192, 320)]
        return all(
            (fields[0], fields[4]) == (storage.data_ptr(), storage.nbytes())
            for storage in storages
            for fields in [_fields_of(storage)]
        )

    def _fields_of(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_uint64]:
        return _Fields.from_address(storage._cdata + _NUM_BYTES_BEFORE)
