"""One microbatch on the way through a chunk: the nodes, run one event at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias, cast

import torch
from torch.profiler import record_function

from lamella_schedule._chunk import ModelChunk
from lamella_schedule._events import Event, Kind, Slot
from lamella_schedule._lanes import NOTHING, Chain, Lanes
from lamella_schedule._nodes import Gradients, SlotNode, Values

Around: TypeAlias = Callable[[Event], AbstractContextManager[object]]

_is_profiled = torch._C._autograd._profiler_enabled


class Flight:
    """One chunk on the way through forward and backward: the nodes, and the values or gradients at the head.

    Args:
        chunk: The chunk.
        lanes: The streams; the same for flights that run together.
        microbatch: Index of the microbatch, for events and errors.
        inputs: The values for preprocess: those of the stage before, in a pipeline. Tensors with `requires_grad` get a
            gradient.
        stage: The pipeline stage of the chunk, for errors; None without pipeline stages.
    """

    def __init__(
        self, chunk: ModelChunk, lanes: Lanes, microbatch: int = 0, inputs: Values = (), stage: int | None = None
    ) -> None:
        self.plans = chunk.plans
        self.lanes = lanes
        self.microbatch = microbatch
        self._chain = Chain(lanes)
        self._delayed: dict[tuple[int | None, Slot], Callable[[], object]] = {
            (i, slot): call for i, layer in enumerate(chunk.layers) for slot, call in layer.delayed.items()
        }
        self._nodes = {
            (i, slot): SlotNode(function, f"slot {slot}{_layer_text(i)} of {self._title(stage)}", lanes)
            for i, slot, function in chunk.functions
        }
        self._at_head: Values = inputs
        self._num_backwards = 0

    def _title(self, stage: int | None) -> str:
        return f"microbatch {self.microbatch}" + ("" if stage is None else f" in stage {stage}")

    @property
    def input_gradients(self) -> Gradients:
        """Gradients of `inputs`, once backward has run; delayed weight gradients may still be to come."""
        return () if self._nodes or not self._num_backwards else cast(Gradients, self._at_head)

    @property
    def is_over(self) -> bool:
        """Whether forward, backward and delayed weight gradients have run, or the flight was dropped."""
        return not self._nodes and not self._delayed

    @property
    def outputs(self) -> Values:
        """Values returned by postprocess, detached; empty before the end of forward, and once backward has begun."""
        is_whole = all(node.has_run for node in self._nodes.values())
        return self._at_head if is_whole and not self._num_backwards else ()

    def take_outputs(self) -> Values:
        """Return `outputs`, and keep shapes without bytes in their place until `begin_backward`."""
        outputs = self.outputs
        self._at_head = tuple(
            torch.empty_like(output, device="meta", requires_grad=output.requires_grad)
            if isinstance(output, torch.Tensor)
            else output
            for output in outputs
        )
        return outputs

    def begin_backward(self, gradients: Gradients) -> None:
        """Give the gradients of `outputs`, before the pair with this flight's backward.

        Raises:
            RuntimeError: Forward is not over, or backward has begun.
            ValueError: More or fewer gradients than outputs, a gradient of another shape than the output, or a gradient
                of an output without `requires_grad`.
        """
        if not self.outputs:
            raise RuntimeError(
                f"Expected gradients of microbatch {self.microbatch} once and after its forward, got others. "
                "Run a pair with the flight in forward first."
            )
        if len(gradients) != len(self._at_head):
            raise ValueError(
                f"Expected a gradient or None for each of the {len(self._at_head)} outputs, got {len(gradients)}. Give "
                "as many."
            )
        for place, (output, gradient) in enumerate(zip(self._at_head, gradients, strict=True)):
            _check_gradient(output, gradient, f"output {place} of microbatch {self.microbatch}")
        self._num_backwards += 1
        self._at_head = gradients

    def check_forward(self) -> None:
        """Refuse a second forward."""
        if any(node.has_run for node in self._nodes.values()) or not self._nodes:
            raise RuntimeError(
                f"Expected a flight that has not run, got microbatch {self.microbatch} a second time in forward. Make "
                "a flight for each pass."
            )

    def check_backward(self) -> None:
        """Refuse a backward without gradients."""
        if not self._num_backwards or not self._nodes:
            raise RuntimeError(
                f"Expected a flight that waits for its backward, got microbatch {self.microbatch}, which has no "
                "gradients or is over. Call begin_backward after the forward."
            )

    def run(self, event: Event, around: Around) -> None:
        """Run one event on its lane."""
        # Delayed weight gradients are outside the chain: Note [Waits].
        is_delayed, lane = event.kind is Kind.WEIGHT_GRADIENT, event.lane
        if not is_delayed:
            self._chain.begin(lane)
        with self.lanes.on(lane), _label(event), around(event):
            if is_delayed:
                self._delayed.pop((event.layer, event.slot))()
            elif event.kind is Kind.FORWARD:
                self._at_head = self._nodes[event.layer, event.slot].forward(self._at_head)
            else:
                self._at_head = self._nodes.pop((event.layer, event.slot)).backward(cast(Gradients, self._at_head))
        if not is_delayed:
            self._chain.end(lane)

    def drop(self) -> None:
        """Let go of all tensors."""
        for node in self._nodes.values():
            node.drop()
        self._nodes.clear()
        self._delayed.clear()
        self._at_head = ()


def _label(event: Event) -> AbstractContextManager[object]:
    """A range of the profiler's, by which a report finds the exchanges of each layer; nothing without a profiler."""
    if not _is_profiled():
        return NOTHING
    layer = "around the layers" if event.layer is None else f"layer {event.layer}"
    return record_function(f"schedule::{event.slot} {event.kind} ({layer})")


def _layer_text(layer: int | None) -> str:
    return "" if layer is None else f" of layer {layer}"


def _check_gradient(output: object, gradient: torch.Tensor | None, title: str) -> None:
    if gradient is None:
        return
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        kind_of_output = (
            "a tensor without requires_grad" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        )
        raise ValueError(
            f"Expected None as gradient of {title}, which is {kind_of_output}, got a gradient of shape "
            f"{tuple(gradient.shape)}. Give None."
        )
    if gradient.shape != output.shape:
        raise ValueError(
            f"Expected a gradient of shape {tuple(output.shape)} for {title}, got shape {tuple(gradient.shape)}. "
            "Give a gradient of the output's shape."
        )
