"""The names and cuts of tensors in a published model's files, by transformers' own table, as boxes.

Loading in transformers renames tensors, stacks experts stored one by one in files, and joins or cuts projections, by
a table for each model type. `from_pretrained` applies the table to unsharded tensors. Here the table becomes pairs
of boxes, of a file's tensor and of a module's tensor: a rank reads its shards alone, and no tensor in full.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

from torch import nn

from lamella_checkpoint import Correspondence, Piece, Place
from lamella_layout import Chunk
from lamella_transformers._errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]


class _CutTensor(NamedTuple):
    """A tensor between files and modules: the shape, and pairs of a box in a file's tensor and one in the module's."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Place, Chunk], ...]


class _ConvertedGroup(NamedTuple):
    """The files' tensors for one step of the table.

    Attributes:
        converter: The step.
        target: The name of the module's tensor, or of the first of several.
        names: The names in files by pattern of the step.
    """

    converter: object
    target: str
    names: dict[str, list[str]]


def correspondences(model: nn.Module, shapes: Shapes) -> list[Correspondence]:
    """Return the correspondences of files' tensors (left) and modules' tensors (right) with other names or cuts.

    Args:
        model: A model of transformers; may be on the meta device.
        shapes: The shape of each tensor in the files, by name.

    Raises:
        ModelError: A step of the table is no stack, join or cut; names the step and the tensor.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    steps = get_model_conversion_mapping(cast(PreTrainedModel, model))
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    model_tensors = model.state_dict()
    renamed: list[Correspondence] = []
    groups: dict[str, _ConvertedGroup] = {}
    # The order in which transformers collects tensors to stack: 2 before 10.
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, str(model.base_model_prefix), model_tensors)
        if target.replace("*", "0") not in model_tensors:
            continue
        if pattern is not None:
            group = groups.setdefault(target, _ConvertedGroup(by_pattern[pattern], target, {}))
            group.names.setdefault(pattern, []).append(name)
        elif target != name:
            renamed.append(Correspondence.rename(name, target, shapes[name]))
    return renamed + [_correspondence(model, group, shapes) for group in groups.values()]


def _correspondence(model: nn.Module, group: _ConvertedGroup, shapes: Shapes) -> Correspondence:
    """Return the correspondence of a group's tensors after the steps of the table."""
    converted = _converted(model, group, shapes)
    return Correspondence(
        left={name: tuple(shapes[name]) for names in group.names.values() for name in names},
        right={name: tensor.shape for name, tensor in converted.items()},
        pieces=tuple(
            Piece(place, Place(name, box)) for name, tensor in converted.items() for place, box in tensor.boxes
        ),
    )


def _converted(model: nn.Module, group: _ConvertedGroup, shapes: Shapes) -> dict[str, _CutTensor]:
    """Return the modules' tensors of a group by name."""
    converter = cast(Any, group.converter)
    tensors = {pattern: [_stored(name, shapes) for name in names] for pattern, names in group.names.items()}
    for operation in converter.operations:
        tensors = _after(operation, tensors, group.target, model, converter)
    return _by_name(group.target, tensors)


_Tensors = dict[str, list[_CutTensor]]
"""Tensors by pattern of the step that converts them."""


def _after(operation: Any, tensors: _Tensors, target: str, model: nn.Module, converter: Any) -> _Tensors:
    """Return the tensors after one operation of a step. By names of classes: older releases lack some classes."""
    patterns = converter.target_patterns
    match type(operation).__name__:
        case "MergeModulelist":
            return {pattern: [_stacked(joined, operation.dim)] for pattern, joined in tensors.items()}
        case "Concatenate":
            # In the order of the patterns, whatever order the files have.
            joined = [tensor for pattern in converter.source_patterns for tensor in tensors.get(pattern, ())]
            return {patterns[0]: [_joined(joined, operation.dim)]}
        case "Chunk":
            patterns = operation.get_target_patterns(patterns, config=cast(Any, model).config)
            tensor = _single(tensors)
            return _cut(tensor, operation.dim, patterns, _chunk_sizes(tensor.shape[operation.dim], len(patterns)))
        case "Split":
            names = [target.replace(patterns[0], pattern) for pattern in patterns]
            sizes = [model.get_parameter(name).shape[operation.dim] for name in names]
            return _cut(_single(tensors), operation.dim, patterns, sizes)
        case "Interleave":
            return {patterns[0]: [_interleaved(_single(tensors), operation.dim, inverse=operation.inverse)]}
        case name:
            raise ModelError(
                f"Expected weights that transformers renames, stacks, joins or cuts, got {name} for {target!r}. Load "
                "the model with transformers' from_pretrained, and save its state_dict()."
            )


def _single(tensors: _Tensors) -> _CutTensor:
    ((tensor,),) = tensors.values()
    return tensor


def _by_name(target: str, tensors: _Tensors) -> dict[str, _CutTensor]:
    """Return converted tensors under full names: a pattern is a part of the name, as in transformers' `convert`."""
    if len(tensors) == 1:
        return {target: _single(tensors)}
    full_name = target.replace("*.", "0.")
    prefix, _, suffix = next(full_name.partition(pattern) for pattern in tensors if pattern in full_name)
    return {f"{prefix}{pattern}{suffix}": tensor for pattern, (tensor,) in tensors.items()}


def _chunk_sizes(size: int, num_chunks: int) -> list[int]:
    """Return the sizes of torch's `chunk`: equal sizes, except the last."""
    chunk = -(-size // num_chunks)
    return [min(chunk, size - start) for start in range(0, size, chunk)]


def _cut(tensor: _CutTensor, dim: int, patterns: Sequence[str], sizes: Sequence[int]) -> dict[str, list[_CutTensor]]:
    """Cut a tensor along a dim into one tensor a pattern."""
    starts = accumulate(sizes, initial=0)
    return {
        pattern: [_CutTensor(_with_dim(tensor.shape, dim, size), tuple(_boxes_in_range(tensor, dim, start, size)))]
        for pattern, start, size in zip(patterns, starts, sizes, strict=False)
    }


def _interleaved(tensor: _CutTensor, dim: int, *, inverse: bool) -> _CutTensor:
    """Put the even rows along a dim before the odd rows; inverse: rows of both halves in turns."""
    size = tensor.shape[dim]
    rows = [*range(0, size, 2), *range(1, size, 2)]
    if inverse:
        rows = [row // 2 + row % 2 * (size // 2) for row in range(size)]
    boxes = (
        (place, _narrowed(box, dim, index, 1))
        for index, row in enumerate(rows)
        for place, box in _boxes_in_range(tensor, dim, row, 1)
    )
    return _CutTensor(tensor.shape, tuple(boxes))


def _boxes_in_range(tensor: _CutTensor, dim: int, start: int, size: int) -> Iterator[tuple[Place, Chunk]]:
    """Yield the boxes of a tensor within a range along a dim, with offsets from the range's start."""
    for place, box in tensor.boxes:
        first = max(start, box.offsets[dim])
        length = min(start + size, box.offsets[dim] + box.sizes[dim]) - first
        if length > 0:
            stored_dim = _stored_dim(place.chunk, box, dim)
            stored = place.chunk
            if stored_dim is not None:
                offset = stored.offsets[stored_dim] + first - box.offsets[dim]
                stored = _narrowed(stored, stored_dim, offset, length)
            yield Place(place.name, stored), _narrowed(box, dim, first - start, length)


def _stored_dim(stored: Chunk, box: Chunk, dim: int) -> int | None:
    """Return the dim of a file's box along a dim of a tensor's box; None for a dim of size 1."""
    if box.sizes[dim] == 1:
        return None
    num_before = sum(size != 1 for size in box.sizes[:dim])
    return [index for index, size in enumerate(stored.sizes) if size != 1][num_before]


def _narrowed(box: Chunk, dim: int, offset: int, size: int) -> Chunk:
    return Chunk(_with_dim(box.offsets, dim, offset), _with_dim(box.sizes, dim, size))


def _with_dim(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _stored(name: str, shapes: Shapes) -> _CutTensor:
    shape = tuple(shapes[name])
    box = Chunk((0,) * len(shape), shape)
    return _CutTensor(shape, ((Place(name, box), box),))


def _stacked(tensors: Sequence[_CutTensor], dim: int) -> _CutTensor:
    """Stack tensors of one shape on a new dim."""
    boxes = (
        (place, Chunk((*box.offsets[:dim], index, *box.offsets[dim:]), (*box.sizes[:dim], 1, *box.sizes[dim:])))
        for index, tensor in enumerate(tensors)
        for place, box in tensor.boxes
    )
    shape = tensors[0].shape
    return _CutTensor((*shape[:dim], len(tensors), *shape[dim:]), tuple(boxes))


def _joined(tensors: Sequence[_CutTensor], dim: int) -> _CutTensor:
    """Join tensors along a dim."""
    sizes = [tensor.shape[dim] for tensor in tensors]
    shape = tensors[0].shape
    return _CutTensor(_with_dim(shape, dim, sum(sizes)), tuple(_along(tensors, sizes, dim)))


def _along(tensors: Sequence[_CutTensor], sizes: Sequence[int], dim: int) -> Iterator[tuple[Place, Chunk]]:
    for start, tensor in zip(accumulate(sizes, initial=0), tensors, strict=False):
        for place, box in tensor.boxes:
            yield place, Chunk(_with_dim(box.offsets, dim, box.offsets[dim] + start), box.sizes)
