"""Exchange the memory of two storages: every view of a storage follows."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING or hasattr(torch.UntypedStorage, "_swap_data_ptr_"):

    def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Exchange the memory of two storages on one device, and their sizes.

        Effects: none on a stream. Each storage frees the memory in its hands when the storage dies.
        """
        storage._swap_data_ptr_(other)  # type: ignore[attr-defined]

    def can_swap_memory() -> bool:
        """Whether this torch can exchange the memory of two storages."""
        return True

else:  # torch before 2.12 has no such call: the fields of the two C++ objects are exchanged.
    # A StorageImpl: virtual table, reference counts, then the five fields: data pointer, deleter and context,
    # device, size. Flags and the allocator, which grows the storage, follow and stay.
    _Fields = ctypes.c_uint64 * 5
    _NUM_BYTES_BEFORE = 16

    def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        mine, theirs = _fields_of(storage), _fields_of(other)
        mine[:], theirs[:] = theirs[:], mine[:]

    def can_swap_memory() -> bool:
        """Whether two trial storages have their fields at the expected offsets."""
        storages = [torch.UntypedStorage(num_bytes) for num_bytes in (192, 320)]
        return all(
            (fields[0], fields[4]) == (storage.data_ptr(), storage.nbytes())
            for storage in storages
            for fields in [_fields_of(storage)]
        )

    def _fields_of(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_uint64]:
        return _Fields.from_address(storage._cdata + _NUM_BYTES_BEFORE)
