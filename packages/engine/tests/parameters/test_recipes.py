"""A unit whose matrices travel in a format of a recipe's: other payloads in forward than in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from block_recipe import BLOCK, RECIPE, Blocks, BlockWeight, MatrixBlock, matrix_recipe, twins_in_8_bits
from engine_models import assert_weights_equal, fsdp, local, mesh_of
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    DDP,
    HFSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Rows,
    ShardingOptions,
    Whole,
    describe,
    fully_shard,
)
from lamella_engine.testing import CollectiveLog, named_units, record
from lamella_precision import Direction
from lamella_precision.testing import check_recipe
from lamella_testing import run_ranks

POLICY = MixedPrecisionPolicy(recipe=matrix_recipe)


def _sharded(model: Blocks, **options: Any) -> Blocks:
    for block in model.blocks:
        fully_shard(block, mp_policy=POLICY, **options)
    return fully_shard(model, **options)  # its head in the main weights' dtype


def _x(width: int = 16) -> torch.Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _step(model: nn.Module, x: torch.Tensor) -> None:
    """A step with the same batch on every rank: the mean of equal gradients is the gradient, to the bit."""
    model(x).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            local(parameter).sub_(0.01 * local(parameter.grad))
            parameter.grad = None


def _assert_trains_as_oracle(sharded: Callable[[Blocks], Blocks], width: int = 16, **sizes: int) -> Blocks:
    mine, oracle = twins_in_8_bits(width=width, **sizes)
    sharded(mine)
    for _ in range(3):
        _step(mine, _x(width))
        _step(oracle, _x(width))
        for model in (mine, oracle):
            with torch.no_grad():
                model(_x(width))
    for _, unit in named_units(mine):
        unit.weights.reshard()  # units that stay after a forward
    assert_weights_equal(oracle, mine, rtol=0.0, atol=0.0)
    return mine


def _payload_nbytes(rows: int = 32, width: int = 16) -> tuple[int, int]:
    """Bytes of a block's payloads for forward alone, and for backward alone: its two matrices' integers and scales."""
    data = 2 * rows * width
    return data + 4 * (rows + width), data + 4 * (rows // BLOCK * width + width // BLOCK * rows)


BIAS = 4 * 32


def test_the_block_recipe_conforms() -> None:
    check_recipe(RECIPE, relative_error=1.0)  # of the smallest numbers nothing is left


WAYS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "kept between": {"reshard_after_forward": False},
    "zero2": {"options": ShardingOptions(placements=ZERO2)},
    "zero1": {"options": ShardingOptions(placements=ZERO1)},
    "ddp": {"options": ShardingOptions(placements=DDP)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "rows": {
        "options": ShardingOptions(keep_together=lambda parameter: Rows(2 * BLOCK) if parameter.ndim == 2 else None)
    },
    "whole": {"options": ShardingOptions(keep_together=lambda parameter: Whole() if parameter.ndim == 2 else None)},
}
# The number of ranks decides where matrices are cut, in either layout; four ranks go on as two do after that.
CUTS = ("zero3", "zero2", "rows", "whole")


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [
        *((way, 2) for way in WAYS),
        *((way, 4) for way in CUTS),
        *(pytest.param(way, 4, marks=pytest.mark.slow) for way in WAYS if way not in CUTS),
    ],
)
def test_training_equals_an_oracle_that_quantises_whole_weights(way: str, num_ranks: int) -> None:
    # A flat layout asks for as many elements a scale of all.
    sizes = {"rows": 16} if way in ("rows", "whole") else {}

    def check() -> None:
        _assert_trains_as_oracle(lambda model: _sharded(model, **WAYS[way]), **sizes)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_blocks_that_even_chunks_would_cut_apart_lie_in_the_flat_layout(num_ranks: int) -> None:
    def check() -> None:
        model = _assert_trains_as_oracle(_sharded, rows=8, width=8)
        keeps = {parameter.sharding.keep for group in _matrices(model) for parameter in group.parameters}
        assert keeps == ({Rows(BLOCK)} if num_ranks == 4 else {None})

    run_ranks(check, num_ranks)


def _matrices(model: nn.Module) -> list[Any]:
    return [group for _, unit in named_units(model) for group in unit.parameters.groups if len(group.buffers) > 1]


@pytest.mark.parametrize("placements", [(HFSDP, ZERO3), None], ids=["hfsdp", "hsdp"])
def test_two_axes(placements: Any) -> None:
    def check() -> None:
        model = _assert_trains_as_oracle(
            lambda model: _sharded(model, mesh=mesh_of((2, 2)), options=ShardingOptions(placements=placements))
        )
        for group in _matrices(model) if placements else ():
            assert set(group.model_weights) in ({0, 1}, {0, 1, 2, 3})

    run_ranks(check, 4)


def test_a_smaller_group_gathers_again_in_backward() -> None:
    def check() -> None:
        model = _assert_trains_as_oracle(lambda model: _sharded(model, reshard_after_forward=2))
        log = record(model)
        _step(model, _x())
        forward, backward = _payload_nbytes()
        # Neighbours gather in backward, from parts of all payloads: one gather a block on the axis.
        gathered = [event.nbytes for event in log.events if event.kind == "gather" and event.unit.startswith("blocks")]
        assert gathered == [forward + backward + BIAS] * 3

    run_ranks(check, 4)


def _logged(**options: Any) -> tuple[Blocks, CollectiveLog]:
    model = _sharded(twins_in_8_bits()[0], **options)
    for _ in range(2):
        _step(model, _x())
    return model, record(model)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_forward_and_backward_gather_only_the_payloads_of_their_direction(num_ranks: int) -> None:
    def check() -> None:
        model, log = _logged()
        _step(model, _x())
        gathered = [event.nbytes for event in log.events if event.kind == "gather" and event.unit.startswith("blocks")]
        forward, backward = _payload_nbytes()
        assert gathered == [forward + BIAS] * 3 + [backward + BIAS] * 3
        log.clear()
        with torch.no_grad():
            model(_x())
        assert [event.nbytes for event in log.events if event.unit.startswith("blocks") and event.kind == "gather"] == [
            forward + BIAS
        ] * 3

    run_ranks(check, num_ranks)


def test_units_that_stay_gather_backwards_payloads_beside_forwards() -> None:
    def check() -> None:
        model, log = _logged(reshard_after_forward=False)
        _step(model, _x())
        gathered = [event.nbytes for event in log.events if event.kind == "gather" and event.unit.startswith("blocks")]
        forward, backward = _payload_nbytes()
        assert gathered == [forward + BIAS] * 3 + [backward] * 3
        assert not any(buffer.has_bytes for group in _matrices(model) for buffer in group.buffers)

    run_ranks(check, 2)


class _RecomputingUnits(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        head: torch.Tensor = self.head(x)
        return head


class _RecomputingInside(MatrixBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = checkpoint(self.up, x, use_reentrant=False)
        return x + nn.functional.layer_norm(self.down(torch.tanh(up)), x.shape[-1:])


@pytest.mark.parametrize("recomputes", ["units", "parts of units"])
def test_recomputed_forwards_find_forwards_payloads(recomputes: str) -> None:
    def check() -> None:
        mine, oracle = twins_in_8_bits()
        for model in (mine, oracle):
            if recomputes == "units":
                model.__class__ = _RecomputingUnits
            else:
                for block in model.blocks:
                    block.__class__ = _RecomputingInside
        _sharded(mine)
        logs = []
        for _ in range(3):
            logs.append(record(mine))
            _step(mine, _x())
            _step(oracle, _x())
        assert_weights_equal(oracle, mine, rtol=0.0, atol=0.0)
        # From the second step on both directions' payloads come together.
        assert len([unit for unit in logs[-1].units_of("gather") if unit.startswith("blocks")]) == 6

    run_ranks(check, 2)


def test_units_from_the_meta_device_know_their_directions() -> None:
    def check() -> None:
        with torch.device("meta"):
            model = Blocks()
        _sharded(model)
        hooked = [bool(model.get_submodule(name)._forward_pre_hooks) for name in ("blocks.0.up", "head")]
        assert hooked == [True, False]
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        with torch.no_grad():
            model(_x())
        assert sum(len(group.buffers) for group in _matrices(model)) == 3 * 4

    run_ranks(check, 2)


def test_verbs_and_holds_gather_the_payloads_of_both_directions() -> None:
    def check() -> None:
        model = _sharded(twins_in_8_bits()[0])
        block = fsdp(model.blocks[0])
        for hold in (block.unshard, lambda: block.hold().wait()):
            hold()
            weight = model.blocks[0].get_parameter("up.weight")
            assert isinstance(weight, BlockWeight)
            for direction in (Direction.FORWARD, Direction.BACKWARD):
                assert weight.read(direction).shape == (32, 16)
            block.reshard()

    run_ranks(check, 2)


def test_unsharded_nbytes_of_a_group_with_a_recipe_counts_all_payloads() -> None:
    def check() -> None:
        model = _sharded(twins_in_8_bits()[0])
        group = _matrices(model)[0]
        assert group.unsharded_nbytes == sum(buffer.flat.numel() * buffer.flat.itemsize for buffer in group.buffers)
        assert "unsharded   int8, float32, int8, float32" in describe(model)

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        (
            {"options": ShardingOptions(keep_together=Rows(BLOCK + 1))},
            ValueError,
            r"multiple of 4 rows of 'weight'.*num_rows=5",
        ),
        ({"shard_placement_fn": lambda _: Shard(1)}, NotImplementedError, "'weight' at dim 0"),
        ({"mp_policy": MixedPrecisionPolicy(recipe=cast(Any, lambda _: 8))}, TypeError, "Recipe or None.*got 8"),
    ],
)
def test_recipes_that_cannot_be_are_refused_at_the_call(
    options: dict[str, Any], kind: type[Exception], complaint: str
) -> None:
    def check() -> None:
        with pytest.raises(kind, match=complaint):
            fully_shard(nn.Linear(16, 16, bias=False), **{"mp_policy": POLICY, **options})

    run_ranks(check, 2)
