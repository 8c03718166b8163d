"""A rank's share of a live model, in the names and cuts of correspondences: fused tensors by component."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from lamella_checkpoint._state.shares import Item, Share
from lamella_files import MODEL, OPTIONS, Correspondence, Piece, box_of, carried, longest_known, meetings, split_section


def recut(
    share: Share, correspondences: Sequence[Correspondence], *, options: Sequence[Correspondence] | None = None
) -> Share:
    """A share of a model's checkpoint, converted to the left side of correspondences.

    A tensor, and a slot of the tensor's shape, is cut; scalars and options are found under each part's name, at one
    place. Every rank cuts its share alike: equal shares stay equal.

    Args:
        share: Under the model's names.
        correspondences: The right side is the model's.
        options: Correspondences for the options of parameter groups instead, if a format names options by other
            parameters than the tensors. None for the same.

    Raises:
        NotImplementedError: A slot of another shape belongs to a tensor to cut; a tied tensor is cut; a shift.

    Items are views of the live tensors.
    """
    if not correspondences:
        return share
    by_name = {name: correspondence for correspondence in correspondences for name in correspondence.right}
    options_by_name = (
        by_name
        if options is None
        else {name: correspondence for correspondence in options for name in correspondence.right}
    )

    def recut_all(items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            yield from _recut(item, options_by_name if item.names[0].startswith(OPTIONS) else by_name)

    items_by_ranks = {ranks: tuple(recut_all(items)) for ranks, items in share.items_by_ranks.items()}
    return replace(share, items_by_ranks=items_by_ranks)


def _recut(item: Item, by_name: Mapping[str, Correspondence]) -> Iterator[Item]:
    places = [_place(name, by_name) for name in item.names]
    section, parameter, entry = places[0]
    if all(correspondence is None for _, correspondence, _ in places):
        yield item
    elif item.chunk is None or (prod(item.shape or ()) == 1 and parameter is not None and not _is_whole(item, by_name)):
        names = zip(item.names, places, strict=True)
        new = [[name] if place[1] is None else _part_names(*place, by_name) for name, place in names]
        yield replace(item, names=tuple(name for names in new for name in names))
    elif len(places) > 1 or parameter is None or by_name[parameter].shift:
        raise NotImplementedError(
            f"Expected tensors that are cut to have one name, and no shift, got {item.names!r}. Save it as it is: "
            f"leave its correspondence out."
        )
    else:
        yield from _cut(item, section, parameter, entry, by_name[parameter])


def _cut(item: Item, section: str, parameter: str, entry: str, by: Correspondence) -> Iterator[Item]:
    if item.shape != tuple(by.right[parameter]):
        if not by.is_rename:
            raise NotImplementedError(
                f"Expected {item.names[0]!r} of shape {tuple(by.right[parameter])!r}, as its parameter is, got "
                f"{item.shape!r}: it cannot be cut as that is."
            )
        yield replace(item, names=tuple(_part_names(section, parameter, entry, {parameter: by})))
        return
    assert isinstance(item.value, torch.Tensor)
    assert item.chunk is not None
    pieces: list[Piece] = [piece for piece in by.pieces if piece.right.name == parameter]
    for index, _, shared in meetings([piece.right.chunk for piece in pieces], [item.chunk]):
        target, source_piece = pieces[index]
        chunk = carried(shared, source_piece.chunk, target.chunk)
        values = box_of(item.value, shared.relative_to(item.chunk))
        name = f"{section}{target.name}{entry}"
        yield Item(names=(name,), value=values.view(chunk.sizes), shape=tuple(by.left[target.name]), chunk=chunk)


def _place(name: str, known_names: Container[str]) -> tuple[str, str | None, str]:
    """A name's section, the parameter if a correspondence covers the parameter, and the rest."""
    section, suffix = split_section(name)
    if not section:
        return "", None, name
    parameter, entry = (suffix, "") if section == MODEL else longest_known(suffix, known_names)
    return section, parameter if parameter in known_names else None, entry and f".{entry}"


def _part_names(
    section: str, parameter: str | None, entry: str, by_name: Mapping[str, Correspondence]
) -> Iterable[str]:
    assert parameter is not None
    return [f"{section}{name}{entry}" for name in by_name[parameter].left]


def _is_whole(item: Item, by_name: Mapping[str, Correspondence]) -> bool:
    """Whether a one-element tensor has the parameter's shape, and is no scalar."""
    _, parameter, _ = _place(item.names[0], by_name)
    return parameter is not None and item.shape == tuple(by_name[parameter].right[parameter])
