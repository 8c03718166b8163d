"""Tensor- and expert-parallel models train as the model of one rank does: each parameter over its own ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import DDP, ZERO1, ZERO2, FSDPModule, ShardingOptions
from lamella_megatron import fully_shard_model, sharding_units
from lamella_testing import run_ranks
from lamella_testing.megatron import LENGTH, VOCAB_SIZE, megatron_on_cpu, tiny_config, tiny_gpt, token_losses

BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
NUM_EXPERTS = 4
Weights = dict[str, torch.Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:megatron"),  # It warns about defaults of its own,
    pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning"),  # and calls what torch 2.13 renamed.
]


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with megatron_on_cpu():
        yield


def _make(*, tp: int = 1, ep: int = 1, moe: bool = False, **changes: Any) -> nn.Module:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep)
    experts = {
        "num_moe_experts": NUM_EXPERTS,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.0,
        "ffn_hidden_size": 24,
        "moe_grouped_gemm": False,
    }
    torch.manual_seed(0)
    config = tiny_config(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, **(experts if moe else {}), **changes
    )
    return tiny_gpt(config)


def _train(model: nn.Module, rows: torch.Tensor, num_steps: int = 3) -> list[float]:
    """SGD: AdamW would hide a gradient that is too large by a factor."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(num_steps):
        loss = token_losses(model, rows).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _reference(*, moe: bool) -> tuple[Weights, Weights, list[float]]:
    """Weights of one rank's model before and after training on the whole batch, and the losses."""

    def on_one_rank() -> tuple[Weights, Weights, list[float]]:
        model = _make(moe=moe)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        losses = _train(model, BATCH)
        return before, {name: p.detach().clone() for name, p in model.named_parameters()}, losses

    [found] = run_ranks(on_one_rank, 1)
    return found


def _own_part(name: str, parameter: nn.Parameter, whole: Weights) -> torch.Tensor:
    """This rank's part of the reference's parameter: its expert, and its tensor-parallel slice."""
    from megatron.core import parallel_state

    local = NUM_EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first = local * parallel_state.get_expert_model_parallel_rank()
    found = whole[re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{first + int(m[1])}", name)]
    if found.shape != parameter.shape:
        num, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        found = found.chunk(num, dim=parameter.partition_dim)[rank]  # type: ignore[attr-defined]
    assert found.shape == parameter.shape, name
    return found


def _assert_trains_as_one_rank(*, num_ranks: int, tp: int, ep: int, moe: bool, **options: Any) -> None:
    before, after, losses = _reference(moe=moe)

    def on_each_rank() -> list[float]:
        from megatron.core import parallel_state

        model = _make(tp=tp, ep=ep, moe=moe)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_own_part(name, parameter, before))
        wanted = {name: _own_part(name, p, after) for name, p in model.named_parameters()}
        fully_shard_model(model, **options)
        num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        got = _train(model, BATCH.chunk(num)[rank])
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter.full_tensor(), wanted[name], rtol=1e-5, atol=1e-6, msg=name)
        mean = torch.tensor(got)
        dist.all_reduce(mean, op=dist.ReduceOp.SUM, group=parallel_state.get_data_parallel_group())
        return (mean / num).tolist()  # type: ignore[no-any-return]

    for got in run_ranks(on_each_rank, num_ranks):
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_ranks", "tp", "ep", "moe"),
    [
        pytest.param(2, 1, 1, False, id="data parallel"),
        pytest.param(2, 2, 1, False, id="tensor parallel"),
        pytest.param(4, 2, 1, False, id="tensor and data parallel"),
        pytest.param(2, 1, 2, True, id="expert parallel"),
        pytest.param(4, 1, 2, True, id="expert and data parallel"),
        pytest.param(4, 1, 4, True, id="an expert a rank"),
    ],
)
def test_a_model_trains_as_on_one_rank(num_ranks: int, tp: int, ep: int, moe: bool) -> None:
    _assert_trains_as_one_rank(num_ranks=num_ranks, tp=tp, ep=ep, moe=moe)


@pytest.mark.parametrize("stage", [ZERO2, ZERO1, DDP], ids=str)
def test_experts_train_in_every_stage(stage: Any) -> None:
    _assert_trains_as_one_rank(num_ranks=4, tp=1, ep=2, moe=True, options=ShardingOptions(placements=stage))


def test_experts_lie_on_the_ranks_that_hold_them_and_units_are_the_layers() -> None:
    def on_each_rank() -> tuple[set[str], set[int], set[int]]:
        model = fully_shard_model(_make(ep=2, moe=True))
        units = {type(m).__mro__[1].__name__ for m in model.modules() if isinstance(m, FSDPModule) and m is not model}
        sizes: dict[bool, set[int]] = {True: set(), False: set()}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            sizes[".experts." in name].add(parameter.device_mesh.size())
        return (
            {type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)} | units,
            sizes[True],
            sizes[False],
        )

    for names, experts, dense in run_ranks(on_each_rank, 4):
        assert any("TransformerLayer" in name for name in names)
        assert (experts, dense) == ({2}, {4})


@pytest.mark.parametrize(("tp", "ep", "moe"), [(2, 1, False), (1, 2, True)])
def test_units_of_models_whose_ranks_differ_are_refused_by_name(tp: int, ep: int, moe: bool) -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match=r"lamella_megatron\.fully_shard_model\(model\)"):
            sharding_units(_make(tp=tp, ep=ep, moe=moe))

    run_ranks(on_each_rank, 2)


def test_groups_that_are_missing_are_named() -> None:
    def on_each_rank() -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        model = _make(ep=2, moe=True)
        with pytest.raises(ValueError, match="process group `dp_cp`, got none"):
            fully_shard_model(model, groups=ProcessGroupCollection())
        dense = ProcessGroupCollection.use_mpu_process_groups(["dp_cp"])
        with pytest.raises(ValueError, match=r"`expt_dp`, over which '.*experts.*' is sharded"):
            fully_shard_model(model, groups=dense)
        with pytest.raises(TypeError, match="got `mesh`"):
            fully_shard_model(model, mesh=None)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing has changed"

    run_ranks(on_each_rank, 2)
