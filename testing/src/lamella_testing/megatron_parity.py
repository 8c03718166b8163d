"""Training of a megatron-core model over any layout of ranks, against training on a single rank."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lamella_testing._ranks import Device, run_ranks
from lamella_testing.megatron import (
    EXPERTS,
    GATED_DELTA_NET,
    LENGTH,
    MAMBA,
    MULTI_LATENT_ATTENTION,
    NUM_EXPERTS,
    VOCAB_SIZE,
    seed_random_states,
    tiny_config,
    tiny_gpt,
    tiny_hybrid,
    token_losses,
)

BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
_GATED = {"gated_linear_unit": True, "activation_func": F.silu}
LEARNING_RATE = 0.2

Weights = dict[str, torch.Tensor]
Steps = tuple[list[float], list[float], list[int]]
"""The loss over all ranks by step, the norm of the gradients, and the number of their zeros."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Numbers of ranks along megatron-core's axes.

    Attributes:
        num_ranks: Number of ranks in the world.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        expert_tp: Tensor-parallel ranks of experts; None: `tp`.
        cp: Context-parallel ranks.
        instances: Instances of the distributed optimizer, replicas of each other.
    """

    num_ranks: int = 4
    tp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    cp: int = 1
    instances: int = 1

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "ep": self.ep, "etp": self.expert_tp or self.tp, "cp": self.cp, "hsdp": self.instances}
        usual = {"etp": self.tp}
        return "-".join([f"{self.num_ranks} ranks", *(f"{k} {n}" for k, n in sizes.items() if n != usual.get(k, 1))])

    def initialize(self) -> None:
        """Make the groups of `parallel_state`. Effects: collective over the world."""
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.expert_tp,
            context_parallel_size=self.cp,
            num_distributed_optimizer_instances=self.instances,
        )


def has_experts(kind: str) -> bool:
    """Whether the models of a kind have experts."""
    return "moe" in kind or "E" in kind


def make_model(kind: str, layout: Layout, **changes: Any) -> nn.Module:
    """A small model of two to four layers, with the same weights on each call.

    Args:
        kind: `gpt`, `moe`, `moe-mla` (of experts and attention in a latent space), `tied` (embedding and output layer),
            `mtp` (a multi-token prediction layer), `moe-mtp` (two, of experts), or a HybridModel's pattern.
        layout: The groups to make, before the model.
        changes: Fields of the `TransformerConfig`.

    Effects: collective over the world.
    """
    layout.initialize()
    seed_random_states(0)
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "context_parallel_size": layout.cp,
        # megatron-core refuses to train tensor-parallel experts without sequence parallelism.
        "sequence_parallel": has_experts(kind) and layout.tp > 1,
        **(EXPERTS if has_experts(kind) else {}),
        **_GATED,
        **(GATED_DELTA_NET if "G" in kind else {}),
        **(MULTI_LATENT_ATTENTION if "+" in kind or "mla" in kind else {}),
        **changes,
    }
    if kind == "gpt":
        return tiny_gpt(tiny_config(**{"num_query_groups": 2, "add_bias_linear": True, **fields}))
    if kind in ("moe", "moe-mla"):
        return tiny_gpt(tiny_config(**fields))
    if kind == "tied":
        return tiny_gpt(tiny_config(**fields), share_embeddings_and_output_weights=True)
    if kind in ("mtp", "moe-mtp"):
        return _with_prediction(tiny_config(**{"mtp_num_layers": 1 if kind == "mtp" else 2, **fields}))
    main, *depths = kind.split("/")
    sizes = {"num_layers": len(main.replace("|", "")), "mtp_num_layers": len(depths) or None}
    return tiny_hybrid(tiny_config(**{**sizes, **MAMBA, **fields}), kind)


def _with_prediction(config: Any) -> nn.Module:
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    return tiny_gpt(config, mtp_block_spec=specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False))


def own_part(name: str, parameter: torch.Tensor, weights: Weights) -> torch.Tensor:
    """This rank's part of a single rank's parameter: an expert, and a tensor-parallel slice.

    Args:
        name: Name of the parameter on this rank.
        parameter: With megatron-core's marks.
        weights: All parameters of the model on one rank.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    first = NUM_EXPERTS // state.get_expert_model_parallel_world_size() * state.get_expert_model_parallel_rank()
    weight = weights[re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{first + int(m[1])}", name)]
    if getattr(parameter, "tensor_model_parallel", False):
        group = _tensor_group(name)
        weight = _slice(weight, parameter, group.size(), group.rank())
    assert weight.shape == parameter.shape, name
    return weight


def _slice(weight: torch.Tensor, parameter: Any, num: int, rank: int) -> torch.Tensor:
    """A tensor-parallel rank's part: of each block (gate and up, or the inputs of a Mamba mixer) the rank's share."""
    dim = parameter.partition_dim
    stride = getattr(parameter, "partition_stride", 1)
    shares = getattr(parameter, "partition_sizes", None) or [weight.shape[dim] // (num * stride)] * stride
    blocks = torch.split(weight, [share * num for share in shares], dim)
    return torch.cat([block.chunk(num, dim)[rank] for block in blocks], dim)


def _tensor_group(name: str) -> dist.ProcessGroup:
    state = importlib.import_module("megatron.core.parallel_state")
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    groups = state.get_tensor_model_parallel_group(), state.get_expert_tensor_parallel_group()
    return groups[".experts." in name]


@dataclass(frozen=True)
class Trained:
    """Training on a single rank: each parameter before and after, and the steps."""

    before: Weights
    after: Weights
    steps: Steps


@cache
def trained_on_one_rank(kind: str, device: Device = "cpu", num_steps: int = 3) -> Trained:
    """Train a model of a kind on the whole batch, on a single rank. Effects: forks a rank, once a kind and device."""

    def on_one_rank() -> Trained:
        model = make_model(kind, Layout(num_ranks=1)).to(device)
        before = _weights(model)
        steps = _train(model, BATCH.to(device), num_steps)
        return Trained(before, _weights(model), steps)

    [trained] = run_ranks(on_one_rank, 1, device=device)
    losses, _, _ = trained.steps
    assert losses[-1] < losses[0] - 0.05, f"nothing was learned: {losses}"
    return trained


def _weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def _train(model: nn.Module, rows: torch.Tensor, num_steps: int) -> Steps:
    """Train by SGD: AdamW would hide a gradient that is too large by a factor."""
    state = importlib.import_module("megatron.core.parallel_state")
    everyone = state.get_data_parallel_group(with_context_parallel=True)
    place = {"cp_rank": state.get_context_parallel_rank(), "cp_size": state.get_context_parallel_world_size()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, norms, zeros = [], [], []
    for _ in range(num_steps):
        loss = token_losses(model, rows, **place).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        _sum_over_sequence(model)
        norm, num_zeros = _gradient_norm_and_zeros(model)
        norms.append(norm)
        zeros.append(num_zeros)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / everyone.size(), group=everyone)
        losses.append(mean.item())
    return losses, norms, zeros


def _sum_over_sequence(model: nn.Module) -> None:
    """Add up gradients from the tensor-parallel ranks' parts of the sequence, as `finalize_model_grads` does."""
    for _, parameter, gradient in _gradients(model):
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=_tensor_group(""))


def _gradient_norm_and_zeros(model: nn.Module) -> tuple[float, int]:
    """The norm of the whole model's gradient, and the number of its zeros: each part is counted once."""
    total = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for name, parameter, gradient in _gradients(model):
        is_part = getattr(parameter, "tensor_model_parallel", False)
        if (is_part or _tensor_group(name).rank() == 0) and _is_first_replica(parameter):
            total[0] += gradient.square().sum()
            total[1] += gradient.numel() - gradient.count_nonzero()
    dist.all_reduce(total)
    square, num_zeros = total.tolist()
    return math.sqrt(square), int(num_zeros)


def _is_first_replica(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        at == 0 for at, kind in zip(coordinate, parameter.placements, strict=True) if isinstance(kind, Replicate)
    )


def _gradients(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        yield name, parameter, gradient.to_local() if isinstance(gradient, DTensor) else gradient


def assert_trains_as_on_one_rank(
    kind: str,
    layout: Layout,
    shard: Callable[[nn.Module], object],
    *,
    train: Callable[[nn.Module, torch.Tensor, int], Steps] = _train,
    tolerance: float = 1e-6,
    device: Device = "cpu",
    from_meta: bool = False,
) -> None:
    """Assert equal training by the ranks of a layout, with a share of the batch each, and by a single rank.

    Args:
        kind: Kind of the model, as `make_model` takes it.
        layout: Layout of the ranks.
        shard: Shards the model in place.
        train: Takes as many steps of SGD as the last argument says, at `LEARNING_RATE`, on this rank's rows.
        tolerance: Absolute and relative, of losses, gradient norms and weights. Numbers of zeros are equal,
            but for `gpt`, which has biases.
        device: Device of the ranks: "cuda" for a GPU each.
        from_meta: Build the model on the meta device, with weights given after `shard`, not before.

    Raises:
        AssertionError: A value differs; or a parameter is not sharded.

    Effects: forks ranks, and once a kind a single rank.
    """
    expected = trained_on_one_rank(kind, device)
    assert_close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

    def on_each_rank() -> None:
        state = importlib.import_module("megatron.core.parallel_state")
        with torch.device("meta") if from_meta else nullcontext():
            model = make_model(kind, layout)
        if from_meta:
            assert any(parameter.is_meta for parameter in model.parameters())
            shard(model)
            model.to_empty(device=device)
            _fill(model, expected.before)
        else:
            _fill(model, expected.before)
            shard(model.to(device))
        expected_parts = {
            name: own_part(name, parameter, expected.after) for name, parameter in model.named_parameters()
        }
        rows = BATCH.chunk(state.get_data_parallel_world_size())[state.get_data_parallel_rank()]
        steps = train(model, rows.to(device), len(expected.steps[0]))
        assert_close(steps[:2], expected.steps[:2])
        if kind != "gpt":  # The gradients of keys' biases are zero but for rounding.
            assert steps[2] == expected.steps[2], "numbers of zeros"
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert_close(parameter.full_tensor().cpu(), expected_parts[name], msg=partial(_headed, name))

    run_ranks(on_each_rank, layout.num_ranks, device=device)


def _fill(model: nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        part = own_part(name, parameter, weights)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                spread = distribute_tensor(part, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(spread.to_local())
            else:
                parameter.copy_(part)


def _headed(name: str, message: str) -> str:
    return f"{name}: {message}"
