"""Weights that megatron-core builds in Transformer Engine's float8 classes: main weights, and gathers in one byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from lamella_precision import MixedPrecisionPolicy, is_quantized
from lamella_precision.te import replace_quantized_weights


def with_float8_weights(policy: MixedPrecisionPolicy, ddp_config: Any, model: nn.Module) -> MixedPrecisionPolicy:
    """Return the policy with the recipes of a model's float8 weights, which become plain weights, in place.

    Main weights have the values from before the quantisation (megatron-core builds with
    `preserve_high_precision_init_val`), so a model in float8 starts from the weights of the same model in bf16.

    Args:
        policy: The policy of every unit.
        ddp_config: megatron-core's `DistributedDataParallelConfig`.
        model: Not sharded yet. Layers without float8 (`first_last_layers_bf16`) keep their weights.

    Returns:
        The policy; `policy` itself for a model without float8 weights.

    Raises:
        ValueError: `ddp_config.fp8_param_gather` is set and the model has no float8 weight, or the opposite.
        NotImplementedError: A weight's format has no recipe, as NVFP4.
    """
    quantized = next((name for name, parameter in model.named_parameters() if is_quantized(parameter)), None)
    if bool(ddp_config.fp8_param_gather) != (quantized is not None):
        weights = "no such weight" if quantized is None else repr(quantized)
        raise ValueError(
            "Expected `ddp_config.fp8_param_gather` to say whether the model has float8 weights, got "
            f"{ddp_config.fp8_param_gather} and {weights}. Weights are float8 by `config.fp8` with "
            "`config.fp8_param=True`, both on Megatron-LM's command line by --fp8-param-gather: set both options, or "
            "neither."
        )
    if quantized is None:
        return policy
    assert policy.param_dtype is not None  # `policy_of` takes the dtype of the weights
    return replace(policy, recipe=replace_quantized_weights(model, compute_dtype=policy.param_dtype))
