"""Buffers that layers accumulate weight gradients into themselves: the `main_grad` of Megatron's fused kernels.

    the layer finds on its weight        and does
    main_grad, or get_main_grad()        adds its gradient to the buffer, in the reduce dtype
    overwrite_main_grad = False          adds, and does not write over the contents: buffers start as zeros
    grad_added_to_main_grad = False      sets the flag to True; the gradient returned to autograd is a dummy
    __fsdp_param__ = True                asks get_main_grad(), rather than look for an attribute in forward
    zero_out_wgrad                       (a mark of the user's) its dummy is zeros: `.grad` holds another layer's part

A layer that sets no flag made an ordinary gradient, and the buffer is not used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn as nn

from lamella_buffers import UnshardedBuffer
from lamella_engine._parameters.extended_form import ExtendedForm
from lamella_engine._parameters.group import ParameterGroup
from lamella_engine._parameters.sharded_parameter import ShardedParameter, add_gradient
from lamella_engine._streams.streams import Streams
from lamella_layout import EvenLayout


class MainGrads:
    """One buffer for gradients of some parameters of a group, which layers accumulate into, from backward to reduction.

    The first backward makes the buffer.

    Args:
        group: Gives the allocator and the reduce dtype.
        parameters: Members of the group.
        streams: The streams of the tree that the unit belongs to.
    """

    def __init__(self, group: ParameterGroup, parameters: Sequence[ShardedParameter], streams: Streams) -> None:
        self.group = group
        self.parameters = list(parameters)
        self._streams = streams
        # From `offer` in the first backward to `take` by the reduction, over any number of kept microbatches.
        self._buffer: UnshardedBuffer | None = None
        # Without bytes: views of a storage are dear to make, and a reduction may still read the last buffer's.
        self._spare: list[UnshardedBuffer] = []
        self._stream: torch.Stream | None = None  # allocated the buffer: waits for readers before the bytes go
        self._zeroed: torch.Event | None = None  # behind the zeroing of the buffer; goes with it
        # A fused layer leaves a dummy in `.grad`, which `settle` drops: sums of earlier microbatches must lie
        # elsewhere.
        for parameter in self.parameters:
            parameter.keeps_grad_clear = True

    def mark(self) -> None:
        """Give unsharded parameters the attributes that layers look for; sharded parameters never have them.

        Effects: those of `drop`, if the parameters were made anew.
        """
        for i, parameter in enumerate(self.parameters):
            marks = vars(parameter.unsharded)
            if "get_main_grad" not in marks:
                if self._buffer is not None:
                    self.drop()  # the former parameters' sums were copied out of it (`ShardedParameter.keep_gradient`)
                marks.update(
                    get_main_grad=_getter(self, i),
                    grad_added_to_main_grad=False,
                    overwrite_main_grad=False,
                    __fsdp_param__=True,
                )

    def unmark(self) -> None:
        """Undo `mark`, and free the buffer."""
        self.drop()
        for parameter in self.parameters:
            for name in ("get_main_grad", "grad_added_to_main_grad", "overwrite_main_grad", "__fsdp_param__"):
                vars(parameter.unsharded).pop(name, None)

    def offer(self) -> None:
        """Make `main_grad` a buffer of zeros, or leave the buffer with the sums of earlier microbatches.

        Effects: allocates and zeroes a missing buffer, on the current stream.
        """
        if self._buffer is not None:
            return
        buffer = self._new_buffer()
        buffer.allocate()
        buffer.flat.zero_()
        self._stream = self._streams.compute_stream
        # A layer may add on another stream: without a wait for this event, its sum would race with the zeroing.
        self._zeroed = self._stream.record_event()
        self._buffer = buffer  # last: an interrupt before leaves no buffer, and no half-made one to be freed
        for parameter, view in zip(self.parameters, buffer.tensors, strict=True):
            vars(parameter.unsharded)["main_grad"] = view

    def view(self, i: int) -> torch.Tensor:
        """One parameter's part of the buffer; the current stream waits for the zeroing."""
        self.offer()
        assert self._buffer is not None
        if self._zeroed is not None:
            self._streams.compute_stream.wait_event(self._zeroed)
        return self._buffer.tensors[i]

    def _new_buffer(self) -> UnshardedBuffer:
        group = self.group
        dtype, device = group.reduce_dtype, group.device
        # `.to()` may have changed the dtype or device of main weights since a spare buffer was made.
        while self._spare:
            buffer = self._spare.pop()
            if (buffer.dtype, buffer.device) == (dtype, device):
                return buffer
        shapes = [group.layout.shapes[group.parameters.index(parameter)] for parameter in self.parameters]
        dims = [parameter.sharding.dim for parameter in self.parameters]
        layout = EvenLayout.build(shapes, group.axes.num_shards, dims=dims)
        return UnshardedBuffer(layout, group.axes.shard_rank, dtype, device, group.allocator)

    def settle(self) -> None:
        """Count the sums in the buffer as the parameters' gradients, and drop the dummies.

        Effects: on the current stream, one add for each parameter with another gradient beside the buffer.
        """
        for i, parameter in enumerate(self.parameters):
            marks = vars(parameter.unsharded)
            if not marks.get("grad_added_to_main_grad"):
                continue
            marks["grad_added_to_main_grad"] = False
            total, accumulated = self.view(i), parameter.accumulated
            with torch.no_grad():
                if (
                    accumulated is not None and accumulated is not total
                ):  # else the view of an earlier microbatch: doubled
                    add_gradient(total, accumulated)
                if parameter.unsharded.grad is not None and marks.get("zero_out_wgrad"):
                    add_gradient(total, parameter.unsharded.grad)
            parameter.unsharded.grad = None
            parameter.accumulated = total

    def take(self) -> tuple[torch.Stream, Callable[[], None]] | None:
        """Let go of the buffer, which a reduction reads now; the next backward gets another buffer.

        Returns:
            The stream that allocated the buffer, and a function that frees the bytes once the stream has waited for the
            reduction; None without a buffer.
        """
        if self._buffer is None:
            return None
        assert self._stream is not None
        buffer, stream = self._buffer, self._stream
        self._buffer = self._stream = self._zeroed = None
        for parameter in self.parameters:
            # A layer with a stale attribute would add to a buffer that a reduction reads, and that is freed after.
            vars(parameter.unsharded).pop("main_grad", None)
        return stream, partial(self._free, buffer, stream)

    def drop(self) -> None:
        """Forget the sums, and free the buffer.

        Effects: the stream that allocated the buffer waits for the current stream.
        """
        for parameter in self.parameters:
            marks = vars(parameter.unsharded)
            if "grad_added_to_main_grad" in marks:
                marks["grad_added_to_main_grad"] = False
        if (buffer := self.take()) is not None:
            stream, free = buffer
            stream.wait_stream(self._streams.compute_stream)
            free()

    def _free(self, buffer: UnshardedBuffer, stream: torch.Stream) -> None:
        # The allocating stream has waited for the last reader by now (`Reduction.allocated_on`, or `drop`): freed any
        # earlier, the bytes would go to the stream's next allocation while a reduction still reads them.
        with self._streams.on(stream):
            buffer.free()
        self._spare.append(buffer)


def _getter(grads: MainGrads, i: int) -> Callable[[], torch.Tensor]:
    # Weak: the parameter holds the function, and a strong reference back would keep a deleted model's memory until the
    # cyclic collector runs.
    ref = weakref.ref(grads)

    def get_main_grad() -> torch.Tensor:
        grads = ref()
        assert grads is not None, "a backward of a unit that is gone"
        return grads.view(i)

    return get_main_grad


def main_grads_of(pairs: Sequence[tuple[ParameterGroup, ShardedParameter]], streams: Streams) -> tuple[MainGrads, ...]:
    """Main-grad buffers for some parameters, a buffer for each group.

    Raises:
        NotImplementedError: A parameter is a DTensor of other axes, its class defines the gather, or its layer writes
            over the buffer.
    """
    members: dict[ParameterGroup, list[ShardedParameter]] = {}
    for group, parameter in dict.fromkeys(pairs):
        if isinstance(group.form, ExtendedForm) or parameter.sharding.part is not None:
            raise NotImplementedError(
                f"Expected {parameter.name!r} to be a plain parameter, got one that is a DTensor of other axes, or "
                "whose class defines the gather. Leave it out: its gradient comes as `.grad`."
            )
        if (layer := _overwriting_layer(parameter)) is not None:
            raise NotImplementedError(
                f"Expected a layer that adds to the main_grad of {parameter.name!r}, got {type(layer).__name__} with "
                "gradient_accumulation_fusion, which writes over the sums of earlier microbatches there. Set "
                "gradient_accumulation_fusion = False on the layer, and leave the parameter out: its gradient comes as "
                "`.grad`."
            )
        members.setdefault(group, []).append(parameter)
    return tuple(MainGrads(group, parameters, streams) for group, parameters in members.items())


def _overwriting_layer(parameter: ShardedParameter) -> nn.Module | None:
    """A layer that takes `__fsdp_param__` for leave to write over `main_grad`: megatron-core's own linears do.

    They have the attribute; Transformer Engine's layers, under megatron-core's names too, have another, and add.
    """
    for owner in parameter.owners:
        if getattr(layer := owner.module(), "gradient_accumulation_fusion", False):
            return layer
    return None
