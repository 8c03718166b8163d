"""Copies of a state to host memory during training, and the waits for the copies.

Note [Waiting for copies]
    Parameters and optimizer state change only in an optimizer's step, so the copies may overlap the forward and
    backward before the step. Everything else (buffers, values made by state-dict hooks) may change in the forward, and
    is copied at once: on the host before `StateCopies` is made, on an accelerator in the order of the current stream.

    A thread makes the remaining copies. Between host tensors it copies with the interpreter free. For accelerators it
    queues copies on a separate stream, which waits for work queued on the current stream at the call; pieces
    are small enough to interleave with other transfers. The thread holds the tensors until the copies are over:
    memory freed by training meanwhile would otherwise be reused under the copy.

    Before any optimizer of `torch.optim` steps, a hook has the host wait for the thread and the current stream for the
    copy stream. `load` does the same. The hook changes nothing that a step reads, and is marked `only_waits`:
    lamella-optim also calls the hook before replays of a captured step, and steps as fast as without hooks.

Note [A torn state is not written]
    Code that changes the state by other means, as a CUDA graph of a whole step or hand-swapped weights, has to
    call `SaveHandle.wait_staged` first. A change without the call is detected, and the save fails:
    - By version counters, raised by in-place operators, and compared until the first wait. Not sufficient alone:
      torch's multi-tensor and fused steps leave counters of DTensors alone, and `.data` has a separate counter.
    - By sample elements along a diagonal of each tensor, taken at the call in the order of the current stream, and
      compared with the copied elements. A step changes all of them.
    Neither detects a change of other elements by code that bypasses version counters.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

_AT_ONCE_NBYTES: Final = 1 << 14  # On the host, a smaller copy is cheaper than a thread's turn.
_PIECE_NBYTES: Final = 32 << 20  # Less than a millisecond on a bus.
_NUM_SAMPLES: Final = 16
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PAUSE_S: Final = 0.001


class HostCopy(NamedTuple):
    """A pending copy of a tensor.

    Attributes:
        name: The name for messages.
        source: Plain, of any strides, on any device.
        target: Contiguous, on the host; pinned if the source is on CUDA.
    """

    name: str
    source: torch.Tensor
    target: torch.Tensor


class StateCopies:
    """A state's copies, by Note [Waiting for copies].

    Attributes:
        waited_seconds: Seconds the host has spent in `wait`.
    """

    def __init__(self, copies: Sequence[HostCopy], steady: Mapping[str, torch.Tensor]) -> None:
        """HostCopy at once values that may change at any time, and take samples of the rest.

        Args:
            copies: All copies.
            steady: Tensors that change in an optimizer's step alone, by name: live tensors, DTensors or plain.

        Effects: on an accelerator queued on the current stream, with no host sync.
        """
        self.waited_seconds = 0.0
        storages = {name: _storage(_local(tensor)) for name, tensor in steady.items()}
        all_steady = set(storages.values())
        self._later: list[HostCopy] = []
        for copy in copies:
            if _can_wait(copy.source) and _storage(copy.source) in all_steady:
                self._later.append(copy)
            else:
                copy.target.copy_(copy.source, non_blocking=True)
        watched = {_storage(copy.source) for copy in self._later}
        self._versions = _Versions({name: tensor for name, tensor in steady.items() if storages[name] in watched})
        self._samples = [
            (group, torch.cat([_diagonal(copy.source) for copy in group])) for group in _alike(self._later)
        ]
        # Sent to the host later; samples on a device stay referenced until sent, or their memory would be reused.
        self._sample_copies = list(self._samples)
        devices = {copy.source.device for copy in copies if copy.source.device.type != "cpu"}
        self._called = {device: _now_on(torch.accelerator.current_stream(device)) for device in devices}
        self._copied: list[torch.Event] = []
        self._are_queued = threading.Event()
        self._is_decided = threading.Event()
        self._decision: dict[str, bool] = {}  # Whether the copies are made: see `cancel`.

    def start(self, end: Callable[[BaseException | None], object]) -> threading.Thread:
        """Make the copies in a separate thread, and call `end` there.

        Args:
            end: Called with None once everything is in host memory, or with the error: a `RuntimeError` if the state
                changed before the copies were over.
        """
        thread = threading.Thread(target=self._run, args=(end,), name="lamella-checkpoint")
        _register_hook()
        thread.start()
        self._is_decided.wait()  # From here on the next step waits.
        return thread

    def cancel(self) -> bool:
        """Return whether the copies never begin; False once they have begun.

        An exception may leave `start` at any point, with a thread that runs, one about to run, or none. The first of
        the thread and this call decides; the answer stays the same.
        """
        return not self._decide(False)

    def _decide(self, proposal: bool) -> bool:
        return self._decision.setdefault("are_made", proposal)  # Atomic, and the same after an interrupt.

    def wait(self) -> None:
        """Wait until the state may be changed.

        Effects: blocks until host tensors have been copied and accelerator copies are queued; the current streams wait
            for the queued copies. Version counters may rise from here on.
        """
        began = time.perf_counter()
        self._are_queued.wait()
        self._versions.forget()
        # The capture of a CUDA graph changes no tensor, and would fail at an event from outside; replays wait anew.
        is_captured = bool(self._copied) and torch.cuda.is_current_stream_capturing()
        for event in () if is_captured else self._copied:
            # Unordered, the next step would overwrite tensors under the copies.
            torch.accelerator.current_stream(event.device).wait_event(event)
        self.waited_seconds += time.perf_counter() - began

    def _run(self, end: Callable[[BaseException | None], object]) -> None:
        error = None
        try:
            # In this thread, where no keyboard interrupt is raised: left among those in flight without a thread that
            # copies, the copies would be awaited for ever.
            are_made = self._decide(True)
            if are_made:
                _in_flight.add(self)
            self._is_decided.set()
            if not are_made:
                return
            self._copy()
        except BaseException as caught:  # noqa: BLE001  A thread cannot raise to a caller: the next call raises it.
            error = caught
        finally:
            self._are_queued.set()
            _in_flight.discard(self)
            self._let_go()
        end(error)

    @torch.no_grad()
    def _copy(self) -> None:
        try:
            self._queue()
            self._versions.look()
        finally:
            self._are_queued.set()
        for event in self._copied:
            while not event.query():  # `synchronize` may spin on a core.
                time.sleep(_PAUSE_S)
        self._versions.forget()
        changed = self._versions.raised.union(*(_differing(group, samples) for group, samples in self._sample_copies))
        if changed:
            raise RuntimeError(_names_text(sorted(changed)))

    def _let_go(self) -> None:
        """Drop references to the state: the last save's handle may live on, and would keep the state in memory."""
        self._versions.forget()
        self._later, self._samples, self._sample_copies = [], [], []

    def _queue(self) -> None:
        for device, called in self._called.items():
            stream = _stream_beside(device)
            torch.accelerator.set_stream(stream)  # The current stream is per thread: training's stays.
            stream.wait_event(called)
            for copy in self._later:
                if copy.source.device == device:
                    for source, target in _pieces(copy):
                        target.copy_(source, non_blocking=True)
            self._sample_copies = [(group, _on_its_way(samples, device)) for group, samples in self._sample_copies]
            self._copied.append(_now_on(stream))
        for copy in self._later:
            if copy.source.device.type == "cpu":
                copy.target.copy_(copy.source)


_in_flight: set[StateCopies] = set()
os.register_at_fork(after_in_child=_in_flight.clear)  # A forked child has no copy threads: waits would never end.


def await_copies() -> None:
    """Wait until any state may be changed: `StateCopies.wait` for all copies in flight."""
    for copies in tuple(_in_flight):
        copies.wait()


@_disable_dynamo
def _await_before_step(*_: object) -> None:
    await_copies()


setattr(_await_before_step, "only_waits", True)  # noqa: B010  Type checkers know no attributes of functions.


@cache
def _register_hook() -> None:
    """Register the hook with the first copies, and for good: removal is unsafe while another thread calls hooks.

    The hook runs first: other hooks may change tensors in flight, or raise their version counters.
    """
    handle = register_optimizer_step_pre_hook(_await_before_step)
    assert isinstance(_global_optimizer_pre_hooks, OrderedDict)
    _global_optimizer_pre_hooks.move_to_end(handle.id, last=False)


@cache
def _stream_beside(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _now_on(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> int:
    """A key that identifies a storage among live storages."""
    return int(tensor.untyped_storage()._cdata)


def _can_wait(source: torch.Tensor) -> bool:
    """Whether a copy is worth a thread's turn, and the elements can be compared bit by bit."""
    least = _AT_ONCE_NBYTES if source.device.type == "cpu" else 0
    return source.nbytes > least and source.itemsize in _INTEGERS and not (source.is_conj() or source.is_neg())


def _pieces(copy: HostCopy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A copy's source and target, in pieces where both are contiguous."""
    if not copy.source.is_contiguous():
        return iter([(copy.source, copy.target)])
    numel = _PIECE_NBYTES // copy.source.itemsize
    return zip(torch.split(copy.source.view(-1), numel), torch.split(copy.target.view(-1), numel), strict=True)


def _on_its_way(samples: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Samples queued for the host, if on the device; valid once the currently queued work is over."""
    if samples.device != device:
        return samples
    return torch.empty_like(samples, device="cpu", pin_memory=True).copy_(samples, non_blocking=True)


# -- changes during the copies ----------------------------------------------------------------------------------------


class _Versions:
    """Version counters of live tensors, while none may rise.

    Attributes:
        raised: The names of tensors whose counters rose.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.raised: set[str] = set()
        self._before = {name: (tensor, _version(tensor)) for name, tensor in tensors.items()}
        self._lock = threading.Lock()

    def look(self) -> None:
        self.raised.update(name for name, (tensor, before) in self._before.items() if _version(tensor) != before)

    def forget(self) -> None:
        """Compare for the last time, and drop the tensors. Thread-safe and idempotent."""
        with self._lock:
            self.look()
            self._before = {}


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    local = _local(tensor)
    return (0, 0) if local.is_inference() else (tensor._version, local._version)


def _alike(copies: Sequence[HostCopy]) -> list[list[HostCopy]]:
    """Copies by device and element size: the samples of a group fit into one tensor."""
    groups: dict[tuple[torch.device, int], list[HostCopy]] = {}
    for copy in copies:
        groups.setdefault((copy.source.device, copy.source.itemsize), []).append(copy)
    return list(groups.values())


def _diagonal(tensor: torch.Tensor) -> torch.Tensor:
    """Elements from one corner of a tensor to the opposite one, as integers."""
    num = min(_NUM_SAMPLES, max(tensor.shape, default=1))
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    stride = sum((size - 1) // (num - 1) * stride for size, stride in strides) if num > 1 else 0
    return tensor.detach().as_strided((num,), (stride,)).view(_INTEGERS[tensor.itemsize])


def _differing(group: Sequence[HostCopy], samples: torch.Tensor) -> set[str]:
    """The names of tensors whose copied samples differ from the samples at the call."""
    copied = [_diagonal(copy.target) for copy in group]
    if torch.equal(samples, torch.cat(copied)):
        return set()
    parts = torch.split(samples, [len(sample) for sample in copied])
    return {copy.name for copy, part, sample in zip(group, parts, copied, strict=True) if not torch.equal(part, sample)}


def _names_text(names: Sequence[str]) -> str:
    return (
        f"Expected the state to stay as it was at the call until it had been copied, got changes to {len(names)} "
        f"tensors, {names[0]!r} among them. Optimizers of torch.optim wait by themselves. Before anything else changes "
        f"the state, call `wait_staged` of the handle that the save returned."
    )
