"""Sums over all elements of a model: the model's ranks, and how much a rank's elements count.

Note [Each element counts once]
    The norm of all gradients and the number of zeros are sums over the ranks of an optimizer instance
    (`intra_dist_opt`) and over the instances (`inter_dist_opt`), with different elements under HFSDP. Some ranks hold
    the same elements: replicas (`no_shard`, HSDP), and tensor-parallel ranks of an unsplit parameter. Replicas count
    for a share each, and of the tensor-parallel ranks the first rank counts, as in megatron-core. One sum thereby
    covers dense parameters and experts, on different meshes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import param_is_not_shared

from lamella_engine.extending import local_of
from lamella_megatron._driver.wrapper import ShardedModel, replica_groups
from lamella_megatron._model.placement import check_group


@dataclass(frozen=True)
class ModelRanks:
    """The ranks of a sum over all elements of a model.

    Attributes:
        tp: Tensor-parallel ranks; None takes the group of `parallel_state`.
        expert_tp: Tensor-parallel ranks of experts; None takes the group of `parallel_state`.
        instance: The ranks of an optimizer instance.
        instances: The ranks of all instances with this rank's place; None for a single instance.
    """

    tp: dist.ProcessGroup | None
    expert_tp: dist.ProcessGroup | None
    instance: dist.ProcessGroup
    instances: dist.ProcessGroup | None

    @classmethod
    def of(cls, pg_collection: Any = None) -> ModelRanks:
        """The groups of a `ProcessGroupCollection`, or of `parallel_state` for None.

        Raises:
            ValueError: The collection lacks `tp` or `intra_dist_opt`.
        """
        if pg_collection is not None:
            for name in ("tp", "intra_dist_opt"):
                check_group(pg_collection, name, "over which gradients' norms are added up")
        instances = (
            getattr(pg_collection, "inter_dist_opt", None)
            if pg_collection is not None
            else parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
        )
        return cls(
            tp=getattr(pg_collection, "tp", None),
            expert_tp=getattr(pg_collection, "expt_tp", None),
            instance=getattr(pg_collection, "intra_dist_opt", None)
            or parallel_state.get_intra_distributed_optimizer_instance_group(),
            instances=instances if instances is not None and instances.size() > 1 else None,
        )

    def share(self, parameter: torch.Tensor) -> float:
        """How much this rank's elements of a parameter count; Note [Each element counts once]."""
        if not param_is_not_shared(parameter) or not tensor_parallel.param_is_not_tensor_parallel_duplicate(
            parameter, tp_group=self.tp, expert_tp_group=self.expert_tp
        ):
            return 0.0
        return 1.0 / math.prod(group.size() for group in replica_groups(parameter))

    def all_reduce(self, number: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """All-reduce over the model's ranks. Effects: an all-reduce, and a second with several instances."""
        dist.all_reduce(number, op=op, group=self.instance)
        if self.instances is not None:
            dist.all_reduce(number, op=op, group=self.instances)


@torch.no_grad()
def weights_norm(chunks: Sequence[ShardedModel]) -> float:
    """The 2-norm of all main weights of a model, on every rank.

    Args:
        chunks: The sharded chunks of this rank's pipeline stage.

    Effects: an all-reduce of a number over the model's ranks, and a host sync.
    """
    ranks = ModelRanks.of(chunks[0].pg_collection)
    shares = {parameter: ranks.share(parameter) for chunk in chunks for parameter in chunk.parameters()}
    device = next((local_of(parameter).device for parameter in shares), torch.device("cpu"))
    square = torch.zeros((), dtype=torch.float64, device=device)
    if shares:
        norms = torch._foreach_norm([local_of(parameter) for parameter in shares], 2, torch.float32)
        torch._foreach_mul_(norms, [math.sqrt(share) for share in shares.values()])
        square += torch.stack(norms).to(torch.float64).square().sum()
    ranks.all_reduce(square)
    return float(square.sqrt().item())
