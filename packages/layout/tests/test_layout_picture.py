"""Pictures of small layouts, letter by letter, and properties of large pictures."""

import pytest

from lamella_layout import EvenLayout, FlatLayout, Rows, Whole, picture

FLAT = FlatLayout.build([(5, 6), (2, 4), (3,)], 3, keep=[Rows(1), Whole(), Rows(1)], alignment=1)
EVEN = EvenLayout.build([(7,), (3, 2)], 2, dims=[0, 1], alignment=3)


def memory(drawn: str, label: str) -> str:
    """The row of memory with this label."""
    (row,) = [line for line in drawn.splitlines() if line.startswith(f"{label} ")]
    return row.split("|")[1]


def test_a_flat_layout_shows_ranks_as_rows_and_names_its_letters() -> None:
    assert (
        picture(FLAT, names=["weight", "scale", "bias"])
        == """\
FlatLayout of 3 tensors on 3 ranks, 18 elements each

rank 0 |bbbbbbbbccc.aaaaaa|
rank 1 |aaaaaaaaaaaaaaaaaa|
rank 2 |aaaaaa............|
        one column is 1 element

a  weight  (5, 6)  rows of 1  ranks 0-2
b  scale   (2, 4)  whole      rank 0
c  bias    (3,)    rows of 1  rank 0
.  padding: 13 elements, 24.1% of all"""
    )


def test_a_picture_of_an_even_layout_shows_shards_and_the_unsharded_buffer() -> None:
    assert (
        picture(EVEN)
        == """\
EvenLayout of 2 tensors on 2 ranks, 9 elements each, 15 unsharded

rank 0 |aaaa..bbb|
rank 1 |aaa-..bbb|
        one column is 1 element

unsharded |aaaaaaa-.bbbbbb|
from rank |00001111 ~~~~~~|
           one column is 1 element

a  (7,)    Shard(0)  ranks 0-1
b  (3, 2)  Shard(1)  ranks 0-1
.  alignment: tensors start at multiples of 3 elements
-  slack: a chunk shorter than rank 0's
~  chunks of all ranks in turn: gathered elsewhere, then copied here"""
    )


@pytest.mark.parametrize("layout", [FLAT, EVEN])
def test_the_docstrings_of_layouts_draw_the_lines_of_their_pictures(layout: EvenLayout | FlatLayout) -> None:
    drawn = [line.split("|")[1] for line in picture(layout).splitlines() if line.endswith("|")]
    assert set(drawn[:3]) <= set(str(layout.__doc__).split())


def test_a_picture_shows_a_small_tensor_beside_a_large_tensor_at_any_scale() -> None:
    for layout in (FlatLayout.build([(4096, 4096), (8,)], 4), EvenLayout.build([(4096, 4096), (8,)], 4)):
        drawn = picture(layout, width=20)
        rows = [line.split("|")[1] for line in drawn.splitlines() if line.endswith("|")]
        assert any("b" in row for row in rows) and any("a" in row for row in rows)
        assert all(len(row) <= 20 for row in rows)


def test_slack_hides_no_tensor_when_columns_are_coarse() -> None:
    assert memory(picture(EvenLayout.build([(9,)], 2, alignment=1), width=2), "rank 1") == "aa"


def test_ranks_in_the_middle_are_left_out_of_a_long_picture() -> None:
    lines = picture(FlatLayout.build([(64, 4)], 64, alignment=4), max_ranks=4).splitlines()
    assert [line[:7] for line in lines[2:7]] == ["rank 0 ", "rank 1 ", "rank 2 ", "...    ", "rank 63"]
    assert lines[5] == "...     |60 more"


def test_tensors_beyond_the_alphabet_are_drawn_and_counted() -> None:
    drawn = picture(FlatLayout.build([(1,)] * 60, 1, alignment=1))
    assert memory(drawn, "rank 0")[-9:] == "Z########"
    assert "#  8 more" in drawn


def test_empty_tensors_and_empty_groups_can_be_drawn() -> None:
    assert "a  (0, 4)  rows of 1  empty" in picture(FlatLayout.build([(0, 4)], 2))
    assert memory(picture(EvenLayout.build([], 2)), "unsharded") == ""
    assert memory(picture(FlatLayout.build([], 2)), "rank 1") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["one"]}, r"Expected one name a tensor \(3 tensors\), got 1"),
        ({"width": 0}, "Expected width of at least 1, got 0"),
        ({"max_ranks": 0}, "Expected max_ranks of at least 1, got 0"),
    ],
)
def test_bad_arguments_of_a_picture_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        picture(FLAT, **arguments)  # type: ignore[arg-type]
