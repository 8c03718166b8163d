"""Values of `extra` that differ between ranks: written by each rank, compared at the end, read by the same rank.

Note [One `extra` for all ranks, or a value for each]
    Most values (the step) are equal on all ranks; random states and positions in the data are not. A save in the
    background has no collective for a comparison. Therefore each rank writes each value as a separate object
    of a kilobyte, and the rank that completes the checkpoint compares lengths and checksums: values equal to rank
    0's, which `lamella.json` has, are left out of the metadata, and `lamella.json` lists the remaining keys.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint._formats.placed import Placed
from lamella_files import CheckpointDamaged, Json, decode_extra, short

_SECTION: Final = "extra"


def name_of(rank: int, key: str) -> str:
    """The name of a rank's value among the checkpoint's objects."""
    return f"{_SECTION}.{rank}.{key}"


def is_of_extra(name: str) -> bool:
    """Whether an object is a rank's value."""
    return name.startswith(f"{_SECTION}.")


def texts(extra: Mapping[str, Json], rank: int) -> Iterator[tuple[str, str]]:
    """Names and texts of a rank's values."""
    for key, value in extra.items():
        yield name_of(rank, key), json.dumps(value)


def without_equal_values(parts: Sequence[Sequence[Placed]], manifest: Manifest) -> tuple[list[list[Placed]], Manifest]:
    """All ranks' placed items without values equal to rank 0's, and the manifest with the remaining values' keys."""
    values: dict[str, dict[int, Placed]] = {}
    for rank, part in enumerate(parts):
        for placed in part:
            if is_of_extra(placed.names[0]):
                values.setdefault(placed.names[0].removeprefix(name_of(rank, "")), {})[rank] = placed
    needed = {
        placed.names
        for by_rank in values.values()
        for rank, placed in by_rank.items()
        if rank > 0 and (0 not in by_rank or _data_of(placed) != _data_of(by_rank[0]))
    }
    keys = {key for key, by_rank in values.items() if any(placed.names in needed for placed in by_rank.values())}
    remaining = [
        [placed for placed in part if not is_of_extra(placed.names[0]) or placed.names in needed] for part in parts
    ]
    return remaining, replace(manifest, extra_by_rank=tuple(sorted(keys)))


def extra_of_rank(stored: StoredCheckpoint, manifest: Manifest, rank: int) -> dict[str, Any]:
    """A rank's `extra`: the rank's values, and rank 0's for keys without a value of the rank.

    A rank beyond the saving ranks has None for keys whose values differ between ranks.

    Raises:
        CheckpointDamaged: A value is unreadable.

    Effects: reads this rank's values; no collective.
    """
    extra: dict[str, Json] = dict(manifest.extra)
    stored_names = frozenset(stored.objects) if manifest.extra_by_rank else frozenset()
    for key in manifest.extra_by_rank:
        name = name_of(rank, key)
        if rank >= manifest.num_ranks:
            extra[key] = None
        elif name in stored_names:
            extra[key] = _loaded(stored, name)
    try:
        return decode_extra(extra)
    except ValueError as error:
        raise CheckpointDamaged(str(stored.path / MANIFEST_FILE), str(error)) from error


def _loaded(stored: StoredCheckpoint, name: str) -> Json:
    text = stored.read_object(name)
    try:
        return json.loads(cast(str, text))  # Another type is a TypeError.
    except (TypeError, ValueError, RecursionError) as error:
        file = stored.path / stored.metadata.items[name, None].file
        raise CheckpointDamaged(str(file), f"expected JSON for {name!r}, got {short(text)}: {error}") from error


def _data_of(placed: Placed) -> tuple[int, int]:
    return placed.span.length, placed.checksum
