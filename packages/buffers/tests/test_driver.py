"""The calls of the CUDA driver, taken by a stand-in."""

import ctypes
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamella_buffers import _driver

A_STREAM, LEGACY_DEFAULT = 7 << 20, 0


def _calls(monkeypatch: pytest.MonkeyPatch, stream: int, *, has_batches: bool, is_capturing: bool) -> list[str]:
    calls: list[str] = []

    def function(name: str) -> Any:
        def call(*_: Any) -> int:
            calls.append(name)
            return 0

        return call

    monkeypatch.setattr(_driver, "_function", function)
    monkeypatch.setattr(_driver, "_has_batches", lambda: has_batches)
    monkeypatch.setattr(_driver, "_allocation_of", lambda address: address)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    _driver.DeviceCopies([(8, 16, 4), (32, 64, 4)]).enqueue(stream)
    return calls


@pytest.mark.parametrize(
    ("stream", "has_batches", "is_capturing", "num_calls"),
    [
        pytest.param(A_STREAM, True, False, 1, id="one batch"),
        pytest.param(A_STREAM, False, False, 2, id="a driver without batches"),
        pytest.param(A_STREAM, True, True, 2, id="a capture, which takes none"),
        pytest.param(LEGACY_DEFAULT, True, False, 2, id="the legacy default stream, which takes none"),
    ],
)
def test_copies_are_one_batch_where_the_driver_takes_one(
    monkeypatch: pytest.MonkeyPatch, stream: int, has_batches: bool, is_capturing: bool, num_calls: int
) -> None:
    calls = _calls(monkeypatch, stream, has_batches=has_batches, is_capturing=is_capturing)
    assert len(calls) == num_calls
    assert ("Batch" in calls[0]) == (num_calls == 1)


MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 3), st.integers(0, 9), st.sampled_from([0, 1, 2])),
    unique_by=lambda move: move[:2],
)


@given(MOVES)
def test_copies_grouped_into_rows_unroll_to_the_same_copies(places: list[tuple[int, ...]]) -> None:
    """Each place is an allocation and an offset in pitches; some pitches are too far for the driver."""
    pitch = (1 << 31) // 4
    moves = [(a * 99 * pitch + i * pitch, b * 99 * pitch + j * pitch, nbytes) for a, i, b, j, nbytes in places]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_driver, "_allocation_of", lambda address: address // (99 * pitch))
        row_groups = list(_driver._as_rows(moves))
    unrolled = []
    for rows in row_groups:
        into, source = rows.into, rows.source
        unrolled += [
            (into.address + i * into.pitch, source.address + i * source.pitch, rows.width) for i in range(rows.height)
        ]
        assert rows.width <= into.pitch < 1 << 31 and rows.width <= source.pitch < 1 << 31
        assert into.kind == source.kind == 4, "CU_MEMORYTYPE_UNIFIED"
    assert sorted(unrolled) == sorted(move for move in moves if move[2] > 0)


def test_pieces_of_a_decoders_block_are_captured_as_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query and output, key and value, three of the feed-forward layer, two norms: four for each peer."""
    monkeypatch.setattr(_driver, "_allocation_of", lambda address: address >> 32)
    numels = {"norm": 4, "q": 64, "k": 16, "v": 16, "o": 64, "second norm": 4, "gate": 224, "up": 224, "down": 224}
    starts = list(itertools.accumulate(numels.values(), initial=0))
    moves = [
        (peer << 32 | start, start, numel)
        for start, numel in zip(starts, numels.values(), strict=False)
        for peer in (1, 2, 3)
    ]
    assert len(list(_driver._as_rows(moves))) == 4 * 3


def test_no_copies_are_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_function", lambda name: pytest.fail(f"Expected no call, got {name}."))
    _driver.DeviceCopies([]).enqueue(A_STREAM)


def test_structures_are_as_large_as_the_drivers() -> None:
    """`CUstreamBatchMemOpParams`, a union padded to six words, `CUmemcpyAttributes`, `CUDA_MEMCPY2D`."""
    assert ctypes.sizeof(_driver._MemoryOp) == 6 * 8
    assert _driver._MemoryOp.address.offset == 8 and _driver._MemoryOp.value.offset == 16
    assert ctypes.sizeof(_driver._CopyAttributes) == 6 * 4
    assert ctypes.sizeof(_driver._Handle) == 64
    assert ctypes.sizeof(_driver._RowCopy) == 2 * 7 * 8 + 2 * 8
    assert _driver._CopyEndpoint.address.offset == 4 * 8


def test_flags_are_waited_for_before_any_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_function", lambda name: partial(print, name))
    (call,) = _driver.FlagOps([64, 128], 5).calls(A_STREAM)
    name, stream, num_ops, ops, flags = call.args
    assert (name, stream, num_ops, flags) == ("cuStreamBatchMemOp_v2", A_STREAM, 4, 0)
    is_equal, wait, write = 1, 1, 2  # CU_STREAM_WAIT_VALUE_EQ, ..._MEM_OP_WAIT_VALUE_32, ..._MEM_OP_WRITE_VALUE_32
    assert [(op.operation, op.address, op.value, op.flags) for op in ops] == [
        (wait, 64, 5, is_equal),
        (wait, 128, 5, is_equal),
        (write, 64, 0, 0),
        (write, 128, 0, 0),
    ]


def test_prepared_copies_read_from_replaced_source_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_function", lambda name: print)
    copies = _driver.DeviceCopies([(8, 16, 4), (32, 64, 2)])
    copies.read_from([128, 256])
    calls = copies.calls(LEGACY_DEFAULT)
    assert [call.args for call in calls] == [(8, 128, 4, LEGACY_DEFAULT), (32, 256, 2, LEGACY_DEFAULT)]


def test_calls_that_were_made_are_not_made_again_and_a_refused_one_is_named() -> None:
    codes: list[int] = []
    calls = [_driver.Call(_code, code) for code in (0, 0, 201)]
    _driver.complete(calls[:1], codes)
    assert codes == [0]
    with pytest.raises(_driver.DriverError, match="_code to succeed, got the driver's error 201"):
        _driver.complete(calls, codes)
    assert codes == [0, 0, 201]


def _code(code: int) -> int:
    return code


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_missing_driver_and_a_refusal_are_errors_that_name_the_call(
    monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    def load(name: str) -> _Refusing:
        if not has_driver:
            raise OSError(f"{name}: cannot open shared object file")
        return _Refusing()

    monkeypatch.setattr(ctypes, "CDLL", load)
    _driver._function.cache_clear()
    expected = "{} to succeed, got the driver's error 201" if has_driver else "the CUDA driver to have {}, got: libcuda"
    try:
        with pytest.raises(_driver.DriverError, match=expected.format("cuMemGetAddressRange_v2")):
            _driver.share(64)
    finally:
        _driver._function.cache_clear()


class _Refusing:
    """A driver library that refuses every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 201
