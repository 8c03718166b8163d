"""Flipped bytes of a `torch.save` file: each flip that `torch.load` would overlook is found, and the record named."""

import io
import zipfile
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Self

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from lamella_checkpoint import CheckpointDamaged, FormatUnknown
from lamella_convert import open_checkpoint, verify
from lamella_testing import run_ranks
from lamella_testing.bits import same_bits

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support",
    "ignore:torch.quantize_per_tensor",
    "ignore:TypedStorage is deprecated",
    "ignore:Validating sparse tensor invariants",
)

base = torch.arange(1.0, 25.0).reshape(4, 6)


class Wrapper(torch.Tensor):
    """A subclass with elements in a tensor beside a separate storage."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner  # type: ignore[assignment, method-assign]

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError(func)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return Wrapper, (self.inner,)


class Holder:
    """An object with a tensor, itself no tensor."""

    def __init__(self) -> None:
        self.inner = base.clone()


KINDS: dict[str, Callable[[], object]] = {
    "plain": base.clone,
    "part": lambda: base.clone()[1:3],
    "odd bytes": lambda: torch.arange(13, dtype=torch.uint8)[:12].view(torch.float32),
    "parameter": lambda: nn.Parameter(base.clone()),
    "two tensors": lambda: TwoTensor(base.clone(), base + 1),  # type: ignore[no-untyped-call]
    "wrapper": lambda: Wrapper(base.clone()),
    "COO": lambda: base.to_sparse(),
    "CSR": lambda: base.to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(base, 0.5, 3, torch.quint8),
    "conjugate": lambda: torch.complex(base, base + 1).conj(),
    "negative": lambda: torch.complex(base, base + 1).conj().imag,
    "attributes": lambda: nn.Buffer(base.clone()),
    "object": Holder,
    "storage": lambda: base.clone().untyped_storage(),
    "inside a tuple": lambda: (1, (TwoTensor(base.clone(), base + 1),)),  # type: ignore[no-untyped-call]
}


def saved(value: object, **options: bool) -> bytes:
    torch.save(value, buffer := io.BytesIO(), **options)
    return buffer.getvalue()


def record_places(content: bytes) -> dict[str, slice]:
    """The records of an archive by name, as slices of bytes."""
    reader = torch._C.PyTorchFileReader(io.BytesIO(content))
    starts = {name: reader.get_record_offset(name) for name in reader.get_all_records()}  # type: ignore[attr-defined]
    return {name: slice(start, start + len(reader.get_record(name))) for name, start in starts.items()}


def flipped(content: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def every_record_is_verified(file: Path, content: bytes, is_named: str) -> None:
    for name, place in record_places(content).items():
        if name.startswith("data/") and place.start < place.stop:
            file.write_bytes(flipped(content, (place.start + place.stop) // 2))
            [problem] = verify(file).problems
            assert problem.file == str(file)
            assert f"({name})" in problem.problem and is_named in problem.problem, problem


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_flipped_bit_is_named_by_record_and_tensor_for_every_kind_of_tensor(
    tmp_path: Path, make: Callable[[], object]
) -> None:
    content = saved({"model": {"first": torch.ones(2), "w": make()}})
    (tmp_path / "a.pt").write_bytes(content)
    verification = verify(tmp_path / "a.pt")
    assert verification and verification.num_unverified_bytes == 0, str(verification)
    assert verification.num_bytes == sum(place.stop - place.start for place in record_places(content).values())
    every_record_is_verified(tmp_path / "a.pt", content, "'model.")


def test_a_flipped_bit_of_a_distributed_tensor_is_named(tmp_path: Path) -> None:
    def save_sharded() -> None:
        mesh = init_device_mesh("cpu", (1,))
        (tmp_path / "a.pt").write_bytes(saved({"w": distribute_tensor(base, mesh)}))
        dist.barrier()

    run_ranks(save_sharded, 1)
    assert verify(tmp_path / "a.pt")
    every_record_is_verified(tmp_path / "a.pt", (tmp_path / "a.pt").read_bytes(), "'w (")


@pytest.mark.parametrize("name", ["data.pkl", "byteorder", "version", ".data/serialization_id"])
def test_a_flipped_bit_of_any_other_record_is_named_and_the_rest_is_still_verified(tmp_path: Path, name: str) -> None:
    content = saved({"w": base.clone(), "v": base.clone()})
    places = record_places(content)
    damaged_content = flipped(flipped(content, places[name].start), places["data/1"].start)
    (tmp_path / "a.pt").write_bytes(damaged_content)
    text = str(verify(tmp_path / "a.pt"))
    assert f"{name!r}" in text and "data/1" in text and "data/0" not in text


def test_a_record_that_a_tensor_needs_and_that_is_absent_is_named(tmp_path: Path) -> None:
    content = saved({"w": TwoTensor(base.clone(), base + 1)})  # type: ignore[no-untyped-call]
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(tmp_path / "a.pt", "w") as lacking:
        for info in archive.infolist():
            if not info.filename.endswith("data/1"):
                lacking.writestr(info.filename, archive.read(info))
    [problem] = verify(tmp_path / "a.pt").problems
    assert problem.problem == "no record 'data/1', which 'w' needs"


def test_tensors_that_share_a_storage_are_told_once_together(tmp_path: Path) -> None:
    shared = base.clone()
    content = saved(dict.fromkeys("abcde", shared[0]))
    (tmp_path / "a.pt").write_bytes(flipped(content, record_places(content)["data/0"].start))
    [problem] = verify(tmp_path / "a.pt").problems
    assert "'a and 4 more (data/0)'" in problem.problem


@pytest.mark.filterwarnings("default:Sparse invariant checks:UserWarning")  # of torch 2.11, once a process
@pytest.mark.parametrize("kind", ["two tensors", "COO", "inside a tuple"])
def test_a_flipped_bit_in_a_value_that_torch_reads_is_found(tmp_path: Path, kind: str) -> None:
    content = saved({"first": torch.ones(2), "w": KINDS[kind]()})
    last = max(name for name in record_places(content) if name.startswith("data/"))
    (tmp_path / "a.pt").write_bytes(flipped(content, record_places(content)[last].start))
    with pytest.raises(CheckpointDamaged, match=f"with the checksum .*{last}"):
        open_checkpoint(tmp_path / "a.pt", trust=True).raw.read_object("w")
    open_checkpoint(tmp_path / "a.pt", trust=True, verify=False).raw.read_object("w")


def test_of_a_file_from_before_torch_1_6_nothing_is_called_verified(tmp_path: Path) -> None:
    content = saved({"w": base}, _use_new_zipfile_serialization=False)
    (tmp_path / "a.pt").write_bytes(content)
    progress: list[tuple[int, int]] = []
    verification = verify(tmp_path / "a.pt", on_progress=lambda *so_far: progress.append(so_far))
    assert verification and verification.num_bytes == verification.num_unverified_bytes == len(content)
    assert progress[-1] == (len(content), len(content))
    assert f"{len(content)} of {len(content)} bytes have no checksum" in str(verification)


PLAIN = {"model": {"w": base, "b": torch.arange(40.0).bfloat16()}, "lr": 0.1, "tied": base}
FILES: dict[str, Callable[[], bytes]] = {
    "plain": lambda: saved(PLAIN),
    "sparse": lambda: saved({"w": base.to_sparse(), "c": torch.complex(base, base).conj()}),
    "rewritten": lambda: _rewritten(saved(PLAIN)),
}


def _rewritten(content: bytes) -> bytes:
    """As by Python's own zip writer: no padding, no ZIP64 records."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out := io.BytesIO(), "w") as other:
        for info in archive.infolist():
            other.writestr(info.filename, archive.read(info))
    return out.getvalue()


def is_read_as_before(file: Path, value: object) -> bool:
    """Whether torch reads the saved values, from memory and from a mapped file; an error is no."""
    try:
        loads = [torch.load(file, weights_only=True, mmap=mmap) for mmap in (False, True)]
    except Exception:  # noqa: BLE001  Any of torch's errors.
        return False
    return all(_is_same(loaded, value) for loaded in loads)


def _is_same(one: object, other: object) -> bool:
    if isinstance(other, dict):
        return isinstance(one, dict) and [*one] == [*other] and all(_is_same(one[key], other[key]) for key in other)
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and same_bits(
            one.to_dense().resolve_conj(), other.to_dense().resolve_conj()
        )
    return type(one) is type(other) and one == other


def found_or_harmless(file: Path, content: bytes, value: object, where: object) -> None:
    file.write_bytes(content)
    assert not verify(file) or is_read_as_before(file, value), where


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_a_flipped_bit_anywhere_in_a_torch_file_is_found_or_harmless(tmp_path: Path, make: Callable[[], bytes]) -> None:
    """Local headers, padding, descriptors, the directory, the end records: every region of the file."""
    content = make()
    value = torch.load(io.BytesIO(content), weights_only=True)
    for position in range(0, len(content), 11):
        found_or_harmless(tmp_path / "a.pt", flipped(content, position, position % 8), value, position)


def test_contents_that_are_marked_as_a_directory_are_found(tmp_path: Path) -> None:
    """torch reads no elements, and leaves the destination's memory unchanged."""
    content = saved(PLAIN)
    directory = content.index(b"PK\1\2")
    attributes = content.index(b"data/0", directory) - len("archive/") - 46 + 38
    (tmp_path / "a.pt").write_bytes(flipped(content, attributes, 4))
    [problem] = verify(tmp_path / "a.pt").problems
    assert "data/0' is marked as a directory" in problem.problem


@settings(deadline=None, derandomize=True, max_examples=150)
@given(data=st.data(), kind=st.sampled_from([*FILES]))
def test_any_flipped_bits_in_a_torch_file_are_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str
) -> None:
    content = FILES[kind]()
    value = torch.load(io.BytesIO(content), weights_only=True)
    bits = data.draw(st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=4))
    changed = reduce(lambda so_far, bit: flipped(so_far, bit // 8, bit % 8), bits, content)
    found_or_harmless(tmp_path_factory.mktemp("flips") / "a.pt", changed, value, bits)


def test_a_cut_off_end_is_found(tmp_path: Path) -> None:
    content = saved(PLAIN)
    for end in range(0, len(content), 7):
        (tmp_path / "a.pt").write_bytes(content[:end])
        assert not verify(tmp_path / "a.pt")


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize(
    ("value", "kind_of_contents"), [(torch.arange(4.0), "one tensor without a name"), ([torch.ones(2)], "a list")]
)
def test_a_whole_file_without_names_is_said_to_be_whole_and_no_checkpoint(
    tmp_path: Path, is_archive: bool, value: object, kind_of_contents: str
) -> None:
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=is_archive)
    verification = verify(tmp_path / "a.pt")
    assert verification and verification.problems == () and verification.num_bytes > 0
    assert verification.notes == (f"not a checkpoint of named tensors: it holds {kind_of_contents}",)
    assert (
        verification.notes[0] in str(verification)
        and "whole" in str(verification)
        and verification.as_json()["notes"] == [*verification.notes]
    )
    with pytest.raises(
        FormatUnknown, match=f"Expected a dict of named tensors in .*, got {kind_of_contents}. Load it with torch"
    ):
        open_checkpoint(tmp_path / "a.pt")


def test_a_flipped_bit_is_found_in_a_file_without_names(tmp_path: Path) -> None:
    tensor = torch.arange(400.0)
    torch.save(tensor, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.find(tensor.numpy().tobytes()) + 5] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    [problem] = verify(tmp_path / "a.pt").problems
    assert "with the checksum" in problem.problem
