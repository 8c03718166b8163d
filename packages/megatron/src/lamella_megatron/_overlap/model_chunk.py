"""A model of megatron-core for a schedule: layers in order with their units, and microbatches as slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamella_engine import FSDPModule, UnitResidence
from lamella_engine.extending import unit_of
from lamella_megatron._model.expert_units import expert_modules
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
from lamella_schedule import ModelChunk


@dataclass(frozen=True)
class ScheduledLayers:
    """The layers of a model's schedule, in order.

    Attributes:
        decoder: The layers of each item of the decoder.
        predictions: The layers of multi-token prediction, a layer for each depth.
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
        """Return the residence of the units of a model."""
        return UnitResidence(model, self.units, called=self.experts)


def scheduled_layers(model: Any) -> ScheduledLayers:
    """Return the layers of a model's schedule.

    Raises:
        ValueError: The layers of a unit are not neighbours.
    """
    groups, predictions = _groups(model), _predictions(model)
    decoder = [_single_layers(group) for group in groups]
    units = [_units_of(*pair) for pair in zip(groups, decoder, strict=True)]
    units += [_units_of([prediction], layers_inside(prediction)) for prediction in predictions]
    experts = [_expert_units(owners) for owners in (*groups, *([prediction] for prediction in predictions))]
    units = [[*layer_units, *expert_units] for layer_units, expert_units in zip(units, experts, strict=True)]
    delayable_modules = [delayable(item) for item in decoder]
    delayable_modules += [
        delayable(layers_inside(prediction), before=(prediction.get_submodule("eh_proj"),))
        for prediction in predictions
    ]
    return ScheduledLayers(decoder, predictions, units, list(itertools.chain(*experts)), delayable_modules)


def _units_of(owners: list[nn.Module], inner_layers: list[nn.Module]) -> list[nn.Module]:
    """A module of each unit among layers and the layers inside; the first layer, if none is a unit."""
    units: list[nn.Module] = list(
        {unit_of(layer): layer for layer in (*owners, *inner_layers) if unit_of(layer)}.values()
    )
    return units or owners[:1]


def _expert_units(owners: list[nn.Module]) -> list[nn.Module]:
    return [experts for layer in owners for experts in expert_modules(layer) if isinstance(experts, FSDPModule)]


def _predictions(model: Any) -> list[nn.Module]:
    """The layers of multi-token prediction. A single layer for all depths is left to the postprocess.

    The layer's gradients of several depths would be reduced depth by depth, and added in another order.
    """
    is_repeated = getattr(model.config, "mtp_use_repeated_layer", False)
    return [] if is_repeated or not getattr(model, "mtp_process", False) else list(model.mtp.layers)


def _groups(model: Any) -> list[list[nn.Module]]:
    """The layers of the decoder, grouped by unit: a unit reduced twice a pass would lose count."""
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


def model_chunk(
    model: Any, scheduled: ScheduledLayers, batch: Mapping[str, Any], loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> ModelChunk:
    """Return a microbatch's way through a model: the slots of the layers between the ends of the model.

    Args:
        model: The model, without wrappers.
        scheduled: The layers of the model.
        batch: The arguments of the model's forward.
        loss_of: Takes the model's output, returns the chunk's.
    """
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
