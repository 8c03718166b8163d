"""What the verbs of a unit return: an unshard or a reduction that was started, and a hold on its parameters."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch.distributed.fsdp as fsdp2

from lamella_engine._context import Context
from lamella_engine._state import FSDPState

_TorchsReductionHandle: Any = getattr(fsdp2, "GradientReductionHandle", object)  # torch 2.15


class UnshardHandle(fsdp2.UnshardHandle):
    """An unshard that was started. The unit's forward waits for it too."""

    def __init__(
        self, state: FSDPState | None = None
    ) -> None:  # FSDP2's is made without a unit too, and waits for none
        self._state = state

    def wait(self) -> None:
        """Make the module hold the unsharded parameters.

        Effects: the current stream waits for the gather; blocks the host on gloo.
        """
        if self._state is not None:
            self._state.wait_for_unshard()
            self._state.order_after_gather()


class GradientReductionHandle(_TorchsReductionHandle):  # type: ignore[misc]
    """The reductions of a backward that was finalized; `finalize_backward(async_op=True)` gives one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_resets = context.num_resets

    def wait(self) -> None:
        """Make the current stream wait for the gradients; nothing if it has.

        Raises:
            RuntimeError: The step was dropped since, by `reset_iter_state`, and its gradients with it.

        Effects: no host sync on CUDA, unless shards rest on the CPU; frees the unreduced gradients.
        """
        if self._context.num_resets != self._num_resets:
            raise RuntimeError(
                "Expected gradients that are being reduced, got a step that reset_iter_state() has dropped: this "
                "gradient reduction handle was invalidated. Run the step again, and wait for its own handle."
            )
        self._context.finish_left()


class Hold:
    """Keeps a unit unsharded until it is released; `FSDPModule.hold` gives one. As a context manager it waits first.

    Several may hold a unit, each for a microbatch of its own: its parameters go when the last lets go. What hooks and
    `reshard()` do to a unit that is held comes into effect then.
    """

    def __init__(self, state: FSDPState) -> None:
        self._state = state
        self._is_released = False
        state.unshard(holder=self)

    def wait(self) -> None:
        """Make the module hold the unsharded parameters, for the stream that is current.

        Raises:
            RuntimeError: The hold was released.

        Effects: the current stream waits for the gather; blocks the host on gloo.
        """
        self._check_not_released("wait()")
        self._state.wait_for_unshard()
        self._state.order_after_gather()

    def release(self) -> None:
        """Let go, on a stream that is ordered after whatever read the parameters. Reshards if nobody else holds them.

        After `reset_iter_state` nothing is left to let go of.

        Raises:
            RuntimeError: The hold was released.

        Effects: those of `FSDPModule.reshard` for the last one; else the gather stream waits for the current one when
            the parameters go.
        """
        self._check_not_released("release()")
        self._is_released = True
        self._state.reshard(holder=self)

    def _check_not_released(self, call: str) -> None:
        if self._is_released:
            raise RuntimeError(
                f"Expected {call} of a hold that is not released, got one on {self._state.title} that is. Ask the "
                "unit for another: hold()."
            )

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
