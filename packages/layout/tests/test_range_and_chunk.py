"""The two value types against sets of integers."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lamella_layout import Chunk, Range

RANGES = st.builds(lambda start, numel: Range(start, start + numel), st.integers(-20, 20), st.integers(0, 20))


@st.composite
def pairs_of_chunks(draw: st.DrawFn) -> tuple[Chunk, Chunk]:
    num_dims = draw(st.integers(1, 3))
    small = st.builds(lambda start, numel: Range(start, start + numel), st.integers(0, 4), st.integers(0, 4))
    boxes = [Chunk.of(draw(st.lists(small, min_size=num_dims, max_size=num_dims))) for _ in range(2)]
    return boxes[0], boxes[1]


def elements(chunk: Chunk) -> set[tuple[int, ...]]:
    return set(product(*(range(*indices) for indices in chunk.ranges)))


@given(RANGES, RANGES)
def test_the_intersection_of_ranges_holds_the_common_elements(one: Range, other: Range) -> None:
    common = one.intersection(other)
    assert set(range(*common)) == set(range(*one)) & set(range(*other))
    assert common.numel == len(range(*common))


@given(RANGES, RANGES)
def test_an_empty_intersection_lies_at_the_nearer_end(one: Range, other: Range) -> None:
    common = one.intersection(other)
    assert one.start <= common.start <= common.stop <= one.stop
    if one.stop <= other.start:
        assert common == (one.stop, one.stop)
    if other.stop <= one.start:
        assert common == (one.start, one.start)


@given(RANGES, st.integers(-20, 20))
def test_a_shifted_range_holds_the_shifted_elements(one: Range, num_elements: int) -> None:
    assert list(range(*one.shift(num_elements))) == [element + num_elements for element in range(*one)]


@given(pairs_of_chunks())
def test_the_intersection_of_chunks_holds_the_common_elements(pair: tuple[Chunk, Chunk]) -> None:
    one, other = pair
    assert elements(one.intersection(other)) == elements(one) & elements(other)
    assert one.numel == len(elements(one))


@given(pairs_of_chunks())
def test_a_chunk_relative_to_another_counts_from_its_first_element(pair: tuple[Chunk, Chunk]) -> None:
    one, origin = pair
    moved = {tuple(a - b for a, b in zip(at, origin.offsets, strict=True)) for at in elements(one)}
    assert elements(one.relative_to(origin)) == moved
