"""A small tensor's archive is torch's own to the byte, and torch writes one for all tensors of a shape and dtype."""

import io
from typing import Any

import pytest
import torch

from lamella_checkpoint._formats import small_archives as _small_archives
from lamella_checkpoint._formats.checksums import ChecksumStream
from lamella_checkpoint._formats.dcp_write import without_archive_checksums
from lamella_testing.bits import random_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16)


def saved(value: object) -> bytes:
    _small_archives.save(value, ChecksumStream(file := io.BytesIO()))
    return file.getvalue()


def of_torch(value: object) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


class Marked(torch.Tensor):
    """A subclass, which an archive names."""


def with_attribute() -> torch.Tensor:
    tensor = torch.arange(4.0)
    tensor.mark = "kept"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (4, 2), (0, 3), (2, 1, 3)], ids=str)
def test_plain_tensors_have_the_bytes_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with without_archive_checksums():
        for _ in range(2):
            tensor = random_bits(shape, dtype)
            assert saved(tensor) == of_torch(tensor)


ODD: dict[str, Any] = {
    "view": torch.arange(8.0)[2:6],
    "column": torch.arange(8.0).view(4, 2).t(),
    "subclass": torch.arange(4.0).as_subclass(Marked),
    "attribute": with_attribute(),
    "parameter": torch.nn.Parameter(torch.arange(4.0)),
    "gradient": torch.arange(4.0, requires_grad=True),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "large": torch.arange(20_000.0),
    "object": {"lr": 0.1},
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_values_have_the_bytes_of_torch(kind: str) -> None:
    with without_archive_checksums():
        assert saved(ODD[kind]) == of_torch(ODD[kind])


def test_archives_with_checksums_keep_the_checksums_of_their_elements() -> None:
    with without_archive_checksums():
        saved(torch.zeros(3))
    for tensor in (torch.arange(3.0), torch.ones(3)):
        assert saved(tensor) == of_torch(tensor)


def test_torch_writes_one_archive_for_a_thousand_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    torch_save = torch.save

    def counting(value: object, stream: Any) -> None:
        calls.append(value)
        torch_save(value, stream)

    monkeypatch.setattr(torch, "save", counting)
    with without_archive_checksums():
        for index in range(1000):
            saved(torch.full((3, 7, 5), float(index)))
    assert len(calls) == 1
