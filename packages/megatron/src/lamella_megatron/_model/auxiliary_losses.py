"""Losses that megatron-core's routers and predictions add in backward: their scales, and their places in records."""

from __future__ import annotations

import copy
import importlib
from typing import Any

from lamella_engine.extending import local_of


def scale_auxiliary_losses(model: Any, num_microbatches: int) -> None:
    """Set the scales of a model's losses added in backward, by the function of megatron-core's driver.

    Without a loss the function sets scales alone. Scales stay from step to step: unset, the scales of another model's
    step, with another number of microbatches, would count.
    """
    scaler = importlib.import_module("megatron.core.transformer.moe.moe_utils").MoEAuxLossAutoScaler
    scale = scaler.main_loss_backward_scale
    if scale is not None and not scale.dim():
        # A backward without scales leaves a 0-D tensor, and the function copies a tensor of one element.
        scaler.main_loss_backward_scale = None
    config = copy.copy(model.config)
    config.timers = None  # the function would stop a timer that the driver starts
    importlib.import_module("megatron.core.pipeline_parallel.schedules").forward_step_calc_loss(
        model,
        local_of(next(model.parameters())),  # for the device
        loss_func=None,
        config=config,
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=num_microbatches,
        forward_data_store=[],
        cp_group_size=config.context_parallel_size,
        is_last_stage=False,
    )


def number_prediction_routers(model: Any) -> None:
    """Number the routers of predictions behind the decoder's layers, for megatron-core's records of losses.

    In a hybrid stack megatron-core numbers a prediction's layers from 1 on, without a mark on its layers of experts:
    a router's losses would be booked under a layer of the decoder. Routers with the mark add the decoder's layers
    themselves.
    """
    if not getattr(model, "mtp_process", False):
        return
    for prediction in model.mtp.layers:
        for module in prediction.modules():
            if hasattr(module, "is_mtp_layer") and hasattr(module, "set_layer_number") and not module.is_mtp_layer:
                module.set_layer_number(model.config.num_layers + prediction.layer_number)
