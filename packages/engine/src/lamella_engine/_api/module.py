"""FSDP2's methods, gained by a module as a unit: calls of the unit's verbs."""

from __future__ import annotations

import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, Self, SupportsFloat, cast, overload

import torch
import torch.distributed.fsdp as fsdp2
import torch.nn as nn

from lamella_engine._api.transports import (
    check_one_mesh,
    check_shares_memory,
    check_takes_group_memory,
    gather_by,
    reduce_by,
    separate_reductions,
)
from lamella_engine._api.verbs import UnitVerbs, fresh_weights, outermost
from lamella_engine._common.errors import MisuseError
from lamella_engine._modules.attached import state_of, unit_state_of, units_of, view_of
from lamella_engine._modules.handles import GradientReductionHandle, UnshardHandle
from lamella_engine._modules.state import FSDPState
from lamella_engine._parameters.custom_collectives import AllGather, ReduceScatter
from lamella_engine._unit.unit import Unit

_TorchsModule = fsdp2.FSDPModule  # bound here: a program may rebind torch's name


class FSDPModule(_TorchsModule, UnitVerbs):
    """Mixed into a module's class by `fully_shard`; never made by itself.

    A subclass of torch's class: programs that look for FSDP2's modules find lamella's. Nothing of torch's is
    used: every method is defined here. Methods with `recurse=True` reach the units below too. Meanings are FSDP2's.
    lamella adds the methods of `UnitVerbs`, which give way to a model's own; FSDP2's win, as in FSDP2.
    """

    _orig_cls_mro_index = 3  # torch's: the place of the module's earlier class

    def __init_subclass__(cls, **kwargs: object) -> None:
        # Not passed on to the model's classes: a unit's class is no model of its own. Registries of subclasses would
        # refuse or list it, and classes that demand a keyword of each subclass would get none.
        pass

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Slicing makes a new container of the same class. The slice is no unit, and gets the container's earlier class.
        original: Any = cls.__mro__[cls._orig_cls_mro_index]
        takes_arguments = original.__new__ is not object.__new__
        instance = original.__new__(original, *args, **kwargs) if takes_arguments else original.__new__(original)
        instance.__init__(*args, **kwargs)
        return cast(Self, instance)

    # -- verbs -------------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; not the parameters of units below.

        The parameters stay until one `reshard()`, after any number of calls: a schedule of several microbatches takes a
        `hold()` for each instead. Parameters that are unsharded already are gathered again only if main weights changed
        between passes.

        Args:
            async_op: Return a handle at once. The module holds the parameters when the caller, or the unit's next
                forward, waits for the handle.

        Returns:
            The handle, if `async_op`.

        Raises:
            RuntimeError: Parameters are on the meta device.

        Effects: collective on the unit's axis; allocates the unsharded parameters, on the gather stream, which between
            passes waits for the current stream; no host sync on CUDA.
        """
        weights = fresh_weights(self)
        weights.unshard()
        handle = UnshardHandle(weights)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters, and hold the DTensors again; not for units below.

        Parameters under a `hold()` stay until the last hold is released. Call it on a stream ordered after every
        reader of the parameters. Views saved by autograd of the parameters are good again after the next
        unshard.

        Effects: not a collective; the gather stream waits for the current stream; no host sync on CUDA.
        """
        state_of(self).unit.weights.reshard()

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End a step's backward, if `set_manual_backward_finalization(True)` has left the end to the caller.

        As `wait_for_gradients()` for a schedule without hooks: kept gradients are reduced, if
        `set_requires_gradient_sync(True)` counts by now; units are resharded if `set_reshard_after_backward(True)`
        counts; and reductions of once a step are made. If no unit was reached, nothing happens.

        Args:
            async_op: Do not wait for the reductions. A reader of `.grad` must wait for the handle before, on the same
                stream. The next forward, the model's `zero_grad`, lamella-optim's `clip_grad_norm_` and steps of
                `torch.optim`'s optimizers wait by themselves.

        Returns:
            The handle, if `async_op`.

        Raises:
            RuntimeError: The unit is not the outermost; backwards are not finalized by hand, or one is under way; a
                hold was not released, or a delayed gradient has not come.

        Effects: as `wait_for_gradients`; with `async_op` the current stream waits for all reductions but the last,
            whose unreduced gradients are held.
        """
        tree = outermost(self, "finalize_backward").tree
        tree.step_end.end_step(defers=async_op, finalizes=True)
        return GradientReductionHandle(tree.step_end) if async_op else None

    def reset_iter_state(self) -> None:
        """Return the whole tree to rest after an exception in forward or backward; gradients of the step are lost.

        The next forward is refused after a failed backward without this call, and forgets a failed forward by itself.

        Raises:
            RuntimeError: The unit is not the outermost.

        Effects: waits for all gathers and reductions in flight; not a collective.
        """
        outermost(self, "reset_iter_state").tree.step_end.reset()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients of the sharded parameters, and gradients kept unreduced, of this unit and all units below.

        Args:
            args: Positional arguments of the model's own `zero_grad`, which is called first; torch's takes
                `set_to_none`, True by default.
            kwargs: Keyword arguments of the model's own `zero_grad`.
        """
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        # First: a reduction still under way would install a gradient behind the clearing.
        state_of(self).tree.step_end.finish_deferred()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        for unit in units_of(self, recurse=True):
            unit.gradients.drop()
            for parameter in (p.sharded for group in unit.parameters.groups for p in group.parameters):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    # -- when units gather, reshard and reduce -------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the step's last: only then the compute stream waits for all reductions.

        With late gradients (`overlap_optimizer`) the optimizer's step waits instead. With
        `set_manual_backward_finalization(True)` `finalize_backward()` ends the step, and the value has no effect.
        """
        state_of(self).tree.step_end.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether the caller ends each step's backward by `finalize_backward()`, instead of autograd.

        For schedules in which the reduction of gradients is an action of its own: no backward is the step's last then,
        also after `set_is_last_backward(True)`. Until the end gradients may be reduced or not, so an optimizer of
        `torch.optim` that holds some of the parameters does not step before.

        Args:
            enabled: Whether the caller ends backwards: of the whole tree, from the next backward on.

        Raises:
            RuntimeError: The unit is not the outermost; or the mode would change within a backward, or after a backward
                that was not finalized.
        """
        outermost(self, "set_manual_backward_finalization").tree.step_end.finalizes_by_hand = enabled

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients, or keeps them unsharded for a later microbatch.

        Kept gradients are summed in the reduce dtype, and cost a whole unsharded gradient a parameter.
        """
        for unit in units_of(self, recurse):
            unit.gradients.requires_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether the parameters go after forward and are gathered again for backward, from all ranks.

        Raises:
            ValueError: Not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"Expected `reshard_after_forward` to be a bool, got {reshard_after_forward!r}: reshard_after_forward "
                f"should be a bool, got {type(reshard_after_forward)}. Give a number of ranks to fully_shard."
            )
        for unit in units_of(self, recurse):
            # A flag replaces the number given to `fully_shard`: no parts are kept for neighbours any more.
            unit.reshard_after_forward = reshard_after_forward
            for group in unit.parameters.groups:
                group.transports.neighbours = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether the parameters go after backward.

        Parameters may stay between microbatches, but not over an optimizer step.
        """
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether unsharded parameters keep their memory, at a fixed address, when they go.

        For captured work that has the addresses in it. The parameters are gathered anew all the same. Memory is then
        the sum of all these units, unsharded.

        Effects: False frees kept memory that is not in use, after all work on the current stream.
        """
        for unit in units_of(self, recurse):
            unit.weights.keep_bytes(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward needs this unit's parameters; not for units below.

        An embedding's backward makes a gradient without looking at the weight. A forward that is recomputed inside
        backward gathers the parameters all the same.
        """
        state_of(self).unit.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Name the units to gather ahead when this unit's forward begins, instead of the next in the learned order.

        Args:
            modules: Units, in the order to gather them; their unsharded parameters are alive together. An empty list
                restores the learned order. Lists that differ between ranks are a deadlock.

        Raises:
            ValueError: A module is no unit.
        """
        state_of(self).unit.forward_prefetch = _references(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Name the units to gather ahead when this unit's backward begins, instead of the next in the learned order.

        Args:
            modules: Units, as `set_modules_to_forward_prefetch` takes them.

        Raises:
            ValueError: A module is no unit.
        """
        state_of(self).unit.backward_prefetch = _references(modules)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the next forward's gathers wait for an event, not for all work on the compute stream before.

        Args:
            event: Recorded after all writes to the parameters. The event serves one forward of the whole tree. None, as
                CPU streams give, changes nothing.

        Raises:
            ValueError: Not an event.
        """
        if event is not None and not hasattr(event, "record"):
            raise ValueError(f"Expected `event` to be a recorded torch.Event, got {type(event).__name__}.")
        state_of(self).tree.streams.post_optim_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' reductions may be in flight before the compute stream waits for the oldest.

        Args:
            max_input_buffers: 1 is the default. Each more keeps another unit's unreduced gradients alive, and helps if
                reductions take longer than the backward that should hide them.
            recurse: Units below change too. The largest number in the tree counts for all units, from the next backward
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
        for unit in units_of(self, recurse):
            unit.max_reductions_in_flight = max_input_buffers

    # -- how gradients are reduced -------------------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by `factor` instead of by their number; not for units below.

        Gradients reduced before, also over the inner axis alone, stay divided as they were.

        Raises:
            ValueError: Not a positive number.
        """
        unchecked_factor: object = factor
        if not (isinstance(unchecked_factor, SupportsFloat) and float(unchecked_factor) > 0):
            raise ValueError(f"Expected a positive gradient divide factor, got {factor!r}.")
        state_of(self).unit.gradients.divide(divisor=float(factor))

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce with sums only and divide after, at the cost of a pass over the shards; not for units below."""
        state_of(self).unit.gradients.divide(sums_only=enable)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients over the replicas (HSDP) too, or keeps each replica's own sum.

        A kept sum costs a sharded gradient in the reduce dtype, and is added to the next reduced gradient.
        """
        for unit in units_of(self, recurse):
            unit.gradients.requires_all_reduce = requires_all_reduce

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` on this unit's reduced gradients before they are installed; not for units below.

        One call for each group of parameters: parameters of another dtype, and parameters whose class defines the
        gather, are groups of their own.

        Args:
            hook: Given this rank's shards of a group of parameters as one flat tensor, to change in place: in the order
                of the parameters, in the reduce dtype, after the all-reduce over replicas. A shard with fewer rows than
                rank 0's ends in zeros, so that every rank's tensor has as many elements, and a parameter without a
                gradient here counts with zeros. The tensor holds the mean, or the sum with
                `set_force_sum_reduction_for_comms`; in float16 a sum of gradients divided beforehand, as in FSDP2.
            stream: The hook's stream. None means the stream of the all-reduces.

        Raises:
            ValueError: The unit's parameters lie on several meshes, or the unit has replicas and a stream was given.
        """
        unit = state_of(self).unit
        check_one_mesh(unit.parameters, "set_all_reduce_hook", "the hook's argument")
        if stream is not None and any(
            group.transports.replicas or group.transports.outer for group in unit.parameters.groups
        ):
            error = ValueError("stream cannot be set when using native HSDP")  # callers compare with FSDP2's words
            error.add_note("Expected no `stream` for a unit with replicas, got one. Leave it out.")
            raise error
        unit.gradients.all_reduce_hook, unit.gradients.all_reduce_hook_stream = hook, stream

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Choose whether a parameter without a gradient here gets the other ranks' gradient.

        False (the default) is right when every rank uses the same parameters: `.grad` stays None as without sharding.
        If use differs between ranks, True installs the sum with zeros from the ranks that did not use the parameter.
        With False parts of a weight would then train and parts not: an error on CPU, unnoticed on a GPU. The unit
        itself must run and take part in backward on every rank all the same.
        """
        for unit in units_of(self, recurse):
            unit.gradients.reduces_unused_parameters = reduce_scatter_unused_params

    # -- the collectives -----------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Let `comm` do this unit's gathers, in memory that `comm` allocates; not for units below.

        Costs a copy of the parameters on both sides, which the gathers of this package do not make.

        Args:
            comm: FSDP2's `AllGather`. Given one flat tensor for all parameters, and this rank's part of the tensor;
                bytes if dtypes differ. `async_op` is False, the current stream keeps the order: a Work that `comm`
                returns all the same is waited for at once. Not called if a single rank holds the parameters.

        Raises:
            ValueError: The unit's parameters lie on several meshes.
            TypeError: `comm` is not callable, or has no `allocate`.
        """
        gather_by(state_of(self).unit.parameters, comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Let `comm` do this unit's gradient reductions, in memory that `comm` allocates; not for units below.

        Costs a copy of the gradients before, and of the shards after. Reductions over replicas are not `comm`'s.

        Args:
            comm: FSDP2's `ReduceScatter`, called once a reduce dtype; else as for `set_custom_all_gather`.

        Raises:
            ValueError: The unit's parameters lie on several meshes.
            TypeError: `comm` is not callable, or has no `allocate`.
        """
        reduce_by(state_of(self).unit.parameters, comm)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give gradient reductions a communicator of their own, so that they need not take turns with gathers.

        NCCL runs the collectives of one communicator one after another, on any streams.

        Args:
            enable: False goes back to the shared communicator.
            recurse: Units below get communicators too. Units on the same ranks share a communicator.

        Effects: creates a process group for each set of ranks that has none, which is a collective on the ranks.
        """
        separate_reductions((unit.parameters for unit in units_of(self, recurse)), enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Taken and not used: no staging buffers exist that the process group could allocate.

        Collectives read and write the memory of parameters and gradients, which comes from torch's allocator.

        Raises:
            MisuseError: `enable` is True, and the unit has custom collectives, which allocate memory themselves.
        """
        if enable:
            check_takes_group_memory(state_of(self).unit.parameters)

    def set_symm_mem_for_comm(self, backend: str | None = "NCCL") -> None:
        """Make sure that gathers go through memory which the ranks of a host share.

        Gathers do by default wherever they can (`lamella_buffers.copy_engines_of`), and then nothing changes. The
        backend's name is not used: lamella has a single way.

        Raises:
            MisuseError: The ranks are not on one host, or not on GPUs over NCCL; torch's allocator or NCCL's settings
                prevent shared memory (`copy_engines_of` tells which); the unit has an `allocator` or custom
                collectives; or the class of a parameter defines the gather. Nothing has changed.
        """
        if backend is not None:
            check_shares_memory(state_of(self).unit.parameters, backend)

    # -- names that torch calls, or called before ----------------------------------------------------------------------

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        warnings.warn("Call set_gradient_divide_factor(factor) instead.", DeprecationWarning, stacklevel=2)
        FSDPModule.set_gradient_divide_factor(self, factor)  # the model may have one of its own

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Taken and not used.

        FSDP2 chooses between streams of its own, which fragment memory, and no gathering ahead. Here unsharded
        parameters are allocated on the gather stream, and nothing is copied out of the gathered bytes.
        """

    def _get_fsdp_state(self) -> Any:
        """The object that torch's methods begin with: a method of a later torch finds nothing to set."""
        return view_of(self)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """`to`, `to_empty`, `cuda`, ...: act on the shards, and take them back into one buffer.

        Raises:
            ValueError: A recipe does not compute in the new dtype; no shard of the units below has changed.
        """
        state = state_of(self)
        for unit in units_of(self, recurse):
            for group in unit.parameters.groups:
                group.check_conversion(fn)
        # Otherwise `fn` would move unsharded forms, and leave the shards where they are.
        state.tree.bring_to_rest(state.unit)
        module: nn.Module = super(_TorchsModule, self)._apply(fn, recurse)  # type: ignore[misc]
        state.unit.weights.adopt_replaced_shards(keep_parameters=True)
        return module

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise MisuseError(
            f"Expected to copy a module before it is sharded, got {type(self).__name__}: FSDP does not support "
            "deepcopy. Copy first, then call fully_shard on each copy; or copy the state dict."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Programs that try whether a value can be pickled catch this class of error.
        raise pickle.PicklingError(
            f"Expected a state dict to be pickled or saved, got the sharded module {type(self).__name__}, whose groups "
            "of ranks and streams are this process's. Save model.state_dict(), or use lamella_checkpoint.save."
        )


def _references(modules: Sequence[object]) -> tuple[Callable[[], Unit | None], ...]:
    return tuple(_reference(unit_state_of(module)) for module in modules)


def _reference(state: FSDPState) -> Callable[[], Unit | None]:
    # Weak: two units that name each other would keep a deleted model's memory until the cyclic collector runs.
    ref = weakref.ref(state)
    return lambda: None if (state := ref()) is None else state.acting.unit
