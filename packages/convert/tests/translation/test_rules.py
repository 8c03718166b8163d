"""Rules read both ways: a table undoes its own changes, for any tensors of one side."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella_checkpoint import Correspondence, Source
from lamella_checkpoint.testing import MemorySource, read_all, read_in_chunks
from lamella_convert._translation.rules import Rule, Rules, parameter_shapes
from lamella_convert._translation.terms import Grouped, Join, Stack
from lamella_convert._translation.translate import Translated, translate

QKV = Rule(
    Join(("hf.{layer}.q", "hf.{layer}.k", "hf.{layer}.v"), sizes=("q", "kv", "kv")),
    Grouped("{layer}.linear_qkv", groups="num_groups", sizes=("q", "kv", "kv")),
)
EXPERTS = Rule(
    "hf.{layer}.gate_up",
    Stack(Join(("{layer}.fc1{expert}_w", "{layer}.fc1{expert}_v"), sizes=(1, 1)), "expert"),
)
LAYERS = Rule("hf.{layer}.norm", "{layer}.norm", shift=-1.0)


def to_right(tensors: Mapping[str, torch.Tensor], rules: Rules) -> Translated:
    source = MemorySource({f"model.{name}": tensor for name, tensor in tensors.items()})
    return translate(source, rules.match(parameter_shapes(source), "left"), to="right")


def back_to_left(source: Source, rules: Rules) -> Translated:
    stored = MemorySource(read_in_chunks(source))
    return translate(stored, rules.match(parameter_shapes(stored), "right"), to="left")


def model(source: Source) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in read_all(source).items()}


def alike(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return list(tensors) == list(expected) and all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_heads_interleave_by_group() -> None:
    # Two groups: two query heads of one row each, then the group's key and value.
    tensors = {"hf.0.q": torch.arange(4.0), "hf.0.k": torch.arange(10.0, 12), "hf.0.v": torch.arange(20.0, 22)}
    rules = Rules((QKV,), {"q": 4, "kv": 2, "num_groups": 2})
    fused = to_right(tensors, rules)
    assert model(fused)["0.linear_qkv"].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert alike(model(back_to_left(fused, rules)), tensors)


def test_packed_experts_come_apart_into_halves() -> None:
    packed = torch.arange(16.0).reshape(2, 4, 2)
    apart = to_right({"hf.0.gate_up": packed}, Rules((EXPERTS,)))
    assert alike(
        model(apart),
        {
            "0.fc10_w": packed[0, :2],
            "0.fc10_v": packed[0, 2:],
            "0.fc11_w": packed[1, :2],
            "0.fc11_v": packed[1, 2:],
        },
    )


def test_a_rank_major_tensor_and_its_components() -> None:
    rule = Rule(
        Join(("{n}.in_proj.query", "{n}.in_proj.value"), sizes=("qk", "v")),
        Grouped("{n}.in_proj", groups="tp", sizes=("qk", "v")),
    )
    components = {"0.in_proj.query": torch.arange(4), "0.in_proj.value": torch.arange(10, 18)}
    fused = to_right(components, Rules((rule,), {"qk": 4, "v": 8, "tp": 2}))
    assert model(fused)["0.in_proj"].tolist() == [0, 1, 10, 11, 12, 13, 2, 3, 14, 15, 16, 17]


def test_a_rule_may_require_a_tensor_beside_its_match() -> None:
    attention = Rule("hf.{layer}.norm", "{layer}.qkv.norm", left_beside="hf.{layer}.q")
    linear = Rule("hf.{layer}.norm", "{layer}.in_proj.norm", left_beside="hf.{layer}.z")
    tensors = {"hf.0.norm": torch.ones(1), "hf.0.z": torch.ones(1), "hf.1.norm": torch.ones(1), "hf.1.q": torch.ones(1)}
    renamed = to_right(tensors, Rules((attention, linear)))
    assert [name for name in model(renamed) if "norm" in name] == ["0.in_proj.norm", "1.qkv.norm"]
    assert renamed.left_over == ("model.hf.0.z", "model.hf.1.q")


class TestWholeModels:
    """Names that are left over by a rule that lacks others, and numbers of layers, are of a model that is not whole."""

    rules = Rules(
        (
            Rule(Join(("hf.{layer}.q", "hf.{layer}.k"), sizes=(1, 1)), "{layer}.qk"),
            Rule("hf.{layer}.norm", "{layer}.qk.norm", left_beside="hf.{layer}.q"),
            Rule(Stack("hf.{layer}.experts.{expert}", index="expert", count="experts"), "{layer}.experts"),
        ),
        {"experts": 2},
        numbered={"hf.{layer}.": 2},
    )

    def test_a_name_left_over_by_a_rule_is_refused_with_the_absent_name(self) -> None:
        for left_over, absent in [("hf.0.q", "hf.0.k"), ("hf.0.norm", "hf.0.q")]:
            with pytest.raises(ValueError, match=f"Expected '{absent}' beside '{left_over}'.*not whole"):
                self.rules.check_complete([left_over], [left_over], "left")
        self.rules.check_complete(["hf.0.q", "other"], ["other"], "left")

    def test_a_missing_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Expected tensors of 2 layers.*got none of 'hf\.1\.'"):
            self.rules.check_numbers(["hf.0.q", "hf.2.q"])
        self.rules.check_numbers(["hf.0.q", "hf.1.q"])
        self.rules.check_numbers(["other"])  # An optimizer's names alone, say.

    @pytest.mark.parametrize("num_experts", [1, 3])
    def test_a_stack_of_another_count_is_refused_from_both_sides(self, num_experts: int) -> None:
        single = {f"hf.0.experts.{expert}": (4,) for expert in range(num_experts)}
        problem = rf"Expected experts \(2\) to stack, got {num_experts}. Needed for"
        with pytest.raises(ValueError, match=problem):
            self.rules.match(single, "left")
        with pytest.raises(ValueError, match=problem):
            self.rules.match({"0.experts": (num_experts, 4)}, "right")


def test_a_double_star_matches_names_with_or_without_a_prefix() -> None:
    rules = Rules((Rule("**.fc1", "**.fc2"), Rule("a.{rest*}", "b.{rest*}")))
    names = {name: torch.ones(1) for name in ["fc1", "x.y.fc1", "xfc1", "a.q.r"]}
    assert list(model(to_right(names, rules))) == ["fc2", "x.y.fc2", "xfc1", "b.q.r"]


class TestRefusals:
    tensors = {"0.linear_qkv": (8,)}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("sizes", "problem"),
        [
            ({"q": 4, "kv": 2}, r"the size 'num_groups', got \{'q': 4, 'kv': 2\}.*Needed for '0.linear_qkv'"),
            ({"q": 4, "kv": 3, "num_groups": 1}, r"q \(4\) \+ kv \(3\) \+ kv \(3\) rows or columns, got 8"),
            ({"q": 4, "kv": 2, "num_groups": 4}, r"divide by 'num_groups' \(4\), got \[4, 2, 2\]"),
        ],
    )
    def test_sizes_that_are_unknown_or_do_not_fit(self, sizes: dict[str, int], problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            Rules((QKV,), sizes).match(self.tensors, "right")

    def test_components_that_are_not_of_their_sizes(self) -> None:
        shapes = {"hf.0.q": (4,), "hf.0.k": (1,), "hf.0.v": (3,)}
        with pytest.raises(ValueError, match=r"kv \(2\) rows or columns, got \[4, 1, 3\]"):
            Rules((QKV,), {"q": 4, "kv": 2, "num_groups": 2}).match(shapes)

    def test_an_expert_that_is_missing_is_named(self) -> None:
        shapes = {f"0.fc1{expert}_{half}": (2, 2) for expert in [0, 2] for half in "wv"}
        with pytest.raises(ValueError, match=r"got no '0.fc11_w'"):
            Rules((EXPERTS,)).match(shapes, "right")

    def test_halves_of_an_odd_size(self) -> None:
        with pytest.raises(ValueError, match=r"divides into shares of \[1, 1\], got 3"):
            Rules((EXPERTS,)).match({"hf.0.gate_up": (2, 3, 2)})

    def test_rules_that_could_not_be_read_back(self) -> None:
        with pytest.raises(ValueError, match="the same numbers in all names"):
            Rule("a.{layer}", "b")
        with pytest.raises(ValueError, match="a size for each of 2 terms"):
            Join(("a", "b"), sizes=(1,))
        with pytest.raises(ValueError, match="all names or all shares"):
            Join(("a", "b"), sizes=(1, "b"))


def test_a_rule_of_which_a_name_is_absent_does_not_apply() -> None:
    assert Rules((QKV,)).match({"hf.0.q": (4,), "hf.0.k": (2,)}) == []


Built = tuple[dict[str, torch.Tensor], dict[str, int]]


@st.composite
def models(draw: st.DrawFn) -> Built:
    """A model of random sizes by left names, and the sizes for the rules."""
    num_groups, tp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    per_group, head = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {
        "q": num_groups * per_group * head,
        "kv": num_groups * head,
        "num_groups": num_groups,
        "qk": tp * draw(st.integers(1, 3)),
        "v": tp * draw(st.integers(1, 3)),
        "nvh": tp * draw(st.integers(1, 2)),
        "tp": tp,
    }
    columns, num_experts, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            shapes |= {f"hf.{layer}.q": (sizes["q"], columns)}
            shapes |= {f"hf.{layer}.{name}": (sizes["kv"], columns) for name in "kv"}
        else:
            for name, size in [("query", "qk"), ("key", "qk"), ("value", "v"), ("beta", "nvh")]:
                shapes[f"{layer}.in_proj.weight.{name}"] = (sizes[size], columns)
        shapes |= {f"hf.{layer}.gate_up": (num_experts, 2 * half, columns), f"hf.{layer}.norm": (columns,)}
        shapes |= {f"hf.{layer}.down": (columns, 2 * half), f"hf.{layer}.tail": (columns, 3 * tp)}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {name: torch.randint(-9, 9, shape, generator=generator).float() for name, shape in shapes.items()}
    return tensors, sizes


COMPONENTS = ("query", "key", "value", "beta")
TABLE = (
    QKV,
    EXPERTS,
    LAYERS,
    Rule(
        Join(tuple(f"{{layer}}.in_proj.weight.{name}" for name in COMPONENTS), sizes=("qk", "qk", "v", "nvh")),
        Grouped("{layer}.in_proj.weight", groups="tp", sizes=("qk", "qk", "v", "nvh")),
    ),
    Rule("hf.{layer}.down", Join(("{layer}.down.a", "{layer}.down.b"), sizes=(1, 1), dim=1)),
    Rule("hf.{layer}.tail", Grouped("{layer}.tail", groups="tp", sizes=(2, 1), dim=1)),
)


@settings(max_examples=60, deadline=None)
@given(models())
def test_rules_applied_both_ways_restore_names_and_bits(built: Built) -> None:
    tensors, sizes = built
    rules = Rules(TABLE, sizes)
    translated = to_right(tensors, rules)
    assert translated.left_over == ()
    back = back_to_left(translated, rules)
    assert back.left_over == ()
    restored = model(back)
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)
    again = to_right(restored, rules)
    assert alike(dict(sorted(model(again).items())), dict(sorted(model(translated).items())))


@settings(max_examples=60, deadline=None)
@given(models())
def test_matches_shared_by_all_layers_equal_matches_of_single_layers(built: Built) -> None:
    tensors, sizes = built
    rules, shapes = Rules(TABLE, sizes), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    matches = rules.match(shapes)
    for match in matches:
        (alone,) = rules.match({name: shapes[name] for name in match.left})
        assert match == alone == Correspondence(**vars(match))  # Whose checks are not made again where numbers differ.
        (back,) = rules.match(match.right, "right")
        assert back.left.items() == match.left.items() and back.shift == match.shift


def test_layers_of_other_shapes_are_cut_as_theirs_are() -> None:
    matches = Rules((EXPERTS,)).match({"hf.0.gate_up": (2, 4, 3), "hf.7.gate_up": (1, 6, 3), "hf.9.gate_up": (2, 4, 3)})
    assert [set(match.right.values()) for match in matches] == [{(2, 3)}, {(3, 3)}, {(2, 3)}]
    assert [name for match in matches for name in match.right if "fc10" in name] == [
        f"{layer}.fc10_{half}" for layer in (0, 7, 9) for half in "wv"
    ]


def test_a_name_is_found_by_its_own_numbers_and_its_text() -> None:
    """Names are looked up without numbers: a different literal number, or an odd spelling, is another name."""
    rules = Rules(
        (
            Rule("norm1.{layer}", "first.{layer}"),
            Rule("**.fc1{expert}", "**.one{expert}"),
            Rule("text.{rest*}", "other.{rest*}"),
        )
    )
    names = ("norm1.0", "norm2.0", "norm1.01", "norm1.10", "a.b.fc112", "fc10", "fc20", "text.7.a", "text")
    matches = rules.match(dict.fromkeys(names, (1,)), "left")
    pairs = {
        left_name: right_name
        for match in matches
        for left_name, right_name in zip(match.left, match.right, strict=True)
    }
    assert pairs == {
        "norm1.0": "first.0",
        "norm1.10": "first.10",
        "a.b.fc112": "a.b.one12",
        "fc10": "one0",
        "text.7.a": "other.7.a",
    }
