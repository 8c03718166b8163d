"""Buffers that layers accumulate weight gradients into themselves: the `main_grad` of Megatron's fused kernels.

    the layer finds on its weight        and does
    main_grad, or get_main_grad()        adds its gradient to that buffer, in the reduce dtype
    overwrite_main_grad = False          adds, and does not write over what is there: buffers start as zeros
    grad_added_to_main_grad = False      sets it to True; whatever it returns to autograd is a dummy
    __fsdp_param__ = True                asks get_main_grad(), rather than look for an attribute in forward
    zero_out_wgrad                       (a mark of the user's) its dummy is zeros: `.grad` holds another layer's part

A layer that sets no flag made an ordinary gradient, and the buffer is not used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from lamella_buffers import UnshardedBuffer
from lamella_engine._context import Context
from lamella_engine._extended_group import ExtendedGroup
from lamella_engine._parameter_group import ParameterGroup
from lamella_engine._sharded_parameter import ShardedParameter, add_gradient
from lamella_layout import EvenLayout


class MainGrads:
    """What some parameters of a group have their layers accumulate into: one buffer, from backward to its reduction.

    Args:
        group: Whose allocator and reduce dtype count.
        parameters: Members of it.
        context: Of the unit.

    Effects: none. A buffer is made when the first backward needs one.
    """

    def __init__(self, group: ParameterGroup, parameters: Sequence[ShardedParameter], context: Context) -> None:
        self.group = group
        self.parameters = list(parameters)
        self._context = context
        self._buffer: UnshardedBuffer | None = None
        self._spare: list[UnshardedBuffer] = []
        self._stream: torch.Stream | None = None
        self._zeroed: torch.Event | None = None
        for parameter in self.parameters:
            parameter.keeps_grad_clear = True

    def mark(self) -> None:
        """Make the unsharded parameters say what layers look for. Their sharded forms never do."""
        for i, parameter in enumerate(self.parameters):
            marks = vars(parameter.unsharded)
            if "get_main_grad" not in marks:
                marks.update(
                    get_main_grad=_getter(self, i),
                    grad_added_to_main_grad=False,
                    overwrite_main_grad=False,
                    __fsdp_param__=True,
                )

    def unmark(self) -> None:
        """Take back what `mark` did."""
        self.drop()
        for parameter in self.parameters:
            for name in ("get_main_grad", "grad_added_to_main_grad", "overwrite_main_grad", "__fsdp_param__"):
                vars(parameter.unsharded).pop(name, None)

    def offer(self) -> None:
        """Make `main_grad` a buffer of zeros, or leave the one that earlier microbatches were added to.

        Effects: allocates it on the current stream, unless it is there, and zeroes it.
        """
        if self._buffer is not None:
            return
        self._buffer = self._new_buffer()
        self._buffer.allocate()
        self._buffer.flat.zero_()
        self._stream = self._context.compute_stream
        self._zeroed = self._stream.record_event()
        for parameter, view in zip(self.parameters, self._buffer.tensors, strict=True):
            vars(parameter.unsharded)["main_grad"] = view

    def view(self, i: int) -> torch.Tensor:
        """One parameter's part of the buffer, ordered after its zeroing on whatever stream is current."""
        self.offer()
        assert self._buffer is not None
        if self._zeroed is not None:
            self._context.compute_stream.wait_event(self._zeroed)
        return self._buffer.tensors[i]

    def _new_buffer(self) -> UnshardedBuffer:
        group = self.group
        dtype, device = group.reduce_dtype, group.device
        while self._spare:
            buffer = self._spare.pop()
            if (buffer.dtype, buffer.device) == (dtype, device):
                return buffer
        shapes = [group.layout.shapes[group.parameters.index(parameter)] for parameter in self.parameters]
        dims = [parameter.sharding.dim for parameter in self.parameters]
        layout = EvenLayout.build(shapes, group.axes.num_shards, dims=dims)
        return UnshardedBuffer(layout, group.axes.shard_rank, dtype, device, group.allocator)

    def settle(self) -> None:
        """Count what layers added to the buffer as their parameters' gradients, and drop the dummies.

        Effects: on the current stream: one add a parameter that has a gradient from elsewhere too.
        """
        for i, parameter in enumerate(self.parameters):
            marks = vars(parameter.unsharded)
            if not marks.get("grad_added_to_main_grad"):
                continue
            marks["grad_added_to_main_grad"] = False
            total, beside = self.view(i), parameter.accumulated
            with torch.no_grad():
                if beside is not None and beside is not total:
                    add_gradient(total, beside)
                if parameter.unsharded.grad is not None and marks.get("zero_out_wgrad"):
                    add_gradient(total, parameter.unsharded.grad)
            parameter.unsharded.grad = None
            parameter.accumulated = total

    def take(self) -> tuple[torch.Stream, Callable[[], None]] | None:
        """Let go of the buffer, from which a reduction reads now; the next backward gets another.

        Returns:
            The stream that it was allocated on, and what frees it once that stream has waited for the reduction; None
            if there is none.
        """
        if self._buffer is None:
            return None
        assert self._stream is not None
        buffer, stream = self._buffer, self._stream
        self._buffer = self._stream = self._zeroed = None
        for parameter in self.parameters:
            vars(parameter.unsharded).pop("main_grad", None)
        return stream, partial(self._free, buffer, stream)

    def drop(self) -> None:
        """Forget what was added, and free the buffer.

        Effects: the stream that it was allocated on waits for the current one.
        """
        for parameter in self.parameters:
            marks = vars(parameter.unsharded)
            if "grad_added_to_main_grad" in marks:
                marks["grad_added_to_main_grad"] = False
        if (taken := self.take()) is not None:
            stream, free = taken
            stream.wait_stream(self._context.compute_stream)
            free()

    def _free(self, buffer: UnshardedBuffer, stream: torch.Stream) -> None:
        with self._context.on(stream):
            buffer.free()
        self._spare.append(buffer)


def _getter(grads: MainGrads, i: int) -> Callable[[], torch.Tensor]:
    # Weak: the parameter holds this, and a strong reference back would keep a deleted model's memory until the cyclic
    # collector runs.
    ref = weakref.ref(grads)

    def get_main_grad() -> torch.Tensor:
        grads = ref()
        assert grads is not None, "a backward of a unit that is gone"
        return grads.view(i)

    return get_main_grad


def main_grads_of(found: Sequence[tuple[ParameterGroup, ShardedParameter]], context: Context) -> tuple[MainGrads, ...]:
    """What these parameters have their layers accumulate into, one for each group that has some of them.

    Raises:
        NotImplementedError: One is a DTensor of other axes, or says itself what is gathered.
    """
    members: dict[ParameterGroup, list[ShardedParameter]] = {}
    for group, parameter in dict.fromkeys(found):
        if isinstance(group, ExtendedGroup) or parameter.sharding.part is not None:
            raise NotImplementedError(
                f"Expected {parameter.name!r} to be a plain parameter, got one that is a DTensor of other axes, or "
                "says itself what is gathered. Leave it out: its gradient comes as `.grad`."
            )
        members.setdefault(group, []).append(parameter)
    return tuple(MainGrads(group, parameters, context) for group, parameters in members.items())
