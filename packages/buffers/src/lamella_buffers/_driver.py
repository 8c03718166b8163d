"""CUDA driver calls missing in torch: memory of other processes, batched copies, flags in memory."""

from __future__ import annotations

import ctypes
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch

_LAZY_PEER_ACCESS = 1
_EQUAL = 1
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_LEGACY_DEFAULT = 0
_UNIFIED = 4
_MAX_PITCH = 2**31 - 1
_COPY, _BATCH, _ROWS = "cuMemcpyDtoDAsync_v2", "cuMemcpyBatchAsync_v2", "cuMemcpy2DAsync_v2"


class DriverError(RuntimeError):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _MemoryOp(ctypes.Structure):
    """A wait for a value or a write, padded to the size of the driver's union."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("rest", ctypes.c_uint64 * 2),
    )


class _CopyAttributes(ctypes.Structure):
    """Access order of a batch's sources; hints stay empty."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class _CopyEndpoint(ctypes.Structure):
    """Source or destination of rows: an address and a pitch."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _RowCopy(ctypes.Structure):
    """A copy of rows of equal width."""

    _fields_ = (
        ("source", _CopyEndpoint),
        ("into", _CopyEndpoint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order, behind the kernels that write them.
_IN_STREAM_ORDER = _CopyAttributes(order=1)


class Shared(NamedTuple):
    """Address of this process's memory for another process: the allocation's handle, and an offset into it."""

    handle: bytes
    offset: int


def share(address: int) -> Shared:
    """Let other processes on this host map the allocation around a device address.

    Raises:
        DriverError: The memory cannot be shared (expandable segments, another kind of allocation).

    Effects: none on a stream.
    """
    # The driver shares whole allocations: the offset inside travels beside the handle.
    base, handle = _allocation_of(address), _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return Shared(bytes(memoryview(handle).cast("B")), address - base)


def map_shared(shared: Shared) -> int:
    """Map another process's memory for the rest of this process's life.

    Returns:
        The memory's address on this process's current device.

    Raises:
        DriverError: This device cannot reach the memory.
    """
    address = ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(shared.handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value + shared.offset


Call = partial[int]
"""A call of the driver with its arguments; returns an error code."""


def complete(calls: Sequence[Call], codes: list[int]) -> None:
    """Make the calls without a code yet, and append their codes.

    After a keyboard interrupt `codes` tells exactly the calls made. Handlers of signals run between bytecodes: a Python
    loop could be interrupted between a call and its record, and a signal to a peer sent twice is a signal too many.

    Raises:
        DriverError: The driver refused a call.
    """
    codes.extend(map(operator.call, calls[len(codes) :] if codes else calls))
    if any(codes):
        index = next(i for i, code in enumerate(codes) if code)
        _refuse(calls[index].func.__name__, codes[index])


class DeviceCopies:
    """Copies of device memory, within a device or between two, as argument arrays of the driver.

    Args:
        moves: Destination, source and bytes of each copy. No copy reads or writes another copy's destination.
    """

    def __init__(self, moves: Iterable[tuple[int, int, int]]) -> None:
        into, sources, nbytes = zip(*moves, strict=True) if (moves := list(moves)) else ((), (), ())
        self._num = num = len(into)
        self._into = (ctypes.c_uint64 * num)(*into)
        self._sources = (ctypes.c_uint64 * num)(*sources)
        self._nbytes = (ctypes.c_size_t * num)(*nbytes)
        # Kept with the object: ctypes passes the arrays' addresses, from which the driver reads at every call.
        self._batch = (
            self._into,
            self._sources,
            self._nbytes,
            ctypes.c_size_t(num),
            ctypes.byref(_IN_STREAM_ORDER),
            ctypes.byref(ctypes.c_size_t(0)),  # index of the attributes' first copy
            ctypes.c_size_t(1),
        )

    def read_from(self, sources: list[int]) -> None:
        """Copy from new addresses, an address for each copy, from the next call on.

        The driver read the earlier addresses at the call: copies in flight are unaffected.
        """
        # Into the same array, whose address `_batch` holds.
        self._sources[:] = sources  # type: ignore[assignment]

    def enqueue(self, stream: int) -> None:
        """Put the copies on a stream, which must be torch's current stream.

        Effects: copies by copy engines between different devices; ordered after earlier work on the stream, and before
            later work.
        """
        complete(self.calls(stream), [])

    def calls(self, stream: int) -> list[Call]:
        """The calls that put the copies on a stream, which must be torch's current stream.

        A single batch, if the driver has batches: a tenth of the host time of separate calls, and no gaps on the copy
        engines. The legacy default stream (torch's default) refuses batches, and graphs cannot capture them: a captured
        graph gets copies of equal size as rows of two-dimensional copies, where spacing allows.
        """
        if not self._num:
            return []
        moves = zip(self._into, self._sources, self._nbytes, strict=True)
        if stream != _LEGACY_DEFAULT and torch.cuda.is_current_stream_capturing():
            return [partial(_function(_ROWS), ctypes.byref(rows), stream) for rows in _as_rows(moves)]
        if stream != _LEGACY_DEFAULT and _has_batches():
            return [partial(_function(_BATCH), *self._batch, stream)]
        return [partial(_function(_COPY), *move, stream) for move in moves]


def _as_rows(moves: Iterable[tuple[int, int, int]]) -> Iterator[_RowCopy]:
    """The same copies as few: equal sizes, equally spaced, between the same two allocations become rows of a copy.

    Two pieces of equal weights always qualify, and so do all pieces of a layer's experts.
    """
    alike: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for into, source, nbytes in moves:
        if nbytes:
            alike[_allocation_of(into), _allocation_of(source), nbytes].append((into, source))
    for (_, _, nbytes), places in alike.items():
        for run in _runs(sorted(places), nbytes):
            pitches = _apart(*run[:2]) if len(run) > 1 else (nbytes, nbytes)
            sides = (_CopyEndpoint(kind=_UNIFIED, address=at, pitch=by) for at, by in zip(run[0], pitches, strict=True))
            yield _RowCopy(into=next(sides), source=next(sides), width=nbytes, height=len(run))


def _runs(places: Iterable[tuple[int, int]], nbytes: int) -> Iterator[list[tuple[int, int]]]:
    """Cut places (destination, source) into runs of equal spacing, within the largest pitch."""
    run: list[tuple[int, int]] = []
    for place in places:
        if run:
            pitches = _apart(run[-1], place)
            # The driver refuses a pitch below the width, or above the limit.
            is_pitch = all(nbytes <= pitch <= _MAX_PITCH for pitch in pitches)
            if not is_pitch or (len(run) > 1 and pitches != _apart(*run[:2])):
                yield run
                run = []
        run.append(place)
    yield run


def _apart(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return other[0] - one[0], other[1] - one[1]


def _allocation_of(address: int) -> int:
    base = ctypes.c_uint64()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(address))
    return base.value


class FlagOps:
    """Waits until each flag has a value, then resets the flag to 0. Prepared once; can be captured in a graph.

    Args:
        addresses: Addresses of 32-bit words in this device's memory.
        value: Not 0.
    """

    def __init__(self, addresses: Sequence[int], value: int) -> None:
        # All waits first: operations of a batch run in order, so no flag is reset before its value has come.
        ops = [_MemoryOp(_WAIT_VALUE_32, address, value, _EQUAL) for address in addresses]
        ops += [_MemoryOp(_WRITE_VALUE_32, address, 0, 0) for address in addresses]
        self._ops = (_MemoryOp * len(ops))(*ops)

    def calls(self, stream: int) -> list[Call]:
        """The call that puts waits and resets on a stream. No multiprocessor is used.

        Effects of the call: later work on the stream waits for the flags.
        """
        return [partial(_function("cuStreamBatchMemOp_v2"), stream, len(self._ops), self._ops, 0)]


# Declared for every call: ctypes would pass a Python int as a C int, and cut a 64-bit address.
_ARGUMENTS: dict[str, list[Any]] = {
    "cuMemGetAddressRange_v2": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64],
    "cuIpcGetMemHandle": [ctypes.c_void_p, ctypes.c_uint64],
    "cuIpcOpenMemHandle_v2": [ctypes.c_void_p, _Handle, ctypes.c_uint],
    _COPY: [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p],
    _ROWS: [ctypes.c_void_p, ctypes.c_void_p],
    _BATCH: [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ],
    "cuStreamBatchMemOp_v2": [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint],
}


@cache
def _has_batches() -> bool:
    """Whether the driver has batched copies (CUDA 13)."""
    try:
        _function(_BATCH)
    except DriverError:
        return False
    return True


@cache
def _function(name: str) -> Any:
    try:
        # At the first call, not at import: machines without a driver import this module, and older drivers lack some
        # names.
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise DriverError(f"Expected the CUDA driver to have {name}, got: {error}.") from error
    function.argtypes = _ARGUMENTS[name]
    function.restype = ctypes.c_int
    return function


def _call(name: str, *arguments: Any) -> None:
    if code := _function(name)(*arguments):
        _refuse(name, code)


def _refuse(name: str, code: int) -> NoReturn:
    raise DriverError(f"Expected {name} to succeed, got the driver's error {code}.")
