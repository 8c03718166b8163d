"""Which calls of the CUDA driver are made; no driver is there to take them."""

from typing import Any

import pytest
import torch

from lamella_buffers import _driver

A_STREAM, LEGACY_DEFAULT = 7 << 20, 0


def _calls(monkeypatch: pytest.MonkeyPatch, stream: int, *, has_batches: bool, is_capturing: bool) -> list[str]:
    calls: list[str] = []

    def call(name: str, *_: Any) -> None:
        calls.append(name)

    monkeypatch.setattr(_driver, "_call", call)
    monkeypatch.setattr(_driver, "_has_batches", lambda: has_batches)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    _driver.Copies([(8, 16, 4), (32, 64, 4)]).enqueue(stream)
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


def test_no_copies_are_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_call", lambda *_: pytest.fail("Expected no call."))
    _driver.Copies([]).enqueue(A_STREAM)
