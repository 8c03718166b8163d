"""How a published model's files name and cut what modules hold: transformers' own table, as boxes.

transformers renames tensors on loading, stacks experts that files store one by one, and joins projections; it keeps a
table of that by model type. `from_pretrained` applies the table to whole tensors. Here the table becomes boxes of
files' tensors that are boxes of modules' tensors, so that each rank reads its shards alone and nothing is held whole.
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
    """A tensor on the way: its shape, and which box of which file's tensor is which box of it."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Place, Chunk], ...]


class _ConvertedGroup(NamedTuple):
    """What becomes one of a module's tensors, or several: the step of the table, and names in files by its pattern."""

    converter: object
    names: dict[str, list[str]]


def correspondences(model: nn.Module, shapes: Shapes) -> list[Correspondence]:
    """What the tensors of files (left) are among those of a model's modules (right), where names or cuts differ.

    Args:
        model: A model of transformers; may be on the meta device.
        shapes: Of the files' tensors, by name.

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
    """What the steps of the table make of a group's tensors."""
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
    """Tensors of one shape on a new dim."""
    boxes = (
        (place, Chunk((*box.offsets[:dim], index, *box.offsets[dim:]), (*box.sizes[:dim], 1, *box.sizes[dim:])))
        for index, tensor in enumerate(tensors)
        for place, box in tensor.boxes
    )
    shape = tensors[0].shape
    return _CutTensor((*shape[:dim], len(tensors), *shape[dim:]), tuple(boxes))


def _joined(tensors: Sequence[_CutTensor], dim: int) -> _CutTensor:
    """Tensors one after another along a dim."""
    sizes = [tensor.shape[dim] for tensor in tensors]
    shape = tensors[0].shape
    return _CutTensor((*shape[:dim], sum(sizes), *shape[dim + 1 :]), tuple(_along(tensors, sizes, dim)))


def _along(tensors: Sequence[_CutTensor], sizes: Sequence[int], dim: int) -> Iterator[tuple[Place, Chunk]]:
    for start, tensor in zip(accumulate(sizes, initial=0), tensors, strict=False):
        for place, box in tensor.boxes:
            offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
            yield place, Chunk(offsets, box.sizes)
