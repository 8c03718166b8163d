"""The names and cuts of tensors in a published model's files, by transformers' own table, as boxes.

transformers renames tensors on loading, stacks experts that files store one by one, and joins projections, by a table
for each model type. `from_pretrained` applies the table to unsharded tensors. Here the table becomes pairs of boxes, of
a file's tensor and of a module's tensor, so that a rank reads its shards alone and no tensor is read in full.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from torch import nn

from lamella_checkpoint import Correspondence, Piece, Place
from lamella_layout import Chunk
from lamella_transformers._errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]


class _CutTensor(NamedTuple):
    """A tensor between files and modules: its shape, and pairs of a box in a file's tensor and a box in this tensor."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Place, Chunk], ...]


class _ConvertedGroup(NamedTuple):
    """The files' tensors that one step of the table converts: the step, and names in files by pattern of the step."""

    converter: object
    names: dict[str, list[str]]


def correspondences(model: nn.Module, shapes: Shapes) -> list[Correspondence]:
    """Return the correspondences of files' tensors (left) and modules' tensors (right) where names or cuts differ.

    Args:
        model: A model of transformers; may be on the meta device.
        shapes: The shape of each tensor in the files, by name.

    Raises:
        ModelError: The table has a step that is neither a stack nor a join; names the step and the tensor.
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
    # transformers collects what it stacks in this order: 2 before 10.
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, str(model.base_model_prefix), model_tensors)
        if target not in model_tensors:
            continue
        if pattern is not None:
            groups.setdefault(target, _ConvertedGroup(by_pattern[pattern], {})).names.setdefault(pattern, []).append(
                name
            )
        elif target != name:
            renamed.append(Correspondence.rename(name, target, shapes[name]))
    return renamed + [_correspondence(target, group, shapes) for target, group in groups.items()]


def _correspondence(target: str, group: _ConvertedGroup, shapes: Shapes) -> Correspondence:
    """Return the correspondence of a group's tensors after the steps of the table."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    converter = cast(WeightConverter, group.converter)
    tensors = {pattern: [_stored(name, shapes) for name in names] for pattern, names in group.names.items()}
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist):
            tensors = {pattern: [_stacked(joined, operation.dim)] for pattern, joined in tensors.items()}
        elif isinstance(operation, Concatenate):
            # In the order of the patterns, whatever order the files have.
            joined = [tensor for pattern in converter.source_patterns for tensor in tensors.get(pattern, ())]
            tensors = {target: [_joined(joined, operation.dim)]}
        else:
            raise ModelError(
                f"Expected weights that transformers renames, stacks or joins, got {type(operation).__name__} for "
                f"{target!r}. Load the model with transformers' from_pretrained, and save its state_dict()."
            )
    ((tensor,),) = tensors.values()
    return Correspondence(
        left={name: tuple(shapes[name]) for names in group.names.values() for name in names},
        right={target: tensor.shape},
        pieces=tuple(Piece(place, Place(target, box)) for place, box in tensor.boxes),
    )


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
    return _CutTensor((*shape[:dim], sum(sizes), *shape[dim + 1 :]), tuple(_along(tensors, sizes, dim)))


def _along(tensors: Sequence[_CutTensor], sizes: Sequence[int], dim: int) -> Iterator[tuple[Place, Chunk]]:
    for start, tensor in zip(accumulate(sizes, initial=0), tensors, strict=False):
        for place, box in tensor.boxes:
            offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
            yield place, Chunk(offsets, box.sizes)
