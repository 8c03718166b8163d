"""In-place writes and `parameter.data = tensor` after `fully_shard` are right, or are refused or warned of by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    assert_trains_alike,
    assert_weights_equal,
    case,
    fsdp,
    inputs,
    mean_square,
    mesh_of,
    shard,
    twins,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrizations, parametrize, prune

from lamella_engine import (
    DDP,
    HFSDP,
    ZERO1,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Rows,
    ShardingOptions,
    fully_shard,
)
from lamella_testing import run_ranks

LOSS = mean_square(lambda model: model(inputs()))
LOST = r"\['head\.weight'\] to be written while their unit is sharded.*Call reshard\(\) first"
ASSIGNED = r"\['head\.weight'\] to be written in place.*`parameter\.data = tensor`.*distribute_tensor.*one Parameter"

OPTIONS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "unsharded until backward": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "flat": {"options": ShardingOptions(keep_together=lambda parameter: Rows(1))},
    "ZeRO-1": {"mesh": (2,), "options": ShardingOptions(placements=ZERO1)},
    "HFSDP": {"mesh": (2, 1), "options": ShardingOptions(placements=(HFSDP, ZERO3))},
}
# Every rank has rows of each weight, to compare with its shard.
COMPARED = {name: options for name, options in OPTIONS.items() if name != "flat"}
over_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def _sharded_twins(options: dict[str, Any], make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    arguments = options | ({"mesh": mesh_of(options["mesh"])} if "mesh" in options else {})
    return twins(make, lambda model: shard(model, **arguments))


def _is_exact(options: dict[str, Any]) -> bool:
    return "mp_policy" not in options


# -- writes into gathered weights ------------------------------------------------------------------------------------


@over_options
def test_a_write_into_a_gathered_weight_is_lost_with_a_warning_that_names_it(options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        reference, sharded = _sharded_twins(options)
        for _ in range(2):
            fsdp(sharded).unshard()
            with torch.no_grad():
                sharded.get_parameter("head.weight").mul_(2)
            with pytest.warns(UserWarning, match=LOST):
                fsdp(sharded).reshard()
        fsdp(sharded).mark_updated()
        assert_weights_equal(reference, sharded)
        if _is_exact(options):
            assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


def test_a_write_under_a_hold_is_named_when_the_last_hold_is_released() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        hold, last = fsdp(sharded).hold(), fsdp(sharded).hold()
        last.wait()
        nn.init.zeros_(sharded.get_parameter("head.weight"))
        hold.release()
        with pytest.warns(UserWarning, match=LOST):
            last.release()
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


def test_a_write_is_kept_where_the_gathered_weight_is_the_main_weight() -> None:
    """Replicated parameters without a compute dtype of their own are gathered nowhere."""

    def on_each_rank() -> None:
        reference, sharded = _sharded_twins({"mesh": (2,), "options": ShardingOptions(placements=DDP)})
        fsdp(sharded).unshard()
        for model in (reference, sharded):
            with torch.no_grad():
                model.get_parameter("head.weight").mul_(2)
        fsdp(sharded).reshard()
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


class _Renormed(Net):
    """A stem whose forward writes its own weight, as `nn.Embedding(max_norm=...)` and clipped critics do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.stem.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_forward_that_writes_its_weights_is_told_so() -> None:
    def on_each_rank() -> None:
        _, sharded = twins(_Renormed)
        with pytest.warns(UserWarning, match=r"\['stem\.weight'\] to be written while"):
            LOSS(sharded).backward()

    run_ranks(on_each_rank, 2)


def test_reads_computations_and_frozen_weights_warn_of_nothing() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        for model in (reference, sharded):
            model.get_parameter("layers.1.up.weight").requires_grad_(False)
        fsdp(sharded).unshard()
        weight = sharded.get_parameter("head.weight")
        assert torch.equal(weight * 1, reference.get_parameter("head.weight"))
        weight.requires_grad_(False).requires_grad_(True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fsdp(sharded).reshard()
            assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


class _Parametrized(Net):
    """A head that is parametrized during each forward alone, as peft's adapters of parameters are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.head, "weight", _Halved())
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.head, "weight", leave_parametrized=False)


class _Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@pytest.mark.parametrize("options", COMPARED.values(), ids=COMPARED)
def test_a_parametrization_inside_each_forward_warns_of_nothing_and_hides_no_write(options: dict[str, Any]) -> None:
    """torch's parametrizations set a weight to itself, which moves the version counter."""

    def on_each_rank() -> None:
        reference, sharded = _sharded_twins(options, _Parametrized)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if _is_exact(options):
                assert_trains_alike(reference, sharded, LOSS)
            else:
                LOSS(sharded).backward()
        fsdp(sharded).unshard()
        with torch.no_grad():
            sharded.get_parameter("head.weight").mul_(2)
        with pytest.warns(UserWarning, match=LOST):
            fsdp(sharded).reshard()

    run_ranks(on_each_rank, 2)


# -- `parameter.data = ...` ------------------------------------------------------------------------------------------


def _assign_dtensor(parameter: Any) -> None:
    parameter.data = parameter.detach() * 2


def _assign_whole(parameter: Any) -> None:
    parameter.data = torch.zeros(tuple(parameter.shape))


def _assign_another_shape(parameter: Any) -> None:
    parameter.data = torch.zeros(2)


def _fill_from_a_vector(parameter: Any) -> None:
    nn.utils.vector_to_parameters(torch.zeros(parameter.numel()), [parameter])


ASSIGNMENTS: list[Callable[[Any], None]] = [_assign_dtensor, _assign_whole, _assign_another_shape, _fill_from_a_vector]


@pytest.mark.parametrize(
    "move",
    [
        lambda head: parametrize.register_parametrization(head, "weight", _Halved()),
        parametrizations.weight_norm,
        lambda head: prune.identity(head, "weight"),  # type: ignore[no-untyped-call]
    ],
    ids=["parametrization", "weight norm", "pruning"],
)
def test_a_parameter_moved_out_of_its_module_is_refused_with_the_way_out(move: Callable[[nn.Module], object]) -> None:
    def check() -> None:
        model = shard(Net())
        move(model.head)
        with pytest.raises(
            TypeError, match=r"'head\.weight' to stay in its module.*Before fully_shard.*parametrizations"
        ):
            model(inputs())

    run_ranks(check, 1)


@over_options
def test_data_assigned_to_a_sharded_parameter_are_refused_once_by_name(options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        reference, sharded = _sharded_twins(options)
        parameter = sharded.get_parameter("head.weight")
        for assign in ASSIGNMENTS:
            assign(parameter)
            with case(assign.__name__), pytest.raises(RuntimeError, match=ASSIGNED):
                LOSS(sharded)
            assert sharded.get_parameter("head.weight") is parameter
            assert_weights_equal(reference, sharded)
            LOSS(sharded).backward()
            sharded.zero_grad()
        if _is_exact(options):
            assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


def test_the_way_out_of_the_error_writes_the_parameter() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        replacement = torch.ones_like(reference.get_parameter("head.weight"))
        parameter = sharded.get_parameter("head.weight")
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            reference.get_parameter("head.weight").copy_(replacement)
            parameter.copy_(distribute_tensor(replacement, parameter.device_mesh, parameter.placements))
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


@over_options
def test_data_assigned_to_a_gathered_weight_are_refused_once_by_name(options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        reference, sharded = _sharded_twins(options)
        fsdp(sharded).unshard()
        gathered = sharded.get_parameter("head.weight")
        gathered.data = torch.zeros_like(gathered)
        fsdp(sharded).reshard()
        with pytest.raises(RuntimeError, match=ASSIGNED):
            LOSS(sharded)
        assert_weights_equal(reference, sharded)
        if _is_exact(options):
            assert_trains_alike(reference, sharded, LOSS)

    run_ranks(on_each_rank, 2)


def test_data_assigned_in_an_inner_unit_are_named_from_the_outermost_on() -> None:
    def on_each_rank() -> None:
        _, sharded = twins()
        _assign_dtensor(sharded.get_parameter("layers.1.up.weight"))
        with pytest.raises(RuntimeError, match=r"\['layers\.1\.up\.weight'\] to be written in place"):
            LOSS(sharded)

    run_ranks(on_each_rank, 2)


def test_parameters_replaced_by_assign_by_casts_or_by_hand_train_as_unsharded() -> None:
    """`load_state_dict(assign=True)`, `to`, and a new Parameter each replace more than the storage."""

    def on_each_rank() -> None:
        reference, sharded = twins()
        sharded.load_state_dict({k: v.detach() * 2 for k, v in sharded.state_dict().items()}, assign=True)
        reference.load_state_dict({k: v * 2 for k, v in reference.state_dict().items()})
        for model in (reference, sharded):
            model.to(torch.float64).to(torch.float32)
        sharded.head.weight = nn.Parameter(sharded.get_parameter("head.weight").detach() * 2)  # type: ignore[union-attr]
        with torch.no_grad():
            reference.get_parameter("head.weight").mul_(2)
        assert_trains_alike(reference, sharded, LOSS)
        assert torch.isfinite(whole(sharded.get_parameter("head.weight"))).all()

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("name", ["ZeRO-3", "offloaded", "flat", "ZeRO-1"])
def test_an_optimizer_made_before_a_state_dict_is_assigned_trains_the_model(name: str) -> None:
    def on_each_rank() -> None:
        reference, sharded = _sharded_twins(OPTIONS[name])
        parameters = list(sharded.parameters())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (reference, sharded)]
        for step in range(3):
            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                LOSS(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 0:
                reference.load_state_dict({k: v * 2 for k, v in reference.state_dict().items()})
                sharded.load_state_dict({k: v.detach() * 2 for k, v in sharded.state_dict().items()}, assign=True)
        assert all(a is b for a, b in zip(sharded.parameters(), parameters, strict=True))
        assert_weights_equal(reference, sharded)

    run_ranks(on_each_rank, 2)


# -- ties made through `.data` ---------------------------------------------------------------------------------------


class _Tieable(Net):
    """A language model whose head has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(11, 7)  # type: ignore[assignment]
        self.head = nn.Linear(7, 11, bias=False)


TOKENS = torch.arange(12).view(3, 4) % 11
TOKEN_LOSS = mean_square(lambda model: model(TOKENS))


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_tie_through_data_is_refused_by_name_and_the_way_out_ties(is_gathered: bool) -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Tieable)
        if is_gathered:
            fsdp(sharded).unshard()
        sharded.get_parameter("head.weight").data = sharded.get_parameter("stem.weight").data
        fsdp(sharded).reshard()
        with pytest.raises(RuntimeError, match=ASSIGNED):
            TOKEN_LOSS(sharded)
        assert_weights_equal(reference, sharded)
        for model in (reference, sharded):
            model.head.weight = model.stem.weight  # type: ignore[union-attr]
        assert_trains_alike(reference, sharded, TOKEN_LOSS)
        assert sharded.get_parameter("head.weight") is sharded.get_parameter("stem.weight")

    run_ranks(on_each_rank, 2)


def test_a_tie_through_data_across_units_is_refused_by_name() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Tieable, lambda model: (fully_shard(model.head), shard(model)))
        sharded.get_parameter("head.weight").data = sharded.get_parameter("stem.weight").data
        with pytest.raises(RuntimeError, match=ASSIGNED):
            TOKEN_LOSS(sharded)
        assert_trains_alike(reference, sharded, TOKEN_LOSS)

    run_ranks(on_each_rank, 2)
