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
from lamella_engine.extending import local_of, unit_of
from lamella_megatron._model.auxiliary_losses import number_prediction_routers, scale_auxiliary_losses
from lamella_megatron._model.expert_units import expert_modules
from lamella_megatron._model.sharded_model import innermost
from lamella_megatron._model.units import is_group
from lamella_megatron._overlap.forward_segments import (
    arguments_of_decoder,
    arguments_of_prediction,
    forward_after_decoder,
    forward_after_prediction,
)
from lamella_megatron._overlap.layer_slots import (
    Delayable,
    Prediction,
    PredictionInput,
    SlottedLayers,
    delayable,
    layers_inside,
)
from lamella_schedule import Flight, Lanes, ModelChunk, run, run_order, run_pair


def forward_backward_overlapped(
    model: nn.Module,
    microbatches: Sequence[Mapping[str, Any]],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    early_release: bool | None = None,
    ahead: int = 1,
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
        ahead: Number of layers whose units are gathered before their use.

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
    _check_schedulable(inner.config)
    _check_stages(inner.config)
    _check_stage(inner, microbatches)
    scheduled = _scheduled_layers(inner)
    chunks = [_model_chunk(inner, scheduled, batch, loss_of) for batch in microbatches]
    number_prediction_routers(inner)
    scale_auxiliary_losses(inner, len(chunks))
    residence = scheduled.residence(inner) if isinstance(inner, FSDPModule) else None
    return run(chunks, residence=residence, early_release=_releases_early(inner, early_release), ahead=ahead)


def overlapped_peak_nbytes(
    model: nn.Module,
    num_microbatches: int,
    *,
    early_release: bool | None = None,
    ahead: int = 1,
) -> int:
    """Compute the bytes of unsharded parameters at the peak of an overlapped step, within the model's budgets.

    Args:
        model: A model in units of `fully_shard_model`, also in wrappers.
        num_microbatches: Number of a step's microbatches.
        early_release: The step's choice; None for `config.ep_overlap_early_attn_memory_release`.
        ahead: Number of layers whose units are gathered before their use.

    Returns:
        As `UnitResidence.peak_nbytes`, equal on every rank.

    Raises:
        ValueError: `model` is not in units, or layers of one unit have others between them.
    """
    inner = innermost(model)
    scheduled = _scheduled_layers(inner)
    plans = _model_chunk(inner, scheduled, {}, lambda output: output).plans
    residence = scheduled.residence(inner)
    is_early = _releases_early(inner, early_release)
    return residence.peak_nbytes(run_order(num_microbatches, plans, early_release=is_early, ahead=ahead))


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
            _model_chunk(schedule.model, schedule.layers, batch, lambda output: output),
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
    layers: _ScheduledLayers
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
    _check_schedulable(model.config)
    num = model.config.pipeline_model_parallel_size
    if num > 1 and model.config.virtual_pipeline_model_parallel_size is None:
        raise ValueError(
            "Expected `config.pipeline_model_parallel_size` to be 1 for megatron-core's overlapped driver, or "
            f"interleaved stages, got {num} without `config.virtual_pipeline_model_parallel_size`: the driver of such "
            "stages overlaps nothing. Step without overlap, or run the last stage by "
            "lamella_megatron.training.forward_backward_overlapped."
        )
    scheduled = _scheduled_layers(model)
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


def _check_schedulable(config: Any) -> None:
    """Refuse options under which a layer cannot be cut into slots.

    Raises:
        ValueError: The first such option, its value and the reason are in the message.
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


def _check_stages(config: Any) -> None:
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


def _check_stage(model: Any, microbatches: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a pipeline stage without a loss, or without its input.

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


@dataclass(frozen=True)
class _ScheduledLayers:
    """The layers of a model's schedule, in order.

    Attributes:
        decoder: The layers of each item of the decoder.
        predictions: The layers of multi-token prediction, one a depth.
        units: The units of each item and each depth.
        experts: Units of experts in a stage of their own, among `units`; the slots call the experts.
        delayable: The modules of each item and each depth that may leave weight gradients to later.
    """

    decoder: list[list[nn.Module]]
    predictions: list[nn.Module]
    units: list[list[nn.Module]]
    experts: list[nn.Module]
    delayable: list[Delayable]

    def residence(self, model: nn.Module) -> UnitResidence:
        """The residence of the units of a model."""
        return UnitResidence(model, self.units, called=self.experts)


def _scheduled_layers(model: Any) -> _ScheduledLayers:
    groups, predictions = _groups(model), _predictions(model)
    decoder = [_single_layers(group) for group in groups]
    units = [_units_of(*pair) for pair in zip(groups, decoder, strict=True)]
    units += [_units_of([prediction], layers_inside(prediction)) for prediction in predictions]
    experts = [_expert_units(owners) for owners in (*groups, *([prediction] for prediction in predictions))]
    units = [[*layer_units, *inner] for layer_units, inner in zip(units, experts, strict=True)]
    delayable_modules = [delayable(item) for item in decoder]
    delayable_modules += [
        delayable(layers_inside(prediction), before=(prediction.get_submodule("eh_proj"),))
        for prediction in predictions
    ]
    return _ScheduledLayers(decoder, predictions, units, list(itertools.chain(*experts)), delayable_modules)


def _units_of(owners: list[nn.Module], inner_layers: list[nn.Module]) -> list[nn.Module]:
    """A module of each unit among layers and the layers inside; the first layer, if none is a unit."""
    units: list[nn.Module] = list(
        {unit_of(layer): layer for layer in (*owners, *inner_layers) if unit_of(layer)}.values()
    )
    return units or owners[:1]


def _expert_units(owners: list[nn.Module]) -> list[nn.Module]:
    return [experts for layer in owners for experts in expert_modules(layer) if isinstance(experts, FSDPModule)]


def _predictions(model: Any) -> list[nn.Module]:
    """The layers of multi-token prediction. One layer for all depths is left to the postprocess.

    Its gradients of several depths would be reduced one by one, and added in another order.
    """
    is_repeated = getattr(model.config, "mtp_use_repeated_layer", False)
    return [] if is_repeated or not getattr(model, "mtp_process", False) else list(model.mtp.layers)


def _groups(model: Any) -> list[list[nn.Module]]:
    """The layers of the decoder, those of one unit together: a unit reduced twice a pass would lose count."""
    groups: list[list[nn.Module]] = []
    for layer in model.decoder.layers:
        unit = unit_of(layer)
        if unit is not None and groups and unit is unit_of(groups[-1][0]):
            groups[-1].append(layer)
        elif unit is not None and any(unit is unit_of(group[0]) for group in groups):
            raise ValueError(
                f"Expected the layers of a unit next to each other for an overlapped step, got {unit.parameters.title} "
                "with others between them. Group neighbours, as `layer_groups` of fully_shard_model does."
            )
        else:
            groups.append([layer])
    return groups


def _single_layers(group: list[nn.Module]) -> list[nn.Module]:
    single_layers: list[nn.Module] = []
    for layer in group:
        single_layers += layer.get_submodule("layers").children() if is_group(layer) else [layer]
    return single_layers


def _model_chunk(
    model: Any, scheduled: _ScheduledLayers, batch: Mapping[str, Any], loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> ModelChunk:
    # The arguments of layers, from the beginning of the forward, or of the first prediction, on.
    decoder_arguments, prediction_arguments = dict[str, Any](), dict[str, Any]()

    def preprocess() -> torch.Tensor:
        decoder_arguments.update(arguments_of_decoder(model, batch))
        hidden: torch.Tensor = decoder_arguments.pop("hidden_states")
        return hidden

    def enter(hidden: torch.Tensor) -> PredictionInput:
        first_arguments, normed = arguments_of_prediction(model, batch, hidden)
        tokens = [first_arguments.pop(name) for name in ("input_ids", "position_ids", "padding_mask")]
        first: torch.Tensor = first_arguments.pop("hidden_states")
        prediction_arguments.update(first_arguments)
        return first, (*tokens, normed)

    def postprocess(*hidden_states: torch.Tensor) -> torch.Tensor:
        if not scheduled.predictions:
            return loss_of(forward_after_decoder(model, batch, *hidden_states))
        _, _, _, normed, *predicted = hidden_states
        return loss_of(forward_after_prediction(model, batch, normed, predicted))

    delayable_modules = iter(scheduled.delayable)
    slots = [SlottedLayers(group, decoder_arguments, next(delayable_modules)).slots() for group in scheduled.decoder]
    slots += [
        Prediction(layer, prediction_arguments, next(delayable_modules), enter if depth == 0 else None).slots()
        for depth, layer in enumerate(scheduled.predictions)
    ]
    return ModelChunk(preprocess, slots, postprocess)
