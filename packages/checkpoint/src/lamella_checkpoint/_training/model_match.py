"""A model's tensors among a checkpoint's: the tensors to fill, the differences, and names tied in the model alone."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from lamella_checkpoint._base.live_boxes import local_boxes
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint._state.model import LiveModel
from lamella_files import TIED, NameDifference, Source, Wanted
from lamella_layout import Chunk

_PIECE_NBYTES: Final = 64 << 20

_INTEGERS: Final = frozenset({
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64
})  # fmt: skip

# Last parts of names of scales: `weight_scale`, `weight_scale_inv`, `scale_weight`, bitsandbytes' `SCB`.
_SCALE: Final = re.compile(r"\.(?:[^.]*scale[^.]*|SCB)$")


def match_model(source: Source, live: LiveModel) -> tuple[dict[str, torch.Tensor], list[NameDifference]]:
    """Tensors to fill by their names in the checkpoint, and the differences, in the model's order.

    A dtype counts as different where a cast would drop information: an imaginary part, a fraction, a scale, an
    integer beyond the live range.
    """
    targets: dict[str, torch.Tensor] = {}
    differences: list[NameDifference] = []
    unexpected = list(_unexpected(source, live))
    scales = {
        _module_of(difference.name): difference.name for difference in unexpected if _SCALE.search(difference.name)
    }
    stored_names = {*source.tensors, *source.objects}
    for name, names in live.all_names().items():
        tensor = live.tensors[name]
        stored_name = next((f"model.{alias}" for alias in names if f"model.{alias}" in stored_names), None)
        saved, live_shape = stored_name and _shape(source, stored_name), str(tuple(tensor.shape))
        stored = (
            source.tensors[stored_name].dtype if stored_name is not None and stored_name in source.tensors else None
        )
        scale = scales.get(_module_of(stored_name or ""))
        if stored_name is None or saved != live_shape or stored is None:
            differences.append(NameDifference(f"model.{name}", saved, live_shape))
        elif scale is not None and stored.itemsize == 1 < tensor.dtype.itemsize:
            saved = f"{stored} {saved} to be multiplied by {scale.rpartition('.')[2]!r}"
            differences.append(NameDifference(f"model.{name}", saved, f"{tensor.dtype} {live_shape}"))
        elif _holds(tensor.dtype, stored):
            targets[stored_name] = tensor
        else:
            differences.append(NameDifference(f"model.{name}", f"{stored} {saved}", f"{tensor.dtype} {live_shape}"))
    return targets, differences + unexpected


def _holds(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether a dtype has a place for every kind of number of another; for integers, for every number."""
    if dtype == stored:
        return True
    if not all(kind in _INTEGERS for kind in (dtype, stored)):
        return torch.can_cast(stored, dtype)
    live_range, stored_range = torch.iinfo(dtype), torch.iinfo(stored)
    return live_range.min <= stored_range.min and stored_range.max <= live_range.max


def _module_of(full_name: str) -> str:
    return full_name.rpartition(".")[0]


def tied_differences(source: Source, live: LiveModel, targets: Mapping[str, torch.Tensor]) -> Iterator[NameDifference]:
    """Names tied in the model, with different values in the checkpoint: the tensor can hold those of one name alone.

    Effects: reads this rank's part of a tied tensor twice, unless both names have one place.
    """
    for name, names in live.all_names().items():
        first, *other_aliases = [f"model.{alias}" for alias in names if f"model.{alias}" in source.tensors] or [""]
        for other in other_aliases if first in targets else ():
            if not _are_alike(source, first, other, live.tensors[name]):
                yield NameDifference(other, f"other values than {first!r}", TIED)


def _are_alike(source: Source, one: str, other: str, tensor: torch.Tensor) -> bool:
    if isinstance(source, StoredCheckpoint) and source.places(one) == source.places(other):
        return True
    if source.tensors[one].shape != source.tensors[other].shape:
        return False
    pieces = [piece for chunk, _ in local_boxes(tensor) for piece in _row_pieces(chunk, tensor.itemsize)]
    return all(_are_alike_in(source, one, other, piece, tensor.dtype) for piece in pieces)


def _are_alike_in(source: Source, one: str, other: str, chunk: Chunk, dtype: torch.dtype) -> bool:
    boxes = [torch.empty(chunk.sizes, dtype=dtype, device="cpu") for _ in range(2)]
    source.read([Wanted(name, chunk, into) for name, into in zip((one, other), boxes, strict=True)])
    return torch.equal(*(into.view(-1).view(torch.uint8) for into in boxes))  # NaNs differ from themselves by value.


def _row_pieces(chunk: Chunk, itemsize: int) -> Iterator[Chunk]:
    """Cut a box along dim 0 into boxes of at most 64 MiB, or of one row: an embedding takes gigabytes."""
    if not chunk.sizes:
        yield chunk
        return
    (start, *offsets), (num_rows, *sizes) = chunk.offsets, chunk.sizes
    step = max(1, _PIECE_NBYTES // max(1, math.prod(sizes) * itemsize))
    for row in range(0, num_rows, step):
        yield Chunk((start + row, *offsets), (min(step, num_rows - row), *sizes))


def _unexpected(source: Source, live: LiveModel) -> Iterator[NameDifference]:
    for full in (*source.tensors, *source.objects):
        section, _, name = full.partition(".")
        if section == "model" and name and name not in live.tensors and name not in live.aliases:
            yield NameDifference(full, _shape(source, full), None)


def _shape(source: Source, full_name: str) -> str:
    info = source.tensors.get(full_name)
    return "an object" if info is None else str(info.shape)
