"""What a module gains when it becomes a unit: FSDP2's methods, as calls of the verbs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, Self, cast, overload

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.nn as nn

from lamella_buffers import CopyEngineTransport, Transport, transport_for
from lamella_engine._attached import state_of, states_of, unit_state_of, view_of
from lamella_engine._custom_collectives import (
    AllGather,
    CustomReduceScatter,
    ReduceScatter,
    check_collective,
    custom_of,
    plain_of,
    with_all_gather,
    with_reduce_scatter,
)
from lamella_engine._errors import MisuseError
from lamella_engine._handles import GradientReductionHandle, Hold, UnshardHandle
from lamella_engine._main_grads import main_grads_of
from lamella_engine._order_check import DEFAULT_TIMEOUT_S, OrderCheck
from lamella_engine._parameter_group import ParameterGroup
from lamella_engine._sharded_parameter import ShardedParameter
from lamella_engine._state import FSDPState

_TorchsModule = fsdp2.FSDPModule  # bound here: a migration may put this package's class in that name's place


class FSDPModule(_TorchsModule):
    """Mixed into a module's class by `fully_shard`; never made by itself.

    A subclass of torch's, so that whoever asks for FSDP2's modules finds these. Nothing of torch's is used: every
    method is defined here. Those with `recurse=True` reach the units below too. Meanings are FSDP2's.
    """

    _orig_cls_mro_index = 3  # torch's: where the class stands that the module had before

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Slicing a container makes a new one of the same class: it is no unit, so it gets the class it had before.
        original: Any = cls.__mro__[cls._orig_cls_mro_index]
        takes_arguments = original.__new__ is not object.__new__
        made = original.__new__(original, *args, **kwargs) if takes_arguments else original.__new__(original)
        made.__init__(*args, **kwargs)
        return cast(Self, made)

    # -- verbs -------------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; not those of units below.

        They stay until `reshard()`, however often this was called: a schedule of several microbatches takes a `hold()`
        for each instead. Nothing is gathered if they are unsharded already, unless they changed since between passes.

        Args:
            async_op: Return a handle at once, and make the module hold the parameters when it is waited for, by the
                caller or by the unit's next forward.

        Returns:
            The handle, if `async_op`.

        Raises:
            RuntimeError: Parameters are on the meta device.

        Effects: collective on the unit's axis; allocates the unsharded parameters, on the gather stream, which between
            passes waits for the current one; no host sync on CUDA.
        """
        state = state_of(self)
        if state.context.is_resting and not state.num_holds:
            state.drop_stale_weights()
        state.unshard()
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters, and hold the DTensors again; not for units below.

        While somebody has a `hold()` they stay, and go when the last is released. Call it on a stream that is ordered
        after whatever read the parameters. What autograd saved of them is good again after the next unshard.

        Effects: not a collective; the gather stream waits for the current one; no host sync on CUDA.
        """
        state_of(self).reshard()

    def hold(self) -> Hold:
        """Start gathering this unit's parameters, and keep them until the hold is released; not those of units below.

        What a schedule needs that has several microbatches in a unit at a time: one hold for each, from before its
        forward (or backward) to after it. The first one gathers, the last to let go reshards, and hooks that run in
        between free nothing. Hooks count as one more holder.

        Returns:
            The hold. Call its `wait()` before the parameters are used, and its `release()` after; or use it in a
            `with` statement.

        Raises:
            RuntimeError: Parameters are on the meta device.

        Effects: those of `unshard(async_op=True)`, if nobody holds the parameters yet.
        """
        state = state_of(self)
        if state.context.is_resting and not state.num_holds:
            state.drop_stale_weights()
        return Hold(state)

    def reduce_gradients(self) -> None:
        """End this unit's backward: reduce its unsharded gradients into its sharded parameters; not for units below.

        The hooks do this at the end of the unit's backward; a schedule that runs without hooks calls it once after each
        backward of the unit. As after hooks, gradients are kept for a later microbatch where
        `set_requires_gradient_sync(False)` or, with ZeRO-1 and DDP, `set_is_last_backward(False)` says so; and if some
        are delayed (`delay_gradient`), all of it happens when the last of them is there. Call it on a stream that is
        ordered after those that made gradients.

        Raises:
            RuntimeError: There are no gradients, or a hook is going to end this backward.

        Effects: collective on the unit's axis, on the reduce stream; the current stream waits for the unit reduced
            before. The gradients themselves are for `wait_for_gradients()` to wait for. No host sync on CUDA.
        """
        state_of(self).end_backward_by_hand()

    def wait_for_gradients(self) -> None:
        """End the backward of the whole tree where no hook ends it, and make the current stream wait for gradients.

        A schedule that runs without hooks calls it before the optimizer steps; after each microbatch too if it likes,
        with `set_is_last_backward(False)` before those that others follow. Units that have gradients are reduced, and
        those that were unsharded without a hold are resharded. Where hooks have ended the backward, it waits for
        gradients that are late (`overlap_optimizer`).

        Raises:
            RuntimeError: This is not the outermost unit; hooks are running a pass; or the last backward is over, and
                a hold was not released, or a delayed gradient has not come. The message names them.

        Effects: those of `reduce_gradients` for what is left; with the last backward the current stream waits for all
            reductions, and copies of the parameters are stale. No host sync on CUDA, unless shards rest on the CPU:
            then the host waits for gradients that go there.
        """
        _outermost(self, "wait_for_gradients").context.end_step()

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End a step's backward, where `set_manual_backward_finalization(True)` has left that to the caller.

        As `wait_for_gradients()` does for a schedule without hooks: what backwards have kept is reduced, if
        `set_requires_gradient_sync(True)` is said by now; units are resharded if `set_reshard_after_backward(True)` is;
        and what is reduced once a step is reduced. Where no unit was reached there is nothing to do.

        Args:
            async_op: Do not wait for the reductions. Whoever reads `.grad` must wait for the handle before, on the same
                stream. The next forward, the model's `zero_grad`, our `clip_grad_norm_` and steps of `torch.optim`'s
                optimizers do by themselves.

        Returns:
            The handle, if `async_op`.

        Raises:
            RuntimeError: This is not the outermost unit; backwards are not finalized by hand, or one is under way; a
                hold was not released, or a delayed gradient has not come.

        Effects: those of `wait_for_gradients`; with `async_op` the current stream waits for none of the reductions but
            those before the last, and the unreduced gradients of that are held.
        """
        context = _outermost(self, "finalize_backward").context
        context.finalize(leaves=async_op)
        return GradientReductionHandle(context) if async_op else None

    def reset_iter_state(self) -> None:
        """Return the whole tree to rest after an exception in forward or backward; that step's gradients are lost.

        Raises:
            RuntimeError: This is not the outermost unit.

        Effects: waits for what was started; not a collective.
        """
        _outermost(self, "reset_iter_state").context.reset()

    def mark_updated(self) -> None:
        """Say that main weights of the whole tree were written other than by a `torch.optim` optimizer.

        An average that is swapped in does so, or a copy through `.data`.

        Needed only where something outlives a pass: units that stay unsharded, and copies that `placements` keep (DDP,
        ZERO1, ZERO2, and HFSDP's shards in the compute dtype). Others are gathered anew each time.
        """
        for state in state_of(self).context.states:
            state.note_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the sharded parameters, and those that were kept unreduced, of all units below too."""
        state_of(self).context.finish_left()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for state in states_of(self, recurse=True):
            state.gradients.drop(state)
            for parameter in (p.sharded for group in state.groups for p in group.parameters):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    # -- gradients that layers make themselves, or later -------------------------------------------------------------

    def delay_gradient(self, parameter: nn.Parameter) -> Callable[[], None]:
        """Say that a parameter's gradient comes after its unit's backward, from now on; not for units below.

        For layers that compute weight gradients later, as Transformer Engine's do with `delay_wgrad_compute`. When a
        backward of the unit ends, by a hook or by `reduce_gradients()`, the unit's gradients are reduced, and the
        parameters resharded, once every delayed gradient is there; the module holds the unsharded parameters until
        then. An optimizer of `torch.optim` that holds one does not step before.

        Args:
            parameter: Of this unit, in either form.

        Returns:
            What the layer calls once for each backward, on the stream that made the gradient, when it has put the
            gradient on the unsharded parameter's `.grad` (or into its `main_grad`), or has found that there is none.
            The last call has the effects of `reduce_gradients`. It raises a RuntimeError for a backward that it was
            called for before.

        Raises:
            ValueError: The parameter is not this unit's.
            RuntimeError: The unit is in the middle of a step.

        Effects: none. Asking again for the same parameter gives another callback for it, of which one is to be called.
        """
        state = state_of(self)
        _check_between_steps(state)
        delayed = _find(state, parameter)[1]
        if delayed not in state.gradients.delayed.parameters:
            state.gradients.delayed.add(delayed)
        ref = weakref.ref(state)  # who holds the callback may be held by the state

        def note() -> None:
            if (state := ref()) is not None:
                state.unit.note_gradient(delayed)

        return note

    def set_main_grads(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give these parameters a `main_grad` that their layers add gradients to themselves; not for units below.

        For layers that accumulate into a given buffer: Transformer Engine's with `fuse_wgrad_accumulation`, Megatron's
        with `gradient_accumulation_fusion`. Their unsharded forms then have what such layers look for: `main_grad` (a
        buffer of zeros in the reduce dtype, from the beginning of the unit's backward to its reduction),
        `get_main_grad()`, `grad_added_to_main_grad` and `overwrite_main_grad` (False: layers add). Gradients are
        reduced from where the layer wrote them. Microbatches that are not reduced add to one buffer. `.grad` counts
        where the layer did not set `grad_added_to_main_grad`, and is a dummy where it did.

        Args:
            parameters: Of this unit, in either form; all that are to have one. None of them: nobody has one any more.

        Raises:
            ValueError: One of them is not this unit's.
            NotImplementedError: One is a DTensor of other axes (tensor parallel), or says itself what is gathered.
            RuntimeError: The unit is in the middle of a step.

        Effects: none until a backward: then allocates the buffer on the stream that it begins on, and zeroes it.
        """
        state = state_of(self)
        _check_between_steps(state)
        found = [_find(state, parameter) for parameter in parameters]
        made = main_grads_of(found, state.context)
        for grads in state.gradients.main_grads:
            grads.unmark()
        state.gradients.main_grads = made

    def allocate_main_grads(self) -> None:
        """Make `main_grad` there for a backward that no hook begins; nothing if it is.

        Only for layers that read the attribute: those that call `get_main_grad()` need not be helped.

        Effects: allocates the buffer on the current stream, and zeroes it.
        """
        for grads in state_of(self).gradients.main_grads:
            grads.offer()

    # -- what happens when -------------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the step's last: only then the compute stream waits for all reductions.

        Or the optimizer's step does (`overlap_optimizer` with late gradients). With
        `set_manual_backward_finalization(True)` it is `finalize_backward()` that counts, and not what is said here.
        """
        state_of(self).context.say_last_backward(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Say whether the caller ends each step's backward by `finalize_backward()`, instead of the end of autograd's.

        For schedules in which the reduction of gradients is an action of its own: no backward is the step's last then,
        whatever `set_is_last_backward` says. Until the end gradients may be reduced or not, so an optimizer of
        `torch.optim` that holds some of the parameters does not step before.

        Args:
            enabled: For the whole tree, from the next backward on.

        Raises:
            RuntimeError: This is not the outermost unit; or it would change within a backward, or after one that was
                not finalized.
        """
        context = _outermost(self, "set_manual_backward_finalization").context
        if enabled != context.finalizes_by_hand and (context.is_in_backward or context.awaits_finalization):
            raise RuntimeError(
                "Expected the mode to stay until the backward is finalized, got a change: "
                "set_manual_backward_finalization cannot change mode during backward, or after backward starts. Call "
                "finalize_backward() before, or reset_iter_state() after an exception."
            )
        context.finalize_by_hand(enabled)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backward reduces gradients, or keeps them unsharded for a later microbatch.

        Kept gradients are summed in the reduce dtype. They cost a whole unsharded gradient a parameter.
        """
        for state in states_of(self, recurse):
            state.gradients.requires_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether the parameters go after forward and are gathered again for backward, from all ranks.

        Raises:
            ValueError: Not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"Expected `reshard_after_forward` to be a bool, got {reshard_after_forward!r}: reshard_after_forward "
                f"should be a bool, got {type(reshard_after_forward)}. Give a number of ranks to fully_shard."
            )
        for state in states_of(self, recurse):
            state.reshard_after_forward = reshard_after_forward
            for group in state.groups:
                group.neighbours = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether the parameters go after backward.

        They may stay between microbatches, but not over an optimizer step.
        """
        for state in states_of(self, recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Say whether unsharded parameters keep their memory, at its address, when they go.

        They are gathered anew all the same. For what was captured with their addresses in it. Memory is then that of
        all these units unsharded.

        Effects: False frees what was kept, if it is not used now, after what is on the current stream.
        """
        for state in states_of(self, recurse):
            state.keep_bytes(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether backward needs this unit's parameters; not for units below.

        An embedding's backward makes a gradient without looking at the weight. A forward that is recomputed inside
        backward gathers them all the same.
        """
        state_of(self).unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Say which units to gather ahead when this one's forward begins, instead of the one that came next last time.

        Args:
            modules: Units, in the order to gather them; their unsharded parameters are alive together. Empty restores
                the learned order. An order that ranks do not share is a deadlock.

        Raises:
            ValueError: One of them is no unit.
        """
        state_of(self).forward_prefetch = _references(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Say which units to gather ahead when this one's backward begins, instead of the one that came next last time.

        Args:
            modules: As for `set_modules_to_forward_prefetch`.

        Raises:
            ValueError: One of them is no unit.
        """
        state_of(self).backward_prefetch = _references(modules)

    def set_prefetch_budget(self, nbytes: int | None) -> None:
        """Say how much may be gathered ahead of the unit that runs, in forward and in backward.

        Units are gathered in the order that was learned, the next first, while the unsharded parameters of those that
        wait for their turn weigh no more than this. One unit is always gathered ahead, whatever it weighs. Lists given
        to `set_modules_to_forward_prefetch` and its sibling count for their units instead.

        Args:
            nbytes: For the whole tree: beside the units that run or are kept, at most so many bytes of unsharded
                parameters, in the compute dtype and with padding, are alive. None, the default, gathers only the
                next unit. Not from free memory: what is communicated must follow from what every rank knows, so every
                rank must give the same.

        Raises:
            RuntimeError: This is not the outermost unit.
            TypeError: Neither an int nor None.
            ValueError: Negative.
        """
        if nbytes is not None:
            _check_nbytes(nbytes)
        _outermost(self, "set_prefetch_budget").context.ahead.budget = nbytes

    def set_keep_budget(self, nbytes: int) -> None:
        """Say how much may stay unsharded between forward and backward, beside units that were told to stay.

        Each unit that stays is gathered once less. Those that backward wants first stay, as the last forward had it.

        Args:
            nbytes: For the whole tree, as in `set_prefetch_budget`; 0, the default, keeps none. They are alive from
                the units' forward to the end of their backward, beside the activations. Every rank must give the same.

        Raises:
            RuntimeError: This is not the outermost unit.
            TypeError: Not an int.
            ValueError: Negative.
        """
        _check_nbytes(nbytes)
        _outermost(self, "set_keep_budget").context.kept.budget = nbytes

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the next forward's gathers wait for an event, not for all that was put on the compute stream before.

        Args:
            event: Recorded after whatever wrote the parameters. It serves one forward of the whole tree. None, as CPU
                streams give it, changes nothing.

        Raises:
            ValueError: Not an event.
        """
        if event is not None and not hasattr(event, "record"):
            raise ValueError(f"Expected `event` to be a recorded torch.Event, got {type(event).__name__}.")
        state_of(self).context.post_optim_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Say how many units' reductions may be in flight before the compute stream waits for the oldest.

        Args:
            max_input_buffers: 1 is the default. Each one more keeps another unit's unreduced gradients alive, and helps
                where reductions take longer than the backward that should hide them.
            recurse: For units below too. The largest number in the tree counts for all of it, from the next backward
                on.

        Raises:
            TypeError: Not an int.
            ValueError: Less than one.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"Expected `max_input_buffers` to be an int, got {max_input_buffers!r}: max_input_buffers must be an "
                f"int, got {type(max_input_buffers).__name__}."
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"Expected `max_input_buffers` to be at least 1, got {max_input_buffers}: max_input_buffers must be a "
                f"positive int, got {max_input_buffers}."
            )
        for state in states_of(self, recurse):
            state.max_reductions_in_flight = max_input_buffers

    def set_order_check(self, enable: bool = True, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Compare, before each collective and at the end of each pass, the order in which ranks run this tree's units.

        Ranks that differ each get an error that names both orders, before the collective: nothing hangs, and nothing is
        added up that does not belong together. Without it, a rank that leaves out a unit makes the others wait or
        receive another unit's parameters. `LAMELLA_DEBUG=order` in the environment does the same for every tree. Slow:
        for finding out. Results are the same to the bit.

        Args:
            enable: Every rank must say the same, between steps.
            timeout_s: How long a rank may take to come before the others give it up.

        Raises:
            RuntimeError: This is not the outermost unit.
            ValueError: The time is not positive.

        Effects: from now on each collective of this tree blocks the host until all its ranks have come, for about a
            millisecond on one host and more on many, through the store of the default process group. No GPU sync.
        """
        if not timeout_s > 0:
            raise ValueError(f"Expected `timeout_s` to be a positive number of seconds, got {timeout_s!r}.")
        _outermost(self, "set_order_check").context.order_check = OrderCheck(timeout_s) if enable else None

    # -- what gradients are reduced to -------------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by `factor` instead of by their number; not for units below.

        Raises:
            ValueError: Not a positive number.
        """
        if not factor > 0:
            raise ValueError(f"Expected a positive gradient divide factor, got {factor!r}.")
        for group in state_of(self).groups:
            group.divisor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce with sums only and divide after, at the cost of a pass over the shards; not for units below."""
        for group in state_of(self).groups:
            group.sums_only = enable

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward reduces gradients over the replicas (HSDP) too, or keeps each replica's own sum.

        A kept sum costs a sharded gradient in the reduce dtype; it is added to the next that is reduced.
        """
        for state in states_of(self, recurse):
            state.gradients.requires_all_reduce = requires_all_reduce

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` on this unit's reduced gradients before they are installed; not for units below.

        It is called once for each group of parameters: those that say what is gathered of them, and those of another
        dtype, are groups of their own.

        Args:
            hook: Given this rank's shards of a group of parameters as one flat tensor, to change in place: in the
                order of the parameters, in the reduce dtype, after the all-reduce over replicas. A shard with fewer
                rows than rank 0's ends in zeros, so that every rank's tensor has as many elements, and a parameter
                without a gradient here counts with zeros. It holds the mean, or the sum with
                `set_force_sum_reduction_for_comms`.
            stream: Where it runs. None means the stream of the all-reduces.

        Raises:
            ValueError: The unit's parameters lie on several meshes, or it has replicas and a stream was given.
        """
        state = state_of(self)
        _check_one_mesh(state, "set_all_reduce_hook", "what the hook is given")
        if stream is not None and any(group.replicas or group.outer for group in state.groups):
            error = ValueError("stream cannot be set when using native HSDP")  # callers compare with FSDP2's words
            error.add_note("Expected no `stream` for a unit with replicas, got one. Leave it out.")
            raise error
        state.gradients.all_reduce_hook, state.gradients.all_reduce_hook_stream = hook, stream

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Say whether a parameter without a gradient here gets the other ranks'.

        False (the default) is right when every rank uses the same parameters: `.grad` stays None as without
        sharding. Where use differs between ranks, True installs what comes back for the zeros that were sent. Left
        False there, parts of a weight train and parts do not: an error on CPU, unnoticed on a GPU. The unit itself must
        run and take part in backward on every rank all the same.
        """
        for state in states_of(self, recurse):
            state.gradients.reduces_unused_parameters = reduce_scatter_unused_params

    # -- what collectives are made of --------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Let `comm` do this unit's gathers, in memory that it allocates; not for units below.

        Costs a copy of the parameters on both sides, which the gathers of this package do not make.

        Args:
            comm: FSDP2's `AllGather`. It is given one flat tensor for all parameters, and this rank's part of it; bytes
                if their dtypes differ. `async_op` is False, the current stream keeps the order: a Work that it returns
                all the same is waited for at once. Not called where a single rank holds the parameters.

        Raises:
            ValueError: The unit's parameters lie on several meshes.
            TypeError: It is not callable, or has no `allocate`.
        """
        for group in _groups_for(self, "set_custom_all_gather", comm):
            group.transport = with_all_gather(group.transport, comm)
            if group.neighbours is not None:
                group.neighbours = with_all_gather(group.neighbours, comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Let `comm` do this unit's gradient reductions, in memory that it allocates; not for units below.

        Costs a copy of the gradients before, and of the shards after. Reductions over replicas are not `comm`'s.

        Args:
            comm: FSDP2's `ReduceScatter`, called once a reduce dtype; else as for `set_custom_all_gather`.

        Raises:
            ValueError: The unit's parameters lie on several meshes.
            TypeError: It is not callable, or has no `allocate`.
        """
        for group in _groups_for(self, "set_custom_reduce_scatter", comm):
            group.reduce_transport = with_reduce_scatter(group.reduce_transport or group.transport, comm)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give gradient reductions a communicator of their own, so that they need not take turns with gathers.

        NCCL runs the collectives of one communicator one after another, on whatever streams they are.

        Args:
            enable: False goes back to the shared one.
            recurse: For units below too. Units on the same ranks share one.

        Effects: creates a process group for each set of ranks, which is a collective on them; none where a unit has one
            already, or lies on a single rank.
        """
        made: dict[tuple[int, ...], Transport] = {}
        for group in (group for state in states_of(self, recurse) for group in state.groups):
            shared, separate = group.axes.shard_group, _separate_reduce_transport(group)
            if enable and shared is not None and shared.size() > 1:
                separate = _separate_transport(shared, group.axes.mesh.device_type, separate, made)
            elif not enable:
                separate = None
            if isinstance(group.reduce_transport, CustomReduceScatter):
                separate = group.reduce_transport.on(separate or plain_of(group.transport))
            group.reduce_transport = separate

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Taken and not used: there are no staging buffers that the process group could allocate.

        Collectives read and write the memory of parameters and gradients, which comes from torch's allocator.

        Raises:
            MisuseError: It was to be enabled, and the unit has custom collectives, which allocate theirs.
        """
        custom = _custom_collective(state_of(self))
        if enable and custom is not None:
            raise MisuseError(
                "Expected `enable` to be False for a unit with custom collectives, got True: cannot call "
                f"set_allocate_memory_from_process_group() when {custom}. It allocates its own memory; leave one of "
                "the two calls out."
            )

    def set_symm_mem_for_comm(self, backend: str | None = "NCCL") -> None:
        """Make sure that gathers go through memory which the ranks of a host share.

        They do by default wherever they can (`lamella_buffers.copy_engines_of`), and then nothing changes. There is one
        way, so the backend's name is not used.

        Raises:
            MisuseError: They cannot: the ranks are not on one host, or not on GPUs over NCCL; torch's allocator or
                NCCL's settings keep them from it (`copy_engines_of` tells which); or the unit was given an `allocator`
                or custom collectives, or its parameters say themselves what is gathered. Nothing has changed.
        """
        if backend is None:
            return
        if (custom := _custom_collective(state_of(self))) is not None:
            raise MisuseError(
                f"Expected no custom collectives for {backend!r}, got one: cannot call set_symm_mem() when {custom}. "
                "It allocates its own memory; leave one of the two calls out."
            )
        for group in state_of(self).groups:
            if group.transport.num_ranks > 1 and not isinstance(group.transport, CopyEngineTransport):
                raise MisuseError(
                    "Expected GPUs of one host over NCCL that map one another's memory (without expandable_segments "
                    "in PYTORCH_CUDA_ALLOC_CONF), and neither `allocator` nor custom collectives, for "
                    f"{backend!r}, got gathers by {type(group.transport).__name__}. Leave the call out: they are in "
                    "place, in ordinary memory."
                )

    # -- what torch calls, or once called so -------------------------------------------------------------------------

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        warnings.warn("Call set_gradient_divide_factor(factor) instead.", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Taken and not used.

        FSDP2 chooses between streams of its own, which fragment memory, and no gathering ahead. Here the unsharded
        parameters are allocated where they are gathered, on the gather stream, and nothing is copied out of them.
        """

    def _get_fsdp_state(self) -> Any:
        """What torch's methods begin with: one that a later torch has and this class has not finds nothing to set."""
        return view_of(self)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """`to`, `to_empty`, `cuda`, ...: act on the shards, and take them back into one buffer."""
        state = state_of(self)
        state.leave_nothing_but_shards()
        module: nn.Module = super(_TorchsModule, self)._apply(fn, recurse)  # type: ignore[misc]
        state.adopt_replaced_shards(keep_parameters=True)
        return module

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise MisuseError(
            f"Expected to copy a module before it is sharded, got {type(self).__name__}: FSDP does not support "
            "deepcopy. Copy first, then call fully_shard on each copy; or copy the state dict."
        )


def _references(modules: Sequence[object]) -> tuple[weakref.ref[FSDPState], ...]:
    # Weak: two units that name each other would keep a deleted model's memory until the cyclic collector runs.
    return tuple(weakref.ref(unit_state_of(module)) for module in modules)


def _check_nbytes(nbytes: object) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"Expected `nbytes` to be a whole number of bytes, got {nbytes!r}.")
    if nbytes < 0:
        raise ValueError(f"Expected `nbytes` to be at least 0, got {nbytes}.")


def _outermost(module: object, method: str) -> FSDPState:
    state = state_of(module)
    if not state.is_outermost:
        raise RuntimeError(
            f"Expected the outermost unit, got {state.name!r}. Call {method}() on the module that was given to the "
            f"last fully_shard: {method} must be called on the root FSDP module."
        )
    return state


def _check_between_steps(state: FSDPState) -> None:
    if not state.context.is_resting or state.has_gradients or state.awaits_gradients:
        raise RuntimeError(
            f"Expected {state.title} between steps, got a pass under way or gradients that were not reduced. Call this "
            "after the step, or reset_iter_state() after an exception."
        )


def _find(state: FSDPState, parameter: nn.Parameter) -> tuple[ParameterGroup, ShardedParameter]:
    """A unit's parameter and its group, from either form of it."""
    for group in state.groups:
        for found in group.parameters:
            if parameter is found.sharded or parameter is found.unsharded:
                return group, found
    raise ValueError(
        f"Expected a parameter of {state.title}, got one of shape {tuple(parameter.shape)} that is not. Ask the unit "
        "that owns it, after it was sharded."
    )


def _groups_for(module: object, method: str, comm: object) -> tuple[ParameterGroup, ...]:
    """The groups of a unit whose collectives a user brings."""
    check_collective(comm)
    state = state_of(module)
    _check_one_mesh(state, method, "the group that `comm` is called with")
    return state.groups


def _check_one_mesh(state: FSDPState, method: str, what: str) -> None:
    if len({group.axes for group in state.groups}) > 1:
        raise ValueError(
            f"Expected a unit whose parameters lie on one mesh, got several: {method} is not supported with multiple "
            f"param groups, as {what} would be ambiguous. Give parameters on other meshes (`shard_placement_fn`) units "
            "of their own."
        )


def _custom_collective(state: FSDPState) -> str | None:
    """Which of a unit's collectives is a user's, in FSDP2's words; None if neither is."""
    for group in state.groups:
        for kind, transport in (("all gather", group.transport), ("reduce scatter", group.reduce_transport)):
            if (comm := custom_of(transport)) is not None:
                return f"{kind} comm is custom: {type(comm).__name__}"
    return None


def _separate_reduce_transport(group: ParameterGroup) -> Transport | None:
    """The group's communicator for reductions, if it has one of its own."""
    plain = None if group.reduce_transport is None else plain_of(group.reduce_transport)
    return None if plain is plain_of(group.transport) else plain


def _separate_transport(
    shared: dist.ProcessGroup, device_type: str, existing: Transport | None, made: dict[tuple[int, ...], Transport]
) -> Transport:
    """A transport over the same ranks with a communicator of its own, one for each set of ranks."""
    ranks = tuple(dist.get_process_group_ranks(shared))
    if existing is not None:
        made.setdefault(ranks, existing)
        return existing
    if ranks not in made:
        own = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter")
        made[ranks] = transport_for(own, device_type)
    return made[ranks]
