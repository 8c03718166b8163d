"""Refusals of options and stages of a model of megatron-core that leave nothing to overlap."""

from collections.abc import Mapping, Sequence
from typing import Any


def check_schedulable(config: Any) -> None:
    """Refuse options under which a layer cannot be cut into slots.

    Raises:
        ValueError: The first refused option, the value and the reason are in the message.
    """
    modules = getattr(config, "recompute_modules", None) or []
    for name, setting, supported, reason in (
        ("recompute_granularity", config.recompute_granularity == "full", False, "Layers would run a second time."),
        ("recompute_modules", "moe" in modules, False, "Recomputed experts would exchange tokens a second time."),
        ("moe_shared_expert_overlap", config.moe_shared_expert_overlap, False, "Shared experts run before dispatch."),
        ("cuda_graph_impl", config.cuda_graph_impl, "none", "A graph keeps no order of two microbatches."),
        (
            "overlap_dispatch_backward_with_experts_wgrad",
            getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False),
            False,
            "The schedule computes these gradients itself.",
        ),
        (
            "mlp_chunks_for_training",
            bool(config.num_moe_experts) and config.mlp_chunks_for_training > 1,
            False,
            "Experts would exchange tokens chunk by chunk.",
        ),
        ("cpu_offloading", config.cpu_offloading, False, "Layers in parts keep what is saved on the device."),
        (
            "fine_grained_activation_offloading",
            config.fine_grained_activation_offloading,
            False,
            "Copies to the host follow the order of whole layers.",
        ),
        ("fp8", config.fp8, None, "Scales of float8 follow the order of microbatches."),
        ("fp4", config.fp4, None, "Scales of 4-bit formats follow the order of microbatches."),
    ):
        if setting != supported:
            configured = getattr(config, name)
            raise ValueError(
                f"Expected another value of `config.{name}` for an overlapped step, got {configured!r}. {reason} "
                "Change the option, or step without overlap."
            )
    if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
        raise ValueError(
            "Expected `config.moe_token_dispatcher_type` to be 'alltoall' or 'flex' for an overlapped step, got "
            "'allgather', which gathers all tokens instead of exchanging some."
        )


def check_stages(config: Any) -> None:
    """Refuse interleaved stages, whose order is the driver's.

    Raises:
        ValueError: The model has virtual stages.
    """
    if (num := config.virtual_pipeline_model_parallel_size) is not None:
        raise ValueError(
            "Expected another value of `config.virtual_pipeline_model_parallel_size` for an overlapped step, got "
            f"{num!r}. Interleaved stages have an order of their own. Step by megatron-core's driver with "
            "`config.overlap_moe_expert_parallel_comm`."
        )


def check_stage(model: Any, microbatches: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a pipeline stage without a loss, or without the input.

    Raises:
        ValueError: Another stage has the output layer; or a microbatch has no input tensor.
    """
    if not model.post_process:
        raise ValueError(
            "Expected a model with the loss, the last pipeline stage (`post_process=True`), got one with "
            "`post_process=False`. Step the stages before by megatron-core's driver without overlap."
        )
    without = [i for i, batch in enumerate(microbatches) if batch.get("decoder_input") is None]
    if without and not model.pre_process:
        raise ValueError(
            "Expected `decoder_input`, the output of the stage before, in each microbatch of a model with "
            f"`pre_process=False`, got none in microbatch {without[0]}. Pass the tensor that set_input_tensor takes."
        )
