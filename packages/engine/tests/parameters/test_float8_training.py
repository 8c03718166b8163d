"""Layers with matrices sent in 8 bits train like one rank that quantises whole weights at each use."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_models import assert_weights_equal, descend, mesh_of
from float8_models import (
    FP32,
    RECIPES,
    AnyRecipe,
    Decoder,
    Linear,
    as_oracle,
    decoder,
    fake_quantised,
    loss_of,
    quantised_straight,
    sharded,
    train,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    HFSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
)
from lamella_engine.testing import named_units, record, require_unit
from lamella_precision import Direction, Float8Recipe, MXFP8Recipe, matrices_of
from lamella_testing import load_compiler, run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")


def _assert_trains_as_oracle(model: Decoder, oracle: Decoder, recipe: AnyRecipe, **options: Any) -> Decoder:
    model = sharded(model, recipe, **options)
    assert train(model) == train(as_oracle(oracle, recipe))
    assert_weights_equal(oracle, model, rtol=0.0, atol=0.0)
    return model


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_llama_trains_to_the_bit_as_one_rank_that_quantises_whole_weights(name: str, num_ranks: int) -> None:
    # MXFP8 needs blocks of 32 rows on one rank: sizes for the flat layout. All others: rows that no rank
    # count divides, and blocks cut by every rank.
    sizes = (32, 64) if name == "mxfp8" else (20, 37)

    def check() -> None:
        _assert_trains_as_oracle(decoder(*sizes), decoder(*sizes), RECIPES[name])

    run_ranks(check, num_ranks)


class _Stack(nn.Module):
    """Matrices in MXFP8 of one unit, between an embedding and a head: the first has blocks of 32 and of 16 columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(23, 48)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    Linear(48, 96, bias=False), nn.Tanh(), Linear(96, 96, bias=False), Linear(96, 32, bias=False)
                )
            ]
        )
        self.head = Linear(32, 23, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.layers[0](self.embedding(tokens))))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_matrices_of_unlike_blocks_train_in_one_unit(num_ranks: int) -> None:
    def check() -> None:
        model, oracle = (cast(Decoder, _Stack()) for _ in range(2))
        model = _assert_trains_as_oracle(model, oracle, RECIPES["mxfp8"])
        (layer,) = model.layers
        # The embedding's and the head's matrices are no part of it.
        assert [len(group.parameters) for group in require_unit(layer).parameters.groups] == [1, 2]

    run_ranks(check, num_ranks)


class _TiedEmbedding(nn.Module):
    """An embedding that is the head's weight too; with a `recipe`, an oracle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(23, 16)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.recipe: AnyRecipe | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.recipe is None:
            return cast(torch.Tensor, self.head(torch.tanh(self.embedding(tokens))))
        weight = quantised_straight(self.embedding.weight, self.recipe)
        return F.linear(torch.tanh(F.embedding(tokens, weight)), weight)


@pytest.mark.parametrize("name", ["tensor", "row", "cut-block"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_tied_weight_is_quantised_for_the_embedding_and_the_head(name: str, num_ranks: int) -> None:
    def check() -> None:
        model, oracle = _TiedEmbedding(), _TiedEmbedding()
        oracle.recipe = RECIPES[name]
        fully_shard(model, mp_policy=MixedPrecisionPolicy(recipe=RECIPES[name]))  # `matrices_of` leaves tables out
        for _, unit in named_units(model):
            for group in unit.parameters.groups:
                group.divisor = 1.0
        assert train(model) == pytest.approx(train(oracle), rel=1e-6)
        assert_weights_equal(oracle, model, rtol=1e-6, atol=1e-7)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("name", ["tensor", "row", "cut-block"])
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_mixture_of_experts_trains_to_the_bit_with_a_stack_of_matrices(name: str, num_ranks: int) -> None:
    def check() -> None:
        model, oracle = decoder(is_moe=True), decoder(is_moe=True)
        _assert_trains_as_oracle(model, oracle, RECIPES[name])

    run_ranks(check, num_ranks)


@pytest.mark.parametrize(
    "options",
    [
        {"options": ShardingOptions(placements=ZERO1)},
        {"options": ShardingOptions(placements=ZERO2)},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["zero1", "zero2", "stay", "offload"],
)
@pytest.mark.parametrize("name", ["tensor", "cut-block"])
def test_stages_and_residence_change_no_bit(name: str, options: dict[str, Any]) -> None:
    def check() -> None:
        _assert_trains_as_oracle(decoder(), decoder(), RECIPES[name], **options)

    run_ranks(check, 2)


@pytest.mark.parametrize("placements", [(HFSDP, ZERO3), None], ids=["hfsdp", "hsdp"])
def test_two_axes_measure_whole_weights(placements: Any) -> None:
    def check() -> None:
        options = {"mesh": mesh_of((2, 2)), "options": ShardingOptions(placements=placements)}
        _assert_trains_as_oracle(decoder(), decoder(), RECIPES["cut-block"], **options)

    run_ranks(check, 4)


@pytest.mark.parametrize("name", ["tensor", "mxfp8"])
def test_neighbours_gather_bytes_again_in_backward(name: str) -> None:
    def check() -> None:
        sizes = (32, 64) if name == "mxfp8" else (20, 36)
        _assert_trains_as_oracle(decoder(*sizes), decoder(*sizes), RECIPES[name], reshard_after_forward=2)

    run_ranks(check, 4)


OPERATORS: dict[str, Any] = {
    "matmul": lambda x, w: x @ w,
    "addmm": lambda x, w: torch.addmm(torch.zeros(64), x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
}


class _Product(nn.Module):
    """A weight under another operator than `linear`."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        magnitudes = torch.exp2(torch.randint(-12, 12, (64, 64)))  # values that differ between the directions
        self.weight = nn.Parameter(torch.randn(64, 64) * magnitudes)
        self.operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, OPERATORS[self.operator](x, self.weight))


def test_every_operator_reads_the_direction_that_is_gathered() -> None:
    def check() -> None:
        recipe = MXFP8Recipe(compute_dtype=FP32)
        for operator, is_recomputed in product(OPERATORS, (False, True)):
            module = _Product(operator)
            forward_weight, backward_weight = (
                fake_quantised(module.weight, recipe, direction)
                for direction in (Direction.FORWARD, Direction.BACKWARD)
            )
            assert not torch.equal(forward_weight, backward_weight)
            model = nn.Sequential(module)
            fully_shard(module, mp_policy=MixedPrecisionPolicy(recipe=recipe))
            fully_shard(model)
            x = torch.randn(8, 64, requires_grad=True)
            output = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
            assert torch.equal(output, OPERATORS[operator](x, forward_weight))
            output.sum().backward()
            # A stack of one is another view, of forward's values; backward with recomputation has both directions.
            used = forward_weight if operator == "bmm" or is_recomputed else backward_weight
            assert torch.equal(cast(torch.Tensor, x.grad), torch.ones(8, 64) @ used.t())

    run_ranks(check, 2)


def test_a_model_that_first_runs_in_inference_mode_trains() -> None:
    def check() -> None:
        model = sharded(decoder(), RECIPES["cut-block"])
        with torch.inference_mode():
            loss_of(model)
        oracle = as_oracle(decoder(), RECIPES["cut-block"])
        assert train(model) == train(oracle)

    run_ranks(check, 2)


def test_a_unit_gathered_inside_the_optimizers_step_is_measured_alone() -> None:
    def check() -> None:
        recipe = RECIPES["row"]
        model, oracle = sharded(decoder(), recipe), as_oracle(decoder(), recipe)
        log = record(model)
        for _ in range(2):
            for twin in (model, oracle):
                share = 0.0 if twin is model and dist.get_rank() else 1.0
                (share * loss_of(twin)).backward()  # type: ignore[no-untyped-call]
            for layer, other in zip(model.layers, oracle.layers, strict=True):
                descend(layer)
                descend(other)
                log.clear()
                require_unit(layer).gather_early()
                assert [event.kind for event in log.events] == ["all-reduce", "gather"]
            for twin in (model, oracle):
                twin.zero_grad()
            log.clear()
            with torch.no_grad():
                assert loss_of(model).item() == loss_of(oracle).item()
            assert "all-reduce" not in [event.kind for event in log.events]  # the layers' scales are in use

    run_ranks(check, 2)


def test_ranks_without_rows_of_a_weight_find_its_scales() -> None:
    def check() -> None:
        model = _assert_trains_as_oracle(decoder(2, 2), decoder(2, 2), RECIPES["cut-block"])
        up = cast(DTensor, model.get_parameter("layers.0.mlp.up.weight"))
        assert up.to_local().shape[0] == (1 if up.device_mesh.get_rank() < 2 else 0)

    run_ranks(check, 4)


def test_bf16_compute_with_fp32_main_weights_trains_as_the_oracle() -> None:
    """Gradients are of bf16 values on both sides; the oracle's norms and head compute in fp32."""

    def check() -> None:
        recipe = Float8Recipe((1, None))
        model, oracle = sharded(decoder(), recipe), as_oracle(decoder(), replace(recipe, compute_dtype=FP32))
        losses, expected = train(model), train(oracle)
        assert losses == pytest.approx(expected, rel=0.02)  # three digits of bf16
        assert losses[-1] < losses[0]
        weight = model.get_parameter("layers.0.qkv.weight")
        assert weight.dtype == FP32

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks wrappers for gradients
@pytest.mark.parametrize(
    "recipe",
    [
        Float8Recipe((8, 8)),
        pytest.param(Float8Recipe(), marks=pytest.mark.slow),
        pytest.param(MXFP8Recipe(gathers_both=True), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_compiled_layers_train_in_one_graph_as_eager_layers(recipe: AnyRecipe) -> None:
    load_compiler()

    def check() -> None:
        losses = []
        for is_compiled in (False, True):
            model = decoder(32, 64, num_layers=1)  # each layer is compiled by itself
            for layer in model.layers if is_compiled else ():
                layer.compile(backend="aot_eager", fullgraph=True)
            losses.append(train(sharded(model, recipe)))
        assert losses[0] == losses[1]

    run_ranks(check, 2)


@pytest.mark.parametrize("derivative", ["grad", "jvp", "vmap", "hessian"])
@pytest.mark.parametrize("name", ["tensor", "mxfp8"])
def test_transforms_take_linear_layers_as_plain_products_with_the_gathered_weights(name: str, derivative: str) -> None:
    class Product(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    def result(kind: type[nn.Linear]) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(kind(32, 32, bias=False), nn.Tanh()) for _ in range(2)))
        for unit in (*model, model):
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(recipe=matrices_of(model, RECIPES[name])))
        x = torch.randn(2, 32)
        if derivative == "jvp":
            return torch.func.jvp(model, (x,), (x,))[1]
        if derivative == "vmap":
            torch.vmap(model)(x).square().sum().backward()
            return cast(DTensor, model.get_parameter("0.0.weight").grad).full_tensor()
        transform = torch.func.grad if derivative == "grad" else torch.func.hessian
        return transform(lambda values: model(values).square().sum())(x[0])

    def check() -> None:
        torch.testing.assert_close(result(nn.Linear), result(Product))

    run_ranks(check, 2)


def test_frozen_matrices_train_around_and_offloaded_shards_leave_no_copy() -> None:
    def check() -> None:
        recipe = RECIPES["row"]
        models = decoder(), decoder()
        for twin in models:
            for layer in twin.layers:
                layer.get_parameter("qkv.weight").requires_grad_(False)
        model = _assert_trains_as_oracle(*models, recipe, offload_policy=CPUOffloadPolicy(pin_memory=False))
        for _, unit in named_units(model):
            for group in unit.parameters.groups:
                assert group.scales is None or group.scales._columns is None

    run_ranks(check, 2)
