"""Layouts of other forms of the same tensors (quantised data, scales of blocks), cut between the same rows."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lamella_layout import EvenLayout, FlatLayout, Rows


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 9))
def test_even_chunks_of_blocks_match_the_chunks_of_rows_or_are_refused(rows: int, block: int, num_shards: int) -> None:
    layout = EvenLayout.build([(rows, 3)], num_shards)
    shapes = [(-(-rows // block), 3)]
    chunks = [layout.chunk(0, rank) for rank in range(num_shards)]
    agrees = all(c.offsets[0] % block == 0 or c.offsets[0] == rows for c in chunks)
    try:
        other = layout.with_shapes(shapes)
    except ValueError:
        assert not agrees or block > rows
        return
    for rank, chunk in enumerate(chunks):
        blocks = other.chunk(0, rank)
        assert blocks.offsets[0] == -(-chunk.offsets[0] // block)
        assert blocks.sizes[0] == -(-chunk.sizes[0] // block)


def test_a_tensor_along_another_dim_has_no_other_form() -> None:
    layout = EvenLayout.build([(4, 8)], 2, dims=[1])
    assert layout.with_shapes([(4, 8)]) is layout
    with pytest.raises(ValueError, match="along dim 1"):
        layout.with_shapes([(4, 4)])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 5))
def test_scales_of_a_flat_layout_are_where_their_blocks_are(blocks: list[int], num_shards: int) -> None:
    shapes = [(4 * num, 8) for num in blocks]
    layout = FlatLayout.build(shapes, num_shards, keep=Rows(4), alignment=32)
    scales = layout.with_shapes([(num, 8) for num in blocks])
    for i in range(len(blocks)):
        for rank in range(num_shards):
            rows, own_chunk = layout.chunk(i, rank), scales.chunk(i, rank)
            assume(rows.sizes[0])
            assert (own_chunk.offsets[0], own_chunk.sizes[0]) == (rows.offsets[0] // 4, rows.sizes[0] // 4)


def test_a_flat_layout_refuses_forms_that_no_one_ratio_describes() -> None:
    layout = FlatLayout.build([(4, 8), (4, 16)], 2, alignment=32)
    with pytest.raises(ValueError, match="for as many of every tensor"):
        layout.with_shapes([(4, 1), (4, 1)])
