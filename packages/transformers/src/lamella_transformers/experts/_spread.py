"""Experts on several ranks: each rank's part of a layer's stacks, and tokens that travel to their experts.

Note [Experts are parts of whole tensors]
    A stack of experts is a DTensor over the ranks that share the experts, cut along its first dim; `fully_shard` cuts
    each part further. With four experts of two rows each, over 2 x 2 ranks:

        whole                  [4, 2, n]
        after spread_experts   [4, 2, n] Shard(0) over experts                rank r: experts 2r, 2r + 1
        after fully_shard      [4, 2, n] _StridedShard(0), Shard(0) over (experts_data, experts)     an expert a rank

    So the names and shapes of parameters, gradients and optimizer state are those of the model with all experts, and
    whatever reads DTensors (checkpoints, norms) needs no word about expert parallelism. Only the experts' own forward
    takes the local part: its rows have come from all ranks already.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import AxisPlacement, FSDPModule, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_engine.extending import placement_on
from lamella_layout import Keep
from lamella_schedule import Splits, exchange, route, unroute
from lamella_transformers.experts._families import check_family, decoder_of, is_sparse


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep the experts of this rank in every layer, and send tokens to their experts' ranks from now on.

    Rank r of the mesh's second axis keeps the experts from r * num_experts / axis size on, as a DTensor under the
    parameter's name: Note [Experts are parts of whole tensors]. Call the function before `fully_shard`, on a model with
    all experts, equal on all ranks, or on the meta device.

    Args:
        model: transformers' `MixtralForCausalLM`, `Qwen2MoeForCausalLM`, `Qwen3MoeForCausalLM`,
            `Qwen3NextForCausalLM` or `Qwen3_5MoeForCausalLM`. Shared experts are not spread.
        mesh: Two axes with names: the ranks with the same experts, and the ranks with shares of the experts.

    Raises:
        ValueError: Another model, a mesh of other axes, experts that do not divide among the ranks, or experts that are
            spread already.

    Effects: frees the other ranks' experts. In each forward and backward of a layer, two all-to-alls of tokens and one
        of counts on the second axis, for which the host waits.
    """
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise ValueError(
            "Expected a `mesh` of two axes with names, the ranks with the same experts and the ranks that share the "
            f"experts, got {mesh}. Pass init_device_mesh(..., mesh_dim_names=('experts_data', 'experts')); one rank "
            "with the same experts is an axis of size 1."
        )
    sharing = mesh[mesh.mesh_dim_names[1]]
    for experts in _checked_stacks(model, sharing.size()):
        num_local = experts.num_experts // sharing.size()
        first = sharing.get_local_rank() * num_local
        for name, weight in list(experts.named_parameters(recurse=False)):
            local = weight.detach()[first : first + num_local].clone()
            part = DTensor.from_local(local, sharing, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(part, requires_grad=weight.requires_grad))
        experts.num_all_experts, experts.num_experts, experts.mesh = experts.num_experts, num_local, mesh
        experts.__class__ = type(type(experts).__name__, (SpreadExperts, type(experts)), {})


def check_spread(model: nn.Module, num_ranks: int) -> None:
    """Refuse the models that `spread_experts` refuses.

    Args:
        model: The model, also on the meta device; not changed.
        num_ranks: The number of ranks with shares of the experts.

    Raises:
        ValueError: Another model, a model without experts, experts that do not divide among the ranks, or experts that
            are spread already.
    """
    _checked_stacks(model, num_ranks)


def _checked_stacks(model: nn.Module, num_ranks: int) -> list[Any]:
    check_family(model)
    stacks: list[Any] = [module.experts for module in model.modules() if is_sparse(module)]
    if not stacks:
        raise ValueError(f"Expected layers with experts, got none in {type(model).__name__}. Shard it by fully_shard.")
    for experts in stacks:
        if isinstance(experts, SpreadExperts):
            raise ValueError("Expected experts that are not spread, got spread ones. Call spread_experts once.")
        if experts.num_experts % num_ranks:
            raise ValueError(
                f"Expected experts that divide among the {num_ranks} ranks that share them, got {experts.num_experts}. "
                "Use a number of ranks that divides."
            )
    return stacks


def shard_with_experts(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    options: ShardingOptions | None = None,
    expert_stage: AxisPlacement | None = None,
) -> None:
    """Shard each layer and the rest of the model over `mesh`, and the layers' experts over the ranks with the same.

    Gradients are means over all ranks of `mesh`: tokens of all ranks with shares reach an expert.

    Args:
        model: After `spread_experts`.
        mesh: All ranks of the experts' mesh, one axis.
        mp_policy: The policy for `fully_shard`. A `Float8Recipe` quantises experts as on one rank with all: scales are
            of matrices, or smaller. Choose parameters (`matrices_of`) after `spread_experts`, which replaces them.
        options: The options for `fully_shard`. `keep_together` does not count for experts.
        expert_stage: The ZeRO stage of experts, as `placements` of `options` are of all other parameters. The experts
            of a layer are a unit of their own then, `layer.mlp.experts`, which `UnitResidence` takes beside the
            layer. None: the stage of `options`, and experts in their layer's unit.

    Raises:
        NotImplementedError: A recipe of `mp_policy` that names experts serves no DTensors, as `MXFP8Recipe`.
        ValueError: Experts are not spread, or `mesh` has another number of ranks.

    Effects: as `fully_shard`.
    """
    expert_mesh = _spread_in(model)[0].mesh
    if mesh.size() != expert_mesh.size():
        raise ValueError(
            f"Expected `mesh` to have the {expert_mesh.size()} ranks of the experts' mesh, got {mesh.size()}: "
            "gradients would be means over other ranks. Pass a mesh of one axis over the same ranks."
        )
    policy = mp_policy or MixedPrecisionPolicy()
    arguments = expert_arguments(model, options or ShardingOptions(), policy)
    if expert_stage is not None:
        staged = {**arguments, "options": replace(arguments["options"], placements=expert_stage)}
        for experts in _spread_in(model):
            expert_unit = cast(FSDPModule, fully_shard(experts, mesh=mesh, mp_policy=policy, **staged))
            expert_unit.set_gradient_divide_factor(mesh.size())
    for module in (*decoder_of(model).layers, model):
        unit = fully_shard(module, mesh=mesh, mp_policy=policy, **arguments)
        unit.set_gradient_divide_factor(mesh.size())


def expert_arguments(
    model: nn.Module, options: ShardingOptions, policy: MixedPrecisionPolicy | None = None
) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that shard spread experts over the ranks with the same experts.

    For units and policies of your own, where `shard_with_experts` has too few arguments. Each unit's
    `set_gradient_divide_factor` must be called with the number of all ranks.

    Args:
        model: After `spread_experts`, before `fully_shard`.
        options: The options of all parameters. `keep_together` does not count for experts.
        policy: The number formats of the experts. Without a recipe, more ranks than a rank has experts cut them along
            dim 1, and every rank gets a part. None cuts along dim 0, as recipes need.

    Returns:
        `shard_placement_fn` and `options`.

    Raises:
        ValueError: Experts are not spread.
    """
    spread = _spread_in(model)
    expert_mesh = spread[0].mesh
    experts = {id(weight) for module in spread for weight in module.parameters()}
    data = expert_mesh[cast(Any, expert_mesh.mesh_dim_names)[0]]

    def place(parameter: torch.Tensor) -> Any:
        if id(parameter) not in experts:
            return None
        shape = cast(DTensor, parameter).to_local().shape
        is_plain = policy is not None and policy.recipe is None
        return placement_on(data, dim=_cut_dim(shape, data.size()) if is_plain else 0)

    return {"shard_placement_fn": place, "options": _beside_experts(options, experts)}


def _cut_dim(shape: torch.Size, num_ranks: int) -> int:
    """Return the dim along which to cut a rank's stack of experts over the ranks with the same experts.

    With fewer experts than ranks along dim 0, ranks without an expert would gather slots of padding: 4 experts on 256
    ranks take 64 times their bytes. Another dim costs a staging copy, so it counts only where the ranks outnumber the
    experts.
    """
    return 1 if shape[0] < num_ranks and shape[1] % num_ranks == 0 else 0


def _spread_in(model: nn.Module) -> list[SpreadExperts]:
    spread = [module for module in model.modules() if isinstance(module, SpreadExperts)]
    if not spread:
        raise ValueError("Expected spread experts, got a model without. Call spread_experts before.")
    return spread


def _beside_experts(options: ShardingOptions, experts: set[int]) -> ShardingOptions:
    """The options with experts in the even layout: the flat layout takes no DTensor."""
    keep = options.keep_together
    if keep is None:
        return options

    def of(parameter: nn.Parameter) -> Keep | None:
        if id(parameter) in experts:
            return None
        return keep(parameter) if callable(keep) else keep

    return replace(options, keep_together=of)


class SpreadExperts(nn.Module):
    """Mixed into the class of a layer's experts: rows go to their experts' ranks, and their results return."""

    num_all_experts: int
    mesh: DeviceMesh

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, local, order, splits = self.route(tokens, experts)
        rows = self.compute(exchange(rows, splits), local)
        return unroute(exchange(rows, splits, back=True), order, weights)

    def route(
        self, tokens: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Splits]:
        return route(tokens, experts, self.num_all_experts, self.group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks with shares of the experts."""
        return self.mesh.get_group(1)

    def compute(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts, by the implementation named in the model's config."""
        weights = {
            name: cast(DTensor, parameter).to_local() for name, parameter in self.named_parameters(recurse=False)
        }
        if not len(rows):
            # The parameters' gradients and the way back to the other ranks must not hang on this rank's tokens.
            return rows + sum(weight.sum() * 0 for weight in weights.values())
        routing_weights = torch.ones_like(local, dtype=rows.dtype).unsqueeze(-1)
        forward: Any = super().forward
        return cast(
            torch.Tensor, forward.__func__(_WithLocal(self, weights), rows, local.unsqueeze(-1), routing_weights)
        )


class _WithLocal:
    """Experts as their own forward sees them: the local parts in place of the DTensors.

    Taken once a forward. Taken wherever the forward reads a weight, each expert's gradient would be a DTensor of its
    own, added up by DTensor's slower operators.
    """

    def __init__(self, experts: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        self._experts = experts
        vars(self).update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)
