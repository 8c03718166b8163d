"""Copies of a state to host memory that go on while training does, and what waits for them.

Note [What waits for copies]
    Parameters and optimizer state change in an optimizer's step, and so they can be copied beside the forward and the
    backward before it. Everything else (buffers, what state-dict hooks made) may change in the forward, and is copied
    at once: on the host before `Copies` is made, on an accelerator in the order of the current stream.

    The rest is a thread's. It copies between host tensors with the interpreter free. For accelerators it queues copies
    on a stream of their own, which waits for what the current stream had been given when the save was called; pieces
    are small enough for other transfers to come between. It holds the tensors until the copies are over, so that memory
    which training lets go of meanwhile is not given to others.

    Before any optimizer of `torch.optim` steps, a hook has the host wait for the thread and the current stream for that
    stream. `load` does so too. It changes nothing that a step finds, and is marked `only_waits`: lamella-optim calls
    it also before replays of a captured step, and steps as fast as without hooks.

Note [A torn state is not written]
    Who changes the state otherwise, as a CUDA graph of a whole step does, or weights that are swapped by hand, has to
    call `SaveHandle.wait_staged` before. Whoever does not is found out, and the save fails:
    - By version counters, which operators raise that write in place. They count until somebody waits. This is not
      enough: torch's multi-tensor and fused steps leave those of DTensors alone, and `.data` has its own.
    - By elements of each tensor, along a diagonal of it. They are taken at the call, in the order of the current
      stream, and compared with those that were copied. A step changes them all.
    What neither sees: elements that are not among these, changed by something that counts no versions.
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

_AT_ONCE_NBYTES: Final = 1 << 14  # On the host: less than taking a thread's turn is worth.
_PIECE_NBYTES: Final = 32 << 20  # Less than a millisecond on a bus.
_NUM_SAMPLES: Final = 16
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PAUSE_S: Final = 0.001


class Copy(NamedTuple):
    """A tensor on its way.

    Attributes:
        name: For messages.
        source: Plain, of any strides, on any device.
        target: Contiguous, on the host; pinned if the source is on CUDA.
    """

    name: str
    source: torch.Tensor
    target: torch.Tensor


class Copies:
    """A state's copies, by Note [What waits for copies].

    Attributes:
        waited_seconds: How long the host has waited for them in `wait`.
    """

    def __init__(self, copies: Sequence[Copy], steady: Mapping[str, torch.Tensor]) -> None:
        """Copy at once what may change at any time, and take samples of the rest.

        Args:
            copies: All of them.
            steady: What changes in an optimizer's step alone, by name: live tensors, DTensors or plain.

        Effects: on an accelerator queued on the current stream, with no host sync.
        """
        self.waited_seconds = 0.0
        storages = {name: _storage(_local(tensor)) for name, tensor in steady.items()}
        all_steady = set(storages.values())
        self._later: list[Copy] = []
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
        self._taken = list(self._samples)  # On the host later; those on devices are held until they have been copied.
        devices = {copy.source.device for copy in copies if copy.source.device.type != "cpu"}
        self._called = {device: _now_on(torch.accelerator.current_stream(device)) for device in devices}
        self._copied: list[torch.Event] = []
        self._are_queued = threading.Event()

    def start(self, end: Callable[[BaseException | None], object]) -> threading.Thread:
        """Make the copies in a thread of their own, and call `end` there.

        Args:
            end: Is given None once everything is in host memory, or why it is not: a `RuntimeError` if the state
                changed before it had been copied.
        """
        thread = threading.Thread(target=self._run, args=(end,), name="lamella-checkpoint")
        _register_hook()
        _in_flight.add(self)
        try:
            thread.start()
        except BaseException:
            _in_flight.discard(self)
            raise
        return thread

    def wait(self) -> None:
        """Let what follows change the state.

        Effects: blocks until host tensors have been copied and other copies are queued; the current streams wait for
            those. From here on version counters may rise.
        """
        began = time.perf_counter()
        self._are_queued.wait()
        self._versions.forget()
        for event in self._copied:
            torch.accelerator.current_stream(event.device).wait_event(event)
        self.waited_seconds += time.perf_counter() - began

    def _run(self, end: Callable[[BaseException | None], object]) -> None:
        error = None
        try:
            self._copy()
        except BaseException as caught:  # noqa: BLE001  Told by the next call, and by no thread.
            error = caught
        self._let_go()
        _in_flight.discard(self)
        end(error)

    @torch.no_grad()
    def _copy(self) -> None:
        try:
            self._queue()
            self._versions.look()
        finally:
            self._are_queued.set()
        for event in self._copied:
            while not event.query():  # `synchronize` may keep a core busy.
                time.sleep(_PAUSE_S)
        self._versions.forget()
        changed = self._versions.raised.union(*(_differing(group, samples) for group, samples in self._taken))
        if changed:
            raise RuntimeError(_told(sorted(changed)))

    def _let_go(self) -> None:
        """Hold nothing of the state: the save that this is of may be the last, and is not forgotten."""
        self._versions.forget()
        self._later, self._samples, self._taken = [], [], []

    def _queue(self) -> None:
        for device, called in self._called.items():
            stream = _stream_beside(device)
            torch.accelerator.set_stream(stream)  # This thread's alone.
            stream.wait_event(called)
            for copy in self._later:
                if copy.source.device == device:
                    for source, target in _pieces(copy):
                        target.copy_(source, non_blocking=True)
            self._taken = [(group, _on_its_way(samples, device)) for group, samples in self._taken]
            self._copied.append(_now_on(stream))
        for copy in self._later:
            if copy.source.device.type == "cpu":
                copy.target.copy_(copy.source)


_in_flight: set[Copies] = set()
os.register_at_fork(after_in_child=_in_flight.clear)  # Where their threads are not.


def await_copies() -> None:
    """Let what follows change any state: `Copies.wait` for all that are being made."""
    for copies in tuple(_in_flight):
        copies.wait()


@_disable_dynamo
def _await_before_step(*_: object) -> None:
    await_copies()


setattr(_await_before_step, "only_waits", True)  # noqa: B010  Functions have no attributes that a checker knows.


@cache
def _register_hook() -> None:
    """With the first copies, and for good: a hook must not go while another thread calls hooks.

    It is the first of all: others may change what is being copied, or say so by version counters.
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
    """What tells a storage from others that are alive."""
    return int(tensor.untyped_storage()._cdata)


def _can_wait(source: torch.Tensor) -> bool:
    """Whether a copy is worth a thread's turn, and its elements can be compared bit by bit."""
    least = _AT_ONCE_NBYTES if source.device.type == "cpu" else 0
    return source.nbytes > least and source.itemsize in _INTEGERS and not (source.is_conj() or source.is_neg())


def _pieces(copy: Copy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A copy's source and target, in pieces where they lie alike."""
    if not copy.source.is_contiguous():
        return iter([(copy.source, copy.target)])
    numel = _PIECE_NBYTES // copy.source.itemsize
    return zip(torch.split(copy.source.view(-1), numel), torch.split(copy.target.view(-1), numel), strict=True)


def _on_its_way(samples: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Samples on the host, if they are on the device; once what is queued now is over."""
    if samples.device != device:
        return samples
    return torch.empty_like(samples, device="cpu", pin_memory=True).copy_(samples, non_blocking=True)


# -- what changes meanwhile -------------------------------------------------------------------------------------------


class _Versions:
    """Version counters of live tensors, for as long as nobody may raise them.

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
        """Look for the last time, and hold the tensors no longer. Any thread may, and more than once."""
        with self._lock:
            self.look()
            self._before = {}


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    local = _local(tensor)
    return (0, 0) if local.is_inference() else (tensor._version, local._version)


def _alike(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Copies by device and size of an element: those whose samples fit into one tensor."""
    groups: dict[tuple[torch.device, int], list[Copy]] = {}
    for copy in copies:
        groups.setdefault((copy.source.device, copy.source.itemsize), []).append(copy)
    return list(groups.values())


def _diagonal(tensor: torch.Tensor) -> torch.Tensor:
    """Elements from one corner of a tensor to the opposite one, as integers."""
    num = min(_NUM_SAMPLES, max(tensor.shape, default=1))
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    stride = sum((size - 1) // (num - 1) * stride for size, stride in strides) if num > 1 else 0
    return tensor.detach().as_strided((num,), (stride,)).view(_INTEGERS[tensor.itemsize])


def _differing(group: Sequence[Copy], samples: torch.Tensor) -> set[str]:
    """The names of tensors that were copied with other elements than they had at the call."""
    copied = [_diagonal(copy.target) for copy in group]
    if torch.equal(samples, torch.cat(copied)):
        return set()
    parts = torch.split(samples, [len(each) for each in copied])
    return {copy.name for copy, part, each in zip(group, parts, copied, strict=True) if not torch.equal(part, each)}


def _told(names: Sequence[str]) -> str:
    return (
        f"Expected the state to stay as it was at the call until it had been copied, got changes to {len(names)} "
        f"tensors, {names[0]!r} among them. Optimizers of torch.optim wait by themselves. Before anything else changes "
        f"the state, call `wait_staged` of what the save returned."
    )
