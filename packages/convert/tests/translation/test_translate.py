"""Translating a checkpoint moves boxes and invents nothing; names without a translation are listed or refused."""

from typing import ClassVar, Literal

import pytest
import torch

from lamella_checkpoint import Correspondence, Piece, Place, Wanted
from lamella_checkpoint.testing import MemorySource, read_all, read_in_chunks
from lamella_convert._translation.rules import parameter_shapes
from lamella_convert._translation.translate import not_undone, translate
from lamella_files import carried, meetings, rename
from lamella_layout import Chunk


def box(*ranges: tuple[int, int]) -> Chunk:
    return Chunk(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))


def halves(fused_name: str, first: str, second: str, rows: int, columns: int, shift: float = 0.0) -> Correspondence:
    """`fused_name` is `first` over `second`."""
    size = (rows, columns)
    pieces = [
        Piece(Place(fused_name, Chunk((index * rows, 0), size)), Place(name, Chunk((0, 0), size)))
        for index, name in enumerate([first, second])
    ]
    shapes = {first: size, second: size}
    return Correspondence(left={fused_name: (2 * rows, columns)}, right=shapes, pieces=tuple(pieces), shift=shift)


def stacked(packed_name: str, names: list[str], shape: tuple[int, ...]) -> Correspondence:
    pieces = [
        Piece(Place(packed_name, Chunk((index, 0, 0), (1, *shape))), Place(name, Chunk((0, 0), shape)))
        for index, name in enumerate(names)
    ]
    return Correspondence(
        left={packed_name: (len(names), *shape)}, right=dict.fromkeys(names, shape), pieces=tuple(pieces)
    )


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


FC1 = halves("fc1", "gate", "up", 3, 2)


def test_a_fused_tensor_comes_apart_and_together() -> None:
    fused = MemorySource({"model.fc1": counted(6, 2)}, cuts={"model.fc1": [2, 4]})
    apart = translate(fused, [FC1], to="right")
    assert list(apart.tensors) == ["model.gate", "model.up"]
    assert apart.tensors["model.gate"].chunks == (box((0, 2), (0, 2)), box((2, 3), (0, 2)))
    assert apart.tensors["model.up"].chunks == (box((0, 1), (0, 2)), box((1, 3), (0, 2)))
    values = read_in_chunks(apart)
    assert torch.equal(values["model.up"], counted(3, 2, start=6))
    back = translate(MemorySource(values), [FC1], to="left")
    assert torch.equal(read_all(back)["model.fc1"], counted(6, 2))
    assert apart.left_over == back.left_over == ()


def test_only_the_boxes_that_are_asked_for_are_read() -> None:
    source = MemorySource({"model.fc1": counted(6, 2)})
    apart = translate(source, [FC1], to="right")
    into = torch.empty(1, 1)
    apart.read([Wanted("model.up", box((1, 2), (1, 2)), into)])
    assert source.requests == [("model.fc1", box((4, 5), (1, 2)))]
    assert into.item() == 9


def test_experts_unstack_and_stack() -> None:
    rule = stacked("packed", ["e0", "e1", "e2"], (2, 2))
    source = MemorySource({"model.packed": counted(3, 2, 2)}, cuts={"model.packed": [2]})
    apart = translate(source, [rule], to="right")
    values = read_in_chunks(apart)
    assert torch.equal(values["model.e2"], counted(2, 2, start=8))
    assert torch.equal(read_all(translate(apart, [rule], to="left"))["model.packed"], counted(3, 2, 2))


def test_a_renamed_tensor_requests_the_same_box_from_its_source() -> None:
    source = MemorySource({"model.a": counted(4, 2)}, cuts={"model.a": [1, 3]})
    renamed = translate(source, [Correspondence.rename("a", "b", (4, 2))], to="right")
    assert renamed.tensors["model.b"] is source.tensors["model.a"]
    want = Wanted("model.b", box((1, 3), (0, 2)), torch.empty(2, 2))
    renamed.read([want])
    assert source.requests == [("model.a", want.chunk)]


@pytest.mark.parametrize("rest", ["keep", "drop"])
def test_names_that_nothing_was_made_of_are_listed(rest: Literal["keep", "drop"]) -> None:
    source = MemorySource({"model.fc1": counted(6, 2), "model.other": counted(2)}, {"extra.note": 5})
    apart = translate(source, [FC1], to="right", rest=rest)
    assert apart.left_over == ("model.other", "extra.note")
    assert ("model.other" in apart.tensors) == ("extra.note" in apart.objects) == (rest == "keep")


def test_half_of_a_fused_tensor_makes_none() -> None:
    source = MemorySource({"model.gate": counted(3, 2)})
    fused = translate(source, [FC1], to="left")
    assert fused.left_over == ("model.gate",)
    assert list(fused.tensors) == ["model.gate"]


def test_two_names_do_not_become_one() -> None:
    source = MemorySource({"model.fc1": counted(6, 2), "model.gate": counted(3, 2)})
    with pytest.raises(ValueError, match=r"one value for 'model\.gate'"):
        translate(source, [FC1], to="right")


def test_a_shape_that_is_not_the_rules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fc1' of shape \(6, 2\), as the rules have it, got \(4, 2\)"):
        translate(MemorySource({"model.fc1": counted(4, 2)}), [FC1], to="right")


class TestOptimizer:
    tensors: ClassVar = {
        "model.fc1": counted(6, 2),
        "optimizer.state.fc1.exp_avg": counted(6, 2, start=50),
        "optimizer.state.fc1.step": torch.tensor(7.0),
        "optimizer.state.fc1.factored": counted(6),
    }
    objects: ClassVar = {"optimizer.param_groups.fc1.lr": 0.5, "optimizer.param_groups.fc1.betas": (0.9, 0.99)}

    def test_slots_are_cut_as_their_parameter_and_scalars_copied(self) -> None:
        source = MemorySource(self.tensors, self.objects)
        apart = translate(source, [FC1], to="right")
        values = read_in_chunks(apart)
        assert torch.equal(values["optimizer.state.up.exp_avg"], counted(3, 2, start=56))
        assert values["optimizer.state.gate.step"].item() == values["optimizer.state.up.step"].item() == 7
        assert apart.read_object("optimizer.param_groups.up.betas") == (0.9, 0.99)
        assert apart.left_over == ("optimizer.state.fc1.factored",)
        back = translate(apart, [FC1], to="left")
        assert {name: tensor.tolist() for name, tensor in read_all(back).items()} == {
            name: tensor.tolist() for name, tensor in self.tensors.items()
        }
        assert {name: back.read_object(name) for name in back.objects} == self.objects

    def test_fused_parameters_with_different_scalars_are_refused_when_read(self) -> None:
        tensors = {f"optimizer.state.{name}.step": torch.tensor(step) for name, step in [("gate", 7.0), ("up", 8.0)]}
        objects = {f"optimizer.param_groups.{name}.lr": lr for name, lr in [("gate", 0.5), ("up", 0.25)]}
        fused = translate(MemorySource(tensors, objects), [FC1], to="left")
        with pytest.raises(ValueError, match=r"got 7.0 of 'optimizer.state.gate.step' and 8.0 of"):
            read_all(fused)
        with pytest.raises(ValueError, match=r"got 0.5 of 'optimizer.param_groups.gate.lr' and 0.25 of"):
            fused.read_object("optimizer.param_groups.fc1.lr")

    def test_a_slot_that_one_part_lacks_is_left_over(self) -> None:
        source = MemorySource({"optimizer.state.gate.momentum_buffer": counted(3, 2)})
        fused = translate(source, [FC1], to="left")
        assert fused.left_over == ("optimizer.state.gate.momentum_buffer",)

    def test_a_slot_of_any_shape_goes_with_a_renamed_parameter(self) -> None:
        source = MemorySource({"optimizer.state.a.row": counted(4), "optimizer.state.a.step": torch.tensor(1.0)})
        renamed = translate(source, [Correspondence.rename("a", "b", (4, 2))], to="right")
        assert list(renamed.tensors) == ["optimizer.state.b.row", "optimizer.state.b.step"]

    def test_weights_are_shifted_and_moments_are_not(self) -> None:
        rule = Correspondence.rename("norm", "gamma", (2,), shift=-1.0)
        slots = ("exp_avg", "master_param")
        source = MemorySource(
            {"model.norm": torch.ones(2)} | {f"optimizer.state.norm.{slot}": torch.ones(2) for slot in slots}
        )
        values = read_all(translate(source, [rule], to="right"))
        assert values["model.gamma"].tolist() == values["optimizer.state.gamma.master_param"].tolist() == [0, 0]
        assert values["optimizer.state.gamma.exp_avg"].tolist() == [1, 1]


class TestShift:
    rule = Correspondence.rename("norm", "gamma", (3,), shift=-1.0)

    def test_a_shift_is_computed_in_a_wider_dtype_than_the_stored_values(self) -> None:
        stored = torch.tensor([1.0078125, 0.98828125, 3.015625], dtype=torch.bfloat16)
        apart = translate(MemorySource({"model.norm": stored}), [self.rule], to="right")
        gamma = read_all(apart)["model.gamma"]
        assert gamma.tolist() == [0.0078125, -0.01171875, 2.015625]
        assert apart.inexact == {}
        back = translate(MemorySource({"model.gamma": gamma}), [self.rule], to="left")
        assert torch.equal(read_all(back)["model.norm"], stored)

    def test_shifted_elements_that_lose_bits_are_reported_as_inexact(self) -> None:
        stored = torch.tensor([0.1, 1.0, 1e-6], dtype=torch.bfloat16)
        apart = translate(MemorySource({"model.norm": stored}), [self.rule], to="right")
        read_all(apart)
        assert apart.inexact == {
            "model.gamma": "-1 in bfloat16 cannot be undone to bfloat16 for 2 of the elements read"
        }
        into = torch.empty(3)
        exact = translate(MemorySource({"model.norm": stored}), [self.rule], to="right")
        exact.read([Wanted("model.gamma", box((0, 2)), into[:2])])
        assert exact.inexact == {}  # In float32 both can.

    def test_originals_restore_bits_lost_by_a_shift_whatever_the_left_over_names(self) -> None:
        stored = torch.tensor([0.1, 1.0, 1e-6], dtype=torch.bfloat16)
        originals = MemorySource({"model.norm": stored})
        gamma = read_all(translate(originals, [self.rule], to="right"))["model.gamma"]
        back = translate(MemorySource({"model.gamma": gamma}), [self.rule], to="left", originals=originals)
        for translated in (back, back.leaving(["step"])):
            assert torch.equal(read_all(translated)["model.norm"], stored)
            assert translated.inexact == {}

    def test_nan_is_itself_again(self) -> None:
        assert not not_undone(torch.tensor([float("nan"), float("inf")]), 1.0, torch.float32).any()


def test_parts_of_several_dtypes_are_told() -> None:
    source = MemorySource({"model.gate": counted(3, 2), "model.up": counted(3, 2).bfloat16()})
    fused = translate(source, [FC1], to="left")
    assert fused.tensors["model.fc1"].dtype == torch.float32
    assert fused.inexact == {"model.fc1": "made of float32 model.gate and bfloat16 model.up"}
    assert torch.equal(read_all(fused)["model.fc1"], torch.cat([counted(3, 2)] * 2))


def test_sections_are_renamed_and_dropped() -> None:
    source = MemorySource({"module.a": counted(2)}, {"module.a._extra_state": None, "iteration": 3})
    native = rename(source, lambda name: None if name.endswith("_extra_state") else name.replace("module.", "model."))
    assert list(native.tensors) == ["model.a"]
    assert native.objects == ("iteration",)
    assert native.left_over == ("module.a._extra_state",)
    assert parameter_shapes(native) == {"a": (2,)}


class TestCorrespondence:
    @pytest.mark.parametrize(
        ("pieces", "problem"),
        [
            ([((0, 2), (0, 2))], "all 4 elements of 'a', got 2"),
            ([((0, 3), (0, 3)), ((2, 3), (3, 4))], "each element of 'a' in one piece"),
            ([((0, 2), (0, 2)), ((3, 5), (2, 4))], "inside 'a' of shape"),
            ([((0, 2), (0, 3)), ((2, 4), (3, 4))], "boxes of one size"),
        ],
    )
    def test_correspondences_that_do_not_cover_both_sides_once_are_refused(
        self, pieces: list[tuple[tuple[int, int], tuple[int, int]]], problem: str
    ) -> None:
        places = tuple(
            Piece(Place("a", box(left_range)), Place("b", box(right_range))) for left_range, right_range in pieces
        )
        with pytest.raises(ValueError, match=problem):
            Correspondence(left={"a": (4,)}, right={"b": (4,)}, pieces=places)

    def test_pieces_of_unknown_tensors_are_refused(self) -> None:
        piece = Piece(Place("c", box((0, 4))), Place("b", box((0, 4))))
        with pytest.raises(ValueError, match=r"pieces of \['a'\], got one of 'c'"):
            Correspondence(left={"a": (4,)}, right={"b": (4,)}, pieces=(piece,))

    def test_the_inverse_of_a_correspondence_undoes_its_shift(self) -> None:
        rule = Correspondence.rename("a", "b", (4,), shift=2.0)
        assert rule.inverse.inverse == rule
        assert rule.inverse.shift == -2.0
        assert rule.is_rename
        assert not FC1.is_rename

    def test_a_renamed_correspondence_keeps_its_pieces_under_other_names(self) -> None:
        other = FC1.renamed(left=lambda name: f"a.{name}")
        assert other == halves("a.fc1", "gate", "up", 3, 2)
        assert other.renamed(left=lambda name: name.removeprefix("a.")) == FC1
        with pytest.raises(ValueError, match="a name for each tensor, got .*'up': 'x'"):
            FC1.renamed(right=lambda _: "x")

    def test_boxes_are_carried_past_sizes_of_one(self) -> None:
        part = carried(box((2, 3), (1, 3), (4, 5)), box((2, 3), (0, 4), (4, 6)), box((10, 14), (0, 1), (8, 10)))
        assert part == box((11, 13), (0, 1), (8, 9))

    def test_boxes_meet_as_all_pairs_do(self) -> None:
        torch.manual_seed(0)
        left_boxes = [Chunk(tuple(pair[:2]), tuple(pair[2:])) for pair in torch.randint(0, 6, (40, 4)).tolist()]
        right_boxes = [Chunk(tuple(pair[:2]), tuple(pair[2:])) for pair in torch.randint(0, 6, (40, 4)).tolist()]
        expected = {
            (i, j, one.intersection(two))
            for i, one in enumerate(left_boxes)
            for j, two in enumerate(right_boxes)
            if one.intersection(two).numel
        }
        assert set(meetings(left_boxes, right_boxes)) == expected
