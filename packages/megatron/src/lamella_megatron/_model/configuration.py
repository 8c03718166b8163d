"""megatron-core's `DistributedDataParallelConfig` in lamella's terms: a stage, a precision policy, budgets.

Note [Each option has one answer]
    A field either changes how units are sharded, or changes nothing here (padded buckets, the place of a division:
    results are the same), or asks for something else than lamella does, and is refused with another value than the
    default. A field of a later megatron-core that is in none of the tables is refused as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, AxisPlacement, MixedPrecisionPolicy, ShardingOptions

STAGES: Mapping[str, AxisPlacement] = {
    "no_shard": DDP,
    "optim": ZERO1,
    "optim_grads": ZERO2,
    "optim_grads_params": ZERO3,
}
_OUTER = {"no_shard": HSDP, "optim": HFSDP}

# Read here, by the wrapper, or by megatron-core.
_USED = frozenset(
    {
        "bucket_size",
        "check_for_nan_in_grad",
        "data_parallel_sharding_strategy",
        "fp8_param_gather",
        "grad_reduce_in_fp32",
        "megatron_fsdp_grad_comm_dtype",
        "megatron_fsdp_main_grads_dtype",
        "megatron_fsdp_main_params_dtype",
        "megatron_fsdp_use_decoupled_grad",
        "num_distributed_optimizer_instances",
        "outer_dp_sharding_strategy",
        "suggested_communication_unit_size",
        "use_distributed_optimizer",
        "use_megatron_fsdp",
    }
)

# Results are the same with any value.
_NO_EFFECT = frozenset(
    {
        "align_param_gather",
        "average_in_collective",
        "delay_wgrad_compute",
        "fsdp_all_gather_in_start_param_sync",
        "gradient_reduce_div_fusion",
        "keep_fp8_transpose_cache",
        "num_buckets",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "pad_buckets_for_high_nccl_busbw",
        "use_custom_fsdp",
    }
)

_REFUSED = {
    "check_for_large_grads": "Give model.parameter_norms() to lamella_engine.SpikeWatch.",
    "disable_symmetric_registration": "Choose the transport by ShardingOptions(allocator=...).",
    "fp4_param_gather": "Parameters are gathered in the compute dtype.",
    "fsdp_db_use_persist_buf_on_alloc_fail": "Choose the memory of gathers by ShardingOptions(allocator=...).",
    "fsdp_double_buffer": "Choose the memory of gathers by ShardingOptions(allocator=...).",
    "fsdp_manual_registration": "Choose the memory of gathers by ShardingOptions(allocator=...).",
    "megatron_fsdp_cuda_graph_mode": "Capture the step by lamella_optim.capture_step.",
    "megatron_fsdp_enable_fine_grained_param_gather": "Name smaller modules in `unit_classes`.",
    "megatron_fsdp_max_pool_double_buffer": "Choose the memory of gathers by ShardingOptions(allocator=...).",
    "nccl_ub": "Choose the memory of gathers by ShardingOptions(allocator=...).",
    "param_name_patterns_for_fp32_local_accumulation": "Set grad_reduce_in_fp32=True: all sums are in fp32 then.",
    "reduce_scatter_with_fp32_accumulation": "Set grad_reduce_in_fp32=True; ranks of one host sum in fp32 with "
    "gradients in the compute dtype on the wire.",
    "reuse_grad_buf_for_mxfp8_param_ag": "Parameters are gathered in the compute dtype.",
}


_REFUSED_OF_MODELS = {
    "cuda_graph_impl": ("none", "Capture the step by lamella_optim.capture_step."),
    "defer_embedding_wgrad_compute": (False, "Gradients of the output layer come in backward."),
    "delay_wgrad_compute": (False, "Set overlap_moe_expert_parallel_comm too: its schedule calls backward_dw."),
    "overlap_dispatch_backward_with_experts_wgrad": (
        False,
        "No unit waits for its stream. Set overlap_moe_expert_parallel_comm and delay_wgrad_compute in its place.",
    ),
}

_MAX_JOINED = 40_000_000  # Below, hooks and exchanges of a unit take the host longer than its compute takes a GPU.


def check_model_config(config: Any) -> None:
    """Refuse an option of a TransformerConfig by which layers would miss what units give and take in their hooks.

    Raises:
        ValueError: The first such option, its value and the value to set are in the message.
    """
    for name, (supported, reason) in _REFUSED_OF_MODELS.items():
        if name == "delay_wgrad_compute" and config.overlap_moe_expert_parallel_comm:
            continue
        if (value := getattr(config, name, supported)) != supported:
            raise ValueError(f"Expected `config.{name}` to be {supported!r}, got {value!r}. {reason}")


def check_options(ddp_config: Any) -> None:
    """Refuse an option that asks for something that lamella does not do.

    Raises:
        ValueError: The first such option, its value, its default and the way out are in the message; or as
            `placements_of`.
    """
    for field in fields(ddp_config):
        value = getattr(ddp_config, field.name)
        if field.name in _USED or field.name in _NO_EFFECT or value == field.default:
            continue
        way_out = _REFUSED.get(field.name, "lamella does not know it.")
        raise ValueError(
            f"Expected `ddp_config.{field.name}` to be left at {field.default!r}, got {value!r}. {way_out}"
        )
    placements_of(ddp_config)


def strategy_of(ddp_config: Any) -> str:
    """The name of the sharding strategy; megatron-core's sharded optimizer over whole weights is `optim`.

    Raises:
        ValueError: No such strategy.
    """
    strategy: str = ddp_config.data_parallel_sharding_strategy
    if strategy not in STAGES:
        raise ValueError(
            f"Expected `ddp_config.data_parallel_sharding_strategy` to be one of {list(STAGES)}, got {strategy!r}."
        )
    shards_optimizer = ddp_config.use_distributed_optimizer and not ddp_config.use_megatron_fsdp
    return "optim" if strategy == "no_shard" and shards_optimizer else strategy


def placements_of(ddp_config: Any) -> AxisPlacement | tuple[AxisPlacement, ...]:
    """The stage of the strategy, behind replicas if there are several instances of the optimizer.

    Raises:
        ValueError: The strategy is unknown; or the strategy is none over replicas.
    """
    strategy, outer = strategy_of(ddp_config), ddp_config.outer_dp_sharding_strategy
    stage = STAGES[strategy]
    if ddp_config.num_distributed_optimizer_instances == 1:
        return stage
    if outer not in _OUTER or (outer == "optim" and stage is not ZERO3) or stage is DDP:
        raise ValueError(
            "Expected `ddp_config.outer_dp_sharding_strategy` to be 'no_shard', or 'optim' with "
            f"'optim_grads_params', for {ddp_config.num_distributed_optimizer_instances} optimizer instances, got "
            f"{outer!r} with {strategy!r}. Set num_distributed_optimizer_instances=1, or another strategy."
        )
    return _OUTER[outer], stage


def policy_of(ddp_config: Any, module: nn.Module) -> MixedPrecisionPolicy:
    """Compute in the dtypes that the module has now; main weights, gradients, sums and communication as options say."""
    compute = _compute_dtype(module)
    reduce = torch.float32 if ddp_config.grad_reduce_in_fp32 else ddp_config.megatron_fsdp_grad_comm_dtype
    return MixedPrecisionPolicy(
        compute,
        reduce or compute,
        cast_forward_inputs=False,  # Float16Module and the layers decide, residuals may stay in fp32.
        main_dtype=ddp_config.megatron_fsdp_main_params_dtype,
        main_grads_dtype=ddp_config.megatron_fsdp_main_grads_dtype,
        param_dtype_override_fn=lambda parameter: parameter.dtype,
    )


def _compute_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most parameters: routers and state-space parameters may stay in fp32 in a bf16 model."""
    counts: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def options_of(ddp_config: Any, compute_dtype: torch.dtype | None) -> ShardingOptions:
    """The options of every unit: the stage, and gathers ahead for as many elements as are suggested."""
    elements = ddp_config.suggested_communication_unit_size
    itemsize = (compute_dtype or torch.float32).itemsize
    budget = None if elements is None else int(elements) * itemsize
    return ShardingOptions(placements=placements_of(ddp_config), prefetch_budget=budget)


def min_unit_size_of(ddp_config: Any) -> int:
    """The number of parameters until which neighbouring layers are one unit: a bucket's, at most 40 million.

    The most is the default of `DistributedDataParallel` for up to 40 ranks. It grows with the ranks there, and a unit
    of ZeRO-3 must not: its weights are whole during its compute.

    Raises:
        ValueError: `bucket_size` is below 1.

    Source: `DistributedDataParallel` of megatron-core 0.19.2.
    """
    size: int | None = ddp_config.bucket_size
    if size is not None and size < 1:
        raise ValueError(
            f"Expected `ddp_config.bucket_size` of at least 1 parameter, or None, got {size}. None joins neighbouring "
            f"layers until a unit holds {_MAX_JOINED:,} parameters; 1 makes each layer a unit."
        )
    return _MAX_JOINED if size is None else min(size, _MAX_JOINED)
