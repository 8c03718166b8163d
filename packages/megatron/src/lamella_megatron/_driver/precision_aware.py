"""Transformer Engine's FusedAdam over shards: gradients, moments and main weights in dtypes of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import optimizer as optimizers
from torch.optim import SGD, Adam, Optimizer

from lamella_engine.extending import local_of
from lamella_optim import step_on_local_shards


def check_gradient_dtypes(config: Any, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Hold the dtypes of sharded gradients against the optimizer's configuration.

    Raises:
        ValueError: The optimizer would read gradients of another dtype; the parameter is named.
    """
    is_aware = config.use_precision_aware_optimizer
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        gradient_dtype = _gradient_dtype(parameter)
        expected_dtype = config.main_grads_dtype if is_aware else parameter.dtype
        if gradient_dtype == expected_dtype or (config.optimizer == "sgd" and not is_aware):
            continue
        if is_aware:
            source = "`config.main_grads_dtype`"
            way_out = (
                f"Set ddp_config.megatron_fsdp_main_grads_dtype={expected_dtype}, or "
                f"config.main_grads_dtype={gradient_dtype}."
            )
        else:
            source = "the dtype of the main weights"
            way_out = "Set use_precision_aware_optimizer=True, or leave ddp_config.megatron_fsdp_main_grads_dtype out."
        raise ValueError(
            f"Expected gradients in {expected_dtype}, {source}, got {gradient_dtype} for {name!r}. {way_out}"
        )


def fused_adam(config: Any, parameters: Iterable[torch.Tensor]) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """A function of parameter groups that makes Transformer Engine's FusedAdam, as a precision-aware config says.

    Main weights in fp32 are the optimizer's own. Over main weights in bf16 FusedAdam keeps fp32 copies, or with
    `store_param_remainders` the 16 bits by which fp32 differs.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    kind: Any = optimizers.Adam  # Transformer Engine's, or else apex's or torch's
    if "exp_avg_dtype" not in inspect.signature(kind).parameters:
        raise ImportError(
            "Expected Transformer Engine's FusedAdam for `config.use_precision_aware_optimizer`, got "
            f"{kind.__module__}.{kind.__name__}, whose moments have no dtypes of their own. Install "
            "transformer-engine, or set the option to False."
        )
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "adam_w_mode": config.decoupled_weight_decay,
        "exp_avg_dtype": config.exp_avg_dtype,
        "exp_avg_sq_dtype": config.exp_avg_sq_dtype,
        "use_decoupled_grad": True,
    }
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        options |= {
            "master_weights": True,
            "master_weight_dtype": config.main_params_dtype,
            "store_param_remainders": config.store_param_remainders,
        }
    return lambda groups: step_on_local_shards(kind(groups, **options))


def bytes_at_rest(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of this rank's shards when an optimizer is about to step, from numbers of elements and dtypes.

    Returns:
        Under "weights", "gradients" and "state". State of a single number a parameter is left out, and so is the
        alignment of shards in their buffers.

    Raises:
        NotImplementedError: The optimizer is neither torch's Adam, AdamW or SGD nor Transformer Engine's FusedAdam.

    Effects: none; no step is needed before.
    """
    nbytes = dict.fromkeys(("weights", "gradients", "state"), 0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            num = local_of(parameter).numel()
            nbytes["weights"] += num * parameter.dtype.itemsize
            nbytes["gradients"] += num * _gradient_dtype(parameter).itemsize * parameter.requires_grad
            nbytes["state"] += num * _state_itemsize(optimizer, group, parameter.dtype)
    return nbytes


def _state_itemsize(optimizer: Any, group: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes of an optimizer's state for each element of a parameter."""
    if isinstance(optimizer, SGD):
        return dtype.itemsize if group["momentum"] else 0
    if isinstance(optimizer, Adam):  # AdamW is a subclass
        return dtype.itemsize * (3 if group["amsgrad"] else 2)
    if hasattr(optimizer, "exp_avg_sq_dtype"):
        moments = sum(
            _moment_itemsize(moment_dtype) for moment_dtype in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
        )
        if not optimizer.master_weights:
            return int(moments)
        has_remainders = optimizer.store_param_remainders and dtype == torch.bfloat16
        return int(moments + (2 if has_remainders else optimizer.master_weight_dtype.itemsize))
    raise NotImplementedError(
        f"Expected torch's Adam or SGD, or Transformer Engine's FusedAdam, got {type(optimizer).__name__}, whose "
        "state is unknown before a step. Count the tensors of `optimizer.state` after one."
    )


def _moment_itemsize(dtype: torch.dtype) -> int:
    """Bytes of a moment of FusedAdam: Transformer Engine 2.11 allocates a transpose with each tensor of 8 bits."""
    return 2 if dtype == torch.uint8 else dtype.itemsize


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype
