"""Counting a step's collectives from below: every c10d call in the dispatcher, and the copy engines' collectives."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lamella_buffers import CopyEngineTransport, WindowAllocator

# Operator -> kind of collective, and the position of the argument with the unsharded side.
_C10D = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 0),
    "alltoall_": ("all_to_all", 0),
}


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One call, which may group many tensors. Exceptions are NCCL's exchanges: each tensor of a group is one call."""

    kind: str
    dtype: torch.dtype
    num_tensors: int
    numel: int  # of the unsharded side, padding included

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every collective of the block in `calls`. An unknown c10d call keeps its own name as `kind`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CollectiveCall] = []

    def __enter__(self) -> Self:
        push_into, exchange = CopyEngineTransport.push_into, CopyEngineTransport._exchange
        allocate = WindowAllocator.allocate

        def counted(transport: CopyEngineTransport, payloads: Any) -> Any:
            gathered = push_into(transport, payloads)
            if gathered is not None:  # None: the transport falls back to a c10d call, recorded by the dispatch mode.
                self._add("all_gather", payloads.wholes)
            return gathered

        def counted_exchange(transport: CopyEngineTransport, payloads: Any, op: Any) -> None:
            self._add("all_to_all", [full for _, full in payloads])
            exchange(transport, payloads, op)

        def uncounted(allocator: WindowAllocator, buffer: torch.Tensor) -> None:
            # Exchanging the addresses of a new window happens once, not in every step: not counted.
            with _disable_current_modes():
                allocate(allocator, buffer)

        self._patches: list[Any] = [
            mock.patch.object(CopyEngineTransport, "push_into", counted),
            mock.patch.object(CopyEngineTransport, "_exchange", counted_exchange),
            mock.patch.object(WindowAllocator, "allocate", uncounted),
        ]
        for patch in self._patches:
            patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for patch in self._patches:
            patch.stop()

    def counts(self) -> dict[str, int]:
        """Count the calls by kind."""
        return dict(Counter(call.kind for call in self.calls))

    def nbytes(self, kind: str) -> int:
        """Sum the bytes of the unsharded side over all calls of a kind."""
        return sum(call.nbytes for call in self.calls if call.kind == kind)

    @property
    def reductions(self) -> list[CollectiveCall]:
        """The gradients' reductions: reduce-scatters, and exchanges, whose receivers add up the pieces."""
        return [call for call in self.calls if call.kind in ("reduce_scatter", "all_to_all")]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the call if it is a collective, and run the call."""
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, args: Sequence[Any]) -> None:
        kind, position = _C10D.get(operator, (operator, 0))
        self._add(kind, list(_flatten(args[position] if args else ())))

    def _add(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        self.calls.append(
            CollectiveCall(
                kind=kind,
                dtype=tensors[0].dtype if tensors else torch.uint8,
                num_tensors=len(tensors),
                numel=sum(tensor.numel() for tensor in tensors),
            )
        )


def _flatten(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _flatten(item)
