"""transformers' mixtures of experts, spread over ranks: alone, by hooks, and under a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # once here instead of once a rank
import torch.distributed as dist
from expert_training import MICROBATCHES, batches_of, float8_policy, moe, plain_step, scheduled_step, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import (
    ZERO1,
    ZERO3,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
    quantization_errors,
)
from lamella_engine.testing import held_nbytes
from lamella_precision import Float8Recipe, MXFP8Recipe, QuantizedWeight, matrices_of
from lamella_testing import run_ranks
from lamella_transformers.experts import chunk, shard_with_experts, spread_experts

STEPS = 3
FAMILIES = [
    "qwen3_moe",
    "mixtral",
    "mixtral, sliding window",
    "qwen3_5_moe",
    "qwen2_moe, sliding window",
    "qwen3_next",
]
IN_THE_GATE = ("qwen3_moe", "qwen3_5_moe")


def _alone(family: str, num_ranks: int) -> list[list[torch.Tensor]]:
    """The losses of each rank's microbatches, computed on a single rank."""
    model = moe(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
    for _ in range(STEPS):
        for rank in range(num_ranks):
            for batch in batches_of(rank):
                loss = model(**batch, use_cache=False).loss / MICROBATCHES
                (loss / num_ranks).backward()
                losses[rank].append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train(
    family: str, is_scheduled: bool, stage: Any, experts: str = "eager", *, expert_stage: Any = None
) -> list[torch.Tensor]:
    options = ShardingOptions(placements=stage)
    model = sharded(moe(family, experts), 2, options=options, expert_stage=expert_stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        losses += (scheduled_step if is_scheduled else plain_step)(model, batches_of(dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    weights = [cast(DTensor, parameter).to_local().detach() for parameter in model.parameters()]
    return [*losses, *weights]


@pytest.mark.parametrize(
    ("family", "stage", "num_ranks"),
    [
        *(pytest.param(family, ZERO3, 2, id=f"{family}, ZERO3") for family in IN_THE_GATE),
        pytest.param("qwen3_moe", ZERO1, 4, id="qwen3_moe, ZERO1, two data ranks"),
        *(
            pytest.param(family, ZERO3, 2, id=f"{family}, ZERO3", marks=pytest.mark.slow)
            for family in FAMILIES
            if family not in IN_THE_GATE
        ),
        *(
            pytest.param(family, ZERO1, 4, id=f"{family}, ZERO1, two data ranks", marks=pytest.mark.slow)
            for family in FAMILIES[1:]
        ),
    ],
)
def test_scheduled_bits_equal_the_models_own_forward(family: str, stage: Any, num_ranks: int) -> None:
    def on_each_rank() -> tuple[int, list[torch.Tensor]]:
        plain, scheduled = (_train(family, is_scheduled, stage) for is_scheduled in (False, True))
        num_losses = STEPS * MICROBATCHES
        return sum(not torch.equal(a, b) for a, b in zip(plain, scheduled, strict=True)), scheduled[:num_losses]

    [expected] = run_ranks(lambda: _alone(family, num_ranks), 1)
    for (num_unequal, losses), expected_losses in zip(run_ranks(on_each_rank, num_ranks), expected, strict=True):
        assert num_unequal == 0
        torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
        assert all(abs(losses[i] - losses[-MICROBATCHES:][i]) > 1e-3 for i in range(MICROBATCHES)), "nothing changed"


@pytest.mark.parametrize(
    ("stage", "expert_stage"), [(ZERO3, ZERO1), pytest.param(ZERO1, ZERO3, marks=pytest.mark.slow)], ids=["stay", "go"]
)
def test_experts_in_a_stage_of_their_own_train_as_in_the_stage_of_their_layer(stage: Any, expert_stage: Any) -> None:
    def on_each_rank() -> tuple[bool, dict[str, int]]:
        expected = _train("qwen3_moe", False, stage)
        plain, scheduled = (_train("qwen3_moe", how, stage, expert_stage=expert_stage) for how in (False, True))
        torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)  # sums of microbatches round differently
        return all(torch.equal(a, b) for a, b in zip(plain, scheduled, strict=True)), present()

    def present() -> dict[str, int]:
        """Unsharded bytes of units between steps."""
        options = ShardingOptions(placements=stage)
        model = sharded(moe("qwen3_moe"), 2, options=options, expert_stage=expert_stage)
        plain_step(model, batches_of(dist.get_rank()))
        return held_nbytes(model)

    outcomes = run_ranks(on_each_rank, 4)
    assert all(are_equal for are_equal, _ in outcomes)
    held = outcomes[0][1]
    layers = {"model.layers.0", "model.layers.1", "model.layers.2"}
    experts = {"model.layers.0.mlp.experts", "model.layers.2.mlp.experts"}
    staying, freed = (experts, layers) if expert_stage is ZERO1 else (layers, experts)
    assert staying <= held.keys() and not freed & held.keys()


def test_more_ranks_than_experts_cut_within_each_expert() -> None:
    def steps(model: nn.Module, ranks: range) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rank in ranks:
            plain_step(model, batches_of(rank))
        optimizer.step()
        return [full_tensor(parameter) for parameter in model.parameters()]

    def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()

    def alone() -> list[torch.Tensor]:
        model = fully_shard(moe("qwen3_moe", num_experts=2))
        cast(FSDPModule, model).set_gradient_divide_factor(4)
        return steps(model, range(4))

    def spread() -> list[torch.Tensor]:
        model = sharded(moe("qwen3_moe", num_experts=2), 2)
        stacks = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
        assert stacks
        for stack in stacks:
            assert cast(DTensor, stack).placements == (Shard(1), Shard(0))
            assert 4 * cast(DTensor, stack).to_local().numel() == stack.numel()
        return steps(model, range(dist.get_rank(), dist.get_rank() + 1))

    [expected] = run_ranks(alone, 1)
    for weights in run_ranks(spread, 4):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_explicit_positions_without_a_mask_equal_the_models_own_forward() -> None:
    def alone() -> list[list[float]]:
        losses_by_family = []
        for family in ("mixtral", "qwen2_moe, sliding window", "qwen3_5_moe"):
            model = sharded(moe(family), 1)
            batch = {name: tokens for name, tokens in batches_of(0)[0].items() if name != "attention_mask"}
            positions = torch.arange(20).view(2, 10) // torch.tensor([[1], [2]])  # different for each row
            batches = [{**batch, "position_ids": positions}, batch]
            losses = [*plain_step(model, batches), *scheduled_step(model, batches)]
            losses_by_family.append([float(loss) for loss in losses])
        return losses_by_family

    [losses_by_family] = run_ranks(alone, 1)
    for with_positions, left_out, scheduled_given, scheduled_left_out in losses_by_family:
        assert with_positions != left_out
        assert (scheduled_given, scheduled_left_out) == (with_positions, left_out)


def test_the_configs_implementation_of_experts_is_used() -> None:
    def on_each_rank() -> bool:
        eager, grouped = (_train("qwen3_moe", True, ZERO3, experts) for experts in ("eager", "grouped_mm"))
        torch.testing.assert_close(grouped, eager, rtol=1e-4, atol=1e-5)
        return all(torch.equal(a, b) for a, b in zip(eager, grouped, strict=True))

    assert run_ranks(on_each_rank, 2) != [True, True]


def _never_spread(model: Any, policy: MixedPrecisionPolicy) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=replace(policy, recipe=None))
    return cast(nn.Module, model)


RECIPES = {
    "tensor": Float8Recipe(compute_dtype=torch.float32),
    "delayed": Float8Recipe(num_past_amaxes=2, compute_dtype=torch.float32),
    "row": Float8Recipe((1, None), compute_dtype=torch.float32),
    "block": Float8Recipe((8, 8), compute_dtype=torch.float32),
}


Trained = tuple[torch.Tensor, list[torch.Tensor], dict[str, float]]


def _train_in_float8(recipe: Float8Recipe, num_spread: int, num_ranks: int) -> Trained:
    """Losses, by step, of this rank's or of all ranks' batches; unsharded weights; and errors of quantisation."""
    unsharded = moe("qwen3_moe", num_layers=1)
    model = (
        sharded(unsharded, num_spread, recipe=recipe)
        if num_spread
        else _never_spread(unsharded, float8_policy(unsharded, recipe))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        for rank in [dist.get_rank()] if num_spread else range(num_ranks):
            loss = model(**batches_of(rank)[0], use_cache=False).loss
            (loss / (1 if num_spread else num_ranks)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    weights = [cast(DTensor, parameter).full_tensor().detach() for parameter in model.parameters()]
    errors = {name: error.relative for name, error in quantization_errors(model).items()}
    return torch.stack(losses).view(STEPS, -1), weights, errors


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (4, ["delayed", "block"]),
        *(pytest.param(num_ranks, list(RECIPES), marks=pytest.mark.slow) for num_ranks in (2, 4)),
    ],
)
def test_spread_experts_in_float8_train_as_all_experts_on_one_rank(num_ranks: int, names: list[str]) -> None:
    """Scales are of matrices, rows and blocks, never shared by ranks of different experts."""

    def on_each_rank(num_spread: int) -> dict[str, Trained]:
        return {name: _train_in_float8(RECIPES[name], num_spread, num_ranks) for name in names}

    [expected] = run_ranks(lambda: on_each_rank(0), 1)
    for rank, figures in enumerate(run_ranks(lambda: on_each_rank(2), num_ranks)):
        for name, (losses, weights, errors) in figures.items():
            expected_losses, expected_weights, expected_errors = expected[name]
            torch.testing.assert_close(losses[:, 0], expected_losses[:, rank], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
            assert errors == pytest.approx(expected_errors, rel=1e-4)
            assert 0.01 < errors["model.layers.0.mlp.experts.down_proj"] < 0.05
            assert (losses[0] - losses[-1]).abs().min() > 1e-2, "nothing changed"


def _saved_bytes(experts: str, recipe: Float8Recipe | None, num_spread: int) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept by autograd between forward and backward, with resharding; and the gradients."""
    unsharded = moe("qwen3_moe", experts, 16)  # a row in bf16 is a multiple of 16 bytes, as kernels ask
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if num_spread:
        options: dict[str, Any] = {"recipe": recipe} if recipe else {"mp_policy": policy}
        model = sharded(unsharded, num_spread, **options)
    else:
        model = _never_spread(unsharded, float8_policy(unsharded, recipe) if recipe else policy)
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        for payload in tensor.payloads if isinstance(tensor, QuantizedWeight) else (tensor,):
            saved[payload.untyped_storage()._cdata] = payload.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batches_of(0)[0], use_cache=False).loss
    num_bytes = sum(storage.nbytes() for storage in saved.values())
    loss.backward()
    return num_bytes, [cast(DTensor, parameter.grad).full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize(("experts", "num_spread"), [("eager", 0), ("grouped_mm", 0), ("grouped_mm", 2)])
def test_stacks_of_experts_in_float8_save_no_more_than_in_bf16(experts: str, num_spread: int) -> None:
    def on_each_rank() -> tuple[int, int]:
        recipe = Float8Recipe()
        in_bf16, _ = _saved_bytes(experts, None, num_spread)
        in_float8, gradients = _saved_bytes(experts, recipe, num_spread)
        with patch(
            "lamella_precision._weights.quantized.views_by", return_value=None
        ):  # a copy of the values for each view
            in_copies, expected = _saved_bytes(experts, recipe, num_spread)
        assert in_copies > in_bf16
        torch.testing.assert_close(gradients, expected, rtol=0.0, atol=0.0)
        return in_float8, in_bf16

    for in_float8, in_bf16 in run_ranks(on_each_rank, 2):
        assert in_float8 <= in_bf16


def test_ranks_without_tokens_take_part_in_backward() -> None:
    def on_each_rank() -> list[bool]:
        model = cast(Any, moe("mixtral"))
        spread_experts(model, _mesh())
        with torch.no_grad():
            for layer in model.model.layers:  # every token goes to the same two experts, on a single rank
                layer.mlp.gate.weight.zero_()
        batch = batches_of(dist.get_rank())[0]
        model(**batch, use_cache=False).loss.backward()
        return [bool(layer.mlp.experts.gate_up_proj.grad.to_local().any()) for layer in model.model.layers]

    assert sorted(run_ranks(on_each_rank, 2)) == [[False] * 3, [True] * 3]


def _mesh() -> DeviceMesh:
    """Experts on all ranks."""
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("edp", "ep"))


def test_wrong_models_and_meshes_are_refused() -> None:
    def on_each_rank() -> None:
        model = moe("mixtral")
        batch = batches_of(0)[0]
        with pytest.raises(ValueError, match=r"model of mixtral or .* or qwen3_5_moe_text, got Linear"):
            spread_experts(nn.Linear(2, 2), _mesh())
        with pytest.raises(ValueError, match=r"Expected spread experts"):
            chunk(model, **batch)
        with pytest.raises(ValueError, match=r"Expected spread experts"):
            shard_with_experts(model, mesh=_mesh()["ep"])
        with pytest.raises(ValueError, match=r"Expected experts that divide among the 3 ranks that share them, got 4"):
            spread_experts(model, _mesh())
        with pytest.raises(ValueError, match=r"Expected a `mesh` of two axes with names"):
            spread_experts(model, init_device_mesh("cpu", (3,), mesh_dim_names=("ep",)))

    run_ranks(on_each_rank, 3)

    def alone() -> None:
        model = cast(Any, moe("mixtral"))
        spread_experts(model, _mesh())
        with pytest.raises(ValueError, match=r"Call spread_experts once"):
            spread_experts(model, _mesh())
        recipe = matrices_of(model.model.layers, MXFP8Recipe(), names="mlp.experts.*")
        mxfp8 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, recipe=recipe)
        with pytest.raises(NotImplementedError, match=r"for a DTensor .* Let `recipe` return None for it"):
            shard_with_experts(model, mesh=_mesh()["ep"], mp_policy=mxfp8)
        model.model.gradient_checkpointing = True
        with pytest.raises(ValueError, match=r"Expected a model without activation checkpointing"):
            chunk(model, **batches_of(0)[0])

    run_ranks(alone, 1)

    def spread_over_more_ranks() -> None:
        model = moe("mixtral")
        pairs = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("others", "edp", "ep"))
        spread_experts(model, pairs["edp", "ep"])
        with pytest.raises(ValueError, match=r"Expected `mesh` to have the 2 ranks of the experts' mesh, got 4"):
            shard_with_experts(model, mesh=init_device_mesh("cpu", (4,)))

    run_ranks(spread_over_more_ranks, 4)
