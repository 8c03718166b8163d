"""What a module gains when it becomes a unit: FSDP2's methods, as calls of the verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, cast

import torch
import torch.nn as nn

from lamella_engine import _updates as updates
from lamella_engine._state import FSDPState

_STATE = "_lamella_state"


class UnshardHandle:
    """An unshard that was started."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    def wait(self) -> None:
        """Make the module hold the unsharded parameters.

        Effects: the current stream waits for the gather; blocks the host on gloo.
        """
        self._state.wait_for_unshard()


class FSDPModule:
    """Mixed into a module's class by `fully_shard`; never made by itself.

    Methods with `recurse=True` reach the units below too. Meanings are FSDP2's.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Slicing a container makes a new one of the same class: it is no unit, so it gets the class it had before.
        original: Any = cls.__mro__[2]
        takes_arguments = original.__new__ is not object.__new__
        made = original.__new__(original, *args, **kwargs) if takes_arguments else original.__new__(original)
        made.__init__(*args, **kwargs)
        return cast(Self, made)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; not those of units below.

        Args:
            async_op: Return a handle at once, and make the module hold the parameters when it is waited for.

        Effects: collective on the unit's axis; allocates the unsharded parameters; no host sync on CUDA.
        """
        state = state_of(self)
        state.unshard()
        if async_op:
            return UnshardHandle(state)
        state.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters, and hold the DTensors again; not for units below.

        Effects: not a collective; no host sync on CUDA.
        """
        state_of(self).reshard()

    def reduce_gradients(self) -> None:
        """Reduce this unit's unsharded gradients into its sharded parameters; not for units below.

        The hooks do this at the end of the unit's backward; a schedule that runs without hooks calls it.

        Effects: collective on the unit's axis if there are gradients; no host sync on CUDA.
        """
        state_of(self).reduce_gradients()

    def reset_iter_state(self) -> None:
        """Return the whole tree to rest after an exception in forward or backward; that step's gradients are lost.

        Raises:
            RuntimeError: This is not the outermost unit.

        Effects: waits for what was started; not a collective.
        """
        state = state_of(self)
        if not state.is_outermost:
            raise RuntimeError(
                f"Expected the outermost unit, got {state.name!r}. Call reset_iter_state() on the module that was "
                "given to the last fully_shard."
            )
        state.context.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the step's last: only then the compute stream waits for all reductions."""
        state_of(self).context.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backward reduces gradients, or keeps them unsharded for a later microbatch.

        Kept gradients are summed in the reduce dtype. They cost a whole unsharded gradient a parameter.
        """
        for state in _states(self, recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether the parameters go after forward and are gathered again for backward, from all ranks.

        Raises:
            TypeError: Not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"Expected `reshard_after_forward` to be a bool, got {reshard_after_forward!r}.")
        for state in _states(self, recurse):
            state.reshard_after_forward = reshard_after_forward
            for group in state.groups:
                group.neighbours = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether the parameters go after backward.

        They may stay between microbatches, but not over an optimizer step.
        """
        for state in _states(self, recurse):
            state.reshard_after_backward = reshard_after_backward

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
        for state in _states(self, recurse):
            state.requires_all_reduce = requires_all_reduce

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` on this unit's reduced gradients before they are installed; not for units below.

        Args:
            hook: Given the flat shards of a group of parameters, in the reduce dtype, to change in place.
            stream: Where it runs. None means the stream of the all-reduces.

        Raises:
            ValueError: The unit's parameters lie on several meshes, or it has replicas and a stream was given.
        """
        state = state_of(self)
        if len({group.axes for group in state.groups}) > 1:
            raise ValueError(
                "Expected a unit whose parameters lie on one mesh, got several: what the hook is given would be "
                "ambiguous. Give parameters on other meshes (`shard_placement_fn`) units of their own."
            )
        if stream is not None and any(group.replicas is not None for group in state.groups):
            raise ValueError(
                "Expected no `stream` for a unit with replicas, got one: stream cannot be set when using native HSDP."
            )
        state.all_reduce_hook, state.all_reduce_hook_stream = hook, stream

    def set_reduce_scatter_unused_params(self, reduce_unused: bool, *, recurse: bool = True) -> None:
        """Say whether a parameter without a gradient here gets the other ranks'.

        False (the default) is right when every rank uses the same parameters: `.grad` stays None as without
        sharding. Where use differs between ranks, True installs what comes back for the zeros that were sent. Left
        False there, parts of a weight train and parts do not: an error on CPU, unnoticed on a GPU. The unit itself must
        run and take part in backward on every rank all the same.
        """
        for state in _states(self, recurse):
            state.reduces_unused_parameters = reduce_unused

    def mark_updated(self) -> None:
        """Say that main weights were written other than by a `torch.optim` optimizer (an average swapped in, a copy).

        Needed only for units that stay unsharded between passes; others are gathered anew each time.
        """
        updates.note()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the sharded parameters, and those that were kept unreduced, of all units below too."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for state in _states(self, recurse=True):
            state.drop_gradients()
            for parameter in (p.sharded for group in state.groups for p in group.parameters):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """`to`, `to_empty`, `cuda`, ...: act on the shards, and take them back into one buffer."""
        state = state_of(self)
        state.reshard()
        module: nn.Module = super()._apply(fn, recurse)  # type: ignore[misc]
        state.adopt_replaced_shards(keep_parameters=True)
        return module

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise NotImplementedError(
            f"Expected to copy a module before it is sharded, got {type(self).__name__}. Copy first, then call "
            "fully_shard on each copy; or copy the state dict."
        )


def attach_state(module: nn.Module, state: FSDPState) -> None:
    """Give a module its state, past `nn.Module.__setattr__`."""
    module.__dict__[_STATE] = state


def find_state(module: object) -> FSDPState | None:
    """A module's state, or None if it is no unit."""
    return cast("FSDPState | None", getattr(module, "__dict__", {}).get(_STATE))


def state_of(module: object) -> FSDPState:
    """A unit's state."""
    state = find_state(module)
    assert state is not None, f"{type(module).__name__} has FSDPModule's methods but no state"
    return state


def _states(module: object, recurse: bool) -> Iterator[FSDPState]:
    assert isinstance(module, nn.Module)
    for inner in module.modules() if recurse else (module,):
        if (state := find_state(inner)) is not None:
            yield state
