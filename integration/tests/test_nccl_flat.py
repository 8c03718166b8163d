"""On GPUs over NCCL: units in the flat layout train as the unsharded model and as the even layout do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from four_gpus import Options, mesh
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import (
    HFSDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    MixedPrecisionPolicy,
    RaggedDTensor,
    Rows,
    ShardingOptions,
    Whole,
    fully_shard,
)
from lamella_integration.collectives import CollectiveCounter
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.tasks import TASKS, Trace, TrainingSettings, shard, train
from lamella_layout import Keep
from lamella_testing import run_ranks

MANY_RANKS = pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _matrices_in_blocks(parameter: nn.Parameter) -> Keep | None:
    return Rows(32) if parameter.ndim == 2 else None


KEEPS: dict[str, Any] = {"rows": Rows(1), "whole": Whole(), "both layouts": _matrices_in_blocks}


def _assert_close(got: Trace, expected: Trace) -> None:
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got.grad_norms, expected.grad_norms, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(got.weights, expected.weights, rtol=0.0, atol=1e-3)


@MANY_RANKS
def test_fp32_training_takes_the_steps_of_one_unsharded_gpu(num_ranks: int) -> None:
    recipe = TrainingSettings(num_steps=8, max_norm=1.0)

    def unsharded() -> dict[str, Trace]:
        return {name: train(task, task.model(device=_cuda()), recipe) for name, task in TASKS.items()}

    def sharded() -> list[dict[str, Trace]]:
        return [
            {
                name: train(task, shard(task.model(device=_cuda()), fully_shard, options=options), recipe)
                for name, task in TASKS.items()
            }
            for options in (ShardingOptions(keep_together=keep) for keep in KEEPS.values())
        ]

    [expected] = run_ranks(unsharded, 1, device="cuda")
    for traces_of_rank in run_ranks(sharded, num_ranks, device="cuda"):
        for traces in traces_of_rank:
            for name, trace in traces.items():
                _assert_close(trace, expected[name])


@MANY_RANKS
def test_bf16_training_takes_the_steps_of_the_even_layout(num_ranks: int) -> None:
    """Bit by bit on two ranks, since a sum has a single order; see test_nccl. Without clipping, since norms differ."""
    recipe = TrainingSettings(num_steps=8, foreach=False)
    tolerance = 0.0 if num_ranks == 2 else 2 * recipe.learning_rate
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def traces() -> list[tuple[Trace, Trace]]:
        use_repeatable_kernels()
        flat = ShardingOptions(keep_together=Rows(1))
        return [
            (
                train(task, shard(task.model(device=_cuda()), fully_shard, mp_policy=policy), recipe),
                train(task, shard(task.model(device=_cuda()), fully_shard, mp_policy=policy, options=flat), recipe),
            )
            for task in TASKS.values()
        ]

    for results in run_ranks(traces, num_ranks, device="cuda"):
        for even, flat in results:
            torch.testing.assert_close(flat.losses, even.losses, rtol=0.0 if num_ranks == 2 else 2**-8, atol=0.0)
            torch.testing.assert_close(flat.weights, even.weights, rtol=0.0, atol=tolerance)


WAYS: dict[str, Options] = {
    "ZERO1": lambda: {"mesh": mesh(4), "placements": ZERO1},
    "ZERO2": lambda: {"mesh": mesh(4), "placements": ZERO2},
    "HSDP": lambda: {"mesh": mesh(2, 2), "placements": (HSDP, ZERO3)},
    "HFSDP": lambda: {"mesh": mesh(2, 2), "placements": (HFSDP, ZERO3)},
    "neighbours": lambda: {"mesh": mesh(4), "reshard_after_forward": 2},
}


@pytest.mark.gpu4
@pytest.mark.parametrize("way", WAYS)
def test_every_stage_takes_the_steps_of_one_unsharded_gpu(way: str) -> None:
    task, recipe = TASKS["odd"], TrainingSettings(num_steps=8, max_norm=1.0)
    [expected] = run_ranks(lambda: train(task, task.model(device=_cuda()), recipe), 1, device="cuda")

    def sharded() -> Trace:
        asked = WAYS[way]()
        options = ShardingOptions(placements=asked.pop("placements", None), keep_together=Rows(1))
        return train(task, shard(task.model(device=_cuda()), fully_shard, options=options, **asked), recipe)

    for trace in run_ranks(sharded, 4, device="cuda"):
        _assert_close(trace, expected)


@MANY_RANKS
def test_a_unit_is_one_gather_and_one_reduction(num_ranks: int) -> None:
    task = TASKS["llama"]

    def counted(keep: Keep | None) -> dict[str, int]:
        model = shard(task.model(device=_cuda()), fully_shard, options=ShardingOptions(keep_together=keep))
        train(task, model, TrainingSettings(num_steps=1))  # the order is learned
        with CollectiveCounter() as counter:
            train(task, model, TrainingSettings(num_steps=1))
        counts = counter.counts()
        return {kind: counts[kind] for kind in ("all_gather", "reduce_scatter")}

    def counts_by_layout() -> tuple[dict[str, int], dict[str, int]]:
        return counted(None), counted(Rows(1))

    for even, flat in run_ranks(counts_by_layout, num_ranks, device="cuda"):
        assert flat == even


class _Short(nn.Module):
    """Parameters with empty shards on most ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 640)
        self.two = nn.Linear(640, 2)
        self.one = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(torch.tanh(self.two(torch.tanh(self.wide(x)))))
        return out


def _trained(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    optimizer = make([p for p in model.parameters() if p.ndim == 2 or make.func is not torch.optim.Muon])  # type: ignore[attr-defined]
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)).to(_cuda())
    for _ in range(4):
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in (q.detach() for q in model.parameters())]


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Keep]] = {
    "fused AdamW": (partial(torch.optim.AdamW, lr=1e-2, fused=True), Rows(1)),
    "fused Adam, amsgrad": (partial(torch.optim.Adam, lr=1e-2, fused=True, amsgrad=True), Rows(1)),
    "fused SGD": (partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True), Rows(1)),
    "AdamW, foreach": (partial(torch.optim.AdamW, lr=1e-2, foreach=True), Rows(1)),
    "AdamW, capturable": (partial(torch.optim.AdamW, lr=1e-2, capturable=True), Rows(1)),
    "Muon": (partial(torch.optim.Muon, lr=1e-2), Whole()),
}


@MANY_RANKS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_where_ranks_own_nothing_of_some_parameters(name: str, num_ranks: int) -> None:
    make, keep = OPTIMIZERS[name]

    def check() -> bool:
        results = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = _Short().to(_cuda())
            if is_sharded:
                fully_shard(model, options=ShardingOptions(keep_together=keep))
                assert all(isinstance(parameter, RaggedDTensor) for parameter in model.parameters())
            owns_nothing = any(not len(p.to_local()) for p in model.parameters() if isinstance(p, DTensor))
            results.append(_trained(model, make))
        # Muon computes in bf16, and a GPU's matmuls round differently by shape.
        tolerance = 5e-3 if name == "Muon" else 1e-5
        for got, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=tolerance)
        return owns_nothing

    assert any(run_ranks(check, num_ranks, device="cuda"))


@MANY_RANKS
def test_fused_optimizers_step_the_even_layouts_empty_shards(num_ranks: int) -> None:
    def check() -> bool:
        results = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = _Short().to(_cuda())
            if is_sharded:
                fully_shard(model)
            owns_nothing = any(not len(p.to_local()) for p in model.parameters() if isinstance(p, DTensor))
            results.append(_trained(model, partial(torch.optim.AdamW, lr=1e-2, fused=True)))
        for got, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        return owns_nothing

    assert any(run_ranks(check, num_ranks, device="cuda"))


@MANY_RANKS
def test_full_tensors_and_random_values_of_flat_shards_are_the_unsharded_models(num_ranks: int) -> None:
    def check() -> None:
        torch.manual_seed(0)
        reference = _Short().to(_cuda())
        torch.manual_seed(0)
        sharded = fully_shard(_Short(), options=ShardingOptions(keep_together=Rows(1)))
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert isinstance(got, RaggedDTensor)
            assert torch.equal(got.full_tensor(), expected)
            for parameter in (expected, got):
                torch.manual_seed(1)
                nn.init.normal_(parameter)
            assert torch.equal(got.full_tensor(), expected)
            torch.testing.assert_close(got.norm().to_local(), expected.norm())

    run_ranks(check, num_ranks, device="cuda")
