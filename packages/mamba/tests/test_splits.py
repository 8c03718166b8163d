"""Parts of a tensor for tensor-parallel ranks: merged again, they are the tensor, at any sizes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamella_mamba import Split, merge, split

NUM_RANKS = st.sampled_from([1, 2, 4])


@st.composite
def _cases(draw: st.DrawFn) -> tuple[torch.Tensor, Split]:
    """A tensor of one to three dims, and a split of it that 1, 2 and 4 ranks can have."""
    num_dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, num_dims - 1))
    blocks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    sizes = [4 * block * draw(st.integers(1, 2)) for block in blocks]
    shape = [draw(st.integers(1, 3)) for _ in range(num_dims)]
    shape[dim] = sum(sizes)
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return tensor, Split(dim=dim, sizes=tuple(sizes), blocks=tuple(blocks))


@given(_cases(), NUM_RANKS)
def test_merged_parts_are_the_tensor(case: tuple[torch.Tensor, Split], num_ranks: int) -> None:
    tensor, by = case
    parts = [split(tensor, by, rank, num_ranks) for rank in range(num_ranks)]
    assert merge(parts, by).equal(tensor)
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == list(range(tensor.numel()))


@given(_cases(), NUM_RANKS, NUM_RANKS)
def test_parts_for_another_number_of_ranks_do_not_depend_on_the_way(
    case: tuple[torch.Tensor, Split], num_ranks: int, num_later: int
) -> None:
    tensor, by = case
    saved = [split(tensor, by, rank, num_ranks) for rank in range(num_ranks)]
    for rank in range(num_later):
        resumed = split(merge(saved, by), by, rank, num_later)
        assert resumed.equal(split(tensor, by, rank, num_later))


@given(_cases(), NUM_RANKS)
def test_a_part_has_the_part_of_the_split(case: tuple[torch.Tensor, Split], num_ranks: int) -> None:
    tensor, by = case
    rank_split = by.part(num_ranks)
    assert rank_split.whole(num_ranks) == by
    for rank in range(num_ranks):
        part = split(tensor, by, rank, num_ranks)
        starts = torch.tensor([0, *rank_split.sizes]).cumsum(0)[:-1]
        wholes = torch.tensor([0, *by.sizes]).cumsum(0)[:-1]
        for start, full_start, size in zip(starts.tolist(), wholes.tolist(), rank_split.sizes, strict=True):
            assert by.dim is not None
            section = part.narrow(by.dim, start, size)
            assert section.equal(tensor.narrow(by.dim, full_start + rank * size, size))


def test_every_rank_has_a_share_of_every_section() -> None:
    by = Split(dim=0, sizes=(4, 4, 2, 2, 2))
    rows = torch.tensor([*b"zzzzxxxxBBCCdd"])
    assert bytes(split(rows, by, 1, 2).tolist()) == b"zzxxBCd"


def test_tensors_that_every_rank_holds_stay() -> None:
    tensor = torch.arange(3)
    by = Split(dim=None)
    assert split(tensor, by, 1, 2) is tensor and merge([tensor, tensor], by) is tensor
    assert by.part(2) == by.whole(2) == by and by.kind == "replicated"
    with_nan = torch.tensor([1.0, float("nan")])
    assert merge([with_nan, with_nan.clone()], by) is with_nan


def test_gradients_reach_the_whole() -> None:
    full_tensor = torch.ones(4, requires_grad=True)
    split(full_tensor, Split(dim=0, sizes=(2, 2)), 1, 2).sum().backward()  # type: ignore[no-untyped-call]
    assert full_tensor.grad is not None and full_tensor.grad.tolist() == [0, 1, 0, 1]


def test_a_group_is_not_cut() -> None:
    by = Split(dim=0, sizes=(16, 8), blocks=(4, 4))
    with pytest.raises(ValueError, match="divides the 2 blocks .* got 4 for a section of 8 elements in blocks of 4"):
        split(torch.ones(24), by, 0, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda by: split(torch.ones(4), by, 2, 2), "Expected `rank` from 0 to 1, got 2"),
        (lambda by: split(torch.ones(5), by, 0, 2), "Expected a tensor of 4 elements along dim 0"),
        (
            lambda by: split(torch.ones(4), Split(dim=1, sizes=(4,)), 0, 2),
            "Expected a tensor of 4 elements along dim 1",
        ),
        (lambda by: merge([torch.ones(4), torch.ones(4)], by), "Expected a tensor of 2 elements along dim 0"),
        (lambda by: merge([], by), "Expected the parts of all tensor-parallel ranks, got none"),
        (lambda by: Split(dim=0), "Expected `sizes` of at least 1 with a `dim`"),
        (lambda by: Split(dim=None, sizes=(2,)), "Expected `sizes` of at least 1 with a `dim`"),
        (lambda by: Split(dim=-1, sizes=(4,)), "Expected `dim` from 0 on, or None, got -1"),
        (lambda by: Split(dim=0, sizes=(4,), blocks=(0,)), "Expected `blocks` of at least 1 element, got (0,)"),
        (lambda by: Split(dim=0, sizes=(4,), blocks=(-2,)), "Expected `blocks` of at least 1 element, got (-2,)"),
        (
            lambda by: merge([torch.ones(2), torch.zeros(2)], Split(dim=None)),
            "got the values from rank 0 and other values from rank 1",
        ),
        (
            lambda by: merge([torch.ones(2), torch.ones(3)], Split(dim=None)),
            "torch.float32 of shape (2,) from rank 0 and torch.float32 of shape (3,) from rank 1",
        ),
        (
            lambda by: merge([torch.ones(2), torch.ones(2).double()], by),
            "Expected parts of one dtype and shape, got torch.float32 of shape (2,) from rank 0 and torch.float64",
        ),
        (
            lambda by: merge([torch.ones(2, 3), torch.ones(2, 4)], by),
            "got torch.float32 of shape (2, 3) from rank 0 and torch.float32 of shape (2, 4) from rank 1",
        ),
        (lambda by: Split(dim=0, sizes=(4,), blocks=(3,)), "Expected one block for each section, which divides it"),
    ],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Split(dim=0, sizes=(2, 2)))
