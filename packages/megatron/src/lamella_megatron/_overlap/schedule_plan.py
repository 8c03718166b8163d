"""Expert-parallel overlap: the forward of one microbatch beside the backward of another, for megatron-core's models."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from torch import nn

from lamella_engine import FSDPModule, UnitResidence
from lamella_engine.extending import local_of
from lamella_megatron._model.auxiliary_losses import number_prediction_routers, scale_auxiliary_losses
from lamella_megatron._model.sharded_model import innermost
from lamella_megatron._overlap.model_chunk import ScheduledLayers, model_chunk, scheduled_layers
from lamella_megatron._overlap.schedule_checks import check_schedulable, check_stage, check_stages
from lamella_schedule import Flight, Lanes, run, run_order, run_pair


def forward_backward_overlapped(
    model: nn.Module,
    microbatches: Sequence[Mapping[str, Any]],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    early_release: bool | None = None,
    num_layers_ahead: int = 1,
) -> list[torch.Tensor]:
    """One step's forwards and backwards, with the all-to-alls of experts beside the compute of another microbatch.

        losses = forward_backward_overlapped(model, batches, lambda losses: losses.mean() / len(batches))
        finalize_model_grads([model])
        optimizer.step()

    Losses and gradients are those of one microbatch after the other, bit by bit (without units but for an embedding
    that predictions read too, whose gradients are added in another order). A layer, or a group of layers with
    experts at the end, is cut into attention and router, dispatch, experts and combine, and so is each depth of
    multi-token prediction; `lamella_schedule.order` is the order. Parameters of units are gathered a layer ahead.

    Args:
        model: A GPTModel or HybridModel, whole or the last pipeline stage, also in wrappers; in units of
            `fully_shard_model`, or without units.
        microbatches: The arguments of the model's forward for each microbatch: `input_ids`, `position_ids`,
            `attention_mask`, `labels`. For a last stage also `decoder_input`, the stage's input tensor, (length, batch,
            width): a leaf with `requires_grad`, whose `.grad` is for the stage before.
        loss_of: Takes the model's output for a microbatch, returns a 0-D loss: the microbatch's share of the step's,
            scaled as by `config.grad_scale_func`. Losses of routers and of multi-token prediction are scaled as by
            megatron-core's driver.
        early_release: Run attention's backward before the forward's experts, to free saved memory earlier; None for
            `config.ep_overlap_early_attn_memory_release`.
        num_layers_ahead: Number of layers whose units are gathered before their use.

    Returns:
        The loss of each microbatch.

    Raises:
        ValueError: An option of the model's configuration leaves nothing to overlap, or no order of slots keeps; or
            layers of one unit have others between them; or the model is another stage than the last, or lacks its
            input tensor.

    Effects: streams of `lamella_schedule.run`, gathers and reductions of `UnitResidence`; reductions of gradients are
        not waited for on the host.
        Sets the scales of megatron-core's auxiliary losses, which all models of the process share, and books the
        losses of predictions' routers behind those of all decoder layers.
    """
    inner = innermost(model)
    check_schedulable(inner.config)
    check_stages(inner.config)
    check_stage(inner, microbatches)
    scheduled = scheduled_layers(inner)
    chunks = [model_chunk(inner, scheduled, batch, loss_of) for batch in microbatches]
    number_prediction_routers(inner)
    scale_auxiliary_losses(inner, len(chunks))
    residence = scheduled.residence(inner) if isinstance(inner, FSDPModule) else None
    return run(
        chunks,
        residence=residence,
        early_release=_releases_early(inner, early_release),
        num_layers_ahead=num_layers_ahead,
    )


def overlapped_peak_nbytes(
    model: nn.Module,
    num_microbatches: int,
    *,
    early_release: bool | None = None,
    num_layers_ahead: int = 1,
) -> int:
    """Compute the bytes of unsharded parameters at the peak of an overlapped step, within the model's budgets.

    Args:
        model: A model in units of `fully_shard_model`, also in wrappers.
        num_microbatches: Number of a step's microbatches.
        early_release: The step's choice; None for `config.ep_overlap_early_attn_memory_release`.
        num_layers_ahead: Number of layers whose units are gathered before their use.

    Returns:
        As `UnitResidence.peak_nbytes`, equal on every rank.

    Raises:
        ValueError: `model` is not in units, or layers of one unit have others between them.
    """
    inner = innermost(model)
    scheduled = scheduled_layers(inner)
    plans = model_chunk(inner, scheduled, {}, lambda output: output).plans
    residence = scheduled.residence(inner)
    is_early = _releases_early(inner, early_release)
    return residence.peak_nbytes(
        run_order(num_microbatches, plans, early_release=is_early, num_layers_ahead=num_layers_ahead)
    )


class SchedulePlan(AbstractSchedulePlan):  # type: ignore[misc]  # megatron-core has no types
    """One microbatch on its way, for megatron-core's driver with `overlap_moe_expert_parallel_comm`.

    Args:
        schedule: The schedule of the model.
        batch: The arguments of the model's forward.
    """

    def __init__(self, schedule: _ModelSchedule, batch: Mapping[str, Any]) -> None:
        self.schedule = schedule
        self.input: torch.Tensor | None = batch.get("decoder_input")
        self.flight = Flight(
            model_chunk(schedule.model, schedule.layers, batch, lambda output: output),
            schedule.lanes,
            next(_numbers),
        )
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # for the driver's loss; the lanes have others

    @property
    def stage(self) -> int:
        """The virtual stage of the model."""
        return int(getattr(self.schedule.model, "vp_stage", None) or 0)

    @staticmethod
    def run(
        f_schedule_plan: SchedulePlan | None,
        b_schedule_plan: SchedulePlan | None,
        b_grad: torch.Tensor | None = None,
        pre_forward: Callable[[int], object] | None = None,
        pre_backward: Callable[[int], object] | None = None,
        post_forward: Callable[[torch.Tensor, int], object] | None = None,
        post_backward: Callable[[torch.Tensor | None, int], object] | None = None,
    ) -> torch.Tensor | None:
        """Run the forward of one plan beside the backward of another, of the same or another stage of the rank.

        Args:
            f_schedule_plan: A new plan, or None.
            b_schedule_plan: A plan after its forward, or None.
            b_grad: The gradient of the second plan's output.
            pre_forward: Waits for the input of a virtual stage's forward.
            pre_backward: Waits for `b_grad`.
            post_forward: Sends the output of a virtual stage.
            post_backward: Sends the gradient of a virtual stage's input.

        Returns:
            The first plan's output, detached.

        Effects: streams of `lamella_schedule.run_pair`, gathers and reductions of `UnitResidence`; messages of the
            functions given, on the current stream, before and after the pair.
        """
        plan = f_schedule_plan or b_schedule_plan
        assert plan is not None, "the driver gives one plan at least"
        if f_schedule_plan is not None and pre_forward is not None:
            pre_forward(f_schedule_plan.stage)
        if b_schedule_plan is not None:
            if pre_backward is not None:
                pre_backward(b_schedule_plan.stage)
            b_schedule_plan.flight.begin_backward((b_grad,))
        forward, backward = (
            schedule_plan and schedule_plan.flight for schedule_plan in (f_schedule_plan, b_schedule_plan)
        )
        run_pair(
            forward,
            backward,
            residence=plan.schedule.residence,
            backward_residence=None if b_schedule_plan is None else b_schedule_plan.schedule.residence,
            early_release=_releases_early(plan.schedule.model, early_release=None),
        )
        output = None
        if forward is not None:
            # The driver may free the output once it is sent; its shape is enough for the backward.
            [output] = forward.take_outputs()
            assert isinstance(output, torch.Tensor)
            if f_schedule_plan is not None and post_forward is not None:
                post_forward(output, f_schedule_plan.stage)
        if b_schedule_plan is not None and post_backward is not None:
            entered = b_schedule_plan.input
            post_backward(None if entered is None else entered.grad, b_schedule_plan.stage)
        return output


@dataclass
class _ModelSchedule:
    """The plans of a model.

    Attributes:
        model: The model in units.
        layers: The layers.
        lanes: The streams of all plans, also of other stages' models.
        residence: The residence of the units.
    """

    model: Any
    layers: ScheduledLayers
    lanes: Lanes
    residence: UnitResidence

    def build(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **more: Any,
    ) -> SchedulePlan:
        """A plan of one microbatch; takes the arguments of the model's forward."""
        if decoder_input is None and not self.model.pre_process:
            # The stage holds the input of one microbatch at a time, which the driver has set for this one.
            decoder_input = self.model.decoder.input_tensor
        arguments = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        return SchedulePlan(self, {**arguments, "decoder_input": decoder_input, "labels": labels, **more})


def schedule_by_plans(model: Any) -> None:
    """Let megatron-core's driver overlap a model's microbatches: give a sharded model a `build_schedule_plan`.

    Raises:
        ValueError: An option of the configuration leaves nothing to overlap, or the model has pipeline stages that are
            not interleaved.
    """
    check_schedulable(model.config)
    num = model.config.pipeline_model_parallel_size
    if num > 1 and model.config.virtual_pipeline_model_parallel_size is None:
        raise ValueError(
            "Expected `config.pipeline_model_parallel_size` to be 1 for megatron-core's overlapped driver, or "
            f"interleaved stages, got {num} without `config.virtual_pipeline_model_parallel_size`: the driver of such "
            "stages overlaps nothing. Step without overlap, or run the last stage by "
            "lamella_megatron.training.forward_backward_overlapped."
        )
    scheduled = scheduled_layers(model)
    residence = scheduled.residence(model)
    lanes = _lanes(local_of(next(model.parameters())).device)
    model.build_schedule_plan = _ModelSchedule(model, scheduled, lanes, residence).build


_numbers = itertools.count()  # of microbatches: a pair of two stages' microbatches needs two numbers


def _lanes(device: torch.device) -> Lanes:
    """The lanes of all models whose plans are made under one stream: a pair of two stages needs the same."""
    stream = torch.get_device_module(device).current_stream(device) if device.type != "cpu" else None
    return _lanes_under(device, stream)


@functools.cache
def _lanes_under(device: torch.device, stream: object) -> Lanes:
    return Lanes(device)


def _releases_early(model: Any, early_release: bool | None) -> bool:
    return bool(model.config.ep_overlap_early_attn_memory_release) if early_release is None else early_release
