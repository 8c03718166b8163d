"""A whole model in one call: the choice of units, refused choices, and agreement with the plan."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import Net, Residual, assert_trains_alike, case, inputs, mean_square, twins
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import MixedPrecisionPolicy, ShardingPlan, fully_shard, fully_shard_model, plan_units
from lamella_engine.extending import local_of
from lamella_engine.testing import named_units
from lamella_precision import Float8Recipe
from lamella_testing import run_ranks

BLOCK_NBYTES = 4 * 196  # (13, 7), (13,), (7, 13) and (1,) in fp32
X = inputs()


class _TiedEnds(Net):
    """The head's weight is the stem's."""

    def __init__(self) -> None:
        super().__init__(dim=5)
        self.stem = nn.Linear(5, 5)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.stem.weight


class _Towers(nn.Module):
    """Two models under one module; the left model lists classes to keep whole."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(2), Net(2)
        self.left._no_split_modules = ["Residual", "OfAnotherVariant"]  # type: ignore[assignment]
        self.right._no_split_modules = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.left(x) + self.right(x)
        return out


class _NamedModules(nn.ModuleDict):
    """Modules under names, with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _names(plan: ShardingPlan) -> list[str]:
    assert plan.units[-1].name == "", "the model is sharded last"
    return [unit.name for unit in plan.units[:-1]]


def _layers(num_layers: int = 3) -> list[str]:
    return [f"layers.{i}" for i in range(num_layers)]


# -- the choice of units --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Residual, _layers()),
        ((Residual,), _layers()),
        ("layers.*", _layers()),
        ("layers.[02]", ["layers.0", "layers.2"]),
        (["stem", "layers.1"], ["stem", "layers.1"]),
        ([Residual, "head"], [*_layers(), "head"]),
        ("*.up", [f"{layer}.up" for layer in _layers()]),
        (nn.Linear, ["stem", *(f"{layer}.{name}" for layer in _layers() for name in ("up", "down")), "head"]),
    ],
    ids=str,
)
def test_classes_and_names_choose_units(wanted: Any, expected: list[str]) -> None:
    assert _names(plan_units(Net(), units=wanted)) == expected


def test_of_matches_inside_each_other_the_outermost_wins() -> None:
    assert _names(plan_units(Net(), units=(Residual, nn.Linear))) == ["stem", *_layers(), "head"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    assert _names(plan_units(nested, units=nn.Sequential)) == ["0"], "the model is a unit anyway, and never a match"


@pytest.mark.parametrize("wanted", ["layers", nn.ModuleList])
def test_a_container_in_units_stands_for_the_modules_inside(wanted: Any) -> None:
    assert _names(plan_units(Net(), units=wanted)) == _layers()


def test_a_container_in_a_container_does_too() -> None:
    model = _NamedModules()
    model["stages"] = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), "b": nn.Linear(2, 2)})
    assert _names(plan_units(model, units="stages")) == ["stages.a.0", "stages.b"]


def test_a_forward_given_to_one_module_counts() -> None:
    model = Net()
    model.layers.forward = lambda x: x
    assert _names(plan_units(model, units="layers")) == ["layers"]


def test_hugging_faces_own_list_is_collected_from_the_modules_below() -> None:
    names = [f"{side}.layers.{i}" for side in ("left", "right") for i in range(2)]
    assert _names(plan_units(_Towers(), units="no_split")) == names


def test_module_names_are_matched_without_the_prefix_of_torch_compile() -> None:
    model = _NamedModules({"_orig_mod": Net()})  # torch.compile's name for a wrapped module
    assert _names(plan_units(model, units="layers.?")) == [f"_orig_mod.{layer}" for layer in _layers()]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (10**6, []),  # the model fits, and is a unit anyway
        (BLOCK_NBYTES, ["stem", *_layers(), "head"]),
        (BLOCK_NBYTES - 1, ["stem", *(f"{layer}.{name}" for layer in _layers() for name in ("up", "down")), "head"]),
        (1, ["stem", *(f"{layer}.{name}" for layer in _layers() for name in ("up", "down")), "head"]),
    ],
)
def test_a_byte_budget_takes_the_outermost_modules_that_fit_and_leaves_that_do_not(
    budget: int, expected: list[str]
) -> None:
    assert _names(plan_units(Net(), units=budget)) == expected


def test_a_byte_budget_counts_in_the_dtype_that_computes() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert _names(plan_units(Net(), units=BLOCK_NBYTES // 2, mp_policy=policy)) == ["stem", *_layers(), "head"]


def test_no_module_inside_a_multihead_attention_becomes_a_unit() -> None:
    model = _NamedModules({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 8)})
    for choice in (1, "attention*", "*"):
        assert "attention" in _names(plan_units(model, units=choice))
    assert _names(plan_units(model, units=nn.Linear)) == ["head"]


def test_ignored_parameters_are_in_no_unit() -> None:
    model = Net()
    ignored = {*model.layers[1].parameters(), model.stem.bias}
    plan = plan_units(model, units=[Residual, "stem"], ignored_params=ignored)
    assert _names(plan) == ["stem", "layers.0", "layers.2"]
    assert [parameter.name for parameter in plan.units[0].parameters] == ["weight"]


def test_fully_shard_model_leaves_existing_units_alone() -> None:
    def check() -> None:
        model = Net()
        fully_shard(model.get_submodule("layers.0.up"))
        fully_shard(model.layers[1])
        plan = plan_units(model, units=Residual)
        assert _names(plan) == ["layers.0", "layers.2"]
        assert "up.weight" not in [parameter.name for parameter in plan.units[0].parameters]
        fully_shard_model(model, units=Residual, verbose=False)
        assert [name for name, _ in named_units(model)] == ["root", "layers.0", "layers.0.up", "layers.1", "layers.2"]

    run_ranks(check, 1)


# -- refused as units -----------------------------------------------------------------------------------------------


def test_tied_parameters_are_left_to_the_unit_around_both_and_the_plan_says_so() -> None:
    plan = plan_units(_TiedEnds(), units=["stem", "layers.*", "head"])
    assert _names(plan) == _layers()
    assert [parameter.name for parameter in plan.units[-1].parameters] == ["stem.weight", "stem.bias"]
    assert "stem.weight is tied to head.weight" in str(plan)
    assert "head.weight is tied to stem.weight" in str(plan)


def test_a_tie_inside_one_unit_splits_nothing() -> None:
    towers = nn.Sequential(_TiedEnds(), _TiedEnds())
    plan = plan_units(towers, units=_TiedEnds)
    assert _names(plan) == ["0", "1"]
    assert plan.notes == ()


def test_matches_inside_a_module_that_is_passed_over_still_count() -> None:
    model = _TiedEnds()
    model.draft = nn.Sequential(nn.Linear(5, 5), Residual(5))
    model.draft[0].weight = model.head.weight
    plan = plan_units(model, units=["draft", "draft.1"])
    assert _names(plan) == ["draft.1"]
    assert len(plan.notes) == 1


def test_a_module_that_two_units_would_hold_is_left_to_the_unit_around_both() -> None:
    model = Net()
    model.layers[2].up = model.layers[0].up
    assert _names(plan_units(model, units=Residual)) == ["layers.1"]


def test_a_unit_that_is_held_twice_is_planned_once() -> None:
    model = Net()
    model.layers[2] = model.layers[0]
    model.again = nn.Sequential(model.layers[1])
    assert _names(plan_units(model, units=Residual)) == ["layers.0", "layers.1"]


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "error", "match"),
    [
        (nn.Conv2d, ValueError, r"Conv2d, which matches none\. There are Linear, Residual\."),
        ((Residual, nn.Conv2d), ValueError, r"Conv2d, which matches none"),
        (nn.Tanh, ValueError, r"Tanh, which matches none"),
        (Net, ValueError, r"Net, which matches none"),
        (type("Residual", (nn.Module,), {}), ValueError, r"There are engine_models\.Residual, Linear"),
        ("layer.*", ValueError, r"'layer\.\*', which matches none\. There are 'layers\.\*'"),
        (["layers.*", "haed"], ValueError, r"'haed', which matches none\. There are 'head'"),
        ("no_split", ValueError, r"`_no_split_modules`.*got Net.*there are Linear, Residual"),
        ((), ValueError, r"at least one class or pattern, got none"),
        (0, ValueError, r"byte budget of at least 1, got 0"),
        (True, TypeError, r"number of bytes, got True"),
        ([3], TypeError, r"number of bytes, got \[3\]"),
        (None, TypeError, r"number of bytes, got None"),
        (int, TypeError, r"number of bytes"),
    ],
    ids=str,
)
def test_a_choice_of_units_without_a_match_is_refused_with_the_candidates(
    wanted: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        plan_units(Net(), units=wanted)


def test_a_list_of_another_model_is_refused() -> None:
    model = Net()
    model._no_split_modules = ["Decoder"]  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"\(Decoder\), got none.*there are Linear, Residual"):
        plan_units(model, units="no_split")


def test_a_model_is_sharded_once() -> None:
    def check() -> None:
        model = fully_shard_model(Net(), units=Residual, verbose=False)
        with pytest.raises(ValueError, match=r"not sharded yet, got FSDPNet"):
            fully_shard_model(model, units=nn.Linear)

    run_ranks(check, 1)


def test_a_plan_for_a_model_without_a_forward_or_for_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a model with a forward, got ModuleList"):
        plan_units(Net().layers, units=Residual)
    with pytest.raises(TypeError, match=r"`model` to be an nn\.Module, got list"):
        plan_units([Net()], units=Residual)  # type: ignore[arg-type]


def test_an_argument_that_fully_shard_does_not_know_changes_nothing() -> None:
    def check() -> None:
        model = Net()
        with pytest.raises(TypeError, match="mesh_of_mine"):
            fully_shard_model(model, units=Residual, mesh_of_mine=None)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    run_ranks(check, 1)


# -- agreement with the plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_model_sharded_in_one_call_trains_as_unsharded(num_ranks: int) -> None:
    def check() -> None:
        for choice in (Residual, "no_split", 300, ["*.up", "left.head"]):
            with case(choice):

                def apply(model: nn.Module, choice: Any = choice) -> None:
                    fully_shard_model(model, units=choice, verbose=False)

                reference, sharded = twins(_Towers, apply)
                assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)))

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_tied_model_trains_as_unsharded(num_ranks: int) -> None:
    x = torch.ones(4, 5)

    def check() -> None:
        def apply(model: nn.Module) -> None:
            fully_shard_model(model, units=nn.Linear, verbose=False)

        reference, sharded = twins(_TiedEnds, apply)
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(x)))

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("recipe", [None, lambda p: Float8Recipe() if p.ndim == 2 else None], ids=["bf16", "float8"])
def test_units_own_the_parameters_and_the_bytes_that_were_planned(recipe: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_dtype=torch.float64, recipe=recipe)

    def check() -> None:
        for choice in (Residual, 300, ["*.up", "left.head"]):
            model = _Towers()
            plan = plan_units(model, units=choice, mp_policy=policy)
            fully_shard_model(model, units=choice, mp_policy=policy, verbose=False)
            units_by_name = dict(named_units(model))
            assert {unit.name or "root" for unit in plan.units} == set(units_by_name)
            for unit in plan.units:
                groups = units_by_name[unit.name or "root"].parameters.groups
                members = [parameter for group in groups for parameter in group.parameters]
                assert {p.name for p in unit.parameters} == {p.name for p in members}, unit.name
                assert unit.numel == sum(p.sharded.numel() for p in members)
                wholes = [payload for p in members for payload in getattr(p.unsharded, "payloads", (p.unsharded,))]
                assert unit.unsharded_nbytes == sum(payload.nbytes for payload in wholes)
                if dist.get_rank() == 0:
                    assert unit.shard_nbytes(2) == sum(p.shard.numel() * p.shard.element_size() for p in members)

    run_ranks(check, 2)


def test_a_parameter_that_is_a_dtensor_is_planned_by_the_part_that_this_rank_gathers() -> None:
    def on_each_rank() -> tuple[int, int]:
        meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "experts"))
        model = nn.Linear(3, 4, bias=False)
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), meshes["experts"], [Shard(0)]))
        [planned] = plan_units(model, units=1).units
        fully_shard(model, mesh=meshes["data"])
        [parameter] = dict(named_units(model))["root"].parameters.trained
        return planned.unsharded_nbytes, local_of(parameter).nbytes

    assert run_ranks(on_each_rank, 2) == [(24, 24)] * 2


def test_a_model_on_meta_is_planned_alike() -> None:
    with torch.device("meta"):
        model = Net()
    assert plan_units(model, units=Residual) == plan_units(Net(), units=Residual)


def test_the_plan_is_printed_on_one_rank_unless_told_not_to() -> None:
    def printed(**options: Any) -> str:
        with redirect_stdout(io.StringIO()) as out:
            fully_shard_model(Net(), units=Residual, **options)
        return out.getvalue()

    def check() -> tuple[str, str]:
        return printed(), printed(verbose=False)

    first, second = run_ranks(check, 2)
    plan = plan_units(Net(), units=Residual, num_ranks=2)
    assert first == (f"{plan}\n", "")
    assert second == ("", "")


def test_equal_units_share_a_row() -> None:
    text = str(plan_units(Net(), units=Residual, num_ranks=2))
    assert text == (
        "unit                   class         parameters  unsharded   a rank\n"
        "layers.0 ... layers.2  3 x Residual         196      784 B    436 B\n"
        "(the model)            Net                   68      272 B    160 B\n"
        "all                    4 units              656    2.6 KiB  1.4 KiB"
    )


def test_units_of_one_class_and_other_shapes_do_not_share_a_row() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3))
    rows = str(plan_units(model, units=nn.Linear)).splitlines()
    assert [row.split("  ")[0] for row in rows[1:3]] == ["0 ... 2", "1"]
    assert "a rank" not in rows[0]
