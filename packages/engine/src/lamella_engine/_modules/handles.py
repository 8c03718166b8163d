"""The handles that a unit's verbs return: an unshard or a reduction in flight, and a hold on the parameters."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch.distributed.fsdp as fsdp2

from lamella_engine._tree.step_end import StepEnd
from lamella_engine._unit.weights import UnitWeights

_TorchsReductionHandle: Any = getattr(fsdp2, "GradientReductionHandle", object)  # torch 2.15


class UnshardHandle(fsdp2.UnshardHandle):
    """An unshard in flight. The unit's forward waits for the gather too."""

    def __init__(
        self, weights: UnitWeights | None = None
    ) -> None:  # FSDP2's may be made without a unit, and then waits for nothing
        self._weights = weights

    def wait(self) -> None:
        """Make the module hold the unsharded parameters.

        Effects: the current stream waits for the gather; blocks the host on gloo.
        """
        if self._weights is not None:
            self._weights.wait_for_unshard()
            # The line above waits once a gather, maybe on another stream: this stream is ordered after the gather in
            # any case.
            self._weights.order_after_gather()


class GradientReductionHandle(_TorchsReductionHandle):  # type: ignore[misc]
    """The reductions of a finalized backward, from `finalize_backward(async_op=True)`."""

    def __init__(self, step_end: StepEnd) -> None:
        self._step_end = step_end
        self._num_resets = step_end.num_resets

    def wait(self) -> None:
        """Make the current stream wait for the gradients, unless they were waited for.

        Raises:
            RuntimeError: `reset_iter_state` has dropped the step and the gradients since.

        Effects: no host sync on CUDA, unless shards rest on the CPU; frees the unreduced gradients.
        """
        if self._step_end.num_resets != self._num_resets:
            raise RuntimeError(
                "Expected gradients that are being reduced, got a step that reset_iter_state() has dropped: this "
                "gradient reduction handle was invalidated. Run the step again, and wait for its own handle."
            )
        self._step_end.finish_deferred()


class Hold:
    """Keeps a unit unsharded until `release`; made by `FSDPModule.hold`. As a context manager the hold waits first.

    A unit may have several holds, one for each microbatch: the parameters go with the last release. Hooks and
    `reshard()` on a held unit take effect at the last release.
    """

    def __init__(self, weights: UnitWeights) -> None:
        self._weights = weights
        self._is_released = False
        weights.unshard(holder=self)

    def wait(self) -> None:
        """Make the module hold the unsharded parameters, for the current stream.

        Raises:
            RuntimeError: The hold was released.

        Effects: the current stream waits for the gather; blocks the host on gloo.
        """
        self._check_not_released("wait()")
        self._weights.wait_for_unshard()
        # Several streams may wait for one gather, of which the line above orders the first alone.
        self._weights.order_after_gather()

    def release(self) -> None:
        """Let go, on a stream ordered after every reader of the parameters. Reshards if no other holder is left.

        After `reset_iter_state` the call frees nothing.

        Raises:
            RuntimeError: The hold was released.

        Effects: those of `FSDPModule.reshard` for the last hold; else the gather stream waits for this moment of the
            current stream when the parameters go.
        """
        self._check_not_released("release()")
        # First: if resharding raises, a second release must not free parameters under another hold.
        self._is_released = True
        self._weights.reshard(holder=self)

    def _check_not_released(self, call: str) -> None:
        if self._is_released:
            raise RuntimeError(
                f"Expected {call} of a hold that is not released, got one on {self._weights.parameters.title} that is. "
                "Ask the unit for another: hold()."
            )

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
