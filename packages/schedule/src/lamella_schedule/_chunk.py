"""A model in parts: the slots of a layer, and the chunk of layers that one microbatch passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lamella_schedule._events import LayerPlan, Slot
from lamella_schedule._nodes import SlotFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlots:
    """A layer in parts. The layer is the composition of its slots.

    Each function takes the values returned by the function before, tensors or other objects, and returns a tensor or a
    flat tuple. A tensor for a later slot (the residual) is returned untouched by each slot in between, without a
    copy. Return tensors themselves: tensors inside other objects, and tensors that a function finds in its
    closure, are not marked as read by the second stream. For such a tensor call `tensor.record_stream` in the function.

    Attributes:
        pre: Before the tokens leave the rank.
        dispatch: The all-to-all to the experts; None for a dense layer.
        experts: The experts, or the MLP of a dense layer.
        combine: The all-to-all back; None for a dense layer.
        post: After the tokens are back.
        delayed: Functions by `Slot.PRE` and `Slot.EXPERTS`: one computes the weight gradients left out by the slot's
            backward, and adds the gradients to `.grad`. Called once a backward, on the compute stream.

    Raises:
        ValueError: `delayed` has another slot.
    """

    pre: SlotFunction
    experts: SlotFunction
    dispatch: SlotFunction | None = None
    combine: SlotFunction | None = None
    post: SlotFunction | None = None
    delayed: Mapping[Slot, Callable[[], object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self.plan  # refuses other slots here, not in the middle of a step

    @property
    def functions(self) -> dict[Slot, SlotFunction]:
        """The functions of the layer's slots, in the order of forward."""
        slots = {
            Slot.PRE: self.pre,
            Slot.DISPATCH: self.dispatch,
            Slot.EXPERTS: self.experts,
            Slot.COMBINE: self.combine,
            Slot.POST: self.post,
        }
        return {slot: function for slot, function in slots.items() if function is not None}

    @property
    def plan(self) -> LayerPlan:
        """The layer, for `order`."""
        return LayerPlan(frozenset(self.functions), frozenset(self.delayed))


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """A model, or a stage of a pipeline, applied to a microbatch.

    Attributes:
        preprocess: Takes nothing; returns the values for the first layer: the embedding of this microbatch.
        layers: The layers.
        postprocess: Takes the values of the last layer; returns the loss, 0-D, or the output of the stage.
    """

    preprocess: SlotFunction
    layers: Sequence[LayerSlots]
    postprocess: SlotFunction

    @property
    def plans(self) -> list[LayerPlan]:
        """The layers, for `order`."""
        return [layer.plan for layer in self.layers]

    @property
    def functions(self) -> Iterator[tuple[int | None, Slot, SlotFunction]]:
        """Each function with its layer and slot, in the order of forward."""
        yield None, Slot.PREPROCESS, self.preprocess
        for i, layer in enumerate(self.layers):
            for slot, function in layer.functions.items():
                yield i, slot, function
        yield None, Slot.POSTPROCESS, self.postprocess
