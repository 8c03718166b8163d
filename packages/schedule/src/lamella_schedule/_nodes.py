"""A slot's function on a microbatch: the piece of the autograd graph between the slot's borders.

Note [Borders]. Tensors go from slot to slot as return values. A border detaches each tensor: a slot's backward stops at
the slot, and no slot reaches into another slot's graph. Neither side of a border holds the bytes. `_Border`, an
autograd function, takes detached data in and puts gradients in a box in backward; of the outputs a node keeps gradient
edges alone. Only tensors saved by autograd stay alive between a slot's forward and backward. The input of an
all-to-all, saved by no function, is free once the all-to-all has read the input, without a list of slots whose inputs
may be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from lamella_schedule._lanes import Lanes

Values: TypeAlias = tuple[object, ...]
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
SlotFunction: TypeAlias = Callable[..., object]


class SlotNode:
    """Runs a slot's function forward, and once backward."""

    def __init__(self, function: SlotFunction, title: str, lanes: Lanes) -> None:
        self._function: SlotFunction | None = function
        self._title = title
        self._lanes = lanes
        self._box = _Box(title)
        self._edges: list[GradientEdge | None] = []

    @property
    def has_run(self) -> bool:
        """Whether forward has run, or the node was dropped."""
        return self._function is None

    def forward(self, values: Values) -> Values:
        """Run the function on values from the slot before, and return values for the slot after.

        A tensor returned untouched crosses without a copy. In backward the gradient from later slots comes first, and
        the uses in this slot add their gradients singly, as in a graph of all slots.

        Args:
            values: Detached tensors, with `requires_grad` for a gradient; or other objects.

        Raises:
            TypeError: The function returned a list, tuple or dict with tensors inside, at any depth.
            ValueError: The function wrote in place to a tensor that shares memory with another input.

        Effects: on the current stream; the values' memory is marked as read by this stream.
        """
        assert self._function is not None
        self._lanes.mark_read(values)
        arguments, entered = self._arguments(values)
        begun = [(tensor, tensor.grad_fn, tensor._version) for tensor in entered]
        outputs = _as_tuple(self._function(*arguments))
        self._function = None  # the closure may hold the microbatch
        _refuse_shared_write(begun, self._title)
        detached: list[object] = []
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                _refuse_nest(output, self._title)
                self._edges.append(None)
                detached.append(output)
            elif output.requires_grad:
                self._edges.append(get_gradient_edge(output))
                detached.append(output.detach().requires_grad_())
            else:
                self._edges.append(None)
                detached.append(output.detach())
        return tuple(detached)

    def backward(self, gradients: Gradients) -> Gradients:
        """Run autograd from the outputs' gradients to the inputs, and add the gradients of parameters.

        Args:
            gradients: A gradient or None for each output.

        Returns:
            A gradient for each input; None for an input without `requires_grad`, or without a gradient.

        Effects: on the current stream; frees tensors saved by forward.
        """
        self._lanes.mark_read(gradients)
        roots = [
            (edge, gradient)
            for edge, gradient in zip(self._edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        with self._box:
            if roots:
                # As torch.autograd.backward, without its comparison of shapes, which costs more than the engine's own
                # work: each gradient is from a border, where the engine has compared, or from `begin_backward`.
                _engine_run_backward(
                    *zip(*roots, strict=True), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        gradients_of_inputs = tuple(self._box.gradients)
        self.drop()
        return gradients_of_inputs

    def drop(self) -> None:
        """Let go of the graph and of the function."""
        self._function = None
        self._edges, self._box.gradients = [], []

    def _arguments(self, values: Values) -> tuple[list[object], Sequence[torch.Tensor]]:
        """The values for the function, and the values that begin a graph here: tensors with a gradient."""
        arguments = list(values)
        self._box.gradients = [None] * len(values)
        tensors = {
            place: value
            for place, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        self._box.places = list(tensors)
        if not tensors or not torch.is_grad_enabled():
            return arguments, ()
        start = torch.empty(0, requires_grad=True)
        entered: tuple[torch.Tensor, ...] = _Border.apply(start, self._box, tensors.values())  # type: ignore[no-untyped-call]
        for place, tensor in zip(tensors, entered, strict=True):
            arguments[place] = tensor
        return arguments, entered


class _Box:
    """The gradients of a node's inputs. Open during the node's backward alone."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_open = False
        self.places: list[int] = []
        self.gradients: list[torch.Tensor | None] = []

    def put(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"Expected tensors to go from slot to slot as return values, got a tensor of {self._title} in a later "
                "slot's graph by another way: an attribute or a closure. Return the tensor from each slot in between."
            )
        for place, gradient in zip(self.places, gradients, strict=True):
            self.gradients[place] = gradient

    def __enter__(self) -> None:
        self._is_open = True

    def __exit__(self, *error: object) -> None:
        self._is_open = False


class _Border(torch.autograd.Function):
    """The beginning of a node's graph: data goes in unchanged, gradients go into the node's box.

    Tensors in a collection are none of the function's inputs for autograd: the graph begins here, without their bytes.
    """

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, box: _Box, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.box = box
        ctx.set_materialize_grads(False)  # a tensor without a gradient must not cost zeros
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.box.put(gradients)
        return None, None, None


def _as_tuple(outputs: object) -> Values:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _refuse_shared_write(begun: Sequence[tuple[torch.Tensor, object, int]], title: str) -> None:
    """Inputs are separate nodes of the graph: a write to an input would change another's data without the gradient.

    Args:
        begun: Each input with a gradient, with `grad_fn` and version before the function.
        title: Text of the slot, for errors.
    """
    written = [tensor for tensor, entry, _ in begun if tensor.grad_fn is not entry]
    reached = [tensor for tensor, entry, version in begun if tensor.grad_fn is entry and tensor._version != version]
    storages = [place for tensor in written if (place := tensor.untyped_storage().data_ptr())]  # 0: a wrapper, or empty
    if written and (reached or len(set(storages)) < len(storages)):
        raise ValueError(
            f"Expected {title} to write in place only to tensors that share no memory with another input, got a write "
            "that reached a second input. Clone the tensor in the slot before."
        )


def _refuse_nest(output: object, title: str) -> None:
    """A tensor inside a container would cross the border with a graph."""
    if _holds_tensors(output):
        raise TypeError(
            f"Expected {title} to return tensors one by one, got a {type(output).__name__} with tensors inside. Return "
            "a flat tuple."
        )


def _holds_tensors(output: object) -> bool:
    contents = list(output.values()) if isinstance(output, dict) else output
    return isinstance(output, torch.Tensor) or (
        isinstance(contents, (list, tuple)) and any(map(_holds_tensors, contents))
    )
