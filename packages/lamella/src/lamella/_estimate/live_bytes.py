"""The bytes of live storages, change by change.

Note [Storages, not tensors]
    Views share a storage, and autograd keeps storages alive without a Python name. A storage's Python object
    lives as long as the storage, so a weak reference tells its end; `resize_` tells bytes that come and go in between,
    as those of gathered units do.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lamella._estimate.gradient_sums import GradientSums
from lamella._estimate.operator_work import OperatorWork, operator_work

_BLOCK_NBYTES: Final = 512
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_STORAGE: Final[Any] = torch.UntypedStorage


@dataclass(eq=False, slots=True)
class TrackedStorage:
    """A storage of a step.

    Attributes:
        kind: The kind of its contents; empty until `classify`.
        shape: The shape of the storage's first tensor.
        moment: The index of the moment of birth.
        nbytes: The bytes now.
    """

    kind: str
    shape: tuple[int, ...]
    moment: int
    nbytes: int = 0


class Change(NamedTuple):
    """Bytes gained or lost by a storage.

    Attributes:
        storage: The storage.
        nbytes: Bytes gained; negative for bytes lost.
        moment: The index of the moment.
    """

    storage: TrackedStorage
    nbytes: int
    moment: int


def in_blocks(nbytes: int) -> int:
    """Return the bytes of a request in CUDA's caching allocator: whole blocks of 512 bytes."""
    return -(-nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES


@dataclass
class MemoryLog:
    """The changes of live bytes over the moments of a step.

    Attributes:
        moments: The names of the moments, in their order.
        changes: The changes, in their order.
        operators: The work of the operators, in their order.
    """

    moments: list[str] = field(default_factory=lambda: ["before the step"])
    changes: list[Change] = field(default_factory=list)
    operators: list[OperatorWork] = field(default_factory=list)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs the bytes of every storage made by an operator in the block; see Note [Storages, not tensors].

    Attributes:
        log: The changes.
        in_backward: Set by the step: a forward that runs now is recomputed.
        sums: Makes sums of gradients in place, once it has learned to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = MemoryLog()
        self.in_backward = False
        self.sums = GradientSums()
        self._kind_of_births = ""
        self._counts = True
        self._storages: dict[int, tuple[TrackedStorage, weakref.ref[torch.UntypedStorage]]] = {}
        self._originals: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def begin(self, moment: str) -> None:
        """Begin a moment for later changes."""
        self.log.moments.append(moment)

    @contextmanager
    def births_are(self, kind: str) -> Iterator[None]:
        """Give storages born in the block a kind."""
        former, self._kind_of_births = self._kind_of_births, kind
        try:
            yield
        finally:
            self._kind_of_births = former

    @contextmanager
    def nothing_counts(self) -> Iterator[None]:
        """Leave out storages born in the block, and the work of the block's operators."""
        self._counts, former = False, self._counts
        try:
            yield
        finally:
            self._counts = former

    def adopt(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Count a tensor's storage, which may be older than the block; the kind replaces the storage's earlier kind."""
        self._note(tensor)
        if kind and (tracked := self._storages.get(tensor.untyped_storage()._cdata)):
            tracked[0].kind = kind

    def storage_of(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Return the tracked storage of a tensor; None for a storage older than the block."""
        tracked = self._storages.get(tensor.untyped_storage()._cdata)
        return None if tracked is None else tracked[0]

    def __enter__(self) -> Self:
        self._originals = (_STORAGE.resize_, _STORAGE.__getitem__)
        resize, part = self._originals

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            output = resize(storage, nbytes)
            if (tracked := self._storages.get(storage._cdata)) is not None:
                self._change(tracked[0], nbytes)
            return output

        def sliced(storage: torch.UntypedStorage, index: Any) -> Any:
            if not isinstance(index, slice):
                return part(storage, index)
            output = _part_on_meta(storage, index) if storage.device.type == "meta" else part(storage, index)
            self._track(output, (), is_part=True)
            return output

        _STORAGE.resize_, _STORAGE.__getitem__ = resized, sliced
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        assert self._originals is not None
        _STORAGE.resize_, _STORAGE.__getitem__ = self._originals
        self._storages.clear()  # The references end with the block, and with them the callbacks.

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if any(issubclass(kind, torch.Tensor) and _wraps(kind) for kind in types):
            return NotImplemented  # The operators on the tensors inside come here again.
        output = self.sums.sum_of(func, args, kwargs or {})
        if output is None:
            output = func(*args, **(kwargs or {}))
        if self._counts:
            self.log.operators += operator_work(func, args, kwargs or {}, output, len(self.log.moments) - 1)
        if isinstance(output, torch.Tensor):
            self._note(output)
        elif output is not None:
            for leaf in tree_iter(output):
                if isinstance(leaf, torch.Tensor):
                    self._note(leaf)
        return output

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        tracked = self._storages.get(storage._cdata)
        if tracked is None:
            self._track(storage, tuple(tensor.shape), is_part=not self._counts)
        elif tracked[0].nbytes != storage.nbytes() and tracked[0].kind != _PART:
            self._change(tracked[0], storage.nbytes())  # An operator has resized its output.

    def _track(self, storage: torch.UntypedStorage, shape: tuple[int, ...], *, is_part: bool = False) -> None:
        key = storage._cdata
        kind = _PART if is_part else self._kind_of_births
        tracked = TrackedStorage(kind, shape, len(self.log.moments) - 1)

        def end(reference: object) -> None:
            latest = self._storages.get(key)
            if latest is not None and latest[1] is reference:
                del self._storages[key]
                self._change(tracked, 0)

        self._storages[key] = (tracked, weakref.ref(storage, end))
        if not is_part:
            self._change(tracked, storage.nbytes())

    def _change(self, tracked: TrackedStorage, nbytes: int) -> None:
        if nbytes == tracked.nbytes:
            return
        self.log.changes.append(Change(tracked, nbytes - tracked.nbytes, len(self.log.moments) - 1))
        tracked.nbytes = nbytes


_PART: Final = "part of another storage"


def _part_on_meta(storage: torch.UntypedStorage, index: slice) -> Any:
    """Return a storage of the size of a part: torch cuts no storage without memory."""
    start, stop, _ = index.indices(storage.nbytes())
    return _STORAGE(max(0, stop - start), device="meta")


def _wraps(kind: type) -> bool:
    """True for classes of tensors with tensors inside, such as `DTensor`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return kind not in _PLAIN and not issubclass(kind, FakeTensor) and not issubclass(kind, torch.nn.Buffer)
