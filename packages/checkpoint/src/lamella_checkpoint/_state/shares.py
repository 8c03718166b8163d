"""Assignment of values to writing ranks: computed by each rank alone, alike on all.

Note [Assignment of writers]
    A DTensor's placements define each mesh rank's boxes, so a rank knows all chunk tables without communication.
    Values held alike by several ranks (replicated axes, plain tensors, options) are written by a single rank,
    and all must choose the same rank. The set of sharing ranks is known: for a DTensor, the mesh ranks differing
    along replicated axes only; for any other value, all ranks of this model. Ranks with a shared list of
    items deal the items out, largest first, always to the rank with the smallest load so far: equal lists give equal
    assignments.

    Equality of the lists is checked. A rank keeps a digest of each list dealt out, and the rank completing
    the checkpoint compares the digests.

    A number (Adam's `step`) beside a DTensor parameter is dealt out among the ranks owning some of the
    parameter: the remaining ranks need not have stepped it. A slot in local coordinates is written like the parameter.
"""

import hashlib
import heapq
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from lamella_checkpoint._base.live_boxes import boxes_beside, cut_order, is_placed_by, is_ragged
from lamella_checkpoint._state.contents import Ranks, StateContents
from lamella_files import box_of, places_in_memory
from lamella_layout import Chunk, mesh_owners, mesh_region

_QUESTION: Final = "__create_write_items__"
_FRAME_NBYTES: Final = 1024  # An archive's approximate overhead per item.


class Encoded(NamedTuple):
    """Data in the bytes of `torch.save`: a later change of an object inside is not written.

    A process that writes in the background needs none of the object's packages, and gets tensors inside as bytes.
    """

    content: bytes

    @classmethod
    def of(cls, value: object) -> "Encoded":
        """Encode a value."""
        file = io.BytesIO()
        torch.save(value, file)
        return cls(file.getvalue())


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """A value, or a box of a tensor, written in one piece.

    Attributes:
        names: The value's own name, and the aliases with the same stored place.
        value: The box as a tensor of the box's sizes, a view of the live memory; or plain data, encoded or not.
        shape: The shape of the whole tensor; None for plain data.
        chunk: The box; None for plain data.
    """

    names: tuple[str, ...]
    value: object
    shape: tuple[int, ...] | None = None
    chunk: Chunk | None = None

    @property
    def nbytes(self) -> int:
        """Approximate size in a file."""
        return _FRAME_NBYTES + (self.value.nbytes if isinstance(self.value, torch.Tensor) else 0)


class Tables:
    """Chunk tables by mesh, shape and placements, each computed once: slots have their parameters' layout."""

    def __init__(self) -> None:
        self._ranks: dict[DeviceMesh, torch.Tensor] = {}
        self._parts: dict[_Key, _SharePart] = {}
        self._owners: dict[_Key, Ranks] = {}

    def part(self, tensor: DTensor) -> "_SharePart":
        """This rank's part of a tensor, and the ranks with the same part. Requires this rank on the tensor's mesh."""
        key = _key(tensor)
        if key not in self._parts:
            self._parts[key] = self._part(*key)
        return self._parts[key]

    def owners(self, tensor: DTensor) -> Ranks:
        """The tensor's mesh ranks with some of the elements; all mesh ranks for an empty tensor."""
        key = _key(tensor)
        if key not in self._owners:
            mesh, shape, placements, order = key
            ranks = self._ranks_of(mesh).flatten().tolist()
            owns = mesh_owners(shape, tuple(mesh.shape), placements, order=order) if prod(shape) else repeat(True)
            self._owners[key] = Ranks(compress(ranks, owns))
        return self._owners[key]

    def _part(
        self, mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...], order: tuple[int, ...] | None
    ) -> "_SharePart":
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        region = mesh_region(shape, tuple(mesh.shape), placements, coordinate, order=order)
        along = zip(placements, coordinate, strict=True)
        alike = tuple(slice(None) if isinstance(placement, Replicate) else at for placement, at in along)
        ranks = Ranks(self._ranks_of(mesh)[alike].flatten().tolist())
        return _SharePart(region.shape, tuple(zip(region.chunks, places_in_memory(region), strict=True)), ranks)

    def _ranks_of(self, mesh: DeviceMesh) -> torch.Tensor:
        if mesh not in self._ranks:
            self._ranks[mesh] = mesh.mesh
        return self._ranks[mesh]


class _SharePart(NamedTuple):
    """A rank's part of a tensor: local shape; each box, in the tensor and in the part; the ranks with the same part."""

    local_shape: tuple[int, ...]
    boxes: tuple[tuple[Chunk, Chunk], ...]
    ranks: Ranks


_Key = tuple[DeviceMesh, tuple[int, ...], tuple[Placement, ...], tuple[int, ...] | None]


def _key(tensor: DTensor) -> _Key:
    # Equality of meshes ignores the order of the cuts: the key has the order too.
    return tensor.device_mesh, tuple(tensor.shape), tuple(tensor.placements), cut_order(tensor)


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's items, by the set of ranks with the same items."""

    items_by_ranks: Mapping[Ranks, tuple[Item, ...]]
    rank: int

    @classmethod
    def of(cls, contents: StateContents, rank: int, tables: Tables | None = None) -> "Share":
        """Collect this rank's items, by Note [Assignment of writers].

        Args:
            contents: The contents of this rank.
            rank: This rank.
            tables: Cached from the last save; None starts afresh.

        Raises:
            NotImplementedError: No reader would read a tensor back: the tensor is sparse, or of an unknown class.
            ValueError: A DTensor is partial, the local tensor contradicts the placements, or a slot has neither as
                many elements as its parameter nor as many as this rank's part of the parameter.

        Items are views of the live tensors: a write before the save has copied an item changes the checkpoint.
        """
        shared_items: dict[Ranks, list[Item]] = {}
        for item, ranks in _Holdings(contents, rank, tables or Tables()).items():
            shared_items.setdefault(ranks, []).append(item)
        items_by_ranks = {ranks: tuple(items) for ranks, items in shared_items.items() if rank in ranks}
        return cls(items_by_ranks=items_by_ranks, rank=rank)

    def with_own(self, values: Iterable[tuple[str, object]]) -> "Share":
        """The share with further plain data by name, written by this rank alone."""
        items = tuple(Item(names=(name,), value=value) for name, value in values)
        this_rank = Ranks((self.rank,))
        local_items = (*self.items_by_ranks.get(this_rank, ()), *items)
        return replace(self, items_by_ranks={**self.items_by_ranks, this_rank: local_items})

    @property
    def digests(self) -> dict[str, str]:
        """A digest of each list shared with other ranks, by the ranks' key; the sharing ranks' digests must agree."""
        return {ranks.key: _digest(items) for ranks, items in self.items_by_ranks.items() if len(ranks) > 1}

    def items(self, apart: frozenset[str] = frozenset()) -> list[Item]:
        """The items to be written by this rank.

        Args:
            apart: Keys of sets of ranks with differing lists: each rank of a set writes its whole list.
        """
        mine: list[Item] = []
        for ranks, items in self.items_by_ranks.items():
            mine += items if ranks.key in apart else _deal(items, ranks)[ranks.index(self.rank)]
        return mine


def differing(digests: Iterable[Mapping[str, str]]) -> frozenset[str]:
    """The keys of sets of ranks with different lists, given the digests of all ranks."""
    lists: dict[str, list[str]] = {}
    for rank_digests in digests:
        for key, digest in rank_digests.items():
            lists.setdefault(key, []).append(digest)
    # A rank sends the keys of sets with this rank alone: with fewer lists than ranks, a rank has none.
    return frozenset(key for key, sent in lists.items() if len(sent) < Ranks.num_in(key) or len(set(sent)) > 1)


class _Holdings:
    """All items of this rank, each with the ranks of equal items."""

    def __init__(self, contents: StateContents, rank: int, tables: Tables) -> None:
        self._contents = contents
        self._alone = Ranks((rank,))
        self._tables = tables
        self._aliases: dict[str, list[str]] = {}
        for alias, name in contents.aliases.items():
            self._aliases.setdefault(name, []).append(alias)

    def items(self) -> Iterator[tuple[Item, Ranks]]:
        for name, value in self._contents.values.items():
            names = (name, *self._aliases.get(name, ()))
            param = self._contents.params.get(name)
            if isinstance(value, torch.Tensor):
                _check_readable(name, value)
            if isinstance(param, DTensor) and isinstance(value, torch.Tensor) and is_placed_by(param, value, name):
                yield from self._placed_by(param, names, value)
            elif isinstance(value, torch.Tensor) and _names_its_own_boxes(value):
                for box, shape, chunk in _own_boxes(name, value):
                    yield Item(names=names, value=box, shape=shape, chunk=chunk), self._alone
            elif isinstance(value, DTensor):
                yield from self._dtensor_items(names, value)
            elif isinstance(value, torch.Tensor):
                full_box = Chunk((0,) * value.ndim, tuple(value.shape))
                yield (
                    Item(names=names, value=value.detach(), shape=full_box.sizes, chunk=full_box),
                    self._ranks_of_parameter(name),
                )
            else:
                yield Item(names=names, value=value), self._ranks_of_parameter(name)

    def _dtensor_items(self, names: tuple[str, ...], tensor: DTensor) -> Iterator[tuple[Item, Ranks]]:
        if tensor.device_mesh.get_coordinate() is None:
            return
        _check_not_partial(names[0], tensor)
        shape, local = tuple(tensor.shape), _local(tensor)
        if not prod(shape):
            empty = Item(names=names, value=local.new_empty(shape), shape=shape, chunk=Chunk((0,) * len(shape), shape))
            yield empty, self._tables.owners(tensor)
            return
        part = self._tables.part(tensor)
        if tuple(local.shape) != part.local_shape:
            raise ValueError(
                f"Expected this rank's part of {names[0]!r} to be of shape {part.local_shape}, as the placements "
                f"{tensor.placements} of a tensor of shape {shape} have it, got {tuple(local.shape)}. A DTensor that "
                f"is cut elsewhere has to say so with a RaggedShard."
            )
        for chunk, box in part.boxes:
            yield Item(names=names, value=box_of(local, box), shape=shape, chunk=chunk), part.ranks

    def _placed_by(self, param: DTensor, names: tuple[str, ...], slot: torch.Tensor) -> Iterator[tuple[Item, Ranks]]:
        """A slot's items, in the boxes of the slot's parameter."""
        ranks = self._alone if _names_its_own_boxes(param) else self._tables.part(param).ranks
        for chunk, box in boxes_beside(param, slot):
            yield Item(names=names, value=box, shape=tuple(param.shape), chunk=chunk), ranks

    def _ranks_of_parameter(self, name: str) -> Ranks:
        """The ranks holding a value that is no DTensor."""
        param = self._contents.params.get(name)
        if not isinstance(param, DTensor):
            return self._contents.everyone
        # Placements do not tell the ranks with elements of the parameter, and thus the ranks that have stepped it.
        return self._alone if _names_its_own_boxes(param) else self._tables.owners(param)


def _names_its_own_boxes(tensor: torch.Tensor) -> bool:
    """Whether a tensor overrides the write items of DTensor, which follow the placements.

    Megatron's uneven DTensors do, with functions on their local tensors.
    """
    if isinstance(tensor, DTensor):
        if is_ragged(tensor):
            return False
        if getattr(type(tensor), _QUESTION) is not getattr(DTensor, _QUESTION):
            return True
        return hasattr(tensor._local_tensor, _QUESTION)
    return hasattr(tensor, _QUESTION)


def _own_boxes(name: str, tensor: Any) -> Iterator[tuple[torch.Tensor, tuple[int, ...], Chunk]]:
    """The boxes from a tensor's own write items: the data, the whole tensor's shape, the box's chunk."""
    for write_item in getattr(tensor, _QUESTION)(name, tensor):
        box = tensor.__get_tensor_shard__(write_item.index) if hasattr(tensor, "__get_tensor_shard__") else tensor
        data = write_item.tensor_data
        yield box.detach(), tuple(data.size), Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _local(tensor: DTensor) -> torch.Tensor:
    local = tensor._local_tensor
    if type(local) is not torch.Tensor:  # An async collective's result: its memory is not valid before the wait.
        with torch.no_grad():
            local = tensor.to_local()
    return local.detach()


def _check_readable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that a save could write, but no load could read."""
    if _names_its_own_boxes(tensor):
        return
    local = _local(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if local.layout is not torch.strided:
        raise NotImplementedError(
            f"Expected dense tensors, got {local.layout} for {name!r}. Keep it dense, or register it with "
            f"`persistent=False`."
        )
    if type(local) is torch.Tensor:
        return
    if not _is_known(type(local)):
        raise NotImplementedError(
            f"Expected plain tensors, or classes known to torch's loads, got {type(local).__name__} for {name!r}. Pass "
            f"the class to `torch.serialization.add_safe_globals`, here and where the checkpoint is read."
        )
    if _stored_nbytes(local) < local.nbytes:
        raise NotImplementedError(
            f"Expected {local.nbytes} bytes for the elements of {name!r} in {local.dtype}, got "
            f"{_stored_nbytes(local)} in its {type(local).__name__}, and no load would read "
            "them. Keep plain tensors, and quantise after the load."
        )


def _is_known(kind: type) -> bool:
    safe_globals = torch.serialization.get_safe_globals()
    return any(
        (safe_global[0] if isinstance(safe_global, tuple) else safe_global) is kind for safe_global in safe_globals
    )


def _stored_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the plain tensors inside a tensor."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_nbytes(getattr(tensor, name)) for name in names)


def _deal(items: Sequence[Item], ranks: Ranks) -> list[list[Item]]:
    """The items of each rank: largest first, each to the rank with the smallest load, the first such rank if equal."""
    if len(ranks) == 1:
        return [list(items)]
    hands: list[list[Item]] = [[] for _ in ranks]
    loads = [(0, index) for index in range(len(ranks))]
    for item in sorted(items, key=lambda item: (-item.nbytes, item.names[0], item.chunk or ())):
        load, index = loads[0]
        hands[index].append(item)
        heapq.heapreplace(loads, (load + item.nbytes, index))
    return hands


def _digest(items: Sequence[Item]) -> str:
    lines = sorted(repr((item.names, item.shape, item.chunk, item.nbytes)) for item in items)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _check_not_partial(name: str, tensor: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"Expected {name!r} to be sharded or replicated along each axis, got {tensor.placements}: no rank has its "
            f"values. Redistribute it first."
        )
