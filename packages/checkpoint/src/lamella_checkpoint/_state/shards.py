"""Live shards under other names: a rank's part of a fused tensor, as pieces of the components.

Note [Coordinates come from the parameter]
    An optimizer's state for a sharded parameter may be a DTensor, a plain tensor of the rank's elements, or a
    DTensor on the data-parallel axes alone. Only the parameter determines the global elements. So a shard is placed
    by its parameter's region, and the data is checked only by number of elements. A tensor-parallel rank's
    part is then written at its true place. By its own coordinates every rank would
    write the same boxes, and a checkpoint keeps one of each: half of the tensor would be lost without an error.

Each rank computes its pieces alone, without communication.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lamella_files import Correspondence, Piece, Side, box_of, carried, meetings, places_in_memory
from lamella_layout import Chunk, Range, Region


@dataclass(frozen=True, kw_only=True)
class LiveShard:
    """A rank's part of a parameter, in the parameter's coordinates: Note [Coordinates come from the parameter].

    Attributes:
        shape: The parameter's global shape.
        region: The rank's part. The region's boxes are in the order of local memory.
    """

    shape: tuple[int, ...]
    region: Region

    @classmethod
    def of_rows(
        cls, shape: Sequence[int], elements: Range, *, tp_dim: int | None = None, num_tp: int = 1, tp_rank: int = 0
    ) -> "LiveShard":
        """A tensor-parallel rank's part, cut between any rows: Megatron-FSDP's form of a shard.

        Args:
            shape: The parameter's global shape.
            elements: The rank's, of the tensor-parallel rank's part laid out flat (`megatron_fsdp_slice`).
            tp_dim: The dim that tensor parallelism cuts, first. None without a cut.
            num_tp: Tensor-parallel ranks.
            tp_rank: This rank among them.

        Raises:
            ValueError: The elements are not whole rows of the part, or the dim does not divide.
        """
        shape = tuple(shape)
        if tp_dim is not None and shape[tp_dim] % num_tp:
            raise ValueError(f"Expected dim {tp_dim} of shape {shape!r} to divide by {num_tp} ranks.")
        part = Region.whole(shape) if tp_dim is None else Region.whole(shape).shard(tp_dim, num_tp, tp_rank)
        row_numel = prod(part.shape[1:])
        if elements.start % row_numel or elements.stop % row_numel or elements.stop > prod(part.shape):
            raise ValueError(f"Expected whole rows of a part of shape {part.shape!r}, got elements {elements!r}.")
        rows = Range(elements.start // row_numel, elements.stop // row_numel)
        return cls(shape=shape, region=part.take(Chunk.of([rows, *(Range(0, size) for size in part.shape[1:])])))

    def local(self, data: torch.Tensor, name: str) -> torch.Tensor:
        """The rank's elements of a parameter, or of a slot of its optimizer state.

        Args:
            data: A DTensor of the parameter's shape, or of its tensor-parallel rank's part; or a plain tensor of the
                rank's elements, of any shape.
            name: The name for messages.

        Returns:
            A view of the region's shape.

        Raises:
            ValueError: The rank's part of the data has another number of elements.
        """
        values = data.to_local() if isinstance(data, DTensor) else data
        numel = prod(self.region.shape)
        if values.numel() != numel:
            raise ValueError(
                f"Expected the {numel} elements that this rank holds of {name!r} (shape {self.shape!r}), got "
                f"{values.numel()} of shape {tuple(values.shape)!r}. A plain tensor has to be the rank's shard alone, "
                f"and not a tensor-parallel rank's part or the whole."
            )
        return values.detach().view(self.region.shape)


class LivePiece(NamedTuple):
    """Part of a shard, and its place in a tensor of a checkpoint.

    `values` is a view of the shard, with the chunk's sizes: reading into `values` fills the shard.
    """

    name: str
    chunk: Chunk
    values: torch.Tensor


class LiveCut:
    """A live model's tensors as the tensors of the correspondences' other side."""

    def __init__(self, correspondences: Iterable[Correspondence], *, to: Side) -> None:
        """Take a model's correspondences; the model's names are on the side opposite to `to`."""
        self._pieces: dict[str, list[Piece]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for correspondence in correspondences:
            turned = correspondence if to == "right" else correspondence.inverse
            if turned.shift:
                raise ValueError(
                    f"Expected live tensors and a checkpoint's to be equal, got a shift for {correspondence.left!r}."
                )
            self._shapes.update(turned.right)
            for piece in turned.pieces:
                self._pieces.setdefault(piece.left.name, []).append(piece)

    def shapes(self, name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The tensors that contain a live tensor, with shapes; a name without a rule maps to itself."""
        if name not in self._pieces:
            return {name: tuple(shape)}
        return {piece.right.name: self._shapes[piece.right.name] for piece in self._pieces[name]}

    def pieces(self, name: str, shard: LiveShard, data: torch.Tensor) -> list[LivePiece]:
        """This rank's pieces of a live tensor to write or read; empty for an empty shard.

        Args:
            name: The live tensor's.
            shard: The shard of the parameter: the tensor itself, or the parameter of a slot.
            data: The live tensor: a DTensor, or a plain tensor of the rank's elements in any shape.
        """
        local = shard.local(data, name)
        if name not in self._pieces:
            boxes = zip(shard.region.chunks, places_in_memory(shard.region), strict=True)
            return [LivePiece(name, chunk, box_of(local, box)) for chunk, box in boxes]
        return list(self._cut(name, shard.region, local))

    def _cut(self, name: str, region: Region, local: torch.Tensor) -> Iterable[LivePiece]:
        chunks, boxes = region.chunks, places_in_memory(region)
        pieces = self._pieces[name]
        for index, chunk_index, shared in meetings([piece.left.chunk for piece in pieces], chunks):
            live_box, right = pieces[index]
            chunk = carried(shared, live_box.chunk, right.chunk)
            values = box_of(box_of(local, boxes[chunk_index]), shared.relative_to(chunks[chunk_index]))
            yield LivePiece(right.name, chunk, values.view(chunk.sizes))  # A view: loads fill the shard through it.


class PiecesOfTensor(torch.Tensor):
    """A state-dict value that torch DCP writes and reads directly: this rank's pieces of one tensor.

    The value has the tensor's global shape and no storage; any computation raises. A rank without pieces
    of the tensor writes nothing; some rank must hold each element.
    """

    _pieces: dict[tuple[int, ...], LivePiece]

    def __new__(cls, shape: Sequence[int], like: torch.Tensor, pieces: Sequence[LivePiece]) -> Self:
        """A value of this shape, of the dtype and on the device of `like`."""
        tensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)
        tensor._pieces = {piece.chunk.offsets: piece for piece in pieces}
        return tensor

    def __init__(self, shape: Sequence[int], like: torch.Tensor, pieces: Sequence[LivePiece]) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., object], *_: object) -> object:  # type: ignore[override]
        """Refuse any computation: no rank has the whole tensor."""
        raise NotImplementedError(f"Expected a checkpoint to write or read pieces of a tensor, got {func}.")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PiecesOfTensor({tuple(self.shape)!r}, {[piece.chunk for piece in self.pieces]!r})"

    @property
    def pieces(self) -> list[LivePiece]:
        """This rank's pieces."""
        return list(self._pieces.values())

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """DCP's hook for a save: the write items."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_stored(piece.chunk), properties=properties, size=self.shape),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP's hook for a load: the chunks to read."""
        return [_stored(piece.chunk) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """DCP's hook for the values of a chunk."""
        assert index.offset is not None
        return self._pieces[tuple(index.offset)].values


def written_pieces(cut: LiveCut, tensors: Mapping[str, tuple[LiveShard, torch.Tensor]]) -> dict[str, PiecesOfTensor]:
    """A live model's tensors, or one slot of its optimizer for every parameter, as values that DCP writes.

    Args:
        cut: The model's.
        tensors: By live name; the data as for `LiveShard.local`.

    Returns:
        By the checkpoint's names. The same names on every rank with the same live names.

    The values are views: they must not change before DCP has copied them.
    """
    pieces: dict[str, list[LivePiece]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    likes: dict[str, torch.Tensor] = {}
    for name, (shard, data) in tensors.items():
        for piece_name, shape in cut.shapes(name, shard.shape).items():
            pieces.setdefault(piece_name, [])
            shapes[piece_name], likes[piece_name] = shape, data
        for piece in cut.pieces(name, shard, data):
            pieces[piece.name].append(piece)
    return {name: PiecesOfTensor(shapes[name], likes[name], pieces[name]) for name in pieces}


def _stored(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
