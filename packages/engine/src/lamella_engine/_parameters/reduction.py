"""The gradients of a parameter group: taken from backward, reduced, and installed on the sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from lamella_buffers import (
    CopyEngineTransport,
    FakeCopyEngineTransport,
    Payload,
    ShardedBuffer,
    all_reduce,
    plain_values,
)
from lamella_engine._parameters.group import MEAN, ParameterGroup, Reduced
from lamella_engine._parameters.sharded_parameter import ShardedParameter, attributes_alone, gradient_over
from lamella_engine._parameters.sharding import local_of
from lamella_layout import EvenLayout, FlatLayout

# The dtype in which autograd makes a parameter's gradient; None for any. Some versions of torch lack the attribute.
_GRAD_DTYPE = "grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype"


def accumulate_gradients(group: ParameterGroup) -> None:
    """Keep a microbatch's gradients unreduced."""
    with attributes_alone():
        for parameter in group.parameters:
            parameter.accumulate(group.reduce_dtype)


def take_gradients(group: ParameterGroup) -> tuple[dict[int, torch.Tensor | None], bool]:
    """Take the unreduced gradients from the parameters.

    Returns:
        The gradients of trainable members, by index, None where backward made no gradient; and whether there is any.
    """
    gradients, has_any = dict[int, torch.Tensor | None](), False
    with attributes_alone():
        for i, parameter in enumerate(group.parameters):
            # A parameter frozen since its microbatch still has a gradient to send; `trains` is equal on every rank.
            if parameter.trains or parameter.has_gradient:
                gradients[i] = gradient = parameter.take_gradient()
                has_any |= gradient is not None
    return gradients, has_any


def wire_dtype(group: ParameterGroup) -> torch.dtype:
    """The communication dtype of gradients.

    Autograd's dtype for gradients if the reduce dtype holds all its values, else the reduce dtype. Derived from the
    parameters alone: ranks agree, even with different gradients present.
    """
    with attributes_alone():
        grad_dtype, *other_dtypes = {getattr(p.unsharded, _GRAD_DTYPE) for p in group.parameters}
    if grad_dtype is None or other_dtypes or grad_dtype == group.reduce_dtype:
        return group.reduce_dtype
    return (
        grad_dtype if torch.promote_types(grad_dtype, group.reduce_dtype) == group.reduce_dtype else group.reduce_dtype
    )


def gradient_nbytes(group: ParameterGroup, members: Iterable[int], wire: torch.dtype) -> int:
    """Bytes in a reduction of some members' gradients, by index; a flat layout travels whole."""
    layout = group.layout
    if isinstance(layout, FlatLayout):
        return layout.full_numel * wire.itemsize
    return sum(layout.full_slot(i).numel for i in members) * wire.itemsize


def predivided(
    group: ParameterGroup, gradients: Mapping[int, torch.Tensor | None], wire: torch.dtype
) -> Mapping[int, torch.Tensor | None]:
    """Gradients over the group's `predivisor`: in float16 their sum overflows where their mean is finite.

    Effects: allocates quotients in the wire dtype, on the current stream, unless the predivisor is 1.
    """
    predivisor = group.predivisor
    present = {i: gradient for i, gradient in gradients.items() if gradient is not None}
    if predivisor == 1 or not present:
        return gradients
    # Not in place: a hook of the user's may have kept the gradient.
    quotients = torch._foreach_div([plain_values(gradient).to(wire) for gradient in present.values()], predivisor)
    return {**gradients, **dict(zip(present, quotients, strict=True))}


def sum_dtype(group: ParameterGroup) -> torch.dtype:
    """The dtype of sums over the shard axis: the reduce dtype, or the sharded gradients' if wider sums cost less.

    Copy engines leave the sum to a kernel. The kernel may as well write the gradients' dtype: no cast follows.
    """
    transports, main = group.transports, group.main_grads_dtype
    transport = transports.reduce or transports.shard
    # Not isinstance for both: a check against an abstract class costs a unit of every step a dozen calls.
    pushes = isinstance(transport, CopyEngineTransport) or type(transport) is FakeCopyEngineTransport
    is_last = transports.replicas is None and transports.outer is None  # a second axis would carry the wider dtype
    widens = pushes and is_last and torch.promote_types(group.reduce_dtype, main) == main
    return main if widens else group.reduce_dtype


def new_reduced(
    group: ParameterGroup,
    gradients: Mapping[int, torch.Tensor | None],
    dtype: torch.dtype,
    *,
    installs_all: bool,
    without_gaps: bool = False,
) -> Reduced:
    """A buffer for reduced gradients.

    Args:
        gradients: The gradients of the members in the reduction, by index.
        dtype: The dtype of the sums.
        installs_all: Install a gradient also for members in the reduction without a gradient here.
        without_gaps: Leave out the unwritten alignment between slots: a hook gets the whole buffer.

    Effects: allocates the buffer on the current stream; zeroes the buffer if some member takes no part.
    """
    layout = _without_gaps(group.layout) if without_gaps else group.layout
    shards = ShardedBuffer.empty(layout, group.transports.rank, dtype, group.device)
    members = range(len(group.parameters))
    if len(gradients) < len(members):
        shards.flat.zero_()  # no reduction writes these members' slots, but hooks and second reductions read them
    if installs_all:
        return Reduced(shards, [i in gradients for i in members])
    return Reduced(shards, [gradients.get(i) is not None for i in members])


def add_partial(group: ParameterGroup, reduced: Reduced) -> Reduced:
    """Add `partial`, the gradients that earlier microbatches left unreduced over the outer axes.

    Effects: on the current stream, which must have allocated `partial`, freed at return: one add.
    """
    assert group.partial is not None
    earlier, group.partial = group.partial, None
    if reduced.shards.layout is earlier.shards.layout:
        reduced.shards.flat.add_(earlier.shards.flat)
    else:  # a hook was set or removed in between
        torch._foreach_add_(list(reduced.shards.slots), list(earlier.shards.slots))
    return Reduced(reduced.shards, [a or b for a, b in zip(reduced.present, earlier.present, strict=True)])


def reduce_over_outer(group: ParameterGroup, reduced: Reduced) -> Reduced:
    """Reduce over the replicate and outer axes, if present.

    Effects: a collective on the replicate axis, in place, or on the outer axis, into a new buffer; on the current
        stream. The caller keeps `reduced` alive until the reduce stream, which allocated it, has waited.
    """
    transports = group.transports
    if transports.replicas is not None:
        all_reduce([reduced.shards.flat], transports.replicas, group.reduce_op).wait()
    if transports.outer is None:
        return reduced
    is_dense = reduced.shards.layout is not group.layout
    main_layout = group.main_weight.layout
    # Dense like the sums: a hook reads the whole buffer, in which gaps are memory that nothing has written.
    layout = _without_gaps(main_layout) if is_dense else main_layout
    parts = ShardedBuffer.empty(layout, group.axes.main_rank, group.reduce_dtype, group.device)
    moves = zip(parts.slots, reduced.shards.slots, strict=True)
    transports.outer.reduce_scatter([Payload(a, b) for a, b in moves if b.numel() > 0], group.reduce_op).wait()
    return Reduced(parts, reduced.present)


def show_gradients(group: ParameterGroup, reduced: Reduced, hook: Callable[[torch.Tensor], None]) -> bool:
    """Call a hook on reduced gradients, which the hook may change: the mean, or the sum if `sums_only`.

    In float16 the sum is over `predivisor`.

    Returns:
        Whether this call divided the gradients.

    Effects: the hook's, on the current stream; one division before, unless the collective divided.
    """
    divides = group.reduce_op is not MEAN and not group.sums_only
    if divides and group.postdivisor != 1:
        reduced.shards.flat.div_(group.postdivisor)
    hook(reduced.shards.flat)
    return divides


def install_gradients(group: ParameterGroup, reduced: Reduced, *, are_divided: bool = False) -> None:
    """Set or add to `.grad` of the sharded parameters, in the policy's `main_grads_dtype`.

    Args:
        reduced: All ranks' gradients after `reduce_op`. Members that are not present keep their `.grad`.
        are_divided: Whether a sum was divided already.

    Effects: on the current stream: one cast of the shards if the dtypes differ, one add to earlier gradients. With
        shards on the CPU, one copy to the CPU, or one each way for earlier gradients: the host must wait for the
        stream before reading `.grad`.
    """
    shards, present = reduced
    if group.reduce_op is not MEAN and not are_divided and group.postdivisor != 1:
        shards.flat.div_(group.postdivisor)
    # The sums stay with the caller, who holds them until the reduce stream, which allocated them, has waited for this
    # cast.
    if shards.dtype != group.main_grads_dtype:
        shards = shards.cast_to(group.main_grads_dtype)
    # Earlier gradients are added to in place, by one kernel; fresh gradients are views of the shards, without a kernel.
    fresh, totals = [], {}
    for i, (parameter, is_present) in enumerate(zip(group.parameters, present, strict=True)):
        if not is_present:
            if parameter.trains:  # no reduction writes the slot of a frozen member
                _check_absent_everywhere(parameter, shards.shards[i])
        elif (grad := parameter.sharded.grad) is None:
            fresh.append(i)
        else:
            totals[i] = local_of(grad)
    if totals:  # microbatches reduced one by one, or a `.grad` that the optimizer has not cleared
        add = torch._foreach_add_ if group.offload is None else group.offload.add_
        add(list(totals.values()), [shards.shards[i] for i in totals])
    # The copy is asynchronous: no gradient may be read before the host has waited (`Streams.expect_gradients`).
    if fresh and group.offload is not None:
        shards = ShardedBuffer(shards.layout, shards.rank, group.offload.to_host(shards.flat))
    # Views of one buffer: the memory stays until the last gradient of the group is gone.
    for i in fresh:
        group.parameters[i].sharded.grad = gradient_over(group.parameters[i], shards.shards[i])


def hooks_of(group: ParameterGroup, present: Sequence[bool]) -> list[Callable[[], None]]:
    """Callables that run the hooks of members with a new gradient and with hooks.

    Raises:
        RuntimeError: A member has hooks from `register_hook`, which autograd calls for the unsharded form alone.
    """
    # Collected, not called: with shards on the CPU the gradients are still on their way, and a hook would read memory
    # that a copy is writing.
    hooks: list[Callable[[], None]] = []
    for parameter, is_present in zip(group.parameters, present, strict=True):
        if parameter.sharded._backward_hooks:
            raise RuntimeError(
                f"Expected a hook on the sharded gradient of {parameter.full_name!r} from "
                "register_post_accumulate_grad_hook, got one from register_hook, which autograd would never call. Read "
                "and change `parameter.grad` in a hook of the other kind."
            )
        if is_present and parameter.sharded._post_accumulate_grad_hooks:
            hooks.append(parameter.run_hooks)
    return hooks


@lru_cache(maxsize=4096)  # called in every reduction with a hook
def _without_gaps(layout: EvenLayout | FlatLayout) -> EvenLayout | FlatLayout:
    """The layout with adjacent slots. A flat layout's gaps are zeros, since all of the buffer travels, and stay."""
    return replace(layout, alignment=1) if isinstance(layout, EvenLayout) else layout


def _check_absent_everywhere(parameter: ShardedParameter, shard: torch.Tensor) -> None:
    """Refuse a gradient that only other ranks have: a part of the weight would train, and a part not.

    On CPU only: on a GPU the check would be a host sync.
    """
    if shard.device.type == "cpu" and bool(shard.any()):
        raise RuntimeError(
            f"Expected no rank to have a gradient for {parameter.name!r}, as this one has none, got one from another "
            "rank. Where ranks use different parameters, call set_reduce_scatter_unused_params(True)."
        )
